// Package probe keeps, for each other node, whether the direct path to it works: that SYNs reach
// its direct ports, and reach them with their option. It decides when to probe and what the answers
// mean; sending, and what follows from a state, are its caller's. See
// docs/decisions/0022-probes-of-direct-paths.md.
package probe

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Pace of probes. A round is a probe of some ports of one peer.
const (
	roundGap   = 20 * time.Millisecond  // between the starts of two rounds
	rounds     = 16                     // at once
	quickPorts = 4                      // of a round
	fullPorts  = 64                     // of one that is to show that a path works again
	minPeriod  = 10 * time.Second       // between rounds of a peer whose path works; more with many peers
	minPause   = 250 * time.Millisecond // between rounds of one peer, whatever happens
	minBackoff = 2 * time.Second        // before a failed round is repeated; doubled each time
	maxBackoff = time.Minute            // longer for peers that are away, with many peers

	// A node is in the store some seconds before its programs take probes, on a busy machine many.
	// What fails until then is tried again before the path is called bad, which it would be for
	// minBackoff at least; new connections take the overlay in either case.
	startGrace = 20 * time.Second
	doubtPause = 500 * time.Millisecond
)

// Answer is what became of one probe.
type Answer uint8

// Answers.
const (
	Silent   Answer = iota // nothing came back
	Refused                // the SYN arrived, or something answered for the node, but not the option
	Answered               // SYN and option arrived
)

var answers = []string{"silent", "refused", "answered"}

// String gives the answer's name in metrics.
func (a Answer) String() string { return answers[a] }

// Peer is another node.
type Peer struct {
	Name string
	// Underlay is its address, Gateway its own overlay address.
	Underlay, Gateway netip.Addr
	// Ports is its direct port range.
	Ports model.PortRange
}

// Config is what a Prober works with. All fields must be set.
type Config struct {
	// Dial probes ports of a peer at once and gives one answer for each. An error says that this
	// node cannot probe.
	Dial func(context.Context, Peer, []uint16) ([]Answer, error)
	// Reach reports whether the peer answers over the overlay.
	Reach func(context.Context, Peer) bool
	// Apply puts a state into force. It is called for each peer before Follow returns, with
	// PeerProven for one that is no more followed, and at each change. It must not call the Prober.
	Apply func(Peer, model.PeerState) error
	// Known are states to begin with, by underlay address: what an earlier agent found. Others are
	// unproven.
	Known map[netip.Addr]model.PeerState
	Log   *slog.Logger
}

// peer is what is known of one Peer. A peer that changes becomes a new one.
type peer struct {
	Peer
	state        model.PeerState
	detail       string
	since        time.Time
	probed, next time.Time
	answered     time.Time // when it last answered, in whatever way
	silent       time.Time // since when it has not, on either path; the zero Time: it has
	failures     int       // rounds in a row that did not show a working path
	busy         bool      // a round goes on
	wanted       bool      // a connect has asked for the next one
	unsure       bool      // what is in force may be another state: one could not be put into force
	place        int       // in its queue, unless busy
	turn         int       // moves the ports of rounds along the range
}

// Prober probes peers. Its methods may be called from any goroutine.
type Prober struct {
	cfg  Config
	wake chan struct{}

	applying sync.Mutex // held while Config.Apply runs, before mu

	mu     sync.Mutex
	peers  map[netip.Addr]*peer
	due    queues
	counts [3]uint64 // by Answer
}

// New gives a Prober that follows nobody yet.
func New(cfg Config) *Prober {
	cfg.Known = maps.Clone(cfg.Known)
	return &Prober{cfg: cfg, wake: make(chan struct{}, 1), peers: make(map[netip.Addr]*peer)}
}

// Follow makes list the peers that are probed.
func (pr *Prober) Follow(list []Peer) error {
	pr.applying.Lock()
	defer pr.applying.Unlock()
	listed := make(map[Peer]bool, len(list))
	for _, p := range list {
		listed[p] = true
	}
	var gone, fresh []Peer
	pr.mu.Lock()
	for _, p := range pr.peers {
		if !listed[p.Peer] {
			gone = append(gone, p.Peer)
		}
	}
	for _, p := range list {
		if old := pr.peers[p.Underlay]; old == nil || old.Peer != p {
			fresh = append(fresh, p)
		}
	}
	pr.mu.Unlock()
	return pr.change(gone, fresh, len(list))
}

