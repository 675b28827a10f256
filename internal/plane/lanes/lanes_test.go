package lanes

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/guest"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

type traps struct{}

func (traps) Handle(trap.Handler)             {}
func (traps) Redelivered(trap.Handler) uint64 { return 0 }

func open(t *testing.T) *Plane {
	t.Helper()
	p, err := Open(Config{Self: filepath.Join(t.TempDir(), "heddled"), Traps: traps{}, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	testutil.NoError(t, err)
	t.Cleanup(func() { testutil.NoError(t, p.Close()) })
	return p
}

// endpointsAt makes endpoints that may have lanes with each other.
func endpointsAt(t *testing.T, p *Plane, addrs ...string) (all []model.Endpoint) {
	t.Helper()
	for i, a := range addrs {
		e := model.Endpoint{ID: model.EndpointID(i + 1), Name: "n1/c" + strconv.Itoa(i+1), Addrs: []netip.Addr{netip.MustParseAddr(a)}, Created: time.Unix(int64(i), 1)}
		testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.SharedMemory}))
		testutil.NoError(t, p.Attach(e, netcfg.EndpointDevice{}))
		all = append(all, e)
	}
	return all
}

// connect gives both ends of a connection of this process, as the agent finds them.
func connect(t *testing.T, from, to string) (fds [2]int, ends [2]end) {
	t.Helper()
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	defer closeFD(l)
	listening, local := netip.MustParseAddr(to).As4(), netip.MustParseAddr(from).As4()
	testutil.NoError(t, unix.Bind(l, &unix.SockaddrInet4{Addr: listening}))
	testutil.NoError(t, unix.Listen(l, 1))
	at, err := unix.Getsockname(l)
	testutil.NoError(t, err)
	fds[connector], err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	testutil.NoError(t, unix.Bind(fds[connector], &unix.SockaddrInet4{Addr: local}))
	testutil.NoError(t, unix.Connect(fds[connector], at))
	fds[acceptor], _, err = unix.Accept4(l, unix.SOCK_CLOEXEC)
	testutil.NoError(t, err)
	for role, fd := range fds {
		t.Cleanup(func() { closeFD(fd) })
		ends[role], err = open(t).look(uint32(unix.Getpid()), fd)
		testutil.NoError(t, err)
	}
	return fds, ends
}

// same reports whether two files are of the same memory.
func same(t *testing.T, a, b int) bool {
	t.Helper()
	var x, y unix.Stat_t
	testutil.NoError(t, errors.Join(unix.Fstat(a, &x), unix.Fstat(b, &y)))
	return x.Ino == y.Ino
}

// TestBothEnds: the two ends of a connection get the same memory, whoever asks first, and what they
// note there is their endpoints' account; it is forgotten when nobody has it.
func TestBothEnds(t *testing.T) {
	p := open(t)
	es := endpointsAt(t, p, "127.0.0.2", "127.0.0.3")
	for _, first := range []int{connector, acceptor} {
		_, ends := connect(t, "127.0.0.2", "127.0.0.3")
		var files [2]int
		for _, role := range []int{first, 1 - first} {
			var err error
			files[role], err = p.lanesOf(p.endpoints[es[role].ID], role, ends[role])
			testutil.NoError(t, err)
		}
		if !same(t, files[0], files[1]) {
			t.Errorf("role %d first: two memories", first)
		}
		_, err := unix.Pwrite(files[0], binary.NativeEndian.AppendUint64(nil, 1000), lanesAt+consumedAt)
		testutil.NoError(t, err)
		p.sweep()
		if list, _ := p.Connections(); len(list) != 2 || list[0].BytesSent+list[1].BytesSent != 1000 || list[0].Path != Path {
			t.Errorf("%+v", list)
		}
		closeFD(files[0])
		p.sweep()
		if len(p.pairs) != 1 {
			t.Error("forgotten, though an end has it")
		}
		mapped, err := unix.Mmap(files[1], 0, size, unix.PROT_READ, unix.MAP_SHARED)
		testutil.NoError(t, err)
		closeFD(files[1])
		p.sweep()
		if len(p.pairs) != 1 {
			t.Error("forgotten, though an end has it mapped")
		}
		testutil.NoError(t, unix.Munmap(mapped))
		p.sweep()
		if len(p.pairs) != 0 || p.endpoints[1].pairs != 0 {
			t.Error("not forgotten")
		}
	}
	traffic, err := p.Traffic(es)
	if err != nil || traffic[0].BytesSent != 2000 || traffic[1].BytesReceived != 2000 || traffic[1].BytesSent != 0 {
		t.Errorf("%v %+v", err, traffic)
	}
}

