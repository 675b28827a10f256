package wireguard

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// TestStep: when a key is tried, taken, and given back.
func TestStep(t *testing.T) {
	at := time.Unix(1000, 0)
	known := func(name string, held, answers bool) Known { return Known{name, held, answers, time.Time{}} }
	live, away, dead := known("n2", true, true), known("n3", false, true), known("n4", false, false)
	for what, c := range map[string]struct {
		passed time.Duration
		others []Known
		said   map[string]Said
		do     Action
		waits  []string
	}{
		"alone":                       {0, nil, nil, Try, nil},
		"accepts":                     {0, []Known{live, dead}, map[string]Said{"n2": Accepts}, Try, nil},
		"sends by it already":         {0, []Known{live}, map[string]Said{"n2": Sends}, Try, nil},
		"does not accept it yet":      {time.Hour, []Known{live}, map[string]Said{"n2": Without}, Wait, []string{"n2"}},
		"an agent that starts":        {time.Hour, []Known{live}, nil, Wait, []string{"n2"}},
		"cannot be asked, early":      {SwitchAfter - 1, []Known{live}, map[string]Said{"n2": Never}, Wait, []string{"n2"}},
		"cannot be asked":             {SwitchAfter, []Known{live}, map[string]Said{"n2": Never}, Try, nil},
		"away":                        {time.Hour, []Known{away, live}, map[string]Said{"n2": Accepts}, Wait, []string{"n3"}},
		"reaches nothing but a store": {time.Hour, []Known{known("n5", true, false)}, nil, Wait, []string{"n5"}},
	} {
		var r Rotation
		do, waits := r.Step(at, at.Add(c.passed), c.others, func([]string) map[string]Said { return c.said })
		if do != c.do || !slices.Equal(waits, c.waits) || r.Trying() != (do == Try) {
			t.Errorf("%s: %v, %v, want %v, %v", what, do, waits, c.do, c.waits)
		}
	}
}

// TestTry: a key is taken when all send by it who accepted it, and goes back after its time if one
// does not. It is tried again when all are known to be back, and a pause has passed; or at once, if
// one may have followed and is not heard of.
func TestTry(t *testing.T) {
	now := time.Unix(1000, 0)
	var r Rotation
	others := []Known{{Node: "n2", Held: true, Answers: true}, {Node: "n3", Held: true, Answers: true}}
	said, asked := map[string]Said{"n2": Accepts, "n3": Accepts}, 0
	step := func(want Action, waits ...string) {
		t.Helper()
		ask := func(nodes []string) map[string]Said { asked += len(nodes); return said }
		if do, got := r.Step(time.Unix(1000, 0), now, others, ask); do != want || !slices.Equal(got, waits) || r.Trying() != (do == Try || do == Wait && r.Trying()) {
			t.Fatalf("%v, %v, want %v, %v", do, got, want, waits)
		}
	}
	step(Try)
	said["n2"], said["n3"] = Sends, Silent
	step(Wait, "n3")
	now = now.Add(TryFor)
	step(Back, "n3")
	said["n2"] = Accepts
	now = now.Add(returns * TryFor)
	step(Try, "n3") // it may have followed
	now = now.Add(TryFor)
	step(Back, "n2", "n3")
	others[1].Heard = now.Add(heardAfter + 1) // by the old key
	step(Wait)
	before := asked
	step(Wait)
	if asked != before {
		t.Error("nodes are asked before the pause is over")
	}
	said["n3"] = Accepts
	now = now.Add(firstPause)
	step(Try)
	said["n2"] = Sends
	others[1].Held, others[1].Answers, said["n3"] = false, false, Silent // it is dead
	step(Take)
	if r.Trying() || r.pause != 0 {
		t.Errorf("after it %+v", r)
	}
	// An agent that finds a next key: one that has no agent may have followed it.
	r.Resume(now)
	others[1].Answers, said["n2"] = true, Accepts
	step(Wait, "n3")
	now = now.Add(returns * TryFor)
	step(Try, "n3")
	others[1].Heard, said["n2"] = now.Add(heardAfter+1), Sends // by the next key
	step(Take)
	// One that is dead is not waited for for ever.
	r.Resume(now)
	others[1].Heard, said["n2"] = time.Time{}, Without
	for _, want := range []Action{Try, Back, Try} {
		now = now.Add(returns * TryFor)
		step(want, map[bool][]string{true: {"n2", "n3"}, false: {"n3"}}[want == Back]...)
	}
	said["n2"] = Sends
	step(Take)
}

