package verbs

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/folder"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// faults are those there are, each with a "reason endpoint".
type faults struct {
	mu  sync.Mutex // guards all
	all map[string]error
}

func key(reason api.FaultReason, endpoint string) string { return string(reason) + " " + endpoint }

func (f *faults) Set(reason api.FaultReason, endpoint string, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all[key(reason, endpoint)] = err
	return true
}

func (f *faults) Clear(reason api.FaultReason, endpoint string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, was := f.all[key(reason, endpoint)]
	delete(f.all, key(reason, endpoint))
	return was
}

func (f *faults) Has(reason api.FaultReason) bool { return f.of(reason, "") != nil }

func (f *faults) of(reason api.FaultReason, endpoint string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.all[key(reason, endpoint)]
}

// busy is loopback where something else listens the first time.
type busy struct {
	loopback
	asked *atomic.Int32
}

func (b busy) ListenRDMA(id model.EndpointID, port uint16, ipv6 bool) (net.Listener, error) {
	if b.asked.Add(1) == 1 {
		return nil, unix.EADDRINUSE
	}
	return b.loopback.ListenRDMA(id, port, ipv6)
}

// loopback has all endpoints at 127.0.0.1, at ports of the kernel's choice; nobody listens at port
// 4791 there.
type loopback struct{}

func (loopback) ConnectRDMA(_ context.Context, _ model.EndpointID, to netip.AddrPort) (*os.File, error) {
	conn, err := net.Dial("tcp", to.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.(*net.TCPConn).File()
}

func (loopback) ConnectAs(context.Context, model.EndpointID, netip.AddrPort) (*os.File, error) {
	return nil, unix.ENOSYS
}

func (loopback) SocketAs(model.EndpointID, bool) (*os.File, error) { return nil, unix.ENOSYS }

func (loopback) ListenRDMA(model.EndpointID, uint16, bool) (net.Listener, error) {
	return net.Listen("tcp4", "127.0.0.1:0")
}

// node is a plane that runs, and where its router would be.
type node struct {
	*testing.T
	plane  *Plane
	faults *faults
	dir    string
	// setGroups is the agent's; nil: nobody joins any.
	setGroups plane.SetGroups
}

func runPlane(t *testing.T) node {
	n := newNode(t)
	n.plane = n.open()
	return n
}

func newNode(t *testing.T) node {
	dir, err := os.MkdirTemp("", "verbs") // t's own is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("PATH", dir) // no router is found
	return node{T: t, faults: &faults{all: map[string]error{}}, dir: dir}
}

// open runs a plane as the next agent of the node would, which has these endpoints.
func (n node) open(all ...model.Endpoint) *Plane {
	p := Open(Config{
		StateDir: n.dir, SeccompSocket: filepath.Join(n.dir, "seccomp.sock"), Self: filepath.Join(n.dir, "heddled"),
		Limits: model.VerbsLimits{QPs: 1, CQs: 77}, SpinMicros: 20, Sockets: loopback{}, SetGroups: n.setGroups, Faults: n.faults, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	for _, e := range all {
		if err := p.Attach(e, netcfg.EndpointDevice{}); err != nil {
			n.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(n.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	n.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, p.Close()); err != nil {
			n.Error(err)
		}
	})
	return p
}

func (n node) attach(e model.Endpoint) {
	n.Helper()
	if err := n.plane.Attach(e, netcfg.EndpointDevice{}); err != nil {
		n.Fatal(err)
	}
}

func (n node) eventually(what string, is func() bool) {
	n.Helper()
	for deadline := time.Now().Add(10 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			n.Fatalf("%s: not within 10 s", what)
		}
	}
}

// router is one that the test plays.
type router struct {
	*testing.T
	listener *net.UnixListener
	conn     *net.UnixConn
}

func (n node) startRouter() *router {
	n.Helper()
	return n.startRouterAt(filepath.Join(n.dir, socketFile))
}

func (n node) startRouterAt(path string) *router {
	n.Helper()
	_ = os.Remove(path)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		n.Fatal(err)
	}
	r := &router{T: n.T, listener: l}
	n.Cleanup(r.end)
	return r
}

// meet accepts the agent and says HELLO.
func (r *router) meet() {
	r.Helper()
	if err := r.listener.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		r.Fatal(err)
	}
	var err error
	if r.conn, err = r.listener.AcceptUnix(); err != nil {
		r.Fatal(err)
	}
	r.say(helloMessage())
	r.hear(protocol.TypeHello)
}

