package netstack

import (
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// handshake is for how long one holds its place in a full backlog: until its SYN-ACK is sent again.
const handshake = time.Second

// forwardersMost is for how many sizes of receive buffers forwarders are kept. Peers choose sizes,
// by how much memory their SYNs leave.
const forwardersMost = 64

// Listeners are none of netstack's: its own have no backlog that counts what no program took, and
// answer by cookies what is beyond it. What is for no connection comes to stranger.

// stranger takes a segment that is for no connection of netstack's; false: it is answered by RST.
func (t *tenant) stranger(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	flags := header.TCP(pkt.TransportHeader().Slice()).Flags()
	if flags&(header.TCPFlagSyn|header.TCPFlagAck|header.TCPFlagRst) != header.TCPFlagSyn {
		return false
	}
	local := netip.AddrPortFrom(toAddr(id.LocalAddress), id.LocalPort)
	remote := netip.AddrPortFrom(toAddr(id.RemoteAddress), id.RemotePort)
	forward, taken := t.admit(local, remote)
	if forward == nil {
		return taken
	}
	return forward.HandlePacket(id, pkt)
}

// admit makes a connection of a SYN if a listener has place for it; taken: the SYN has been dealt
// with, it may be by dropping it.
func (t *tenant) admit(local, remote netip.AddrPort) (forward *tcp.Forwarder, taken bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byAddresses[addresses{local, remote}] != nil {
		return nil, true // its handshake has just begun
	}
	id := t.ports.listener(local, remote)
	s := t.sockets[id]
	if s == nil {
		return nil, false
	}
	options := s.options
	switch {
	case s.pending >= s.backlog && !t.makePlace(s):
		t.drops[dropBacklog].Add(1)
		return nil, true
	case t.connect.available(time.Now()) == 0:
		t.drops[dropRate].Add(1)
		return nil, true
	case !t.hasPlace():
		t.drops[dropConnections].Add(1)
		return nil, true
	case !t.afford(&options):
		t.drops[dropMemory].Add(1)
		return nil, true
	}
	t.connect.take(1)
	t.lastID++
	c := t.newConnection(t.lastID, id, options, arriving)
	c.local, c.remote = local, remote
	s.pending++
	t.insert(c)
	if len(s.handling) > 2*s.backlog {
		s.handling = s.live()
	}
	s.handling = append(s.handling, c)
	return t.forwarder(options.ReceiveBuffer), false
}

// live gives those handshakes that are not over.
func (s *socket) live() (out []*connection) {
	for _, c := range s.handling {
		if c.phase == arriving {
			out = append(out, c)
		}
	}
	return out
}

// makePlace drops the oldest handshake of a listener that is not over in time: who floods it with
// SYNs of nobody does not keep others out.
func (t *tenant) makePlace(s *socket) bool {
	for len(s.handling) > 0 {
		c := s.handling[0]
		if c.phase == arriving && time.Since(c.began) < handshake {
			return false
		}
		s.handling = s.handling[1:]
		if c.phase == arriving {
			t.evictHandshake(c)
			return true
		}
	}
	return false
}

// evictHandshake gives up a handshake of a peer's. netstack hears of it when nobody holds mu: it
// may deliver segments again.
func (t *tenant) evictHandshake(c *connection) {
	c.evicted = true
	t.forgetLocked(c)
	id := stack.TransportEndpointID{
		LocalAddress: toAddress(c.local.Addr()), LocalPort: c.local.Port(), RemoteAddress: toAddress(c.remote.Addr()), RemotePort: c.remote.Port(),
	}
	go func() {
		if ep := t.stack.FindTransportEndpoint(familyOf(c.local.Addr()), tcp.ProtocolNumber, id, 0); ep != nil {
			ep.Abort()
		}
	}()
}

// forwarder gives what makes endpoints with such a receive buffer: its window is in the SYN-ACK.
func (t *tenant) forwarder(buffer uint32) *tcp.Forwarder {
	f := t.forwarders[buffer]
	if f == nil {
		if len(t.forwarders) >= forwardersMost { // handshakes have what they need of theirs
			clear(t.forwarders)
		}
		f = tcp.NewForwarder(t.stack, 2*int(buffer), 1<<30, t.shakeHands)
		t.forwarders[buffer] = f
	}
	return f
}

// shakeHands has netstack answer a SYN that was admitted, waits for the handshake to be over, and
// serves the connection.
func (t *tenant) shakeHands(r *tcp.ForwarderRequest) {
	id := r.ID()
	key := addresses{netip.AddrPortFrom(toAddr(id.LocalAddress), id.LocalPort), netip.AddrPortFrom(toAddr(id.RemoteAddress), id.RemotePort)}
	t.mu.Lock()
	c := t.byAddresses[key]
	t.mu.Unlock()
	if c == nil {
		r.Complete(false)
		return
	}
	ep, err := r.CreateEndpoint(&c.queue)
	r.Complete(false)
	if err != nil {
		t.forget(c, nil)
		return
	}
	apply(ep, &c.options)
	applyBuffers(ep, &c.options)
	program, own, failed := newPair()
	if failed == nil {
		failed = t.watcher.add(own, c)
	}
	if !t.finishHandshake(c, ep, program, own, failed) {
		ep.Abort()
		return
	}
	c.queue.EventRegister(&c.entry)
	c.wake()
	c.serve()
}

// finishHandshake makes a handshake that is over an open connection with that pair; false: it was
// given up meanwhile, or there is no pair.
func (t *tenant) finishHandshake(c *connection, ep tcpip.Endpoint, program, own int, failed error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.evicted || failed != nil {
		if failed != nil { // no descriptors: as if the backlog were full
			t.drops[dropConnections].Add(1)
		}
		t.forgetLocked(c)
		if own >= 0 {
			t.watcher.remove(own)
		}
		closeAll([]int{program, own}) // none is c's yet
		return false
	}
	c.ep, c.pair, c.program = ep, own, program
	c.phase, c.guard = open, true
	t.done.Accepted++
	t.announce(c)
	return true
}

// announce tells an agent of a connection that was accepted, if one is there to hear of it.
func (t *tenant) announce(c *connection) {
	if !t.live || c.phase != open || c.program < 0 {
		return
	}
	head := protocol.Head{Type: protocol.TypeAccepted, Tenant: t.message.Head.Tenant, ID: c.id}
	m := protocol.Accepted{Head: head, Listener: c.listener, Local: addressOf(c.local), Remote: addressOf(c.remote)}
	t.agent.send(protocol.Append(nil, &m), c.program)
	c.program = -1
}

// announceAll tells an agent that has just come of connections that nobody was told of.
func (t *tenant) announceAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.live = true
	for _, c := range t.connections {
		t.announce(c)
	}
}

// arriving looks at a segment before netstack has it.
func (t *tenant) arriving(s *segment) {
	t.mu.Lock()
	c := t.byAddresses[addresses{s.local, s.remote}]
	again := c != nil && c.phase == waits && s.opens()
	if again { // in place of one in TIME-WAIT, RFC 6191
		t.orderLocked(c, orderAbort)
		t.forgetLocked(c)
	}
	t.mu.Unlock()
	switch {
	case again:
		c.ep.Abort()
	case c != nil && s.flags.Contains(header.TCPFlagAck):
		c.saw(s.ack)
	}
}

// opening notes with what number a connection begins.
func (t *tenant) opening(pkt *stack.PacketBuffer, h header.TCP) {
	n := pkt.Network()
	key := addresses{netip.AddrPortFrom(toAddr(n.SourceAddress()), h.SourcePort()), netip.AddrPortFrom(toAddr(n.DestinationAddress()), h.DestinationPort())}
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.byAddresses[key]; c != nil && c.phase < open {
		c.lastAck.Store(h.SequenceNumber() + 1)
		c.opened.Store(true)
	}
}
