// Package netstack is a stack module (docs/protocols/stack-module.md) whose TCP is gVisor's
// netstack.
//
// A host speaks with the agent, and has a process for each tenant, to which it passes on what is
// the tenant's: so the kernel says what processor time and memory a tenant uses, and shares the
// machine among them, and what a tenant breaks is its own (docs/decisions/0073).
//
//	host.go, process.go   the host: messages of the agent's, processes of tenants
//	tenant.go             a tenant's process: requests, limits
//	sockets.go, ports.go  who is bound, listens, connects
//	accept.go             whom a SYN is for, backlogs
//	connection.go         netstack's endpoint on one side, the program's pair on the other
//	device.go, stack.go   netstack, and packets in and out
//	pair.go, watcher.go   pairs of sockets
//	wire.go, mailbox.go   messages
//	sandbox.go            what a tenant's process gives up
package netstack

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/hang"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// name is what HELLO says.
const name = "gVisor netstack 2026-09-05"

// tenantAnswers is for how long the host waits for a tenant's process that has a question: the
// agent takes a host that rests for 2 s for one that hangs.
const tenantAnswers = time.Second

// endsWithin is how long a tenant's process may take to end.
const endsWithin = 3 * time.Second

// host is a module without TCP of its own.
type host struct {
	start starter

	mu      sync.Mutex // guards the rest
	agent   *mailbox   // nil: none is connected
	greeted bool
	live    bool // the agent has named its tenants
	sent    bool // the agent wants to hear SENT
	tenants map[uint64]*process
	gone    protocol.Stats // counters of tenants that are gone
}

// Run serves the agents that connect at a path, for ever.
func Run(path string) error {
	if err := raiseDescriptorLimit(); err != nil {
		return err
	}
	// What somebody has left open is not for tenants' processes.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close descriptors in children: %w", err)
	}
	old := unix.Umask(0o177)
	listener, err := net.Listen("unixpacket", path)
	unix.Umask(old)
	if err != nil {
		return err
	}
	h := &host{start: newStarter(), tenants: map[uint64]*process{}}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go h.serve(h.take(conn.(*net.UnixConn))) // in the order in which they came
	}
}

func raiseDescriptorLimit() error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return err
	}
	l.Cur = l.Max
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &l) // Go undoes what it raised itself in children
}

// take takes an agent in place of the one before.
func (h *host) take(conn *net.UnixConn) *mailbox {
	agent := newMailbox(conn)
	h.mu.Lock()
	before := h.agent
	h.agent, h.greeted, h.live, h.sent = agent, false, false, false
	for _, p := range h.tenants {
		p.part()
	}
	h.mu.Unlock()
	if before != nil {
		before.close()
	}
	return agent
}

// serve hears an agent until it ends.
func (h *host) serve(agent *mailbox) {
	for agent.settle(mailMany) {
		b, fds, err := receive(agent.conn)
		if err != nil {
			break
		}
		if err := h.hear(agent, b, fds); err != nil {
			log.Printf("heddle-netstack: %v", err)
			agent.settle(0) // the answer says why
			break
		}
	}
	h.mu.Lock()
	if h.agent == agent {
		h.agent, h.live = nil, false
		for _, p := range h.tenants {
			p.part()
		}
	}
	h.mu.Unlock()
	agent.close()
}

// hear serves one message. After an error the agent's connection is closed.
func (h *host) hear(agent *mailbox, b []byte, fds []int) error {
	head, body, err := parse(b, len(fds))
	if err != nil {
		closeAll(fds)
		return err
	}
	fd := only(fds)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.agent != agent {
		closeFD(fd)
		return net.ErrClosed
	}
	if hello, is := body.(*protocol.Hello); is || !h.greeted {
		closeFD(fd)
		return h.greet(agent, head, hello)
	}
	switch m := body.(type) {
	case *protocol.Tenant:
		h.tenant(agent, m, b, fd)
		return nil
	case *protocol.Plain:
		if h.plain(agent, head, b) {
			return nil
		}
	}
	p := h.tenants[head.Tenant]
	switch {
	case p != nil:
		p.mail.send(b, fd)
	case head.Type == protocol.TypeTaken:
	default: // a connect that cannot be brings its pair back
		agent.send(plain(head, unix.ENODEV), fd)
	}
	return nil
}

func (h *host) greet(agent *mailbox, head protocol.Head, m *protocol.Hello) error {
	var err error
	switch {
	case m == nil || h.greeted:
		err = unix.EPROTO
	case m.Version != protocol.Version:
		err = unix.EPROTONOSUPPORT
	default:
		h.greeted = true
		its := protocol.Hello{
			Head: answerTo(head, nil), Version: protocol.Version,
			Features: protocol.CanReno | protocol.CanCubic | protocol.CanSACK | protocol.CanIPv6 | protocol.CanTellSent,
		}
		copy(its.Name[:], name)
		agent.send(protocol.Append(nil, &its), -1)
		return nil
	}
	agent.send(plain(head, err), -1)
	return fmt.Errorf("the agent's greeting: %w", err)
}

