package intercept

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// heldBatches are those that the child of a test keeps, with what is in them.
var heldBatches []int

// openBatch asks for c.N sockets at a time. It looks at what came, and, with c.Signals, keeps the
// batch as it is; with c.Threads it closes all that it has kept, or, with both, shuts them down.
func openBatch(c command) outcome {
	if c.Threads > 0 {
		for _, fd := range heldBatches {
			if c.Signals {
				_ = unix.Shutdown(fd, unix.SHUT_RD)
			} else {
				closeFD(fd)
			}
		}
		if c.Signals {
			return outcome{}
		}
		heldBatches = nil
		return outcome{}
	}
	r, _, e := unix.Syscall6(unix.SYS_SOCKET, uintptr(c.Family), uintptr(c.Type), uintptr(c.Proto), uintptr(uint64(batchMagic)), uintptr(c.N), ^uintptr(uint64(batchMagic)))
	if e != 0 {
		return outcome{Errno: int(e)}
	}
	o := outcome{FD: int(r)}
	if domain, _ := unix.GetsockoptInt(o.FD, unix.SOL_SOCKET, unix.SO_DOMAIN); domain != unix.AF_UNIX {
		o.Protocol, _ = unix.GetsockoptInt(o.FD, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		closeFD(o.FD)
		return o
	}
	flags, _ := unix.FcntlInt(r, unix.F_GETFD, 0)
	o.CloExec = flags&unix.FD_CLOEXEC != 0
	o.Peer = lookAtBatch(o.FD)
	if c.Signals {
		heldBatches = append(heldBatches, o.FD)
		return o
	}
	defer closeFD(o.FD)
	for {
		fd, err := takeFromBatch(o.FD)
		if err != nil || fd < 0 {
			return o
		}
		var st unix.Stat_t
		_ = unix.Fstat(fd, &st)
		p, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY)
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if flags, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); p != int(testEndpoint) || domain != c.Family || flags != unix.O_RDWR {
			o.Strange++
		}
		o.OK, o.UID = o.OK+1, st.Uid
		closeFD(fd)
	}
}

// passFile passes a file to itself, as a process that may have few and has no capabilities.
func passFile() outcome {
	var lim unix.Rlimit
	var data [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	err = errors.Join(err, unix.Getrlimit(unix.RLIMIT_NOFILE, &lim), unix.Capset(&header, &data[0]))
	lim.Cur = 20 * maxBatches / 2
	if err := errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)); err != nil {
		return outcome{Errno: int(errnoIn(err))}
	}
	// The kernel compares before it adds: the second one is over the limit if the first was at it.
	for range 2 {
		if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(0), nil, 0); err != nil {
			return outcome{Errno: int(errnoIn(err))}
		}
	}
	return outcome{}
}

// takeFromBatch gives -1 when nothing is left.
func takeFromBatch(batch int) (int, error) {
	data, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(batch, data, oob, 0) // the agent says when nothing comes any more
	if err != nil || n == 0 {
		return -1, err
	}
	fds, err := descriptors(oob[:n])
	if err != nil || len(fds) != 1 {
		return -1, err
	}
	return fds[0], nil
}

// lookAtBatch tries what a hostile program would with a batch, and says what worked.
func lookAtBatch(fd int) string {
	var worked []string
	if cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil || cred.Pid != 0 {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", cred.Pid)); err == nil {
			worked = append(worked, "SO_PEERCRED names a process")
		}
	}
	if pidfd, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, 77); err == nil { // SO_PEERPIDFD
		if err := unix.PidfdSendSignal(pidfd, 0, nil, 0); err == nil || err == unix.EPERM {
			worked = append(worked, "SO_PEERPIDFD leads to a process")
		}
		if _, err := unix.PidfdGetfd(pidfd, 0, 0); err == nil {
			worked = append(worked, "files of the peer")
		}
		closeFD(pidfd)
	}
	for what, err := range map[string]error{
		"bind":    unix.Bind(fd, &unix.SockaddrUnix{Name: "@squatter"}),
		"listen":  unix.Listen(fd, 1),
		"connect": unix.Connect(fd, &unix.SockaddrUnix{Name: "@somebody"}),
		"send":    unix.Sendmsg(fd, []byte{0}, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL),
		"to":      unix.Sendmsg(fd, []byte{0}, nil, &unix.SockaddrUnix{Name: "@somebody"}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL),
	} {
		if err == nil {
			worked = append(worked, what)
		}
	}
	if ns, err := unix.IoctlRetInt(fd, 0x894c /* SIOCGSKNS */); err == nil {
		var of, own unix.Stat_t
		if errors.Join(unix.Fstat(ns, &of), unix.Stat("/proc/self/ns/net", &own)) != nil || of.Ino != own.Ino {
			worked = append(worked, "SIOCGSKNS gives another network namespace")
		}
		closeFD(ns)
	}
	return strings.Join(worked, ", ")
}

