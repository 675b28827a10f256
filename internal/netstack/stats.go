package netstack

import (
	"bytes"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// info says what a socket is.
func (t *tenant) info(id uint64) (protocol.Info, error) {
	t.mu.Lock()
	if s := t.sockets[id]; s != nil {
		defer t.mu.Unlock()
		return t.infoOf(id, s), nil
	}
	c := t.connections[id]
	t.mu.Unlock()
	if c == nil {
		return protocol.Info{}, unix.ENOENT
	}
	return c.info(), nil
}

func (t *tenant) infoOf(id uint64, s *socket) protocol.Info {
	i := protocol.Info{
		Head: protocol.Head{Tenant: t.message.Head.Tenant, ID: id}, Kind: protocol.KindBound, State: uint32(tcp.StateClose),
		Local: addressOf(s.local), Options: s.options,
	}
	i.Remote.Address[10], i.Remote.Address[11] = 0xff, 0xff // 0.0.0.0
	if s.listens {
		i.Kind, i.State, i.Pending, i.Backlog = protocol.KindListener, uint32(tcp.StateListen), uint32(s.pending), uint32(s.backlog)
	}
	return i
}

// list gives what there is, for an agent that has just come.
func (t *tenant) list() []protocol.Info {
	t.mu.Lock()
	var out []protocol.Info
	for id, s := range t.sockets {
		out = append(out, t.infoOf(id, s))
	}
	all := make([]*connection, 0, len(t.connections))
	for _, c := range t.connections {
		all = append(all, c)
	}
	t.mu.Unlock()
	for _, c := range all {
		out = append(out, c.info())
	}
	slices.SortFunc(out, func(a, b protocol.Info) int {
		if a.Head.ID < b.Head.ID {
			return -1
		}
		return 1
	})
	return out
}

func (c *connection) info() protocol.Info {
	c.t.mu.Lock()
	options, ep, p := c.options, c.ep, c.phase
	c.t.mu.Unlock()
	head := 20 + 20
	if c.local.Addr().Is6() {
		head += 20
	}
	i := protocol.Info{
		Head: protocol.Head{Tenant: c.t.message.Head.Tenant, ID: c.id}, Kind: protocol.KindConnection, State: uint32(tcp.StateSynRecv),
		Listener: c.listener, Local: addressOf(c.local), Remote: addressOf(c.remote), Options: options,
		BytesSent: c.sent(), BytesReceived: c.pushed.Load(), MSS: c.t.dev.mtu - uint32(head),
	}
	if ep == nil {
		return i
	}
	if p == connecting {
		i.State = uint32(tcp.StateSynSent)
	} else if i.State = ep.State(); i.State > uint32(tcp.StateClosing) {
		i.State = uint32(tcp.StateClose) // netstack has states of its own
	}
	queued := uint64(c.unread())
	i.BytesReceived += queued
	i.ReceiveQueue, i.SendQueue = uint32(queued), uint32(c.pulled.Load()-i.BytesSent)
	var of tcpip.TCPInfoOption
	if ep.GetSockOpt(&of) == nil {
		i.RTT, i.RTTVariation = uint32(of.RTT.Microseconds()), uint32(of.RTTVar.Microseconds())
	}
	if s, ok := ep.Stats().(*tcp.Stats); ok {
		i.SegmentsSent, i.SegmentsReceived, i.Retransmits = s.SegmentsSent.Value(), s.SegmentsReceived.Value(), s.SendErrors.Retransmits.Value()
	}
	return i
}

// ended notes that a connection is over, and tells the agent.
func (t *tenant) ended(c *connection, errno unix.Errno) {
	info := c.info()
	info.Head.Type, info.Head.Error = protocol.TypeEnded, int32(errno)
	t.mu.Lock()
	defer t.mu.Unlock()
	if errno != 0 {
		t.done.Reset++
	}
	t.done.BytesSent += info.BytesSent
	t.done.BytesReceived += info.BytesReceived
	if t.live && c.program < 0 {
		t.agent.send(protocol.Append(nil, &info), -1)
	}
	t.notPending(c)
	closeFD(c.program)
	c.program, c.phase = -1, waits
	close(c.ended)
	delete(t.connections, c.id)
	t.waiting = append(t.waiting, c)
	if len(t.waiting) > 2*t.count+16 {
		t.waiting = slices.DeleteFunc(t.waiting, func(c *connection) bool { return c.phase != waits })
	}
}

// stats gives what the tenant has done, and has now. Its processor time and memory are those of the
// process, which is its own.
func (t *tenant) stats() protocol.Stats {
	t.mu.Lock()
	s := t.done
	s.MemoryReserved, s.Tenants, s.Sockets, s.Connections = t.reserved, 1, uint64(t.ports.count), uint64(t.count)
	s.TimeWait = uint64(t.count - len(t.connections))
	var ready []*connection
	for _, c := range t.connections {
		if c.phase < open {
			s.HalfOpen++
		}
		if c.ep != nil {
			ready = append(ready, c)
		}
	}
	t.mu.Unlock()
	for _, c := range ready {
		sent, unread := c.sent(), uint64(c.unread())
		s.BytesSent += sent
		s.BytesReceived += c.pushed.Load() + unread
		s.SendQueued += c.pulled.Load() - sent
		s.ReceiveQueued += unread
	}
	s.Processor, s.Memory = processorTime(), residentMemory()
	s.SegmentsSent, s.SegmentsReceived = t.dev.sent.Load(), t.dev.received.Load()
	s.Retransmits = t.stack.Stats().TCP.Retransmits.Value()
	for why, to := range map[drop]*uint64{
		dropMalformed: &s.DropMalformed, dropMartian: &s.DropMartian, dropChecksum: &s.DropChecksum, dropProtocol: &s.DropProtocol,
		dropBacklog: &s.DropBacklog, dropConnections: &s.DropConnections, dropMemory: &s.DropMemory, dropRate: &s.DropRate, dropDevice: &s.DropDevice,
	} {
		*to = t.drops[why].Load()
	}
	return s
}

// statm is opened before the process shuts itself off.
var statm, _ = os.Open("/proc/self/statm")

// residentMemory gives the bytes of memory that the process has to itself.
func residentMemory() uint64 {
	var buf [128]byte
	n, err := statm.ReadAt(buf[:], 0)
	if err != nil && n == 0 {
		return 0
	}
	fields := bytes.Fields(buf[:n])
	if len(fields) < 3 {
		return 0
	}
	resident, _ := strconv.ParseUint(string(fields[1]), 10, 64)
	shared, _ := strconv.ParseUint(string(fields[2]), 10, 64)
	return (resident - min(shared, resident)) * uint64(os.Getpagesize())
}
