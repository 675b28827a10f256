package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"heddle.dev/heddle/internal/model"
)

// network is a made-up underlay.
type network struct {
	mu      sync.Mutex
	answer  func(Peer, uint16) Answer
	alive   bool
	dialErr error
	dials   map[string]int // ports probed, by peer
	first   map[string]time.Time
	states  map[string]model.PeerState // in force
	applied []string
	rounds  []time.Time
}

func newNetwork() *network {
	return &network{
		alive: true, answer: func(Peer, uint16) Answer { return Answered },
		dials: map[string]int{}, first: map[string]time.Time{}, states: map[string]model.PeerState{},
	}
}

func (n *network) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *network) config() Config {
	return Config{
		Dial: func(ctx context.Context, p Peer, ports []uint16) ([]Answer, error) {
			n.mu.Lock()
			if _, ok := n.first[p.Name]; !ok {
				n.first[p.Name] = time.Now()
			}
			n.rounds = append(n.rounds, time.Now())
			n.dials[p.Name] += len(ports)
			out, silent, err := make([]Answer, len(ports)), false, n.dialErr
			for i, port := range ports {
				out[i] = n.answer(p, port)
				silent = silent || out[i] == Silent
			}
			n.mu.Unlock()
			if err != nil {
				return nil, err
			}
			if silent {
				select {
				case <-time.After(1500 * time.Millisecond):
				case <-ctx.Done():
				}
			}
			return out, nil
		},
		Reach: func(context.Context, Peer) bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.alive
		},
		Apply: func(p Peer, s model.PeerState) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.states[p.Name] = s
			n.applied = append(n.applied, fmt.Sprintf("%s %s", p.Name, s))
			return nil
		},
		Log: slog.New(slog.DiscardHandler),
	}
}

func (n *network) state(name string) model.PeerState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.states[name]
}

func peers(count int) []Peer {
	out := make([]Peer, count)
	for i := range out {
		out[i] = Peer{
			Name: fmt.Sprintf("n%d", i), Underlay: netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}),
			Gateway: netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1}), Ports: model.PortRange{First: 17408, Last: 17471},
		}
	}
	return out
}

// run has a Prober follow list in made-up time.
func run(t *testing.T, cfg Config, list []Peer, f func(pr *Prober)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		pr := New(cfg)
		if err := pr.Follow(list); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); pr.Run(ctx) }()
		f(pr)
		cancel()
		<-done
	})
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestStates leads one path through everything that can happen to it.
func TestStates(t *testing.T) {
	n := newNetwork()
	run(t, n.config(), peers(1), func(pr *Prober) {
		want := func(when string, s model.PeerState) {
			t.Helper()
			if got := n.state("n0"); got != s {
				t.Errorf("%s: %s, want %s", when, got, s)
			}
		}
		want("before the first probe", model.PeerUnproven)
		pass(time.Second)
		want("answered", model.PeerProven)
		at := peers(1)[0].Underlay

		n.set(func() { n.answer = func(Peer, uint16) Answer { return Silent } })
		pr.Suspect(at)
		pass(5 * time.Second)
		want("silent, the node alive", model.PeerBlocked)
		paths := pr.Paths()
		if len(paths.Overlay) != 1 || paths.Overlay[0].Reason != "fallback_blocked" || !strings.Contains(paths.Overlay[0].Detail, "4 are silent") {
			t.Errorf("reported as %+v", paths.Overlay)
		}

		n.set(func() { n.answer = func(Peer, uint16) Answer { return Refused } })
		pass(time.Minute)
		want("refused", model.PeerStripped)

		n.set(func() {
			n.answer = func(_ Peer, port uint16) Answer { return map[bool]Answer{true: Silent, false: Answered}[port == 17450] }
		})
		pass(2 * time.Minute)
		want("one port of 64 silent when it is tried again", model.PeerBlocked)

		n.set(func() { n.answer = func(Peer, uint16) Answer { return Answered } })
		pass(2 * maxBackoff)
		want("answered again", model.PeerProven)
		if o := pr.Paths().Overlay; len(o) != 0 {
			t.Errorf("still reported: %+v", o)
		}
	})
}

// TestNotReadyYet: a node that refuses while it starts is not called bad, and its path is used as
// soon as it works; one that goes on to refuse is.
func TestNotReadyYet(t *testing.T) {
	n := newNetwork()
	n.answer = func(Peer, uint16) Answer { return Refused }
	run(t, n.config(), peers(1), func(*Prober) {
		pass(startGrace - time.Second)
		if got := n.state("n0"); got != model.PeerUnproven {
			t.Errorf("while it starts: %s", got)
		}
		n.set(func() { n.answer = func(Peer, uint16) Answer { return Answered } })
		pass(time.Second)
		if got := n.state("n0"); got != model.PeerProven {
			t.Errorf("when it has started: %s", got)
		}
	})
	n = newNetwork()
	n.answer = func(Peer, uint16) Answer { return Refused }
	run(t, n.config(), peers(1), func(*Prober) {
		pass(startGrace + 2*time.Second)
		if got := n.state("n0"); got != model.PeerStripped {
			t.Errorf("one that goes on to refuse: %s", got)
		}
	})
}