// plain serves what is about no tenant, or about its end; false: it is for the tenant.
func (h *host) plain(agent *mailbox, head protocol.Head, b []byte) bool {
	switch head.Type {
	case protocol.TypeBegin:
		for _, p := range h.tenants {
			p.named = false
		}
	case protocol.TypeTellSent:
		h.sent = true
	case protocol.TypeEnd:
		h.live = true
		for _, p := range h.tenants {
			if p.named {
				p.mail.send(b, -1)
			} else {
				h.endLocked(p, protocol.Head{})
			}
		}
	case protocol.TypeTenantGone:
		p := h.tenants[head.Tenant]
		if p == nil {
			agent.send(plain(head, unix.ENODEV), -1)
		} else {
			h.endLocked(p, head)
		}
	case protocol.TypeStats:
		if head.Tenant != 0 {
			return false
		}
		go h.stats(agent, head)
	default:
		return false
	}
	return true
}

// tenant serves TENANT: a new one, or another container in its place, or other limits.
func (h *host) tenant(agent *mailbox, m *protocol.Tenant, b []byte, fd int) {
	head := m.Head
	answer := func(err error) {
		closeFD(fd)
		agent.send(plain(head, err), -1)
	}
	if p := h.tenants[head.Tenant]; p != nil {
		if p.generation == m.Generation {
			p.named = true
			if fd >= 0 {
				answer(unix.EEXIST)
				return
			}
			p.mail.send(b, -1)
			p.weigh(m.Limits.Weight)
			return
		}
		h.endLocked(p, protocol.Head{})
	}
	if fd < 0 {
		answer(unix.ENODEV)
		return
	}
	if _, err := checkTenant(m); err != nil {
		answer(err)
		return
	}
	p, err := h.startProcess(m)
	if err != nil {
		log.Printf("heddle-netstack: start a process for tenant %d: %v", head.Tenant, err)
		answer(unix.ENOBUFS)
		return
	}
	h.tenants[head.Tenant] = p
	p.mail.send(b, fd)
	if h.live {
		p.mail.send(protocol.Append(nil, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeEnd}}), -1)
	}
}

// endLocked has a tenant's process reset its connections and end. The agent gets its answer to
// asked, unless that is nothing.
func (h *host) endLocked(p *process, asked protocol.Head) {
	delete(h.tenants, p.id)
	p.ending = true
	if asked.Type == 0 {
		asked = protocol.Head{Type: protocol.TypeTenantGone, Tenant: p.id}
		p.unanswered = true
	}
	p.mail.send(protocol.Append(nil, &protocol.Plain{Head: asked}), -1)
	time.AfterFunc(endsWithin, p.kill) // unless it has ended
}

// heard passes on what a tenant's process says.
func (h *host) heard(p *process, b []byte, fds []int) error {
	head, err := protocol.ParseHead(b[:min(len(b), 32)])
	if err == nil && !p.may(head, len(b), len(fds)) {
		err = fmt.Errorf("it says type %#x of tenant %d, in %d bytes with %d descriptors", head.Type, head.Tenant, len(b), len(fds))
	}
	if err != nil {
		closeAll(fds)
		return err
	}
	fd := only(fds)
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case head.Type == protocol.TypeBegin: // what it says from now on is for the agent that is there
		p.parts = max(p.parts-1, 0)
	case head.Type == protocol.TypeStats|protocol.Answer && head.Tenant == 0:
		p.counted(b)
	case head.Type == protocol.TypeSent && !h.sent:
	case p.parts > 0 || h.agent == nil || p.unanswered && head.Type == protocol.TypeTenantGone|protocol.Answer:
		closeFD(fd)
	default:
		h.agent.send(b, fd)
		return nil
	}
	return nil
}

// ended notes that a tenant's process is no more. If nobody has asked for that, the agent's
// connection is closed, so that it comes back, names its tenants, and hears that one is missing.
func (h *host) ended(p *process, why error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	addCounters(&h.gone, &p.last)
	if h.tenants[p.id] == p {
		delete(h.tenants, p.id)
	}
	if p.ending {
		return
	}
	log.Printf("heddle-netstack: the process of tenant %d (%s) has ended: %v", p.id, p.name, why)
	if h.agent != nil {
		h.agent.close()
	}
}

