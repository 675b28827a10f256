package netstack

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// A tenant's defaults, and what a connection takes beside its buffers.
const (
	tenantMemory      = 512 << 20
	tenantConnections = 16384
	tenantSockets     = 4096
	overhead          = 4096
	bufferShort       = 16 << 10 // the least a buffer gets when memory is short
	leastMemory       = 2*bufferShort + overhead
	backlogMost       = 4096
	timeWait          = 10 * time.Second
)

// drop is a reason for which a packet is dropped.
type drop int

const (
	dropNone drop = iota
	dropMalformed
	dropMartian
	dropChecksum
	dropProtocol
	dropBacklog
	dropConnections
	dropMemory
	dropRate
	dropDevice
	dropCount
)

// socket is a bound socket, or a listener.
type socket struct {
	local   netip.AddrPort
	listens bool
	backlog int
	pending int // connections that nobody took
	options protocol.Options
}

// addresses are those of a connection.
type addresses struct{ local, remote netip.AddrPort }

// tenant is the endpoint whose TCP this process runs.
type tenant struct {
	agent   *mailbox // to the host, which passes on
	dev     *device
	stack   *stack.Stack
	watcher *watcher
	drops   [dropCount]atomic.Uint64

	send, receive, connect, processor bucket
	capped                            atomic.Bool // processor has a rate
	turns                             atomic.Uint32
	charged                           sync.Mutex // guards used
	used                              uint64     // of the processor, when it was charged last

	mu          sync.Mutex // guards the rest, but no call of netstack's
	message     protocol.Tenant
	own         [2]netip.Addr // IPv4, IPv6; not valid: it has none
	live        bool          // there is an agent that has named its tenants
	options     protocol.Options
	limits      protocol.Limits
	sockets     map[uint64]*socket
	connections map[uint64]*connection // that have an id
	byAddresses map[addresses]*connection
	waiting     []*connection // in TIME-WAIT, the oldest first; some may be gone
	ports       ports
	count       int
	handling    []*connection // peers' handshakes, the oldest first; some may be over
	halfOpen    int           // how many are not
	reserved    uint64
	lastID      uint64
	done        protocol.Stats // counters
	forwarders  map[uint32]*tcp.Forwarder
}

// newTenant makes the tenant at its device.
func newTenant(m *protocol.Tenant, fd int, agent *mailbox) (*tenant, error) {
	options, err := checkTenant(m)
	if err != nil {
		return nil, err
	}
	t := &tenant{
		agent: agent, message: *m, own: ownAddresses(m), sockets: map[uint64]*socket{}, connections: map[uint64]*connection{},
		byAddresses: map[addresses]*connection{}, ports: newPorts(), lastID: protocol.IDOfModule, forwarders: map[uint32]*tcp.Forwarder{},
	}
	t.update(m, options)
	if t.watcher, err = newWatcher(); err != nil {
		return nil, err
	}
	if t.dev, err = newDevice(t, m, fd); err != nil {
		return nil, err
	}
	if err := t.makeStack(); err != nil {
		return nil, err
	}
	go t.watcher.run() //nolint:errcheck // it ends with the process
	go t.dev.run()     //nolint:errcheck // as above: a device that is gone is no end of what the tenant has with itself
	go t.dev.flush()   //nolint:errcheck // the same
	return t, nil
}

// checkTenant gives the options of a TENANT, or why it cannot be.
func checkTenant(m *protocol.Tenant) (protocol.Options, error) {
	options, err := with(defaults(), &m.Options)
	if err != nil {
		return options, err
	}
	v4, v6 := netip.AddrFrom4(m.Address4), netip.AddrFrom16(m.Address6)
	bad4 := v4.IsLoopback() || v4.IsMulticast() || v4 == netip.AddrFrom4([4]byte{255, 255, 255, 255})
	bad6 := v6.IsLoopback() || v6.IsMulticast() || v6.Is4In6()
	// IPv6 asks for 1280 at least, and no device of the kernel's has more than 65535.
	if bad4 || bad6 || v4.IsUnspecified() && v6.IsUnspecified() || m.MTU < 1280 || m.MTU > packetMax || m.Link > protocol.LinkEthernet {
		return options, unix.EINVAL
	}
	return options, nil
}