// batchServer runs a server whose batches are ready, and a child that may have them.
func batchServer(t *testing.T, m SocketMaker, keeper string) (*testAgent, *child, func()) {
	t.Helper()
	testutil.NeedRoot(t, "changes the caller's user")
	path := socketPath(t)
	cfg := testConfig(path, keeper, m)
	cfg.ListenElsewhere = listenInTest
	s, stop := serve(t, cfg)
	c := startChild(t, nil)
	c.annotations = map[string]string{model.AnnotationSocketPool: "true"}
	c.handOver(path, testName)
	eventually(t, "batches", s.sockets.maker.ready.Load)
	return s, c, stop
}

func listenInTest(socket *os.File) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return fdkeep.ListenBy(socket, "/usr/bin/env", childEnv+"=listen", self)
}

func askBatch(c *child, family, n int) outcome {
	c.t.Helper()
	return c.do(command{Op: "batch", Family: family, Type: unix.SOCK_STREAM, N: n})
}

func TestBatch(t *testing.T) { bothWays(t, tryBatch) }

func tryBatch(t *testing.T) {
	s, c, _ := batchServer(t, &testMaker{}, "")
	total := 0
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		for n, want := range map[int]int{1: 1, 4: 4, 16: 16, 100: 100, maxBatch: maxBatch, 10 * maxBatch: maxBatch} {
			o := askBatch(c, family, n)
			if o.Errno != 0 || o.OK != want || o.Strange != 0 || !o.CloExec || o.UID != uint32(os.Geteuid()) {
				t.Errorf("%d sockets of family %d: %+v", n, family, o)
			}
			total += want
			// The agent's end may hear of the close after the child's answer: then the next is one
			// of four.
		}
	}
	eventually(t, "counters", func() bool {
		st := s.Stats()
		return st.Batches == 12 && st.BatchSockets == uint64(total) && st.Answered == 0
	})
	if o := c.do(command{Op: "euid", N: 1000}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	if o := askBatch(c, unix.AF_INET, 8); o.OK != 8 || o.UID != 1000 {
		t.Errorf("as another user: %+v", o)
	}
	// What is no TCP socket, and MPTCP, is as ever.
	if o := c.do(command{Op: "batch", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Proto: unix.IPPROTO_MPTCP, N: 8}); o.OK != 0 || o.Protocol != unix.IPPROTO_TCP {
		t.Errorf("MPTCP: %+v, want a single socket", o)
	}
}