// Change is Follow for peers that have changed: before are those that are not probed any more, or
// not as they were, and now is what they are, with the new ones.
func (pr *Prober) Change(before, now []Peer) error {
	pr.applying.Lock()
	defer pr.applying.Unlock()
	var fresh []Peer
	pr.mu.Lock()
	for _, p := range now {
		if old := pr.peers[p.Underlay]; old == nil || old.Peer != p {
			fresh = append(fresh, p)
		}
	}
	all := len(pr.peers) + len(now) - len(before)
	pr.mu.Unlock()
	gone := slices.DeleteFunc(slices.Clone(before), func(p Peer) bool { return slices.Contains(now, p) })
	return pr.change(gone, fresh, all)
}

// change does it, among a number of peers. The caller holds applying.
func (pr *Prober) change(gone, fresh []Peer, all int) error {
	var failed error
	apply := func(p Peer, state model.PeerState) bool {
		err := pr.cfg.Apply(p, state)
		if err != nil {
			failed = fmt.Errorf("state of the direct path to %s: %w", p.Name, err)
		}
		return err == nil
	}
	now := time.Now()
	taken := make(map[netip.Addr]bool, len(fresh))
	for _, p := range fresh {
		taken[p.Underlay] = true
		pr.mu.Lock()
		old := pr.peers[p.Underlay]
		pr.mu.Unlock()
		next := &peer{Peer: p, state: model.PeerUnproven, since: now}
		// Not all nodes at once to one that is new to all of them.
		wait := time.Duration(max(all, 1)) * roundGap
		if known, ok := pr.cfg.Known[p.Underlay]; ok && old == nil {
			next.state = known
			delete(pr.cfg.Known, p.Underlay) // one that goes and comes back begins anew
			if known == model.PeerProven {
				wait = period(all)
			}
		}
		next.next = now.Add(rand.N(wait))
		if !apply(p, next.state) {
			continue // not followed: tried again with the next list
		}
		pr.mu.Lock()
		if old != nil && !old.busy {
			pr.due.remove(old)
		}
		pr.peers[p.Underlay] = next
		pr.due.put(next)
		pr.mu.Unlock()
	}
	for _, p := range gone {
		if taken[p.Underlay] {
			continue // another has its place
		}
		pr.mu.Lock()
		old := pr.peers[p.Underlay]
		if old != nil {
			delete(pr.peers, p.Underlay)
			if !old.busy {
				pr.due.remove(old)
			}
		}
		pr.mu.Unlock()
		if old != nil {
			apply(p, model.PeerProven)
		}
	}
	pr.poke()
	return failed
}

// Suspect asks for a round soon: a connect to the node at underlay failed, or went over the overlay
// because its path is unproven. A path that is known to fail keeps its pause. It gives the state of
// the path as known: PeerProven if the node is not followed.
func (pr *Prober) Suspect(underlay netip.Addr) model.PeerState {
	if !model.ProtectProbes.On() {
		pr.believe(underlay)
	}
	pr.mu.Lock()
	state := model.PeerProven
	p := pr.peers[underlay]
	if p != nil {
		state = p.state
	}
	if p != nil && (p.state == model.PeerProven || p.state == model.PeerUnproven) {
		if !p.busy {
			pr.due.remove(p)
		}
		p.wanted = true
		soon := time.Now()
		if earliest := p.probed.Add(minPause); earliest.After(soon) {
			soon = earliest
		}
		if p.next.After(soon) {
			p.next = soon
		}
		if !p.busy {
			pr.due.put(p)
		}
	}
	pr.mu.Unlock()
	pr.poke()
	return state
}

// believe takes a suspicion for proof that a path is blocked. Only programs of the attack suite do:
// anybody's connects can fail.
func (pr *Prober) believe(underlay netip.Addr) {
	pr.applying.Lock()
	defer pr.applying.Unlock()
	pr.mu.Lock()
	p := pr.peers[underlay]
	pr.mu.Unlock()
	if p == nil || pr.cfg.Apply(p.Peer, model.PeerBlocked) != nil {
		return
	}
	pr.mu.Lock()
	p.state = model.PeerBlocked
	pr.mu.Unlock()
}