// TestRefused: what is to have no lanes gets none, for a reason.
func TestRefused(t *testing.T) {
	p := open(t)
	es := endpointsAt(t, p, "127.0.0.2", "127.0.0.3", "127.0.0.4")
	_, ends := connect(t, "127.0.0.2", "127.0.0.3")
	_, elsewhere := connect(t, "127.0.0.2", "127.0.0.9")
	_, itself := connect(t, "127.0.0.2", "127.0.0.2")
	limited := es[1]
	limited.Limits = &model.Limits{Egress: 1e9}
	for name, c := range map[string]struct {
		of   int
		at   end
		do   func() error
		undo func() error
		want *trap.Reason
	}{
		"another's connection": {2, ends[0], nil, nil, &p.why.socket},
		"to elsewhere":         {0, elsewhere[0], nil, nil, &p.why.elsewhere},
		"to itself":            {0, itself[0], nil, nil, &p.why.elsewhere},
		"peer with a cap": {0, ends[0], func() error { return p.SetLimits(limited, nil) },
			func() error { return p.RestoreLimits(es) }, &p.why.limited},
		"peer with another stack": {0, ends[0], func() error { return p.SetStack(es[1], stack.Choice{Stack: stack.Kernel}) },
			func() error { return p.SetStack(es[1], stack.Choice{Stack: stack.SharedMemory}) }, &p.why.notChosen},
		"too many": {0, ends[0], func() error { p.endpoints[1].pairs = maxPairs; return nil },
			func() error { p.endpoints[1].pairs = 0; return nil }, &p.why.full},
	} {
		if c.do != nil {
			testutil.NoError(t, c.do())
		}
		fd, err := p.lanesOf(p.endpoints[es[c.of].ID], connector, c.at)
		var failure *trap.Failure
		if !errors.As(err, &failure) || failure.Reason != c.want {
			t.Errorf("%s: %d, %v, want %s", name, fd, err, c.want.Name)
		}
		if c.undo != nil {
			testutil.NoError(t, c.undo())
		}
	}
	file, err := p.lanesOf(p.endpoints[1], connector, ends[0])
	testutil.NoError(t, err)
	closeFD(file)
}

// TestLookAt: only an established TCP connection is one, and only if the node's own network
// namespace has it: in one of its own a container could make any, and rules would know nothing.
func TestLookAt(t *testing.T) {
	fds, ends := connect(t, "127.0.0.2", "127.0.0.3")
	p := open(t)
	thread := uint32(unix.Getpid())
	at, err := p.look(thread, fds[0])
	if err != nil || at.Cookie != ends[0].Cookie || at.local != ends[0].local || at.remote != ends[1].local {
		t.Errorf("%+v, %v", at, err)
	}
	if _, err := p.look(thread, 1<<20); !errors.Is(err, guest.ErrNoConnection) {
		t.Errorf("a number that is none: %v", err)
	}
	netns := p.programs.Netns
	p.programs.Netns++
	if _, err := p.look(thread, fds[0]); !errors.Is(err, guest.ErrNoConnection) {
		t.Errorf("a connection of another network namespace: %v", err)
	}
	p.programs.Netns = netns
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	fresh, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	for _, fd := range []int{pair[0], fresh} {
		if _, err := p.look(thread, fd); !errors.Is(err, guest.ErrNoConnection) {
			t.Errorf("taken for a connection: %v", err)
		}
	}
	testutil.NoError(t, unix.Shutdown(fds[0], unix.SHUT_WR))
	if _, err := p.look(thread, fds[0]); !errors.Is(err, guest.ErrNoConnection) {
		t.Errorf("a connection that ends: %v", err)
	}
	for _, fd := range []int{pair[0], pair[1], fresh} {
		closeFD(fd)
	}
}

// TestWaitsFor: memory that an end asked for is not given to another connection that has the same
// addresses later, nor to the same end once more.
func TestWaitsFor(t *testing.T) {
	p := open(t)
	endpointsAt(t, p, "127.0.0.2", "127.0.0.3")
	_, ends := connect(t, "127.0.0.2", "127.0.0.3")
	old, err := p.lanesOf(p.endpoints[1], connector, ends[connector])
	testutil.NoError(t, err)
	for _, pair := range p.pairs {
		pair.first.Cookie++ // of a socket that is no more
	}
	other, err := p.lanesOf(p.endpoints[2], acceptor, ends[acceptor])
	testutil.NoError(t, err)
	again, err := p.lanesOf(p.endpoints[2], acceptor, ends[acceptor])
	testutil.NoError(t, err)
	if same(t, old, other) || same(t, other, again) {
		t.Error("memory of an earlier connection")
	}
	for _, fd := range []int{old, other, again} {
		closeFD(fd)
	}
}

