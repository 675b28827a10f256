package stacks

import (
	"net"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
)

// noted has the same note of every socket.
type noted struct {
	plane.StackModules
	n socket.Note
}

func (k noted) Note(int) ([plane.NoteBytes]byte, bool, error) { return k.n.Bytes(), true, nil }

// answer is a module: it answers what it is asked about a connection by says, and tells of what it
// is to abort.
func answer(t *testing.T, by *net.UnixConn, aborts func(protocol.Head), says func() protocol.Info) {
	for b := make([]byte, protocol.MessageMax); ; {
		n, err := by.Read(b)
		if err != nil {
			return
		}
		h, err := protocol.ParseHead(b[:min(n, 32)])
		if err != nil {
			return
		}
		if h.Type == protocol.TypeClose {
			aborts(h)
			reply(t, by, h)
			continue
		}
		i := says()
		i.Head = h
		i.Head.Type |= protocol.Answer
		_, _ = by.Write(protocol.Append(nil, &i)) // the answer fails, too
	}
}

// TestConnected: by queues an endpoint sends on established connections of its own alone, not on
// those of others, of an earlier container with its number, on listeners, or before there is a
// connection.
func TestConnected(t *testing.T) {
	l, other := linked(t)
	go func() { _, _, _, _ = l.Hear() }()
	says := make(chan protocol.Info, 1)
	aborted := make(chan uint64, 1)
	go answer(t, other, func(h protocol.Head) { aborted <- h.ID }, func() protocol.Info { return <-says })
	p := &Plane{ctx: t.Context(), cfg: Config{Faults: &faults{}}, tenants: map[model.EndpointID]*tenant{}}
	m := p.newModule(stack.Smoltcp)
	m.SetLink(l)
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, m)
	p.tenants[7] = tn
	own := socket.Note{ID: 5, Tenant: tn.number(), Generation: tn.generation(), State: socket.Connected}
	for name, c := range map[string]struct {
		change      func(*socket.Note)
		endpoint    model.EndpointID
		kind, state uint32
		want        bool
	}{
		"its own":                  {func(*socket.Note) {}, 7, protocol.KindConnection, tcpEstablished, true},
		"whose peer sends no more": {func(*socket.Note) {}, 7, protocol.KindConnection, tcpCloseWait, true},
		"another's":                {func(n *socket.Note) { n.Tenant = 8 }, 7, protocol.KindConnection, tcpEstablished, false},
		"asked by another":         {func(*socket.Note) {}, 8, protocol.KindConnection, tcpEstablished, false},
		"an earlier container's":   {func(n *socket.Note) { n.Generation++ }, 7, protocol.KindConnection, tcpEstablished, false},
		"only made":                {func(n *socket.Note) { n.ID = 0 }, 7, protocol.KindConnection, tcpEstablished, false},
		"a listener":               {func(*socket.Note) {}, 7, protocol.KindListener, tcpEstablished, false},
		"being connected":          {func(*socket.Note) {}, 7, protocol.KindConnection, tcpSynSent, false},
	} {
		n := own
		c.change(&n)
		p.cfg.StackModules = noted{n: n}
		select {
		case <-says: // nobody asked for the one before
		default:
		}
		says <- protocol.Info{Kind: c.kind, State: c.state}
		abort, ok, err := p.Connected(t.Context(), c.endpoint, 0)
		testutil.NoError(t, err)
		if ok != c.want {
			t.Errorf("%s: %v", name, ok)
		}
		if ok {
			testutil.NoError(t, abort(t.Context()))
			if id := <-aborted; id != 5 {
				t.Errorf("%s: connection %d was ended", name, id)
			}
		}
	}
}

// TestAbortByLaterLink: what was connected when the agent had another connection to the module is
// ended by the one that there is; of another process there is nothing to end.
func TestAbortByLaterLink(t *testing.T) {
	p := &Plane{ctx: t.Context(), cfg: Config{Faults: &faults{}}, tenants: map[model.EndpointID]*tenant{}}
	m := p.newModule(stack.Netstack)
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, m)
	p.tenants[7] = tn
	p.cfg.StackModules = noted{n: socket.Note{ID: 5, Tenant: tn.number(), Generation: tn.generation(), State: socket.Connected}}
	aborted := make(chan int, 3)
	connect := func(number, process int) *module.Link {
		l, other := linked(t)
		l.PID += process
		go func() { _, _, _, _ = l.Hear() }()
		go answer(t, other, func(protocol.Head) { aborted <- number }, func() protocol.Info {
			return protocol.Info{Kind: protocol.KindConnection, State: tcpEstablished}
		})
		return l
	}
	first := connect(1, 0)
	m.SetLink(first)
	abort, ok, err := p.Connected(t.Context(), 7, 0)
	if err != nil || !ok {
		t.Fatalf("%v, %v", ok, err)
	}
	first.Close()
	m.SetLink(nil)
	m.SetLink(connect(2, 0))
	testutil.NoError(t, abort(t.Context()))
	if number := <-aborted; number != 2 {
		t.Errorf("by link %d", number)
	}
	m.SetLink(nil)
	m.SetLink(connect(3, 1))
	testutil.NoError(t, abort(t.Context()))
	select {
	case number := <-aborted:
		t.Errorf("another process's connection was ended, by link %d", number)
	default:
	}
}
