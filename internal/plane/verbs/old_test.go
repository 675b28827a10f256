package verbs

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// startOldRouter plays one whose place another has taken.
func (n node) startOldRouter() *router {
	n.Helper()
	if err := os.Mkdir(filepath.Join(n.dir, oldDir), 0o700); err != nil {
		n.Fatal(err)
	}
	return n.startRouterAt(filepath.Join(n.dir, oldDir, "1.sock"))
}

func refusal(number uint64, errno unix.Errno) []byte {
	return layout.Append(nil, &protocol.Number{Head: protocol.Head{Type: protocol.TypeRefused, Endpoint: number}, Number: uint32(errno)})
}

// TestOldRouterGivesEndpointsBack: what an old router does not have is the new one's at once; what
// it has, when it gives it back, with all that programs wait at.
func TestOldRouterGivesEndpointsBack(t *testing.T) {
	n := newNode(t)
	old, r := n.startOldRouter(), n.startRouter()
	other := wanted
	other.ID, other.Name, other.Created = 8, "n1/c2", time.Unix(6, 0)
	n.plane = n.open(wanted, other)
	old.meet()
	old.hear(protocol.TypeBegin)
	old.hear(protocol.TypeEndpoint)
	old.hear(protocol.TypeEndpoint)
	old.hear(protocol.TypeEnd)
	old.hear(protocol.TypeDrain)
	old.say(refusal(6_000_000_000, unix.EBADF))
	old.say(plain(protocol.TypeDrain, 0))
	r.meet()
	r.hear(protocol.TypeBegin)
	m, _ := r.hear(protocol.TypeEndpoint)
	if told, err := layout.Parse[protocol.Endpoint](m); err != nil || told.Head.Endpoint != 6_000_000_000 {
		t.Errorf("the new router is told of %x", m)
	}
	r.hear(protocol.TypeEnd)
	n.eventually("the state of two routers", func() bool {
		st := n.plane.Router()
		return st.State == api.RouterRuns && len(st.Old) == 1 && st.Old[0] == api.OldRouter{PID: os.Getpid(), Endpoints: 1}
	})

	// Connections of what it has are the old one's, and what it asks for is answered.
	n.plane.mu.Lock()
	listener := n.plane.endpoints[wanted.ID].connections
	n.plane.mu.Unlock()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	old.hear(protocol.TypeAccepted)
	const local = "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x7f\x00\x00\x01"
	old.say(append(layout.Append(nil, &protocol.Head{Type: protocol.TypeConnect, Tag: 9, Endpoint: 5_000_000_009}), local+local...))
	old.hear(protocol.TypeConnected)

	record := layout.Append(nil, &protocol.EndpointRecord{Endpoint: 1, Traffic: [3]protocol.Traffic{byMemory: {Sent: 77}}})
	head := protocol.Head{Type: protocol.TypeStatistics, Endpoint: 5_000_000_009}
	last := layout.Append(nil, &protocol.Statistics{Head: head, Kind: protocol.KindEndpoints, Count: 1, Size: uint32(len(record))})
	old.say(append(last, record...))
	pipe, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	if _, _, err := old.conn.WriteMsgUnix(plain(protocol.TypeReleased, 5_000_000_009), unix.UnixRights(int(write.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	write.Close()
	_, fd := r.hear(protocol.TypeEndpoint)
	if _, err := unix.Write(fd, []byte("x")); err != nil {
		t.Errorf("the new router has another socket: %v", err)
	}
	if _, err := io.ReadFull(pipe, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	if _, err := old.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the old router is to end: %v", err)
	}
	n.plane.mu.Lock()
	if sent := n.plane.endpoints[wanted.ID].counted.moved.BytesSent; sent != 77 {
		t.Errorf("%d bytes of the old router are counted", sent)
	}
	n.plane.mu.Unlock()
	old.end()
	n.eventually("the end of the old router", func() bool {
		_, err := os.Lstat(filepath.Join(n.dir, oldDir, "1.sock"))
		return len(n.plane.Router().Old) == 0 && errors.Is(err, fs.ErrNotExist)
	})
	if st := n.plane.Router(); st.Ended != 0 {
		t.Errorf("%d routers have ended that were wanted", st.Ended)
	}
}

// TestOldRouterDies: its endpoints are the new router's then.
func TestOldRouterDies(t *testing.T) {
	n := newNode(t)
	old, r := n.startOldRouter(), n.startRouter()
	n.plane = n.open(wanted)
	old.meet()
	for _, m := range []uint32{protocol.TypeBegin, protocol.TypeEndpoint, protocol.TypeEnd, protocol.TypeDrain} {
		old.hear(m)
	}
	old.say(plain(protocol.TypeDrain, 0))
	r.meet()
	r.hear(protocol.TypeBegin)
	r.hear(protocol.TypeEnd)
	old.end()
	r.hear(protocol.TypeEndpoint)
	r.say(refusal(5_000_000_009, unix.EBADF))
	if _, fd := r.hear(protocol.TypeEndpoint); !n.connects(fd) {
		t.Error("a program does not reach the new router")
	}
	if st := n.plane.Router(); st.Ended != 1 || len(st.Old) != 0 {
		t.Errorf("router %+v", st)
	}
}

// TestOldRouterOfAnotherVersion: it is named, with what to do, and the new one has all endpoints.
func TestOldRouterOfAnotherVersion(t *testing.T) {
	n := newNode(t)
	old, r := n.startOldRouter(), n.startRouter()
	n.plane = n.open(wanted)
	if err := old.listener.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	var err error
	if old.conn, err = old.listener.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	message := helloMessage()
	message[16] = 1
	old.say(message)
	r.meet()
	r.hear(protocol.TypeBegin)
	r.hear(protocol.TypeEndpoint)
	if err := n.faults.of(FaultOldRouter, ""); err == nil || !strings.Contains(err.Error(), "speaks version 1, and this agent 3") || !strings.Contains(err.Error(), "kill ") {
		t.Errorf("fault %v", err)
	}
	old.end()
	n.eventually("no fault", func() bool { return !n.faults.Has(FaultOldRouter) })
}

// TestOldRouterIsSilent: one that does not answer in time is not taken for one that has ended: it
// keeps its socket, at which the next agent finds it, and the new one has the endpoints.
func TestOldRouterIsSilent(t *testing.T) {
	n := newNode(t)
	before := routerAnswers
	routerAnswers = 100 * time.Millisecond
	t.Cleanup(func() { routerAnswers = before })
	n.startOldRouter()
	r := n.startRouter()
	n.plane = n.open(wanted)
	r.meet()
	r.hear(protocol.TypeBegin)
	r.hear(protocol.TypeEndpoint)
	n.eventually("the fault", func() bool { return n.faults.Has(FaultOldRouter) })
	if err := n.faults.of(FaultOldRouter, ""); err == nil || !strings.Contains(err.Error(), "restart heddled") {
		t.Errorf("fault %v", err)
	}
	if _, err := os.Lstat(filepath.Join(n.dir, oldDir, "1.sock")); err != nil {
		t.Errorf("the socket of a router that may be there: %v", err)
	}
}