// Answered gives when the node at underlay last answered a probe, on whatever path; the zero Time
// if it has not, or is not followed.
func (pr *Prober) Answered(underlay netip.Addr) time.Time {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	if p := pr.peers[underlay]; p != nil {
		return p.answered
	}
	return time.Time{}
}

func (pr *Prober) poke() {
	select {
	case pr.wake <- struct{}{}:
	default:
	}
}

// Run probes until ctx ends.
func (pr *Prober) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, rounds)
	for ctx.Err() == nil {
		wait := roundGap
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		p, due := pr.take()
		if p == nil {
			<-slots
			wait = due
		} else {
			wg.Go(func() {
				defer func() { <-slots }()
				pr.round(ctx, p)
			})
		}
		timer := time.NewTimer(wait)
		if p != nil {
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
		} else {
			select {
			case <-timer.C:
			case <-pr.wake:
			case <-ctx.Done():
			}
		}
		timer.Stop()
	}
}

// take gives the peer whose round is due, those that a connect asked for first; or how long to wait
// for one.
func (pr *Prober) take() (*peer, time.Duration) {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	p, wait := pr.due.take(time.Now(), minPeriod)
	if p != nil {
		p.busy, p.wanted = true, false
	}
	return p, wait
}

// finding is what a round has shown.
type finding struct {
	state  model.PeerState
	known  bool // otherwise the state stays as it is: the peer is away, or this node cannot probe
	silent bool // the peer answers on neither path; not known
	early  bool // the peer may not have been ready: not known, and to be looked at again at once
	detail string
}

// round probes p once, and has what it shows put into force.
func (pr *Prober) round(ctx context.Context, p *peer) {
	pr.mu.Lock()
	target, ports := p.Peer, p.ports()
	pr.mu.Unlock()
	f := pr.measure(ctx, target, ports)
	if ctx.Err() != nil {
		return
	}
	pr.applying.Lock()
	defer pr.applying.Unlock()
	pr.mu.Lock()
	current, was, unsure := pr.peers[p.Underlay] == p, p.state, p.unsure
	if f.known && f.state != model.PeerProven && was == model.PeerUnproven && time.Since(p.since) < startGrace {
		f.known, f.early = false, true
	}
	pr.mu.Unlock()
	if !current {
		return
	}
	if f.known && (f.state != was || unsure) {
		err := pr.cfg.Apply(target, f.state)
		pr.mu.Lock()
		p.unsure = err != nil
		pr.mu.Unlock()
		if err != nil {
			pr.cfg.Log.Error("state of a direct path not put into force; will try again", "node", target.Name, "state", f.state, "err", err)
			f.known = false
		} else if f.state != was {
			pr.cfg.Log.Info("direct path", "node", target.Name, "state", f.state, "was", was, "detail", f.detail)
		}
	}
	pr.record(p, f)
	pr.poke()
}

// record notes a finding and when to look again.
func (pr *Prober) record(p *peer, f finding) {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	now := time.Now()
	if f.known && f.state != p.state {
		p.state, p.since, p.failures = f.state, now, 0
	}
	p.busy, p.detail, p.probed = false, f.detail, now
	wait := period(len(pr.peers))
	switch {
	case f.early:
		wait = doubtPause
	case !f.known:
		// Away: a round takes seconds. Were they tried as often as few are, many would keep all
		// rounds busy for good.
		wait = min(minBackoff<<min(p.failures, 10), max(maxBackoff, wait))
		p.failures++
	case f.state != model.PeerProven:
		wait = min(minBackoff<<min(p.failures, 10), maxBackoff)
		p.failures++
	default:
		p.failures = 0
	}
	if f.known {
		p.answered = now
	}
	if !f.silent {
		p.silent = time.Time{}
	} else if p.silent.IsZero() {
		p.silent = now
	}
	p.next = now.Add(wait - rand.N(wait/5))
	if p.wanted { // asked for while the round went on
		p.next = now.Add(minPause)
	}
	pr.due.put(p)
}

// period gives the time between rounds of a peer whose path works, with n peers.
func period(n int) time.Duration { return max(minPeriod, time.Duration(n)*roundGap*5/2) }

