package differ

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Lab is where programs run: the workers, and the addresses of the places.
type Lab struct {
	Hub   *Hub
	Addrs map[string]Addrs // by place
	Spare Addrs            // of the containers' network, and nobody's
	// Gateway is the overlay address of the node of actor a.
	Gateway Addrs
	// InUse gives the local ports of all the places' sockets. Slow runs avoid them: what the
	// connection of an earlier program left is no difference between the modes.
	InUse func() (map[int]bool, error)
}

// Addrs are addresses of one host. Without V6 the IPv6 form is the v4-mapped one.
type Addrs struct{ V4, V6 string }

// Pace says how long things are given.
type Pace struct {
	Limit  time.Duration // a call that takes longer counts as blocked
	Gap    time.Duration // between two looks at all sockets
	Stable int           // how often nothing must have changed
	Most   int           // looks, at most
}

// Fast is for the first try of a program, Slow to see whether a difference is one.
var (
	Fast = Pace{Limit: 8 * time.Millisecond, Gap: time.Millisecond, Stable: 1, Most: 30}
	Slow = Pace{Limit: 150 * time.Millisecond, Gap: 15 * time.Millisecond, Stable: 3, Most: 60}
)

// Pool names the workers of a place in a mode. The node and the host outside are the same in every
// mode.
func Pool(place, mode string) string {
	if place == PlaceNode || place == PlaceOutside {
		return place
	}
	return place + " " + mode
}

// run is one program on its way.
type run struct {
	lab     Lab
	program Program
	pace    Pace
	workers map[string]*worker
	hosts   map[string]Addrs
	ports   map[string]int
	seen    map[string]map[string]string // what is ready, by actor and slot
	told    map[string]bool              // the workers that know the program's addresses
	trace   Trace
}

// Run runs a program in a mode and gives its trace. An error is one of the tester's, not of the
// program.
func (l Lab) Run(p Program, mode string, pace Pace) (Trace, error) {
	if err := p.Check(); err != nil {
		return Trace{}, err
	}
	r := &run{lab: l, program: p, pace: pace, workers: map[string]*worker{}, seen: map[string]map[string]string{}, told: map[string]bool{}}
	var err error
	if r.ports, err = l.ports(p, pace); err != nil {
		return Trace{}, err
	}
	r.hosts = map[string]Addrs{"a": l.Addrs[p.A], "b": l.Addrs[p.B], "any": {"0.0.0.0", "::"}, "lo": {"127.0.0.1", "::1"}, "lo5": {V4: "127.0.0.5"},
		"nobody": l.Spare, "gateway": l.Gateway, PlaceNode: l.Addrs[PlaceNode], "broadcast": {V4: "255.255.255.255"}, "multicast": {V4: "224.0.0.5"}}
	for _, actor := range []string{"a", "b"} {
		place := map[string]string{"a": p.A, "b": p.B}[actor]
		m := mode
		if p.Plain == actor {
			m = "overlay"
		}
		w, err := l.Hub.take(Pool(place, m))
		if err != nil {
			return Trace{}, err
		}
		defer l.Hub.give(w)
		r.workers[actor] = w
	}
	for i, s := range p.Steps {
		if err := r.step(i, s); err != nil {
			return Trace{}, fmt.Errorf("step %d, %s (%s): %w", i, s, mode, err)
		}
	}
	if err := r.finish(); err != nil {
		return Trace{}, fmt.Errorf("end of the program (%s): %w", mode, err)
	}
	r.trace.normalise(r.hosts, r.ports)
	return r.trace, nil
}

// ports gives a program its ports.
func (l Lab) ports(p Program, pace Pace) (map[string]int, error) {
	if pace == Fast || l.InUse == nil {
		return l.Hub.freshPorts(p.hasLowPort()), nil
	}
	inUse, err := l.InUse()
	if err != nil {
		return nil, fmt.Errorf("look for ports in use: %w", err)
	}
	return l.Hub.unusedPorts(p.hasLowPort(), inUse)
}

// ask has an actor carry out a step, and notes what it sees at its sockets afterwards.
func (r *run) ask(actor string, q Request) (Reply, []string, bool, error) {
	name, child := strings.CutSuffix(actor, "+")
	q.Child = child
	if !r.told[name] {
		q.Hosts, q.Ports, r.told[name] = r.hosts, r.ports, true
	}
	reply, err := r.workers[name].ask(q)
	if err != nil {
		return Reply{}, nil, false, err
	}
	ended := r.note(name, reply)
	return reply, ended, reply.Moving, nil
}