// TestInUse: an address is at the key by which its node shook hands last.
func TestInUse(t *testing.T) {
	a := netip.MustParseAddr("100.72.0.2")
	peers := []Peer{{Node: "n2", Key: model.PublicKey{1}, Inner: a}, {Node: "n3", Key: model.PublicKey{3}, Inner: a.Next()}, {Node: "n2", Key: model.PublicKey{2}}}
	now := time.Unix(1000, 0)
	for what, c := range map[string]struct {
		first, second time.Duration // before now
		next          bool
	}{"the next": {2, 1, true}, "the old": {1, 2, false}, "the clock was set back": {-time.Hour, 1, true}, "nothing said": {-1, -2, false}} {
		at := map[model.PublicKey]time.Time{{1}: now.Add(-c.first), {2}: now.Add(-c.second)}
		got := InUse(peers, func(k model.PublicKey) time.Time { return at[k] }, now)
		if got[0].Inner.IsValid() == c.next || got[2].Inner.IsValid() != c.next || got[1] != peers[1] || peers[0].Inner != a {
			t.Errorf("%s: %v", what, got)
		}
	}
	if !Changing(peers) || Changing(peers[:2]) {
		t.Error("Changing")
	}
}

// The model: nodes with kernels, agents that may end, start, be slow or dead, and a store that may
// be away. One tick is a second. What agents decide is the product's.

const most = 3

type record struct{ key, next byte }

type modelNode struct {
	on       bool // the node, with its kernel
	private  byte
	accepted [most]record   // keys that the kernel accepts of others
	address  [most]byte     // by which of them it sends
	shook    [most][2]int16 // when they shook hands last, of record's two

	alive, applied bool   // the agent has started; and has applied the network's state
	files          record // its keys
	kernel         byte   // that it has given the kernel
	stored         record // that the store has, as it knows
	seen           [most]record
	rotation       Rotation
	heard          [most]int16
	left           int16 // keys that it is to have yet
}

type world struct {
	n     [most]modelNode
	store [most]record
	down  bool
	now   int16
	count int16               // of handshakes: they are in an order
	shook [most][most][2]byte // the private keys of the last handshake
	live  [most][most]bool    // whether a pair has transfers
	lost  [most][most]int16   // for how long a pair has lost what it sends while an agent of it ran
}

// What may happen to a node in a tick.
const (
	runs = iota
	answers
	stalls
	isKilled
	crashes
	happenings
)

const modelTry = 3

func second(n int16) time.Time { return time.Unix(1000+int64(n), 0) }

func nodeName(i int) string { return string(rune('a' + i)) }

func modelRecord(i int, r record) model.Node {
	n := node(byte(i + 1))
	n.Name = nodeName(i)
	n.WireGuard.Key, n.WireGuard.Next = model.PublicKey{r.key}, model.PublicKey{r.next}
	return n
}

func newWorld(size int, rotations [most]int16) world {
	var w world
	for i := range size {
		w.store[i].key = byte(16 * (i + 1))
	}
	for i := range size {
		n := &w.n[i]
		n.on, n.alive, n.left = true, true, rotations[i]
		n.files, n.stored, n.private, n.kernel = w.store[i], w.store[i], w.store[i].key, w.store[i].key
		n.seen = w.store
		n.apply(i, &w)
	}
	w.shakeHands()
	return w
}

// apply is admit: the state of the network that the agent has goes to the kernel.
func (n *modelNode) apply(self int, w *world) {
	var nodes []model.Node
	for i, r := range n.seen {
		if r.key != 0 {
			nodes = append(nodes, modelRecord(i, r))
		}
	}
	peers, _ := Peers(modelRecord(self, n.files), nodes)
	before, shaken := n.accepted, n.shook
	shook := func(k model.PublicKey) time.Time {
		for i, r := range before {
			if at := slices.Index([]byte{r.key, r.next}, k[0]); at >= 0 && shaken[i][at] >= 0 {
				return second(shaken[i][at])
			}
		}
		return time.Time{}
	}
	n.accepted, n.address, n.shook = [most]record{}, [most]byte{}, [most][2]int16{{-1, -1}, {-1, -1}, {-1, -1}}
	for _, p := range InUse(peers, shook, second(w.count)) {
		i := int(p.Node[0] - 'a')
		r := &n.accepted[i]
		if p.Inner.IsValid() {
			n.address[i] = p.Key[0]
		}
		if p.Key[0] == n.seen[i].key {
			r.key = p.Key[0]
		} else {
			r.next = p.Key[0]
		}
	}
	for i, r := range n.accepted { // peers that stay have shaken hands
		for at, k := range []byte{r.key, r.next} {
			if was := slices.Index([]byte{before[i].key, before[i].next}, k); was >= 0 && k != 0 {
				n.shook[i][at] = shaken[i][was]
			}
		}
	}
	n.on, n.applied = true, true
}

func (n *modelNode) accepts(of int, key byte) int {
	return slices.Index([]byte{n.accepted[of].key, n.accepted[of].next}, key)
}

