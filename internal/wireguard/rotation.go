package wireguard

import (
	"slices"
	"time"

	"heddle.dev/heddle/internal/patience"
)

// SwitchAfter is how long after its publication a key is used at the earliest beside nodes whose
// agents do not say what they accept. It is longer than a node's name stays held without its agent
// (store.HoldTime).
const SwitchAfter = 15 * time.Second

// TryFor is how long a node tries its next key without all that accept it sending by it: then it
// goes back to the one in use. It bounds what a change costs a connection, whatever ends meanwhile.
var TryFor = patience.For(10 * time.Second)

// returns is how many times as long it is back before it tries again without having heard of one of
// them: that one may have followed in the moment in which it went back, and have lost its agent.
const returns = 3

// Bounds of the pause before a node asks or tries again; it doubles from time to time. heardAfter
// is how long after a change of keys an answer to a probe is one by the new key. Variables for the
// test that goes through all interleavings.
var (
	firstPause = time.Second
	lastPause  = 30 * time.Second
	heardAfter = 2 * time.Second
)

// Said is what a node's agent says of another's next key.
type Said int

// What may be said.
const (
	Silent  Said = iota // nothing: it is asked again
	Never               // it is of a build, or has settings, with which it answers nobody
	Without             // its kernel does not accept the key
	Accepts             // its kernel accepts the key
	Sends               // and sends what is for its holder by it
)

// Known is what a node knows of another that has to accept its next key.
type Known struct {
	Node string
	// Held says that the node has an agent that reaches the store; Answers that the node itself
	// answers, or may: then it may have connections, which must not be lost by its agent's being
	// away.
	Held, Answers bool
	// Heard is when it last answered a probe, which only goes through if both ends send by keys
	// that the other has.
	Heard time.Time
}

// Action is what a node is to do about its next key.
type Action int

// The actions.
const (
	Wait Action = iota
	Try         // give it to the kernel, for now
	Back        // give the kernel the one in use
	Take        // it is the one in use from now on
)

// Rotation is a node's change of its key. A key is tried when all that may have connections with
// the node have said that their kernels accept it, and is taken when they all send by it: what they
// said before may hold no more, for an agent ends at any moment. Not for several goroutines at
// once.
type Rotation struct {
	trying bool            // the kernel is to have the next key
	since  time.Time       // when it got it, or the one in use back; zero: it was not tried
	sure   map[string]bool // who sends by the key that it has since then
	turns  int             // how often that was
	again  time.Time       // when to ask again
	pause  time.Duration
	waits  []string
}

// Trying reports whether the kernel is to have the next key.
func (r *Rotation) Trying() bool { return r.trying }

// Resume is for an agent that finds a next key of the agent before, which may have ended in a try:
// the kernel has the key in use again, and who has followed has to come back.
func (r *Rotation) Resume(now time.Time) { r.turn(false, now) }

// turn begins a try, or ends one without success.
func (r *Rotation) turn(trying bool, now time.Time) {
	r.trying, r.since, r.sure = trying, now, make(map[string]bool)
	r.turns++
}

// Step decides what is next about a key published at that time. ask gets what the agents of nodes
// say. waits are the nodes that keep the key from being used.
func (r *Rotation) Step(published, now time.Time, others []Known, ask func(nodes []string) map[string]Said) (do Action, waits []string) {
	if !r.since.IsZero() {
		do = r.settle(now, others, ask)
		return do, r.waits
	}
	asked, away := sides(others)
	if len(away) > 0 { // no agent is asked as long as one is away
		r.waits = away
		return Wait, away
	}
	if now.Before(r.again) {
		return Wait, r.waits
	}
	said := ask(names(asked))
	r.waits = nil
	for _, o := range asked {
		s := said[o.Node]
		ready := s == Accepts || s == Sends || s == Never && now.Sub(published) >= SwitchAfter
		if !ready {
			r.waits = append(r.waits, o.Node)
		}
	}
	if len(r.waits) > 0 {
		r.later(now)
		return Wait, r.waits
	}
	r.turn(true, now)
	return Try, nil
}

// deadAfter is after how many turns a node that has no agent, and was heard of by neither key, is
// not waited for any more.
const deadAfter = 4

// settle is Step after a turn, until all send by the key that the kernel has. Those that have left
// the network, or have no agent and do not answer, need not.
func (r *Rotation) settle(now time.Time, others []Known, ask func(nodes []string) map[string]Said) Action {
	others = slices.DeleteFunc(slices.Clone(others), func(o Known) bool {
		return r.sure[o.Node] || o.Heard.After(r.since.Add(heardAfter))
	})
	said := ask(names(others))
	r.waits = nil
	for _, o := range others {
		switch s := said[o.Node]; {
		case s == Never, s == Sends && r.trying, (s == Accepts || s == Without) && !r.trying:
			r.sure[o.Node] = true
		case s != Silent || o.Held || o.Answers && r.turns < deadAfter:
			r.waits = append(r.waits, o.Node)
		}
	}
	passed := now.Sub(r.since)
	switch {
	case len(r.waits) == 0 && r.trying:
		*r = Rotation{}
		return Take
	case len(r.waits) == 0:
		r.since, r.turns = time.Time{}, 0
		r.later(now)
	case r.trying && passed >= TryFor:
		r.turn(false, now)
		return Back
	case !r.trying && passed >= returns*TryFor:
		r.turn(true, now)
		return Try
	}
	return Wait
}

// sides gives the nodes that have agents, and those whose agents are away while they live.
func sides(others []Known) (held []Known, away []string) {
	for _, o := range others {
		switch {
		case o.Held:
			held = append(held, o)
		case o.Answers:
			away = append(away, o.Node)
		}
	}
	slices.Sort(away)
	return held, away
}

func names(nodes []Known) (out []string) {
	for _, n := range nodes {
		out = append(out, n.Node)
	}
	return out
}

// later puts the next question off.
func (r *Rotation) later(now time.Time) {
	r.pause = min(max(2*r.pause, firstPause), lastPause)
	r.again = now.Add(r.pause)
}
