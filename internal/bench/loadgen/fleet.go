package loadgen

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A fleet stands for the processes of many containers in one process: each member is a thread with
// a network namespace, a table of descriptors and, if it is intercepted, a seccomp filter of its
// own, whose listener it hands to the agent as a container runtime does. A thousand processes would
// measure the machine's memory, not the network's.
//
// It reads FleetCommands, one JSON object a line, and answers each with a FleetReply.

// FleetMember is where a member lives.
type FleetMember struct {
	// Netns is the path of its network namespace; empty for that of the fleet.
	Netns string `json:"netns,omitempty"`
	// Endpoint is whose sockets it gets, and Socket where its listener is handed over; empty for
	// one that is not intercepted.
	Endpoint string `json:"endpoint,omitempty"`
	Socket   string `json:"socket,omitempty"`
}

// The operations of a FleetCommand.
const (
	FleetJoin    = "join"    // those of Join become members, numbered on from those there are
	FleetServe   = "serve"   // members listen on a free port, from now on; Ports tells which
	FleetHold    = "hold"    // members open Count connections in turn, to To in turn, and keep them
	FleetDrop    = "drop"    // all connections that are kept end, at both ends
	FleetLatency = "latency" // members connect to To Count times in turn, one after the other
	FleetAccept  = "accept"  // members connect to To for Duration, each as fast as it can
	FleetPace    = "pace"    // members call socket() for Duration, Rate times a second together
)

// FleetCommand is one thing for a fleet to do. Members are numbers in the order in which they
// joined, from 0.
type FleetCommand struct {
	Op       string           `json:"op"`
	Join     []FleetMember    `json:"join,omitempty"`
	Members  []int            `json:"members,omitempty"`
	To       []netip.AddrPort `json:"to,omitempty"`
	Count    int              `json:"count,omitempty"`
	Rate     float64          `json:"rate,omitempty"`
	Duration time.Duration    `json:"duration,omitempty"`
}

// FleetReply is what came of it.
type FleetReply struct {
	Error    string   `json:"error,omitempty"`
	Count    int      `json:"count,omitempty"` // of calls or connections
	ElapsedS float64  `json:"elapsed_s,omitempty"`
	Ports    []uint16 `json:"ports,omitempty"`
	// Of each call of socket(), and of socket() with connect().
	SocketP50Us  float64 `json:"socket_p50_us,omitempty"`
	SocketP99Us  float64 `json:"socket_p99_us,omitempty"`
	ConnectP50Us float64 `json:"socket_connect_p50_us,omitempty"`
	ConnectP99Us float64 `json:"socket_connect_p99_us,omitempty"`
}

// Limits of a fleet.
const (
	maxFleet     = 1 << 14
	fleetWorkers = 16 // members that join or connect at a time
	// fleetRoom is for members that are in a system call: those keep their place in the Go
	// scheduler (raw.go).
	fleetRoom = 96
	// fleetFiles is the most descriptors that the kernel lets a process have unless it is told
	// otherwise.
	fleetFiles = 1 << 20
	fleetLine  = 4 << 20
)

// fleetState is all that lives on between commands. Only the goroutine that reads commands uses it,
// save what says otherwise.
type fleetState struct {
	members  []*member
	serving  int
	held     int                   // connections that members keep
	keep     atomic.Bool           // servers keep what they accept
	drops    atomic.Int64          // counts drops: a server that has seen fewer closes what it keeps
	over     atomic.Bool           // servers end
	accepted atomic.Int64          // connections that servers keep
	refused  atomic.Pointer[error] // why a server could not accept, the last time
}

// fleet is the command.
func fleet(_ context.Context, _ settings, streams Streams) error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + fleetRoom))
	defer debug.SetMaxThreads(debug.SetMaxThreads(maxFleet + 2*fleetRoom)) // a member has one
	if err := raiseFiles(); err != nil {
		return err
	}
	var c fleetState
	defer c.end()
	out, in := json.NewEncoder(streams.Out), bufio.NewScanner(streams.In)
	in.Buffer(nil, fleetLine)
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return err
	}
	for in.Scan() {
		var command FleetCommand
		if err := json.Unmarshal(in.Bytes(), &command); err != nil {
			return fmt.Errorf("fleet: %w", err)
		}
		reply, err := c.do(command)
		if err != nil {
			reply.Error = err.Error()
		}
		if err := out.Encode(reply); err != nil {
			return err
		}
	}
	return in.Err()
}

// end ends all members' threads, and with them their descriptors.
func (c *fleetState) end() {
	c.over.Store(true)
	for _, m := range c.members {
		close(m.work)
	}
}

// raiseFiles lets each member have as many descriptors as this process may give it.
func raiseFiles() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read RLIMIT_NOFILE: %w", err)
	}
	// Only some may raise the hard limit.
	if raised := (unix.Rlimit{Cur: fleetFiles, Max: fleetFiles}); limit.Max < fleetFiles && unix.Setrlimit(unix.RLIMIT_NOFILE, &raised) == nil {
		return nil
	}
	limit.Cur = limit.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raise RLIMIT_NOFILE: %w", err)
	}
	return nil
}