// shakeHands is what kernels do by themselves, as soon as one has another key.
func (w *world) shakeHands() {
	for i := range w.n {
		for j := range i {
			a, b := &w.n[i], &w.n[j]
			keys := [2]byte{a.private, b.private}
			if !a.on || !b.on || keys == w.shook[i][j] {
				continue
			}
			if x, y := a.accepts(j, b.private), b.accepts(i, a.private); x >= 0 && y >= 0 {
				w.count++
				a.shook[j][x], b.shook[i][y], w.shook[i][j] = w.count, w.count, keys
			}
		}
	}
}

// says is what an agent answers about the next key of another.
func (n *modelNode) says(of int, key byte) Said {
	switch {
	case !n.alive || !n.applied:
		return Silent
	case n.address[of] == key:
		return Sends
	case n.accepts(of, key) >= 0:
		return Accepts
	}
	return Without
}

// run is a tick of a node's agent: it follows the store, looks at its peers, and at its key.
func (w *world) run(self int, happens [most]int) {
	n := &w.n[self]
	if !n.alive {
		if w.down {
			return // it does not start without
		}
		if !n.on {
			n.accepted, n.address = [most]record{}, [most]byte{}
			for i := range w.n {
				w.shook[self][i], w.shook[i][self] = [2]byte{}, [2]byte{}
			}
		}
		n.alive, n.applied, n.seen = true, false, w.store
		n.rotation, n.private, n.kernel = Rotation{}, n.files.key, n.files.key
		if n.files.next != 0 {
			n.rotation.Resume(second(w.now))
		}
		w.store[self], n.stored = n.files, n.files
		return // its name is held, and it has applied nothing yet
	}
	if !w.down {
		n.seen = w.store
	}
	n.apply(self, w)
	w.step(self, happens)
}

// step is keepKeys.step.
func (w *world) step(self int, happens [most]int) {
	n := &w.n[self]
	for tried := false; ; {
		key := n.files.key
		if n.rotation.Trying() {
			key = n.files.next
		}
		if n.kernel != key {
			n.kernel, n.private = key, key
			w.shakeHands()
		}
		if tried {
			return // anything may happen before the others are asked again
		}
		if n.files != n.stored && !n.rotation.Trying() {
			if w.down {
				return
			}
			w.store[self], n.stored = n.files, n.files
		}
		if n.files.next == 0 {
			if n.left == 0 {
				return
			}
			n.left--
			n.files.next = n.files.key + 1
			continue
		}
		var others []Known
		for i := range w.n {
			if o := &w.n[i]; i != self && w.store[i].key != 0 {
				others = append(others, Known{nodeName(i), o.alive, o.on, second(n.heard[i])})
			}
		}
		do, _ := n.rotation.Step(second(0), second(w.now), others, func(names []string) map[string]Said {
			said := make(map[string]Said)
			for _, name := range names {
				i := int(name[0] - 'a')
				if o := &w.n[i]; happens[i] == runs || happens[i] == answers {
					if o.applied {
						o.apply(i, w) // who is asked looks
					}
					said[name] = o.says(self, n.files.next)
				}
			}
			return said
		})
		switch do {
		case Wait:
			return
		case Take:
			n.files = record{key: n.files.next}
		default:
			tried = true
		}
	}
}

// tick gives what the world is after a second, in which that happens to its nodes.
func (w world) tick(happens [most]int, down bool) world {
	w.now++
	w.down = down
	for i := range w.n {
		n := &w.n[i]
		n.rotation.sure = maps.Clone(n.rotation.sure)
		n.rotation.waits = nil
		switch {
		case w.store[i].key == 0:
		case happens[i] == runs:
			w.run(i, happens)
		case happens[i] == isKilled:
			n.alive, n.applied = false, false
		case happens[i] == crashes:
			n.on, n.alive, n.applied = false, false, false
		}
	}
	w.shakeHands()
	for i := range w.n {
		for j := range i {
			a, b := &w.n[i], &w.n[j]
			switch {
			case !a.on || !b.on:
				w.live[i][j], w.lost[i][j] = false, 0
			case a.address[j] == b.private && b.address[i] == a.private:
				w.live[i][j], w.lost[i][j] = true, 0
				a.heard[j], b.heard[i] = w.now, w.now
			case happens[i] == isKilled, happens[j] == isKilled:
				w.lost[i][j] = 0
			case w.live[i][j] && (happens[i] == runs && a.applied || happens[j] == runs && b.applied):
				w.lost[i][j]++
			}
		}
	}
	return w
}