// TestEveryPortIsTried finds the one port that a firewall forgot, although a round tries but four.
func TestEveryPortIsTried(t *testing.T) {
	n := newNetwork()
	n.answer = func(_ Peer, port uint16) Answer { return map[bool]Answer{true: Silent, false: Answered}[port == 17461] }
	run(t, n.config(), peers(1), func(*Prober) {
		pass(64 / quickPorts * 2 * minPeriod)
		if got := n.state("n0"); got != model.PeerBlocked {
			t.Errorf("state %s", got)
		}
	})
}

// TestAway keeps the state of a node that does not answer by the overlay either, or when this node
// cannot probe.
func TestAway(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(*network)
	}{
		{"away", func(n *network) { n.alive, n.answer = false, func(Peer, uint16) Answer { return Silent } }},
		{"refuses, away", func(n *network) { n.alive, n.answer = false, func(Peer, uint16) Answer { return Refused } }},
		{"no sockets", func(n *network) { n.dialErr = errors.New("too many open files") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNetwork()
			run(t, n.config(), peers(2), func(pr *Prober) {
				pass(time.Second)
				n.set(func() { tc.spoil(n) })
				pass(10 * time.Minute)
				if got := n.state("n0"); got != model.PeerProven {
					t.Errorf("state %s", got)
				}
			})
		})
	}
}

// TestApplyFails: a state that may be half in force is followed by the one that holds, also if that
// is what it was before.
func TestApplyFails(t *testing.T) {
	n := newNetwork()
	cfg, fails := n.config(), false
	apply := cfg.Apply
	cfg.Apply = func(p Peer, s model.PeerState) error {
		if err := apply(p, s); err != nil || !fails {
			return err
		}
		return errors.New("map busy")
	}
	run(t, cfg, peers(1), func(pr *Prober) {
		pass(time.Minute)
		n.set(func() { fails, n.answer = true, func(Peer, uint16) Answer { return Silent } })
		pass(time.Minute)
		if got := n.state("n0"); got != model.PeerBlocked {
			t.Fatalf("half in force: %s", got)
		}
		n.set(func() { fails, n.answer = false, func(Peer, uint16) Answer { return Answered } })
		pass(3 * time.Minute)
		if got := n.state("n0"); got != model.PeerProven {
			t.Errorf("in force for good: %s", got)
		}
	})
}

// TestLostOnce does not give a path up for one SYN that is lost with its repetition.
func TestLostOnce(t *testing.T) {
	n := newNetwork()
	lost := false
	run(t, n.config(), peers(1), func(*Prober) {
		pass(time.Second)
		n.set(func() {
			n.answer = func(Peer, uint16) Answer {
				if !lost {
					lost = true
					return Silent
				}
				return Answered
			}
		})
		pass(time.Minute)
		if got := n.applied; !lost || len(got) != 2 {
			t.Errorf("states put into force: %v", got)
		}
	})
}

// TestMany follows as many nodes as a network may have: the pace is bounded, all come to their
// turn, and one that a connect needs does not wait for the others.
func TestMany(t *testing.T) {
	const count = 5000
	list := peers(count)
	n := newNetwork()
	run(t, n.config(), list, func(pr *Prober) {
		began := time.Now()
		pass(time.Second)
		late := ""
		n.set(func() {
			for _, p := range list {
				if _, ok := n.first[p.Name]; !ok {
					late = p.Name
					pr.Suspect(p.Underlay)
					break
				}
			}
		})
		pass(time.Second)
		if got := n.state(late); got != model.PeerProven {
			t.Errorf("%s, which a connect needs: %s after a second", late, got)
		}
		pass(3 * time.Minute)
		if got := pr.Paths().Peers[model.PeerProven]; got != count {
			t.Errorf("%d of %d proven after three minutes", got, count)
		}
		perSecond := map[int]int{}
		for _, at := range n.rounds {
			perSecond[int(at.Sub(began).Seconds())]++
		}
		for second, rounds := range perSecond {
			if rounds > 51 {
				t.Errorf("%d rounds in second %d", rounds, second)
			}
		}
	})
}