func (r *router) end() {
	if r.conn != nil {
		r.conn.Close()
	}
	r.listener.Close()
}

func (r *router) say(b []byte) {
	r.Helper()
	if _, err := r.conn.Write(b); err != nil {
		r.Fatal(err)
	}
}

// hear wants a message of a type; it gives it, and the descriptor that came with it, or -1.
func (r *router) hear(want uint32) (message []byte, fd int) {
	r.Helper()
	message, rights := make([]byte, 512), make([]byte, 64)
	if err := r.conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		r.Fatal(err)
	}
	n, ctl, _, _, err := r.conn.ReadMsgUnix(message, rights)
	if err != nil {
		r.Fatalf("wanted message %d: %v", want, err)
	}
	if got := uint32(message[0]); got != want {
		r.Fatalf("message %d, want %d", got, want)
	}
	if ctl == 0 {
		return message[:n], -1
	}
	parsed, err := unix.ParseSocketControlMessage(rights[:ctl])
	if err != nil {
		r.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&parsed[0])
	if err != nil || len(fds) != 1 {
		r.Fatalf("descriptors %v, %v", fds, err)
	}
	r.Cleanup(func() { unix.Close(fds[0]) })
	return message[:n], fds[0]
}

var wanted = model.Endpoint{
	ID: 7, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.2")}, Created: time.Unix(5, 9),
	Planes: model.EndpointPlanes{Verbs: model.VerbsRecord{VerbsEndpoint: model.VerbsEndpoint{Wanted: true, SpinMicros: 3}}},
}

// connects reports whether a program of the endpoint reaches whoever has the listener fd.
func (n node) connects(fd int) bool {
	n.Helper()
	conn, err := net.Dial("unixpacket", filepath.Join(folder.Of(n.plane.cfg.SeccompSocket, wanted.ID), folder.Socket))
	if err != nil {
		return false
	}
	defer conn.Close()
	accepted, _, err := unix.Accept(fd)
	if err != nil {
		return false
	}
	unix.Close(accepted)
	return true
}

func TestRouterIsToldAndMissed(t *testing.T) {
	n := runPlane(t)
	n.attach(model.Endpoint{ID: 3, Name: "plain"})
	if _, err := os.Stat(filepath.Join(n.dir, folder.Dir)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("an endpoint without verbs has a folder: %v", err)
	}
	if st := n.plane.Router(); st.State != api.RouterNone {
		t.Fatalf("router %+v", st)
	}
	var said *api.Error
	if err := n.plane.Accepts(wanted.Planes); !errors.As(err, &said) || said.Field != "verbs" || !strings.Contains(said.Remedy, "install it") {
		t.Errorf("an endpoint on a node without a router's program: %v", err)
	}
	n.attach(wanted)
	n.eventually("a fault that says what is missing", func() bool {
		err := n.faults.of(FaultRouter, "")
		return err != nil && strings.Contains(err.Error(), "install it")
	})
	if n.connects(-1) {
		t.Error("a program connects although there is no router")
	}

	r := n.startRouter()
	r.meet()
	r.hear(protocol.TypeBegin)
	message, fd := r.hear(protocol.TypeEndpoint)
	if fd != -1 {
		t.Error("the socket was closed, and comes all the same")
	}
	r.hear(protocol.TypeEnd)
	if m, err := layout.Parse[protocol.Endpoint](message); err != nil || m.GIDs != gidsOf(wanted.Addr4(), netip.Addr{}) {
		t.Fatalf("ENDPOINT %x, %v", message, err)
	}
	r.say(refusal(5_000_000_009, unix.EBADF))
	if _, fd = r.hear(protocol.TypeEndpoint); !n.connects(fd) {
		t.Error("a program does not reach the router")
	}
	n.eventually("no fault", func() bool { return !n.faults.Has(FaultRouter) })
	if st := n.plane.Router(); st.State != api.RouterRuns || st.PID != os.Getpid() || st.Endpoints != 1 {
		t.Fatalf("router %+v", st)
	}

	r.end()
	n.eventually("a fault of a router that has ended", func() bool { return n.faults.Has(FaultRouter) })
	if st := n.plane.Router(); st.State != api.RouterDown || st.Ended != 1 {
		t.Fatalf("router %+v", st)
	}
}

