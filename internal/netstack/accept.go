package netstack

import (
	"net/netip"
	"slices"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

const (
	// halfOpen is what a connection takes that a peer's SYN has begun, until its handshake is over:
	// netstack's endpoint and the goroutine that waits.
	halfOpen = 32 << 10
	// halfOpenShare is which part of a tenant's memory those may have; halfOpenLeast and
	// halfOpenMost are how many there may be.
	halfOpenShare = 16
	halfOpenLeast = 16
	halfOpenMost  = 1024
	// beginsWithin is how soon netstack sends its SYN-ACK; a SYN that is behind another one of the
	// same addresses it may drop.
	beginsWithin = time.Second
	// forwardersMost is for how many sizes of receive buffers forwarders are kept: programs choose
	// them.
	forwardersMost = 64
)

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
	forward, evicted, taken := t.admit(local, remote)
	if evicted != nil {
		t.abortHandshake(evicted)
	}
	if forward == nil {
		return taken
	}
	return forward.HandlePacket(id, pkt)
}

// admit makes a connection of a SYN if a listener has place for it, for which another handshake may
// be evicted; taken: the SYN has been dealt with, it may be by dropping it.
func (t *tenant) admit(local, remote netip.AddrPort) (forward *tcp.Forwarder, evicted *connection, taken bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byAddresses[addresses{local, remote}] != nil {
		return nil, nil, true // its handshake has just begun
	}
	id := t.ports.listener(local, remote)
	s := t.sockets[id]
	if s == nil {
		return nil, nil, false
	}
	why := dropNone
	switch {
	case s.pending >= s.backlog:
		why = dropBacklog
	case t.connect.available(time.Now()) == 0:
		why = dropRate
	case !t.hasPlace():
		why = dropConnections
	case t.halfOpen >= t.mostHalfOpen() || t.left() < leastMemory:
		if evicted = t.giveWay(); evicted == nil {
			why = dropBacklog
		}
	}
	if why == dropNone && !t.hasMemory(leastMemory) {
		why = dropMemory
	}
	if why != dropNone {
		t.drops[why].Add(1)
		return nil, evicted, true
	}
	t.lastID++
	c := t.newConnection(t.lastID, id, s.options, arriving)
	c.local, c.remote = local, remote
	t.insert(c)
	if len(t.handling) > 2*t.halfOpen+16 {
		t.handling = slices.DeleteFunc(t.handling, isOver)
	}
	t.handling = append(t.handling, c)
	return t.forwarder(s.options.ReceiveBuffer), evicted, false
}

// mostHalfOpen is how many handshakes of peers' may be under way.
func (t *tenant) mostHalfOpen() int {
	return int(min(max(t.limits.Memory/halfOpenShare/halfOpen, halfOpenLeast), halfOpenMost))
}

// giveWay drops the oldest handshake that is not over: who floods listeners with SYNs of nobody
// keeps those out that answer more slowly than the flood takes all places, and no others. The
// caller has abortHandshake tell netstack, so it is one that netstack has begun; nil if there is
// none.
func (t *tenant) giveWay() *connection {
	for len(t.handling) > 0 && isOver(t.handling[0]) {
		t.handling = t.handling[1:]
	}
	i := slices.IndexFunc(t.handling, func(c *connection) bool {
		return !isOver(c) && (c.opened.Load() || time.Since(c.began) > beginsWithin)
	})
	if i < 0 {
		return nil
	}
	c := t.handling[i]
	copy(t.handling[1:], t.handling[:i])
	t.handling = t.handling[1:]
	t.drops[dropBacklog].Add(1)
	c.evicted = true
	t.forgetLocked(c)
	return c
}

// isOver reports whether a connection is no handshake any more.
func isOver(c *connection) bool { return c.phase != arriving }

// evictHandshake gives up a handshake of a peer's. netstack hears of it when nobody holds mu: it
// may deliver segments again.
func (t *tenant) evictHandshake(c *connection) {
	c.evicted = true
	t.forgetLocked(c)
	go t.abortHandshake(c)
}

// abortHandshake has netstack forget a handshake. The peer hears nothing: it may not be the one
// that has asked.
func (t *tenant) abortHandshake(c *connection) {
	id := stack.TransportEndpointID{
		LocalAddress: toAddress(c.local.Addr()), LocalPort: c.local.Port(), RemoteAddress: toAddress(c.remote.Addr()), RemotePort: c.remote.Port(),
	}
	if ep := t.stack.FindTransportEndpoint(familyOf(c.local.Addr()), tcp.ProtocolNumber, id, 0); ep != nil {
		ep.Abort()
	}
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
	program, own, failed := newPair()
	if failed == nil {
		failed = t.watcher.add(own, c)
	}
	if !t.finishHandshake(c, ep, program, own, failed) {
		ep.Abort()
		return
	}
	t.mu.Lock()
	options := c.options
	t.mu.Unlock()
	applyBuffers(ep, &options)
	c.queue.EventRegister(&c.entry)
	c.wake()
	c.serve()
}

// finishHandshake makes a handshake that is over an open connection with that pair; false: it was
// given up meanwhile, there is no pair, or the tenant may not have it: it may be the last of many
// that began at the same time.
func (t *tenant) finishHandshake(c *connection, ep tcpip.Endpoint, program, own int, failed error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	why := dropNone
	switch {
	case c.evicted:
	case failed != nil || !t.hasPlace(): // no descriptors: as if there were too many connections
		why = dropConnections
	case !t.establish(c):
		why = dropMemory
	}
	if why != dropNone {
		t.drops[why].Add(1)
	}
	if c.evicted || why != dropNone {
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

// establish gives a connection what it needs from now on, and its place in its listener's backlog.
func (t *tenant) establish(c *connection) bool {
	if !t.afford(&c.options) {
		return false
	}
	t.halfOpen--
	t.reserved -= c.reserved
	c.reserved = cost(&c.options)
	t.reserved += c.reserved
	t.connect.take(1)
	if s := t.sockets[c.listener]; s != nil {
		s.pending++
		c.taken = false
	}
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
	head.Type = protocol.TypeSent // this process has no copy then; the host says so to who wants to hear it
	t.agent.send(protocol.Append(nil, &protocol.Plain{Head: head}), -1)
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