func (c *fleetState) do(command FleetCommand) (reply FleetReply, err error) {
	if command.Op == FleetJoin {
		began := time.Now()
		err := c.join(command.Join)
		return FleetReply{Count: len(command.Join), ElapsedS: time.Since(began).Seconds()}, err
	}
	if command.Op == FleetDrop {
		return c.drop()
	}
	if len(command.Members) == 0 {
		return reply, fmt.Errorf("fleet: %s: no members", command.Op)
	}
	members := make([]*member, len(command.Members))
	for i, n := range command.Members {
		if n < 0 || n >= len(c.members) {
			return reply, fmt.Errorf("fleet: member %d of %d", n, len(c.members))
		}
		members[i] = c.members[n]
	}
	if command.Duration < 0 || command.Duration > maxDuration || command.Count < 0 || command.Count > maxSamples {
		return reply, fmt.Errorf("fleet: %s of %d for %s: out of bounds", command.Op, command.Count, command.Duration)
	}
	if command.Op == FleetServe {
		return c.serve(members)
	}
	if command.Op == FleetPace {
		return pace(members, command.Rate, command.Duration)
	}
	to := make([]*rawAddress, len(command.To))
	for i, a := range command.To {
		to[i] = newRawAddress(a)
	}
	if len(to) == 0 {
		return reply, fmt.Errorf("fleet: %s: no addresses", command.Op)
	}
	c.keep.Store(command.Op == FleetHold)
	switch command.Op {
	case FleetHold:
		return c.hold(members, to, command.Count)
	case FleetLatency:
		return fleetLatency(members, to, command.Count)
	case FleetAccept:
		return acceptRate(members, to, command.Duration)
	}
	return reply, fmt.Errorf("fleet: no operation %q", command.Op)
}