// TestBatchIsNoWayOut: what a container can do with the Unix socket itself, and who may have one.
func TestBatchIsNoWayOut(t *testing.T) {
	s, c, _ := batchServer(t, &testMaker{}, "")
	if o := askBatch(c, unix.AF_INET, 1); o.OK != 1 || o.Peer != "" {
		t.Errorf("%+v: want nothing to work on a batch", o)
	}
	other := trapped(t, s.cfg.SocketPath, testName)
	if o := askBatch(other, unix.AF_INET, 8); o.Errno != 0 || o.OK != 0 || o.Protocol != unix.IPPROTO_TCP {
		t.Errorf("a container that may have no batches: %+v, want a single socket", o)
	}
	if o := c.do(command{Op: "unshare"}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	o := askBatch(c, unix.AF_INET, 8)
	if o.OK != 0 || o.Errno != 0 {
		t.Errorf("from another network namespace: %+v, want a socket of that", o)
	}
}

// TestBatchesAreBounded: a program that never looks into its batches has so many, and what is in
// them counts, but not against the files that others may have under way.
func TestBatchesAreBounded(t *testing.T) {
	var quota atomic.Int64
	quota.Store(20*maxBatches + 100)
	s, c, _ := batchServer(t, &testMaker{quota: &quota}, "")
	hold := command{Op: "batch", Family: unix.AF_INET, Type: unix.SOCK_STREAM, N: 20, Signals: true}
	for i := range maxBatches {
		if o := c.do(hold); o.Errno != 0 || o.Protocol != 0 {
			t.Fatalf("batch %d: %+v", i, o)
		}
	}
	for range 3 {
		if o := c.do(hold); o.Errno != 0 || o.Protocol != unix.IPPROTO_TCP {
			t.Fatalf("one batch more: %+v, want a single socket", o)
		}
	}
	eventually(t, "full batches, and what they left of the quota", func() bool {
		return s.Stats().BatchSockets == 20*maxBatches && quota.Load() == 100-3
	})
	if o := c.do(command{Op: "pass"}); o.Errno != 0 {
		t.Errorf("root passes a file while %d are in batches: %v", 20*maxBatches, unix.Errno(o.Errno))
	}
	// shutdown() makes the agent's end look like one whose other end is closed.
	c.do(command{Op: "batch", Threads: 1, Signals: true})
	if o := c.do(hold); o.Errno != 0 || o.Protocol != unix.IPPROTO_TCP {
		t.Errorf("one batch more after all were shut down: %+v, want a single socket", o)
	}
	c.do(command{Op: "batch", Threads: 1})
	quota.Store(5)
	if o := askBatch(c, unix.AF_INET, 10); o.OK != 5 {
		t.Errorf("%+v: want what the quota leaves", o)
	}
	if o := askBatch(c, unix.AF_INET, 10); unix.Errno(o.Errno) != unix.ENFILE {
		t.Errorf("%+v: want the errno of the quota", o)
	}
}

// TestBatchAfterRestart: the next agent knows who may have batches.
func TestBatchAfterRestart(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	keeper := keeper(t)
	s, c, stop := batchServer(t, &testMaker{}, keeper)
	stop()
	cfg := testConfig(s.cfg.SocketPath, keeper, &testMaker{})
	cfg.ListenElsewhere = listenInTest
	next, _ := serve(t, cfg)
	eventually(t, "batches", next.sockets.maker.ready.Load)
	if o := askBatch(c, unix.AF_INET, 4); o.OK != 4 {
		t.Errorf("%+v", o)
	}
}

// TestBatchIsNotAnothers: a connection that could not be accepted is not taken for that of the next
// batch, whose container would get what is filled for another one.
func TestBatchIsNotAnothers(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	listener, err := unixSocket(unix.SOCK_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(listener)
	if err := unix.Listen(listener, 4); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(listener)
	if err != nil {
		t.Fatal(err)
	}
	left, err := unixSocket(0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(left)
	if err := unix.Connect(left, name); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c, err := newBatch(listener, name)
		if err != nil {
			t.Fatal(err)
		}
		defer closeFD(c.fd)
		defer closeFD(c.own)
		if err := unix.Sendmsg(c.own, []byte{7}, nil, nil, unix.MSG_DONTWAIT); err != nil {
			t.Fatal(err)
		}
		var b [1]byte
		if _, _, err := unix.Recvfrom(c.fd, b[:], unix.MSG_DONTWAIT); err != nil || b[0] != 7 {
			t.Errorf("what is put into a batch does not come out of it: %v", err)
		}
	}
	var b [1]byte
	if n, _, err := unix.Recvfrom(left, b[:], unix.MSG_DONTWAIT); err != nil && err != unix.ECONNRESET || n != 0 {
		t.Errorf("the left one got %d bytes, %v; want its end", n, err)
	}
}