func ownAddresses(m *protocol.Tenant) (own [2]netip.Addr) {
	if a := netip.AddrFrom4(m.Address4); !a.IsUnspecified() {
		own[0] = a
	}
	if a := netip.AddrFrom16(m.Address6); !a.IsUnspecified() {
		own[1] = a
	}
	return own
}

// makeStack makes netstack: the device, and a loopback that nobody else sees.
func (t *tenant) makeStack() error {
	t.stack = stack.New(stack.Options{
		NetworkProtocols: networkProtocols(), TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol}, HandleLocal: true,
	})
	if err := tune(t.stack); err != nil {
		return err
	}
	for nic, link := range map[tcpip.NICID]stack.LinkEndpoint{deviceNIC: t.dev, loopbackNIC: newLoopback()} {
		if err := t.stack.CreateNIC(nic, link); err != nil {
			return errors.New(err.String())
		}
	}
	at := []struct {
		nic  tcpip.NICID
		addr netip.Addr
	}{{deviceNIC, t.own[0]}, {deviceNIC, t.own[1]}, {loopbackNIC, loopback4}, {loopbackNIC, netip.IPv6Loopback()}}
	for _, a := range at {
		if !a.addr.IsValid() {
			continue
		}
		address := tcpip.ProtocolAddress{Protocol: familyOf(a.addr), AddressWithPrefix: toAddress(a.addr).WithPrefix()}
		if err := t.stack.AddProtocolAddress(a.nic, address, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("address %s: %s", a.addr, err)
		}
	}
	t.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4LoopbackSubnet, NIC: loopbackNIC},
		{Destination: header.IPv6Loopback.WithPrefix().Subnet(), NIC: loopbackNIC},
		{Destination: header.IPv4EmptySubnet, NIC: deviceNIC},
		{Destination: header.IPv6EmptySubnet, NIC: deviceNIC},
	})
	t.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, t.stranger)
	return nil
}

// change gives it other limits and options.
func (t *tenant) change(m *protocol.Tenant) error {
	options, err := checkTenant(m)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if ownAddresses(m) != t.own || m.MTU != t.message.MTU || m.Link != t.message.Link {
		return unix.EINVAL
	}
	t.update(m, options)
	return nil
}

// update is called with mu held, or before anybody else has the tenant.
func (t *tenant) update(m *protocol.Tenant, options protocol.Options) {
	t.options, t.limits = options, m.Limits
	t.limits.Memory = cmp.Or(t.limits.Memory, tenantMemory)
	t.limits.Connections = cmp.Or(t.limits.Connections, tenantConnections)
	t.limits.Sockets = cmp.Or(t.limits.Sockets, tenantSockets)
	now := time.Now()
	t.send.set(m.Limits.SendRate, now)
	t.receive.set(m.Limits.ReceiveRate, now)
	t.connect.set(uint64(m.Limits.ConnectRate), now)
	t.processor.set(uint64(min(m.Limits.Processor, 64000))*1e6, now)
	t.capped.Store(m.Limits.Processor != 0)
}

// turnsUnseen is how many turns and packets there are from one call to the next that Go's scheduler
// sees.
const turnsUnseen = 256

// gate comes before each turn and packet, and waits until the tenant may use the processor.
func (t *tenant) gate() {
	// What takes the processor from a goroutine that does not let go of it, and looks for events
	// when there is always something else to do, is a thread that sleeps when all wait, until such
	// a call.
	if t.turns.Add(1)%turnsUnseen == 0 {
		_, _ = unix.Poll(nil, 0)
	}
	for t.capped.Load() {
		t.charged.Lock()
		used := processorTime()
		t.processor.take(int(used - t.used))
		t.used = used
		t.charged.Unlock()
		if t.processor.available(time.Now()) > 0 {
			return
		}
		time.Sleep(refill)
	}
}