// ports chooses the ports of p's next round: some, spread over the range, and others the next time.
// A path that failed must show more before connections are entrusted to it.
func (p *peer) ports() []uint16 {
	all := int(p.Ports.Last) - int(p.Ports.First) + 1
	n := quickPorts
	if p.state == model.PeerStripped || p.state == model.PeerBlocked {
		n = fullPorts
	}
	n = min(n, all)
	var first, rest []uint16
	for i := range n {
		port := p.Ports.First + uint16((p.turn+i*all/n)%all)
		if i%max(n/quickPorts, 1) == 0 && len(first) < quickPorts {
			first = append(first, port)
		} else {
			rest = append(rest, port)
		}
	}
	p.turn = (p.turn + 1) % all
	return append(first, rest...)
}

// measure probes ports, a few first, those that fail twice, and tells a path that fails from a peer
// that is away.
func (pr *Prober) measure(ctx context.Context, p Peer, ports []uint16) finding {
	few := min(len(ports), quickPorts)
	failing, _, err := pr.dial(ctx, p, ports[:few])
	if err == nil && len(failing) == 0 && len(ports) > few {
		failing, _, err = pr.dial(ctx, p, ports[few:])
	} else {
		ports = ports[:few]
	}
	if err != nil {
		return finding{detail: err.Error()}
	}
	if len(failing) == 0 {
		return finding{state: model.PeerProven, known: true}
	}
	reached := make(chan bool, 1)
	go func() { reached <- pr.cfg.Reach(ctx, p) }()
	failing, refused, err := pr.dial(ctx, p, failing)
	alive := <-reached
	switch {
	case err != nil:
		return finding{detail: err.Error()}
	case len(failing) == 0:
		return finding{state: model.PeerProven, known: true}
	case !alive:
		return finding{silent: true, detail: describe(len(ports), failing, refused) + "; nor does the node answer over the overlay"}
	case refused > 0:
		return finding{state: model.PeerStripped, known: true, detail: describe(len(ports), failing, refused)}
	}
	return finding{state: model.PeerBlocked, known: true, detail: describe(len(ports), failing, refused)}
}

// dial probes ports and gives those that did not answer, and how many of them refused.
func (pr *Prober) dial(ctx context.Context, p Peer, ports []uint16) (failing []uint16, refused int, err error) {
	got, err := pr.cfg.Dial(ctx, p, ports)
	if err != nil {
		return nil, 0, fmt.Errorf("probe %s: %w", p.Name, err)
	}
	pr.mu.Lock()
	defer pr.mu.Unlock()
	for i, a := range got {
		pr.counts[a]++
		if a != Answered {
			failing = append(failing, ports[i])
		}
		if a == Refused {
			refused++
		}
	}
	return failing, refused, nil
}

// shownPorts is how many ports a detail names.
const shownPorts = 4

func describe(probed int, failing []uint16, refused int) string {
	var names []string
	for _, port := range failing[:min(len(failing), shownPorts)] {
		names = append(names, fmt.Sprint(port))
	}
	if len(failing) > shownPorts {
		names = append(names, "...")
	}
	return fmt.Sprintf("of %d ports %d refuse the option, %d are silent: %s", probed, refused, len(failing)-refused, strings.Join(names, " "))
}

// reasons are what connects over the overlay are counted under.
var reasons = map[model.PeerState]string{
	model.PeerUnproven: "fallback_unproven", model.PeerStripped: "fallback_stripped", model.PeerBlocked: "fallback_blocked",
}

// Paths reports on all peers.
func (pr *Prober) Paths() model.DirectPaths {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	out := model.DirectPaths{Peers: make(map[model.PeerState]int), Probes: make(map[string]uint64)}
	for s := model.PeerUnproven; s <= model.PeerBlocked; s++ {
		out.Peers[s] = 0
	}
	for a, n := range pr.counts {
		out.Probes[Answer(a).String()] = n
	}
	for _, p := range pr.peers {
		out.Peers[p.state]++
		path := model.PeerPath{
			Node: p.Name, Underlay: p.Underlay, State: p.state, Reason: reasons[p.state], Detail: p.detail,
			Since: p.since, Probed: p.probed, Next: p.next,
		}
		if p.state != model.PeerProven {
			out.Overlay = append(out.Overlay, path)
		}
		if !p.silent.IsZero() {
			path.Since = p.silent
			out.Silent = append(out.Silent, path)
		}
	}
	for _, list := range [][]model.PeerPath{out.Overlay, out.Silent} {
		slices.SortFunc(list, func(a, b model.PeerPath) int { return strings.Compare(a.Node, b.Node) })
	}
	return out
}