// stats asks all tenants' processes, and answers with the sums: for those that have not answered in
// time, with what they said last.
func (h *host) stats(agent *mailbox, head protocol.Head) {
	h.mu.Lock()
	all := make([]*process, 0, len(h.tenants))
	for _, p := range h.tenants {
		all = append(all, p)
	}
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), tenantAnswers)
	defer cancel()
	asked := make([]<-chan struct{}, len(all))
	for i, p := range all {
		asked[i] = h.ask(p)
	}
	for i, p := range all {
		select {
		case <-asked[i]:
		case <-p.done:
		case <-ctx.Done():
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	sum := h.gone
	sum.Processor = processorTime() + childrenTime()
	sum.Memory = residentMemory()
	for _, p := range all {
		addCounters(&sum, &p.last)
		addStates(&sum, &p.last)
		sum.Processor += p.last.Processor
	}
	sum.Head = answerTo(head, nil)
	agent.send(protocol.Append(nil, &sum), -1)
}

// ask asks a tenant's process for its counters, unless it has a question already; what is given is
// closed when they are there. A process that hangs is ended.
func (h *host) ask(p *process) <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.asked == nil {
		p.asked = make(chan struct{})
		p.mail.send(protocol.Append(nil, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeStats}}), -1)
		go p.watch(p.asked)
	}
	return p.asked
}

// watch ends the process if it hangs before it has answered.
func (p *process) watch(there <-chan struct{}) {
	bound, cancel := hang.Bound(context.Background(), p.cmd.Process.Pid)
	defer cancel()
	select {
	case <-there:
	case <-p.done:
	case <-bound.Done():
		log.Printf("heddle-netstack: tenant %d (%s) hangs, its process is ended: for %s %v", p.id, p.name, hang.After, hang.Err)
		p.kill()
	}
}

// addCounters adds what only grows, addStates what is now.
func addCounters(sum, s *protocol.Stats) {
	for to, from := range map[*uint64]uint64{
		&sum.Connected: s.Connected, &sum.Accepted: s.Accepted, &sum.Failed: s.Failed, &sum.Reset: s.Reset,
		&sum.BytesSent: s.BytesSent, &sum.BytesReceived: s.BytesReceived,
		&sum.SegmentsSent: s.SegmentsSent, &sum.SegmentsReceived: s.SegmentsReceived, &sum.Retransmits: s.Retransmits,
		&sum.DropMalformed: s.DropMalformed, &sum.DropMartian: s.DropMartian, &sum.DropChecksum: s.DropChecksum,
		&sum.DropProtocol: s.DropProtocol, &sum.DropBacklog: s.DropBacklog, &sum.DropConnections: s.DropConnections,
		&sum.DropMemory: s.DropMemory, &sum.DropRate: s.DropRate, &sum.DropDevice: s.DropDevice,
		&sum.RefuseConnections: s.RefuseConnections, &sum.RefuseMemory: s.RefuseMemory, &sum.RefuseRate: s.RefuseRate,
		&sum.RefuseSockets: s.RefuseSockets, &sum.RefusePorts: s.RefusePorts,
	} {
		*to += from
	}
}

func addStates(sum, s *protocol.Stats) {
	for to, from := range map[*uint64]uint64{
		&sum.Memory: s.Memory, &sum.MemoryReserved: s.MemoryReserved, &sum.Tenants: s.Tenants, &sum.Sockets: s.Sockets,
		&sum.Connections: s.Connections, &sum.HalfOpen: s.HalfOpen, &sum.TimeWait: s.TimeWait,
		&sum.SendQueued: s.SendQueued, &sum.ReceiveQueued: s.ReceiveQueued,
	} {
		*to += from
	}
}

// childrenTime gives the nanoseconds of processor of processes that have ended.
func childrenTime() uint64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); err != nil {
		return 0
	}
	return uint64(u.Utime.Nano() + u.Stime.Nano())
}

// RunTenant is the main function of a tenant's process, which the host has started.
func RunTenant() error {
	file := os.NewFile(hostFD, "host")
	conn, err := net.FileConn(file)
	if err != nil {
		return err
	}
	_ = file.Close() // conn has its own
	host, ok := conn.(*net.UnixConn)
	if !ok {
		return errors.New("not started by heddle-netstack")
	}
	if err := shutOff(); err != nil {
		return fmt.Errorf("give up privileges: %w", err)
	}
	b, fds, err := receive(host)
	if err != nil {
		return err
	}
	head, body, err := parse(b, len(fds))
	if err != nil {
		return err
	}
	m, ok := body.(*protocol.Tenant)
	if !ok {
		return fmt.Errorf("%w: type %d before TENANT", errMalformed, head.Type)
	}
	agent := newMailbox(host)
	t, err := newTenant(m, only(fds), agent)
	agent.send(plain(head, err), -1)
	if err == nil {
		err = t.serve(host)
	}
	agent.settle(0)
	return err
}