// each runs f for every member on its thread, some at a time, and gives the errors of the first few
// that failed.
func each(members []*member, f func(i int, m *member) error) error {
	var (
		mu     sync.Mutex
		failed []error
		wg     sync.WaitGroup
	)
	places := make(chan struct{}, fleetWorkers)
	for i, m := range members {
		places <- struct{}{}
		mu.Lock()
		enough := len(failed) > 0
		mu.Unlock()
		if enough {
			break
		}
		wg.Go(func() {
			defer func() { <-places }()
			if err := m.call(func() error { return f(i, m) }); err != nil {
				mu.Lock()
				failed = append(failed, fmt.Errorf("member %d: %w", m.number, err))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(failed...)
}

func (c *fleetState) join(specs []FleetMember) error {
	if len(c.members)+len(specs) > maxFleet {
		return fmt.Errorf("fleet: %d members, at most %d", len(c.members)+len(specs), maxFleet)
	}
	var fresh []*member
	for i, spec := range specs {
		m := &member{number: len(c.members) + i, spec: spec, work: make(chan func())}
		go m.live()
		fresh = append(fresh, m)
	}
	if err := each(fresh, func(_ int, m *member) error { return m.enter() }); err != nil {
		for _, m := range fresh {
			close(m.work)
		}
		return err
	}
	c.members = append(c.members, fresh...)
	return nil
}

func (c *fleetState) serve(members []*member) (reply FleetReply, err error) {
	if c.serving += len(members); c.serving > fleetRoom/2 {
		return reply, fmt.Errorf("fleet: %d servers, at most %d", c.serving, fleetRoom/2)
	}
	reply.Ports = make([]uint16, len(members))
	err = each(members, func(i int, m *member) (err error) { reply.Ports[i], err = m.listen(); return err })
	if err != nil {
		return FleetReply{}, err
	}
	for _, m := range members {
		m.work <- func() { m.accept(c) }
	}
	return reply, nil
}

// acceptTimeout bounds how long servers may be behind clients.
const acceptTimeout = 20 * time.Second

// hold opens connections and waits until the servers have accepted them all.
func (c *fleetState) hold(members []*member, to []*rawAddress, count int) (reply FleetReply, err error) {
	shares := make([]int, len(members))
	for i := range count {
		shares[i%len(members)]++
	}
	began := time.Now()
	var opened atomic.Int64
	err = each(members, func(i int, m *member) error {
		for n := range shares[i] {
			fd, err := openSocket(to[0].family)
			if err == nil {
				if err = rawConnect(fd, to[(i+n*len(members))%len(to)]); err != nil {
					err = errors.Join(fmt.Errorf("connect: %w", err), rawClose(fd))
				}
			}
			if err != nil {
				return fmt.Errorf("connection %d of this member: %w", len(m.held)+1, err)
			}
			m.held = append(m.held, fd)
			opened.Add(1)
		}
		return nil
	})
	c.held += int(opened.Load())
	reply = FleetReply{Count: int(opened.Load()), ElapsedS: time.Since(began).Seconds()}
	if err != nil {
		return reply, err
	}
	return reply, await100us(acceptTimeout, func() bool { return int(c.accepted.Load()) >= c.held },
		func() error {
			err := fmt.Errorf("servers accepted %d of %d connections", c.accepted.Load(), c.held)
			if why := c.refused.Load(); why != nil {
				err = fmt.Errorf("%w: accept: %w", err, *why)
			}
			return err
		})
}

// await100us waits until ok, or gives what late says.
func await100us(limit time.Duration, ok func() bool, late func() error) error {
	for deadline := time.Now().Add(limit); !ok(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			return late()
		}
	}
	return nil
}

// drop ends all connections: the clients' ends by reset.
func (c *fleetState) drop() (FleetReply, error) {
	began := time.Now()
	keepers := slices.DeleteFunc(slices.Clone(c.members), func(m *member) bool { return m.serving || len(m.held) == 0 })
	err := each(keepers, func(_ int, m *member) (err error) {
		for _, fd := range m.held {
			err = errors.Join(err, abort(fd))
		}
		m.held = nil
		return err
	})
	c.drops.Add(1)
	err = errors.Join(err, await100us(acceptTimeout, func() bool { return c.accepted.Load() == 0 },
		func() error { return fmt.Errorf("servers still keep %d connections", c.accepted.Load()) }))
	count := c.held
	c.held = 0
	return FleetReply{Count: count, ElapsedS: time.Since(began).Seconds()}, err
}

// times are latencies in nanoseconds.
type times struct{ sockets, connects []int64 }

// reply gives their percentiles.
func (t times) reply(elapsed time.Duration) FleetReply {
	r := FleetReply{Count: max(len(t.sockets), len(t.connects)), ElapsedS: elapsed.Seconds()}
	slices.Sort(t.sockets)
	slices.Sort(t.connects)
	if len(t.sockets) > 0 {
		r.SocketP50Us, r.SocketP99Us = percentileUs(t.sockets, 50), percentileUs(t.sockets, 99)
	}
	if len(t.connects) > 0 {
		r.ConnectP50Us, r.ConnectP99Us = percentileUs(t.connects, 50), percentileUs(t.connects, 99)
	}
	return r
}

// fleetLatency has one member after the other make a connection.
func fleetLatency(members []*member, to []*rawAddress, count int) (FleetReply, error) {
	t := times{newSamples(count), newSamples(count)}
	began := time.Now()
	for i := range count {
		m := members[i%len(members)]
		err := m.call(func() error { return m.connectOnce(to[i%len(to)], began, &t) })
		if err != nil {
			return FleetReply{}, fmt.Errorf("member %d: %w", m.number, err)
		}
	}
	return t.reply(time.Since(began)), nil
}

// acceptRate has members connect at the same time: what they reach together is what the listeners
// accept.
func acceptRate(members []*member, to []*rawAddress, duration time.Duration) (FleetReply, error) {
	if len(members) > fleetWorkers {
		return FleetReply{}, fmt.Errorf("fleet: %d members connect at a time, at most %d", len(members), fleetWorkers)
	}
	all := make([]times, len(members))
	began := time.Now()
	err := each(members, func(i int, m *member) error {
		for n := 0; n == 0 || time.Since(began) < duration; n++ { // one at least, however late the thread begins
			if err := m.connectOnce(to[i%len(to)], began, &all[i]); err != nil {
				return err
			}
		}
		return nil
	})
	elapsed := time.Since(began)
	var t times
	for _, a := range all {
		t.sockets, t.connects = append(t.sockets, a.sockets...), append(t.connects, a.connects...)
	}
	return t.reply(elapsed), err
}

// paceTick is how often a member looks what is due, at most.
const paceTick = time.Millisecond

// pace has members call socket() at a common rate. Who is late makes up for it.
func pace(members []*member, rate float64, duration time.Duration) (FleetReply, error) {
	if rate < minRate || rate > maxRate || len(members) > fleetRoom/2 {
		return FleetReply{}, fmt.Errorf("fleet: %d members call socket() %g times a second: out of bounds", len(members), rate)
	}
	all := make([]times, len(members))
	errs := make([]error, len(members))
	interval := time.Duration(float64(len(members)) / rate * float64(time.Second))
	began := time.Now()
	var wg sync.WaitGroup
	for i, m := range members {
		wg.Go(func() {
			offset := interval * time.Duration(i) / time.Duration(len(members))
			errs[i] = m.call(func() error { return m.pace(began.Add(offset), interval, duration, &all[i]) })
		})
	}
	wg.Wait()
	elapsed := time.Since(began)
	var t times
	for _, a := range all {
		t.sockets = append(t.sockets, a.sockets...)
	}
	return t.reply(elapsed), errors.Join(errs...)
}