// serve answers the host, which passes on what the agent asks, until it has ended.
func (t *tenant) serve(conn *net.UnixConn) error {
	for {
		b, fds, err := receive(conn)
		if err != nil {
			return err
		}
		head, body, err := parse(b, len(fds))
		if err != nil {
			closeAll(fds)
			return err
		}
		if !t.agent.settle(mailMost / 2) {
			return net.ErrClosed
		}
		if t.ask(head, body, only(fds)) {
			return nil
		}
	}
}

// ask serves a request. It reports whether the tenant has ended with it.
func (t *tenant) ask(head protocol.Head, body any, fd int) (last bool) {
	switch m := body.(type) {
	case *protocol.Tenant:
		t.agent.send(plain(head, t.change(m)), -1)
	case *protocol.Bind:
		local, err := t.bind(head.ID, m.Address.AddrPort(), m.Flags)
		t.name(head, local, err)
	case *protocol.Listen:
		local, err := t.listen(head.ID, m)
		t.name(head, local, err)
	case *protocol.Connect:
		if err := t.open(head, m, fd); err != nil {
			t.agent.send(plain(head, err), fd)
		}
	case *protocol.Set:
		t.agent.send(plain(head, t.set(head.ID, m.Options)), -1)
	case *protocol.Close:
		t.agent.send(plain(head, t.close(head.ID, m.Flags&protocol.Abort != 0)), -1)
	case *protocol.Plain:
		return t.askPlain(head, m)
	}
	return false
}

func (t *tenant) askPlain(head protocol.Head, m *protocol.Plain) (last bool) {
	switch head.Type {
	case protocol.TypeBegin: // another agent, or none; the host waits for this
		t.mu.Lock()
		t.live = false
		t.mu.Unlock()
		t.agent.send(protocol.Append(nil, m), -1)
	case protocol.TypeEnd:
		t.announceAll()
	case protocol.TypeTenantGone:
		t.end()
		t.agent.send(plain(head, nil), -1)
		return true
	case protocol.TypeTaken:
		t.taken(head.ID)
	case protocol.TypeInfo:
		if info, err := t.info(head.ID); err != nil {
			t.agent.send(plain(head, err), -1)
		} else {
			info.Head = answerTo(head, nil)
			t.agent.send(protocol.Append(nil, &info), -1)
		}
	case protocol.TypeStats:
		s := t.stats()
		s.Head = answerTo(head, nil)
		t.agent.send(protocol.Append(nil, &s), -1)
	case protocol.TypeList:
		for _, info := range t.list() {
			info.Head.Type, info.Head.Tag = protocol.TypeListed, head.Tag
			t.agent.send(protocol.Append(nil, &info), -1)
		}
		t.agent.send(plain(head, nil), -1)
	}
	return false
}

func (t *tenant) name(head protocol.Head, local netip.AddrPort, err error) {
	if err != nil {
		t.agent.send(plain(head, err), -1)
		return
	}
	t.agent.send(protocol.Append(nil, &protocol.Named{Head: answerTo(head, nil), Local: addressOf(local)}), -1)
}

// end resets all connections: peers get RST, programs see a reset.
func (t *tenant) end() {
	t.mu.Lock()
	var left []*connection
	for _, c := range t.connections {
		left = append(left, c)
		t.orderLocked(c, orderAbort)
	}
	t.mu.Unlock()
	timeout := time.After(endsWithin / 2) // then the host ends the process
	for _, c := range left {
		select {
		case <-c.ended:
		case <-timeout:
			return
		}
	}
}

// isMartian reports whether nobody out there can have sent this to the tenant.
func (t *tenant) isMartian(from, to netip.Addr) bool {
	mine := func(a netip.Addr) bool { return a == t.own[0] || a == t.own[1] }
	broadcast := from == netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return !mine(to) || mine(from) || from.IsMulticast() || from.IsUnspecified() || from.IsLoopback() || broadcast
}
