package queues

import (
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
	"heddle.dev/heddle/internal/testutil"
)

// memory makes what a service would: a region with streams, and nothing in their rings. It gives the
// file, and the same memory as a program has it.
func memory(t *testing.T, streams int) (fd int, h *protocol.Header, at func(stream int) *protocol.Stream) {
	t.Helper()
	const head, size = 1024, 64 << 10
	fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	testutil.NoError(t, err)
	testutil.NoError(t, unix.Ftruncate(fd, size))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	testutil.NoError(t, err)
	mapped, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(mapped) })
	h = (*protocol.Header)(unsafe.Pointer(&mapped[0]))
	h.Streams, h.Streams_at = uint32(streams), head
	at = func(stream int) *protocol.Stream {
		return (*protocol.Stream)(unsafe.Pointer(&mapped[head+stream*int(unsafe.Sizeof(protocol.Stream{}))]))
	}
	for i := range streams {
		at(i).State = protocol.StreamUsed
	}
	return fd, h, at
}

// TestLose: programs are told that the service has died before anybody looks into their rings, and
// of all connections that are over before any is cut, which may take long. What they put into an
// empty ring afterwards is theirs to end.
func TestLose(t *testing.T) {
	var e endpoint
	p := &Plane{regions: map[uint64]*region{}}
	var mu sync.Mutex
	cut := map[[2]int]bool{}
	var headers []*protocol.Header
	var streams []func(int) *protocol.Stream
	for id := range 3 {
		fd, h, at := memory(t, 3)
		at(0).Out_produced, at(0).Out_consumed = 5000, 1000
		at(1).Out_produced, at(1).Out_consumed = 3000, 3000
		at(1).Out_waiting = 1
		headers, streams = append(headers, h), append(streams, at)
		r := &region{id: uint64(id), of: &e, memory: fd, capacity: e.take(), given: map[uint32]func(){}}
		for stream := range 2 {
			r.given[uint32(stream)] = func() {
				mu.Lock()
				defer mu.Unlock()
				cut[[2]int{id, stream}] = true
				for i, h := range headers {
					if ended := atomic.LoadUint32(&h.Ended); ended != protocol.EndedDied {
						t.Errorf("when stream %d of region %d is cut, %d is the end of region %d", stream, id, ended, i)
					}
					if state := atomic.LoadUint32(&streams[i](0).State); state != protocol.StreamUsed|protocol.StreamDead {
						t.Errorf("when stream %d of region %d is cut, %d is the state of the one lost in region %d", stream, id, state, i)
					}
					atomic.StoreUint64(&streams[i](1).Out_produced, 4000)
				}
			}
		}
		p.regions[r.id] = r
	}
	p.lose()
	for i, at := range streams {
		if !cut[[2]int{i, 0}] || at(0).Error != int32(unix.ECONNRESET) {
			t.Errorf("region %d: the connection with bytes is cut: %v, error %d", i, cut[[2]int{i, 0}], at(0).Error)
		}
		if cut[[2]int{i, 1}] || at(1).State != protocol.StreamUsed {
			t.Errorf("region %d: the connection without is cut: %v, state %d", i, cut[[2]int{i, 1}], at(1).State)
		}
	}
	if len(p.regions) != 0 || e.regions != 0 {
		t.Errorf("%d regions are known, %d counted", len(p.regions), e.regions)
	}
}

// TestHostileRegion: what a guest writes into its header leads to nothing beyond its memory.
func TestHostileRegion(t *testing.T) {
	fd, h, _ := memory(t, 1)
	defer closeFD(fd)
	r := &region{memory: fd}
	for _, at := range []uint64{1 << 63, 1<<64 - 1, 1<<63 - 8, 64<<10 - 8, 64 << 10, 1 << 40, 1025} {
		h.Streams_at = at
		if r.lost(0) {
			t.Errorf("bytes of a stream at %d", at)
		}
		r.end(0)
	}
}

// TestRegionOfAServiceThatDied: a region that comes when its service has been given up is nobody's.
func TestRegionOfAServiceThatDied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unixpacket", path)
	testutil.NoError(t, err)
	defer listener.Close()
	l, err := dial(path)
	testutil.NoError(t, err)
	defer l.Close()
	conn, err := listener.Accept()
	testutil.NoError(t, err)
	defer conn.Close()
	e := &endpoint{Endpoint: model.Endpoint{ID: 7}, attached: true}
	p := &Plane{cfg: Config{Log: slog.New(slog.DiscardHandler)}, why: newReasons(), endpoints: map[model.EndpointID]*endpoint{7: e}, regions: map[uint64]*region{}, link: l}
	go func() { _ = p.hear(l) }()
	for _, died := range []bool{true, false} {
		done := make(chan error, 1)
		go func() {
			_, guest, err := p.newRegion(t.Context(), l, e, 0)
			if err == nil {
				_ = guest.Close()
			}
			done <- err
		}()
		b := make([]byte, protocol.MessageMax)
		n, err := conn.Read(b)
		testutil.NoError(t, err)
		head, err := protocol.ParseHead(b[:n])
		testutil.NoError(t, err)
		p.mu.Lock()
		if p.link = l; died {
			p.link = nil
		}
		p.mu.Unlock()
		p.lose()
		fd, _, _ := memory(t, 1)
		head.Type |= protocol.Answer
		_, _, err = conn.(*net.UnixConn).WriteMsgUnix(protocol.Append(nil, &protocol.Plain{Head: head}), unix.UnixRights(fd), nil)
		testutil.NoError(t, err)
		closeFD(fd)
		if err := <-done; errors.Is(err, process.ErrGone) != died {
			t.Errorf("the service died: %v, the region: %v", died, err)
		}
		if want := map[bool]int{false: 1}[died]; e.regions != want || len(p.regions) != want {
			t.Errorf("the service died: %v: %d regions are counted, %d known", died, e.regions, len(p.regions))
		}
	}
}

// TestDisconnect: who is at the other end of a connection that the agent ends is told of a reset,
// at once, and not that what came was all.
func TestDisconnect(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.NoError(t, err)
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	testutil.NoError(t, err)
	defer conn.Close()
	peer, err := l.Accept()
	testutil.NoError(t, err)
	defer peer.Close()
	file, err := conn.(*net.TCPConn).File()
	testutil.NoError(t, err)
	defer file.Close()
	for range 2 { // and one that is over stays so
		testutil.NoError(t, disconnect(int(file.Fd())))
	}
	if n, err := peer.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the other end read %d bytes, %v; want %v", n, err, unix.ECONNRESET)
	}
}