// TestCounts: what a container notes spoils its account by so much at most, and never takes any away.
func TestCounts(t *testing.T) {
	p := open(t)
	endpointsAt(t, p, "127.0.0.2", "127.0.0.3")
	found, err := newPair([2]*endpoint{p.endpoints[1], p.endpoints[2]})
	testutil.NoError(t, err)
	defer found.close()
	for _, c := range []struct{ noted, want uint64 }{{500, 500}, {100, 500}, {1 << 63, 500}, {^uint64(0), 500}, {700, 700}} {
		_, err := unix.Pwrite(found.fd, binary.NativeEndian.AppendUint64(nil, c.noted), lanesAt+consumedAt)
		testutil.NoError(t, err)
		found.count()
		if got := p.endpoints[1].sent; got != c.want || p.endpoints[2].received != c.want {
			t.Errorf("noted %d: counted %d, want %d", c.noted, got, c.want)
		}
	}
}

// TestStops: lanes are not to be used while one of their ends may not, and are again when both may.
func TestStops(t *testing.T) {
	p := open(t)
	es := endpointsAt(t, p, "127.0.0.2", "127.0.0.3")
	_, ends := connect(t, "127.0.0.2", "127.0.0.3")
	file, err := p.lanesOf(p.endpoints[1], connector, ends[connector])
	testutil.NoError(t, err)
	defer closeFD(file)
	expect := func(when string, want byte) {
		t.Helper()
		word := make([]byte, 4)
		if _, err := unix.Pread(file, word, stopAt); err != nil || !bytes.Equal(word, []byte{want, 0, 0, 0}) {
			t.Errorf("%s: %v, %v", when, word, err)
		}
	}
	expect("at first", 0)
	es[1].Limits = &model.Limits{ConnectionIngress: 1e6}
	testutil.NoError(t, p.SetLimits(es[1], nil))
	expect("with a cap", 1)
	es[1].Limits = nil
	testutil.NoError(t, p.SetLimits(es[1], nil))
	expect("without", 0)
	testutil.NoError(t, p.SetStack(es[0], stack.Choice{Stack: stack.Kernel}))
	expect("another profile", 1)
	testutil.NoError(t, p.SetStack(es[0], stack.Choice{Stack: stack.SharedMemory}))
	testutil.NoError(t, p.Detach(es[1]))
	expect("a container that has gone", 1)
	if len(p.pairs) != 0 {
		t.Error("its lanes are kept")
	}
}

// TestServes: a node without the library cannot serve such profiles.
func TestServes(t *testing.T) {
	p := open(t)
	if err := p.ServeStack(stack.SharedMemory, stack.Settings{}); err == nil || errors.Is(err, plane.ErrOtherStack) {
		t.Errorf("without the library: %v", err)
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(p.cfg.Self), guest.Library), nil, 0o644))
	testutil.NoError(t, p.ServeStack(stack.SharedMemory, stack.Settings{}))
	if err := p.ServeStack(stack.Kernel, stack.Settings{}); !errors.Is(err, plane.ErrOtherStack) {
		t.Errorf("the kernel's: %v", err)
	}
}

// TestLayout: the library has the same numbers.
func TestLayout(t *testing.T) {
	header, err := os.ReadFile("../../../clib/guest/lanes.h")
	testutil.NoError(t, err)
	for name, want := range map[string]uint64{"LANES_MAGIC": magic, "LANES_VERSION": version, "LANES_HEAD": headBytes, "LANES_ASK": askMagic} {
		found := regexp.MustCompile(`#define ` + name + `\s+(0x[0-9a-f]+|[0-9]+)`).FindSubmatch(header)
		if found == nil {
			t.Errorf("no %s", name)
			continue
		}
		if got, err := strconv.ParseUint(string(found[1]), 0, 64); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", name, got, err, want)
		}
	}
	if !bytes.Contains(header, []byte("#define LANES_CAPACITY (1u << 20)")) || capacity != 1<<20 {
		t.Error("another capacity")
	}
}