// name is the same for worlds that differ in what time it is only.
func (w *world) name() string {
	var b strings.Builder
	for i := range w.n {
		n := &w.n[i]
		if w.store[i].key == 0 {
			continue
		}
		order := [most]bool{}
		for j := range n.shook {
			order[j] = n.shook[j][1] > n.shook[j][0]
		}
		r := &n.rotation
		since, again, heard := -1, 0, [most]bool{}
		if !r.since.IsZero() {
			since = min(int(second(w.now).Sub(r.since)/time.Second), returns*modelTry)
			for j := range n.heard {
				heard[j] = second(n.heard[j]).After(r.since)
			}
		}
		if d := int(r.again.Sub(second(w.now)) / time.Second); d > 0 {
			again = d
		}
		fmt.Fprint(&b, n.on, n.private, n.accepted, n.address, order, n.alive, n.applied, n.files, n.kernel, n.stored, n.seen, r.trying, min(r.turns, deadAfter), since, again, r.pause, r.sure, heard, n.left, w.store[i], w.live[i], w.lost[i])
	}
	for i := range w.n {
		for j := range i {
			fmt.Fprint(&b, w.shook[i][j] == [2]byte{w.n[i].private, w.n[j].private})
		}
	}
	return b.String()
}

// shorten has a key tried for three seconds, so that there are fewer worlds.
func shorten(t *testing.T) {
	try, last, heard := TryFor, lastPause, heardAfter
	t.Cleanup(func() { TryFor, lastPause, heardAfter = try, last, heard })
	TryFor, lastPause, heardAfter = modelTry*time.Second, firstPause, 0
}

// TestInterleavings goes through all that may happen to another node, and to the store, while one
// whose agent runs changes its key: the other's agent runs, answers and does nothing else, stands
// still, is killed and starts again, and its node crashes and comes back. What the two send each
// other is lost no longer than a key is tried.
func TestInterleavings(t *testing.T) {
	shorten(t)
	first := newWorld(2, [most]int16{1})
	worlds, known := []world{first}, map[string]link{first.name(): {}}
	changed, longest := 0, int16(0)
	for len(worlds) > 0 {
		var next []world
		for _, w := range worlds {
			from := w.name()
			for c := range 2 * happenings {
				happens, down := [most]int{runs, c / 2}, c%2 == 1
				to := w.tick(happens, down)
				name := to.name()
				if _, is := known[name]; is {
					continue
				}
				known[name] = link{from, happens, down}
				next = append(next, to)
				if longest = max(longest, to.longest()); longest > modelTry+1 {
					t.Fatalf("what the two send is lost for %d s:\n%s", longest, story(known, name))
				}
				if to.done(2) {
					changed++
				}
			}
		}
		worlds = next
	}
	t.Logf("%d worlds, in %d of which the key is changed; the longest loss %d s", len(known), changed, longest)
	if changed == 0 {
		t.Error("no key changes")
	}
}

// TestWalks has all of that happen to two and three nodes, which all change their keys, by chance.
// What a pair sends is lost for no longer than a key is tried and given back, after the last end of
// an agent of the two.
func TestWalks(t *testing.T) {
	shorten(t)
	changed, longest := 0, int16(0)
	for seed := range uint64(600) {
		random := rand.New(rand.NewPCG(seed, 0))
		size := 2 + int(seed%2)
		w := newWorld(size, [most]int16{2, int16(random.IntN(3)), int16(seed % 2)})
		var happens [most]int
		down := false
		for range 150 {
			for i := range size {
				if random.IntN(4) == 0 {
					if happens[i] = runs; random.IntN(2) == 0 {
						happens[i] = random.IntN(happenings)
					}
				}
			}
			down = down != (random.IntN(10) == 0)
			w = w.tick(happens, down)
			if longest = max(longest, w.longest()); longest > (1+returns)*modelTry+2 {
				t.Fatalf("seed %d: a pair has lost what it sends for %d s at %d s: %s", seed, longest, w.now, w.name())
			}
		}
		if w.done(size) {
			changed++
		}
	}
	t.Logf("in %d of 600 walks all have changed their keys; the longest loss %d s", changed, longest)
	if changed < 300 {
		t.Errorf("in %d of 600 walks all have changed their keys", changed)
	}
}

// longest gives for how long a pair has lost what it sends.
func (w *world) longest() (most int16) {
	for i := range w.lost {
		most = max(most, slices.Max(w.lost[i][:]))
	}
	return most
}

// link is how a world came about.
type link struct {
	from    string
	happens [most]int
	down    bool
}

// story tells how the named world came about.
func story(known map[string]link, name string) (text string) {
	for ; known[name].from != ""; name = known[name].from {
		text = fmt.Sprintf("%v, store away %v: %s\n", known[name].happens, known[name].down, name) + text
	}
	return text
}

// done reports whether all have taken their keys, and told the store.
func (w *world) done(size int) bool {
	for i := range size {
		if n := &w.n[i]; n.left > 0 || n.files.next != 0 || n.stored != n.files {
			return false
		}
	}
	return true
}