func (r *run) step(i int, s Step) error {
	before := r.slots()
	reply, ended, moving, err := r.ask(s.At, Request{Kind: "step", Index: i, Step: s, LimitMS: int(r.pace.Limit.Milliseconds())})
	if err != nil {
		return err
	}
	e := Entry{Step: i, Result: reply.Result.String(), Ended: ended}
	if reply.Pending {
		e.Result = "blocks"
	}
	if !ops[s.Op].local || len(ended) > 0 || moving {
		if e.Ended, err = r.quiesce(ended); err != nil {
			return err
		}
	}
	slices.Sort(e.Ended)
	e.Changes = changes(before, r.slots())
	r.trace.Entries = append(r.trace.Entries, e)
	return nil
}

// quiesce waits until nothing changes any more at any socket, and gives the calls that ended
// meanwhile.
func (r *run) quiesce(ended []string) ([]string, error) {
	for look, stable := 0, 0; look < r.pace.Most && stable < r.pace.Stable; look++ {
		if look > 0 {
			time.Sleep(r.pace.Gap) // the pace of looking: the condition is that two looks are equal
		}
		before := r.slots()
		done, moving, err := r.look()
		if err != nil {
			return nil, err
		}
		ended = append(ended, done...)
		if look > 0 && !moving && len(done) == 0 && maps.Equal(before, r.slots()) {
			stable++
		} else {
			stable = 0
		}
	}
	return ended, nil
}

// look asks every worker what is ready and which calls have ended.
func (r *run) look() (ended []string, moving bool, err error) {
	for _, actor := range []string{"a", "b"} {
		reply, err := r.workers[actor].ask(Request{Kind: "sample"})
		if err != nil {
			return nil, false, err
		}
		ended = append(ended, r.note(actor, reply)...)
		moving = moving || reply.Moving
	}
	return ended, moving, nil
}

// note keeps what a worker saw, and gives the calls that ended.
func (r *run) note(actor string, reply Reply) (ended []string) {
	seen := map[string]string{}
	for slot, text := range reply.Slots {
		seen[fmt.Sprintf("%s f%d", actor, slot)] = text
	}
	for slot, text := range reply.Child {
		seen[fmt.Sprintf("%s+ f%d", actor, slot)] = text
	}
	r.seen[actor] = seen
	for _, d := range reply.Done {
		ended = append(ended, fmt.Sprintf("%3d %s = %s", d.Index, r.program.Steps[d.Index], d.Result))
	}
	return ended
}

// slots gives what is ready at both actors.
func (r *run) slots() map[string]string {
	all := maps.Clone(r.seen["a"])
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, r.seen["b"])
	return all
}

// finish interrupts what still blocks and asks every open socket for its names and its error.
func (r *run) finish() error {
	last := Entry{Step: len(r.program.Steps)}
	for _, actor := range []string{"a", "b"} {
		reply, err := r.workers[actor].ask(Request{Kind: "interrupt"})
		if err != nil {
			return err
		}
		for _, d := range reply.Done {
			last.Ended = append(last.Ended, fmt.Sprintf("%3d %s = %s", d.Index, r.program.Steps[d.Index], d.Result))
		}
	}
	slices.Sort(last.Ended)
	if _, _, err := r.look(); err != nil {
		return err
	}
	const solSocket, soError = 1, 4
	for _, at := range slices.Sorted(maps.Keys(r.slots())) {
		var actor string
		var slot int
		if _, err := fmt.Sscanf(at, "%s f%d", &actor, &slot); err != nil {
			return fmt.Errorf("slot %q: %w", at, err)
		}
		for _, s := range []Step{
			{At: actor, Op: "getsockname", Fd: slot, Args: []int{128}},
			{At: actor, Op: "getpeername", Fd: slot, Args: []int{128}},
			{At: actor, Op: "getsockopt", Fd: slot, Args: []int{solSocket, soError, 4}},
		} {
			reply, _, _, err := r.ask(actor, Request{Kind: "step", Index: len(r.program.Steps), Step: s, LimitMS: 1000})
			if err != nil {
				return err
			}
			last.Ended = append(last.Ended, fmt.Sprintf("    %s = %s", s, reply.Result))
		}
	}
	r.trace.Entries = append(r.trace.Entries, last)
	return nil
}