func TestRouterOutlivesTheAgent(t *testing.T) {
	n := newNode(t)
	r := n.startRouter()
	n.plane = n.open(wanted)
	r.meet()
	r.hear(protocol.TypeBegin)
	_, fd := r.hear(protocol.TypeEndpoint)
	if !n.connects(fd) {
		t.Error("a program does not reach the router")
	}
	r.hear(protocol.TypeEnd)
	if err := n.plane.Close(); err != nil {
		t.Fatal(err)
	}

	n.plane = n.open(wanted)
	r.meet()
	r.hear(protocol.TypeBegin)
	if _, fd := r.hear(protocol.TypeEndpoint); fd != -1 {
		t.Error("the socket is another one: programs that wait at the first are lost")
	}
	r.hear(protocol.TypeEnd)
	if !n.connects(fd) {
		t.Error("a program does not reach the router any more")
	}
	if err := n.plane.Detach(wanted); err != nil {
		t.Fatal(err)
	}
	r.hear(protocol.TypeRemove)
	if _, err := os.Stat(folder.Of(n.plane.cfg.SeccompSocket, wanted.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder stays: %v", err)
	}
}

// TestConnections: what connects to an endpoint is the router's, and what the router asks for is
// answered.
func TestConnections(t *testing.T) {
	n := newNode(t)
	r := n.startRouter()
	n.plane = n.open(wanted)
	r.meet()
	r.hear(protocol.TypeBegin)
	r.hear(protocol.TypeEndpoint)
	r.hear(protocol.TypeEnd)
	n.plane.mu.Lock()
	listener := n.plane.endpoints[wanted.ID].connections
	n.plane.mu.Unlock()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	message, fd := r.hear(protocol.TypeAccepted)
	const local = "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x7f\x00\x00\x01"
	if string(message[16:]) != local+local {
		t.Errorf("ACCEPTED %x", message)
	}
	if _, err := unix.Write(fd, []byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Error(err)
	}

	ask := protocol.Head{Type: protocol.TypeConnect, Tag: 9, Endpoint: 5_000_000_009}
	r.say(append(layout.Append(nil, &ask), local+local...))
	message, fd = r.hear(protocol.TypeConnected)
	if fd != -1 || string(message) != string(connectedMessage(ask, unix.ECONNREFUSED)) {
		t.Errorf("CONNECTED %x with descriptor %d, want a refusal", message, fd)
	}

	// With a card in both nodes the router hears first where the other one is.
	n.plane.mu.Lock()
	n.plane.cfg.Device = "mlx5_0"
	n.plane.mu.Unlock()
	card := model.VerbsCard{GIDs: addrs("::ffff:10.1.0.2", "fe80::2"), LID: 7}
	err = n.plane.SetTopology(nil, []model.Node{{Name: "n2", Planes: model.NodePlanes{Verbs: model.VerbsNode{Card: &card}}}},
		model.EndpointsOf(model.Endpoint{Node: "n2", Addrs: addrs("127.0.0.1")}))
	if err != nil {
		t.Fatal(err)
	}
	again, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	message, _ = r.hear(protocol.TypeCard)
	gid := func(last string) string { return strings.Repeat("\x00", 10) + "\xff\xff" + last }
	const linkLocal = "\xfe\x80\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02"
	if string(message[16:]) != "\x07\x00\x00\x00\x02\x00\x00\x00"+gid("\x0a\x01\x00\x02")+linkLocal {
		t.Errorf("CARD %x", message)
	}
	_, fd = r.hear(protocol.TypeAccepted)
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
}

// TestPortIsTakenLater: a program that has port 4791 when the endpoint is attached keeps others'
// queue pairs out until it is gone, and not for ever.
func TestPortIsTakenLater(t *testing.T) {
	n := runPlane(t)
	n.plane.cfg.Sockets = busy{asked: new(atomic.Int32)}
	r := n.startRouter()
	n.attach(wanted)
	if err := n.faults.of(FaultRouter, wanted.Name); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("fault %v while the port is another's", err)
	}
	r.meet()
	n.eventually("the port to be the plane's", func() bool { return !n.faults.Has(FaultRouter) && n.faults.of(FaultRouter, wanted.Name) == nil })
	n.plane.mu.Lock()
	defer n.plane.mu.Unlock()
	if n.plane.endpoints[wanted.ID].connections == nil {
		t.Error("nobody listens")
	}
}