// TestKnown begins with what an earlier agent found, and trusts it until a probe says otherwise.
func TestKnown(t *testing.T) {
	n := newNetwork()
	list := peers(3)
	cfg := n.config()
	cfg.Known = map[netip.Addr]model.PeerState{list[0].Underlay: model.PeerProven, list[1].Underlay: model.PeerBlocked}
	n.answer = func(Peer, uint16) Answer { return Silent }
	n.alive = false
	run(t, cfg, list, func(*Prober) {
		pass(time.Minute)
		for name, want := range map[string]model.PeerState{"n0": model.PeerProven, "n1": model.PeerBlocked, "n2": model.PeerUnproven} {
			if got := n.state(name); got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
	})
}

// TestFollow takes up new nodes, forgets others, and begins anew with one that has changed its
// address.
func TestFollow(t *testing.T) {
	n := newNetwork()
	list := peers(2)
	run(t, n.config(), list, func(pr *Prober) {
		pass(time.Second)
		moved := list[0]
		moved.Underlay = netip.MustParseAddr("192.0.2.7")
		n.set(func() { n.applied = nil; n.answer = func(Peer, uint16) Answer { return Silent } })
		if err := pr.Follow([]Peer{moved}); err != nil {
			t.Fatal(err)
		}
		n.set(func() {
			if got := strings.Join(n.applied, ", "); !strings.HasPrefix(got, "n0 unproven, ") {
				t.Errorf("put into force: %s", got)
			}
			n.dials = map[string]int{}
		})
		pass(time.Minute)
		if n.dials["n1"] != 0 || n.dials["n0"] == 0 {
			t.Errorf("probed: %v", n.dials)
		}
		pr.Suspect(list[1].Underlay) // nobody by now
	})
}

// TestSuspectsArePaced: however often connects fail, a peer is probed four times a second.
func TestSuspectsArePaced(t *testing.T) {
	n := newNetwork()
	list := peers(1)
	run(t, n.config(), list, func(pr *Prober) {
		pass(2 * time.Second)
		n.set(func() { n.rounds = nil })
		for range 1000 {
			pr.Suspect(list[0].Underlay)
			pass(10 * time.Millisecond)
		}
		if got := len(n.rounds); got < 20 || got > 42 {
			t.Errorf("%d rounds in ten seconds", got)
		}
	})
}

// TestChangeFollows: whatever sequence of changes led to a list of peers, those are probed that
// Follow would have probed, and those that are gone are direct.
func TestChangeFollows(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	cfg := newNetwork().config()
	inForce := make(map[netip.Addr]model.PeerState)
	cfg.Apply = func(p Peer, s model.PeerState) error { inForce[p.Underlay] = s; return nil }
	pr := New(cfg)
	var list []Peer
	all := peers(6)
	for step := range 500 {
		next := slices.Clone(list)
		for range 1 + r.IntN(3) {
			p := all[r.IntN(6)]
			next = slices.DeleteFunc(next, func(o Peer) bool { return o.Name == p.Name })
			p.Underlay = all[r.IntN(6)].Underlay
			p.Ports.Last = uint16(17471 + r.IntN(2))
			if r.IntN(3) > 0 && !slices.ContainsFunc(next, func(o Peer) bool { return o.Underlay == p.Underlay }) {
				next = append(next, p)
			}
		}
		different := func(from, others []Peer) []Peer {
			return slices.DeleteFunc(slices.Clone(from), func(p Peer) bool { return slices.Contains(others, p) && r.IntN(4) > 0 })
		}
		// Those that have not changed may be named, too, on both sides.
		before := different(list, next)
		now := different(next, list)
		for _, p := range before {
			if slices.Contains(next, p) && !slices.Contains(now, p) {
				now = append(now, p)
			}
		}
		if err := pr.Change(before, now); err != nil {
			t.Fatal(err)
		}
		list = next
		probed := make(map[Peer]bool)
		for at, p := range pr.peers {
			probed[p.Peer] = true
			if at != p.Underlay || !slices.Contains(list, p.Peer) || p.state != model.PeerUnproven {
				t.Fatalf("step %d: probed: %+v, among %+v", step, p, list)
			}
		}
		if len(probed) != len(list) {
			t.Fatalf("step %d: %d are probed: %v, want %v", step, len(probed), probed, list)
		}
		for _, p := range all {
			state, known := inForce[p.Underlay]
			if probed := pr.peers[p.Underlay] != nil; probed != (known && state == model.PeerUnproven) {
				t.Fatalf("step %d: %s is %s, probed: %t", step, p.Underlay, state, probed)
			}
		}
		if err := pr.Follow(list); err != nil || len(pr.peers) != len(list) {
			t.Fatalf("step %d: Follow of the same: %d are probed (%v), want %d", step, len(pr.peers), err, len(list))
		}
	}
}
