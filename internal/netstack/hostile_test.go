package netstack

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/testutil"
)

// mailboxes gives a mailbox, and the other end of its connection.
func mailboxes(t *testing.T) (*mailbox, *net.UnixConn) {
	t.Helper()
	one, two := pairOf(t, unix.SOCK_SEQPACKET)
	var conns [2]*net.UnixConn
	for i, fd := range []int{one, two} {
		file := os.NewFile(uintptr(fd), "end")
		conn, err := net.FileConn(file)
		testutil.NoError(t, err)
		testutil.NoError(t, file.Close())
		conns[i] = conn.(*net.UnixConn)
	}
	t.Cleanup(func() { _ = conns[1].Close() })
	m := newMailbox(conns[0])
	t.Cleanup(m.close)
	return m, conns[1]
}

func isOpen(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return err == nil
}

// files gives the descriptors of so many new files.
func files(t *testing.T, n int) (fds []int) {
	t.Helper()
	for range n {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		testutil.NoError(t, err)
		fds = append(fds, fd)
	}
	return fds
}

// TestTakenOver: who has taken over a tenant's process speaks for that tenant only, says nothing for
// which the agent hangs up, and leaves the host no descriptors.
func TestTakenOver(t *testing.T) {
	of := func(kind uint32, tenant uint64) protocol.Head {
		return protocol.Head{Type: kind, Tag: 1, Tenant: tenant, ID: 7}
	}
	plain := func(kind uint32, tenant uint64) []byte {
		return protocol.Append(nil, &protocol.Plain{Head: of(kind, tenant)})
	}
	accepted := func(tenant uint64) []byte {
		return protocol.Append(nil, &protocol.Accepted{Head: of(protocol.TypeAccepted, tenant)})
	}
	ended := protocol.Append(nil, &protocol.Info{Head: of(protocol.TypeEnded, 3)})
	for name, c := range map[string]struct {
		message     []byte
		descriptors int
		good        bool
	}{
		"a connection":                    {accepted(3), 1, true},
		"the end of one":                  {ended, 0, true},
		"an answer":                       {plain(protocol.TypeBind|protocol.Answer, 3), 0, true},
		"a pair that comes back":          {plain(protocol.TypeConnect|protocol.Answer, 3), 1, true},
		"a connection of another's":       {accepted(4), 1, false},
		"an answer for another":           {plain(protocol.TypeBind|protocol.Answer, 4), 0, false},
		"one for the module":              {plain(protocol.TypeHello|protocol.Answer, 0), 0, false},
		"a connection without descriptor": {accepted(3), 0, false},
		"more descriptors":                {accepted(3), 3, false},
		"descriptors with an answer":      {plain(protocol.TypeBind|protocol.Answer, 3), 1, false},
		"descriptors with counters":       {protocol.Append(nil, &protocol.Stats{Head: of(protocol.TypeStats|protocol.Answer, 0)}), 2, false},
		"a type that there is not":        {plain(77, 3), 0, false},
		"a connection that is too short":  {plain(protocol.TypeAccepted, 3), 1, false},
		"an end that is too long":         {append(ended, 0), 0, false},
		"no head":                         {[]byte{1}, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			box, agent := mailboxes(t)
			h := &host{agent: box, tenants: map[uint64]*process{}}
			fds := files(t, c.descriptors)
			if err := h.heard(&process{id: 3}, c.message, fds); (err == nil) != c.good {
				t.Fatalf("%v, but it is good: %v", err, c.good)
			}
			if c.good {
				got, passed, err := receive(agent)
				if closeAll(passed); err != nil || string(got) != string(c.message) || len(passed) != c.descriptors {
					t.Errorf("the agent hears %x with %d descriptors, %v", got, len(passed), err)
				}
				return
			}
			for _, fd := range fds {
				if isOpen(fd) {
					t.Error("the host keeps a descriptor")
				}
			}
		})
	}
}

func handshakeOf(t *testing.T) (*tenant, *connection) {
	t.Helper()
	box, _ := mailboxes(t)
	w, err := newWatcher()
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = w.file.Close() })
	tn := &tenant{
		agent: box, watcher: w, sockets: map[uint64]*socket{}, connections: map[uint64]*connection{}, byAddresses: map[addresses]*connection{}, ports: newPorts(),
	}
	c := tn.newConnection(protocol.IDOfModule+1, 1, defaults(), arriving)
	c.local, c.remote = netip.MustParseAddrPort("10.9.0.1:80"), netip.MustParseAddrPort("10.9.0.2:4000")
	tn.insert(c)
	return tn, c
}

// TestHandshakeGivenUp: one that is over just when it was given up leaves no descriptor, however
// often a peer that fills the backlog brings that about.
func TestHandshakeGivenUp(t *testing.T) {
	tn, c := handshakeOf(t)
	c.evicted = true
	tn.forgetLocked(c)
	program, own, err := newPair()
	testutil.NoError(t, err)
	testutil.NoError(t, tn.watcher.add(own, c))
	if tn.finishHandshake(c, nil, program, own, nil) {
		t.Error("it goes on")
	}
	if isOpen(program) || isOpen(own) || len(tn.watcher.fds) > 0 {
		t.Errorf("the program's end is open: %v, the module's: %v; %d are watched", isOpen(program), isOpen(own), len(tn.watcher.fds))
	}
}

// TestForwarders: peers choose, by their SYNs, how much memory is left, and with it sizes of
// buffers; what is kept of each size is bounded.
func TestForwarders(t *testing.T) {
	tn, _ := handshakeOf(t)
	tn.stack = stack.New(stack.Options{TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol}})
	defer tn.stack.Destroy()
	tn.forwarders = map[uint32]*tcp.Forwarder{}
	for size := range uint32(10 * forwardersMost) {
		if first, again := tn.forwarder(size), tn.forwarder(size); first != again {
			t.Fatal("one of a size is not used again")
		}
	}
	if n := len(tn.forwarders); n > forwardersMost {
		t.Errorf("%d forwarders are kept", n)
	}
}

// TestPartsOfAPacket: a packet goes out that has more parts than the kernel takes at once, as it has
// when the program has written few bytes at a time.
func TestPartsOfAPacket(t *testing.T) {
	one, two := pairOf(t, unix.SOCK_SEQPACKET)
	defer unix.Close(two)
	tn := &tenant{}
	d, err := newDevice(tn, &protocol.Tenant{MTU: 1500}, one)
	testutil.NoError(t, err)
	defer d.file.Close()
	parts := make([][]byte, partsMost+1)
	for i := range parts {
		parts[i] = []byte{byte(i), byte(i >> 8)}
	}
	d.emit(parts)
	got := make([]byte, 2*len(parts)+1)
	n, _, err := unix.Recvfrom(two, got, unix.MSG_DONTWAIT)
	if want := bytes.Join(parts, nil); err != nil || !bytes.Equal(got[:max(n, 0)], want) {
		t.Errorf("%d bytes of %d, %v", n, len(want), err)
	}
}