func TestKeepRemovesFolders(t *testing.T) {
	n := runPlane(t)
	gone, plane := wanted, n.plane
	gone.ID = 8
	n.attach(wanted)
	n.attach(gone)
	removed, err := plane.Keep(map[model.EndpointID]bool{wanted.ID: true})
	if err != nil || removed["folders"] != 1 {
		t.Fatalf("removed %v, %v", removed, err)
	}
	if _, err := os.Stat(folder.Of(plane.cfg.SeccompSocket, wanted.ID)); err != nil {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(helloMessage())
	f.Add(refusal(7, 9))
	f.Add(endpointMessage(7, wanted, Config{}))
	f.Add(statisticsMessage(3, protocol.KindEndpoints, 0, endpointStatistics(nil, api.RDMATraffic{})))
	f.Add(statisticsMessage(3, protocol.KindQPs, 9, qpRecord()))
	f.Add(statisticsMessage(3, protocol.KindIDs, 0, idRecord()))
	f.Add(plain(protocol.TypeDrain, 0))
	f.Add(plain(protocol.TypeReleased, 7))
	f.Add(layout.Append(nil, &protocol.Ends{Head: protocol.Head{Type: protocol.TypeAsk, Tag: 3, Endpoint: 7}}))
	f.Add(routerGroups(7, wanted.Addr4()))
	f.Add(acceptedMessage(7, wanted.Addr4(), wanted.Addr4()))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parse(b)
		if err == nil && m.Type == protocol.TypeStatistics {
			m.statistics.each(func(b []byte) {
				switch m.statistics.Kind {
				case protocol.KindEndpoints:
					record[protocol.EndpointRecord](b)
				case protocol.KindQPs:
					parseQP(b)
				default:
					parseID(b)
				}
			})
			return
		}
		if err == nil && (m.Type == protocol.TypeDrain || m.Type == protocol.TypeReleased) {
			if len(b) != 16 || (m.Endpoint == 0) != (m.Type == protocol.TypeDrain) {
				t.Errorf("%x is %+v", b, m)
			}
			return
		}
		if err == nil && m.Type != protocol.TypeConnect && m.Type != protocol.TypeAsk && m.Type != protocol.TypeGroups && (len(b) != 16+8 || (m.Endpoint == 0) != (m.Type == protocol.TypeHello)) {
			t.Errorf("%x is %+v", b, m)
		}
	})
}
