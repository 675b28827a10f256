package netstack

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/testutil"
)

// What each module has to do is tested with heddle-stack: rust/heddle-stack/tests, with
// HEDDLE_TEST_MODULE (make test-rust). Here is what only this one does.

// TestMain is a tenant's process, too, or one that tries what such a process must not be able to do.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "--tenant":
		if err := RunTenant(); err != nil && !errors.Is(err, io.EOF) {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case os.Getenv(breakOut) != "":
		tryToBreakOut()
	default:
		os.Exit(m.Run())
	}
}

// agent is an agent's connection to a module.
type agent struct {
	testing.TB
	conn *net.UnixConn
	tag  uint32
	fds  map[uint64]int
}

func start(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	go func() { _ = Run(path) }() // it ends with the tests
	testutil.EventuallyTrue(t, "the module listens", func() bool {
		conn, err := net.Dial("unixpacket", path)
		return err == nil && conn.Close() == nil
	})
	return path
}

// greet connects, and says HELLO.
func greet(t testing.TB, path string) *agent {
	t.Helper()
	conn, err := net.Dial("unixpacket", path)
	testutil.NoError(t, err)
	a := &agent{TB: t, conn: conn.(*net.UnixConn), fds: map[uint64]int{}}
	t.Cleanup(func() { _ = conn.Close() })
	testutil.NoError(t, conn.SetReadDeadline(time.Now().Add(2*testutil.WaitTimeout)))
	ask[protocol.Hello](a, &protocol.Hello{Head: a.head(protocol.TypeHello, 0, 0), Version: protocol.Version}, -1)
	return a
}

func (a *agent) head(kind uint32, tenant, id uint64) protocol.Head {
	a.tag++
	return protocol.Head{Type: kind, Tag: a.tag, Tenant: tenant, ID: id}
}

func tell[M protocol.Message](a *agent, m *M, fd int) {
	a.Helper()
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_, _, err := a.conn.WriteMsgUnix(protocol.Append(nil, m), rights, nil)
	testutil.NoError(a, err)
	closeFD(fd)
}

func (a *agent) plain(kind uint32, tenant uint64) {
	a.Helper()
	tell(a, &protocol.Plain{Head: a.head(kind, tenant, 0)}, -1)
}

// hear waits for a message that is wanted.
func (a *agent) hear(wanted func(protocol.Head) bool) []byte {
	a.Helper()
	for {
		b, fds, err := receive(a.conn)
		testutil.NoError(a, err)
		h, err := protocol.ParseHead(b[:min(len(b), 32)])
		testutil.NoError(a, err)
		if len(fds) == 1 {
			a.fds[h.ID] = fds[0]
		}
		if wanted(h) {
			return b
		}
	}
}

// ask gives the answer to a request, or its errno.
func ask[A, M protocol.Message](a *agent, m *M, fd int) (A, unix.Errno) {
	a.Helper()
	tag := a.tag
	tell(a, m, fd)
	b := a.hear(func(h protocol.Head) bool { return h.Tag == tag && h.Type&protocol.Answer != 0 })
	h, _ := protocol.ParseHead(b[:32])
	var none A
	if h.Error != 0 {
		return none, unix.Errno(h.Error)
	}
	answer, err := protocol.Parse[A](b)
	testutil.NoError(a, err)
	return answer, 0
}

// tenant makes 10.9.0.N, with a device unless it is -1.
func (a *agent) tenant(number byte, device int) unix.Errno {
	a.Helper()
	m := protocol.Tenant{
		Head: a.head(protocol.TypeTenant, uint64(number), 0), Generation: 1, Address4: [4]byte{10, 9, 0, number}, MTU: 1500,
	}
	copy(m.Name[:], "tenant-"+strconv.Itoa(int(number)))
	_, errno := ask[protocol.Plain](a, &m, device)
	return errno
}

// hangUp waits until the module hangs up, which it does when it has lost a tenant. It is asked for
// its counters again and again, as by an agent: so it sees that one hangs.
func (a *agent) hangUp() {
	a.Helper()
	asks := protocol.Append(nil, &protocol.Plain{Head: a.head(protocol.TypeStats, 0, 0)})
	for end := time.Now().Add(testutil.WaitTimeout); time.Now().Before(end); {
		_, _, _ = a.conn.WriteMsgUnix(asks, nil, nil) // what comes of it is heard
		testutil.NoError(a, a.conn.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
		if _, fds, err := receive(a.conn); err == nil {
			closeAll(fds)
		} else if !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
	a.Fatal("the module goes on without a tenant")
}

func (a *agent) listen(tenant, id uint64) netip.AddrPort {
	a.Helper()
	m := protocol.Listen{Head: a.head(protocol.TypeListen, tenant, id), Address: addressOf(netip.AddrPort{}), Backlog: 16}
	named, errno := ask[protocol.Named](a, &m, -1)
	if errno != 0 {
		a.Fatalf("listen: %v", errno)
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, 0, byte(tenant)}), named.Local.Port)
}

func pairOf(t testing.TB, kind int) (one, two int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	return fds[0], fds[1]
}

// connect gives the ends that the programs have of a connection from one tenant to another.
func (a *agent) connect(from, to, id uint64) (*os.File, *os.File) {
	a.Helper()
	at := a.listen(to, id)
	program, module := pairOf(a, unix.SOCK_STREAM)
	_, err := unix.Write(program, []byte{0})
	testutil.NoError(a, err)
	m := protocol.Connect{Head: a.head(protocol.TypeConnect, from, id+1), Remote: protocol.AddressOf(at), Skip: 1}
	if _, errno := ask[protocol.Named](a, &m, module); errno != 0 {
		a.Fatalf("connect: %v", errno)
	}
	for {
		for accepted, fd := range a.fds {
			delete(a.fds, accepted)
			return fileOf(a, program), fileOf(a, fd)
		}
		a.hear(func(h protocol.Head) bool { return h.Type == protocol.TypeAccepted })
	}
}

func fileOf(t testing.TB, fd int) *os.File {
	t.Helper()
	testutil.NoError(t, unix.SetNonblock(fd, true)) // for deadlines
	f := os.NewFile(uintptr(fd), "program's end")
	t.Cleanup(func() { _ = f.Close() })
	testutil.NoError(t, f.SetDeadline(time.Now().Add(2*testutil.WaitTimeout)))
	return f
}

// processOf gives a tenant's process.
func processOf(t *testing.T, number int) int {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	testutil.NoError(t, err)
	for _, path := range all {
		stat, err := os.ReadFile(filepath.Join(filepath.Dir(path), "stat"))
		args, err2 := os.ReadFile(path)
		if err != nil || err2 != nil {
			continue // it has ended
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if fields[1] == strconv.Itoa(os.Getpid()) && strings.Contains(string(args), fmt.Sprintf("\x00--tenant\x00%d:", number)) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			testutil.NoError(t, err)
			return pid
		}
	}
	t.Fatalf("no process of tenant %d", number)
	return 0
}

// TestTenantsEndForThemselves: what ends one tenant's process, or has it hang, ends its connections
// and those of no other, and the agent hears that it has to make that tenant again.
func TestTenantsEndForThemselves(t *testing.T) {
	for name, harm := range map[string]unix.Signal{"killed": unix.SIGKILL, "hangs": unix.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			path := start(t)
			a := greet(t, path)
			a.plain(protocol.TypeBegin, 0)
			a.plain(protocol.TypeEnd, 0)
			left, right := pairOf(t, unix.SOCK_SEQPACKET)
			alone, device := pairOf(t, unix.SOCK_SEQPACKET)
			defer closeFD(alone)
			for number, device := range map[byte]int{1: left, 2: right, 3: device} {
				if errno := a.tenant(number, device); errno != 0 {
					t.Fatalf("tenant %d: %v", number, errno)
				}
			}
			from, to := a.connect(1, 2, 10)
			its, _ := a.connect(3, 3, 20)
			testutil.NoError(t, unix.Kill(processOf(t, 3), harm))
			a.hangUp()
			if _, err := its.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("a connection of the tenant's: %v", err)
			}
			a = greet(t, path)
			a.plain(protocol.TypeBegin, 0)
			for number, want := range map[byte]unix.Errno{1: 0, 2: 0, 3: unix.ENODEV} {
				if errno := a.tenant(number, -1); errno != want {
					t.Errorf("tenant %d: %v, want %v", number, errno, want)
				}
			}
			a.plain(protocol.TypeEnd, 0)
			_, err := from.Write([]byte("still there"))
			testutil.NoError(t, err)
			_, err = io.ReadFull(to, make([]byte, len("still there")))
			testutil.NoError(t, err)
		})
	}
}

// lossy is a link that loses one packet of a hundred.
func lossy(t *testing.T) (left, right int) {
	t.Helper()
	left, a := pairOf(t, unix.SOCK_SEQPACKET)
	right, b := pairOf(t, unix.SOCK_SEQPACKET)
	random := rand.New(rand.NewPCG(1, 2))
	lost := make([]bool, 10007)
	for i := range lost {
		lost[i] = random.IntN(100) == 0
	}
	pass := func(from, to, at int) {
		buf := make([]byte, 1<<17)
		for {
			n, err := unix.Read(from, buf)
			if err != nil && err != unix.EINTR || n == 0 {
				return
			}
			if at++; err == nil && !lost[at%len(lost)] {
				_, _ = unix.Write(to, buf[:n]) // a link that is gone loses everything
			}
		}
	}
	go pass(a, b, 0)
	go pass(b, a, len(lost)/2)
	t.Cleanup(func() {
		_ = unix.Shutdown(a, unix.SHUT_RDWR)
		_ = unix.Shutdown(b, unix.SHUT_RDWR)
	})
	return left, right
}

// TestLoss: one lost packet of a hundred slows a connection down and does not stop it.
func TestLoss(t *testing.T) {
	a := greet(t, start(t))
	a.plain(protocol.TypeBegin, 0)
	a.plain(protocol.TypeEnd, 0)
	left, right := lossy(t)
	for number, device := range map[byte]int{1: left, 2: right} {
		if errno := a.tenant(number, device); errno != 0 {
			t.Fatalf("tenant %d: %v", number, errno)
		}
	}
	from, to := a.connect(1, 2, 10)
	data := make([]byte, 16<<20)
	random := rand.NewChaCha8([32]byte{})
	_, err := random.Read(data)
	testutil.NoError(t, err)
	go func() {
		_, _ = from.Write(data) // what is missing is seen at the other end
	}()
	got := make([]byte, len(data))
	began := time.Now()
	if n, err := io.ReadFull(to, got); err != nil {
		t.Fatalf("%d bytes in %s: %v", n, time.Since(began), err)
	}
	if sha256.Sum256(got) != sha256.Sum256(data) {
		t.Error("other bytes than were sent")
	}
	s, _ := ask[protocol.Stats](a, &protocol.Plain{Head: a.head(protocol.TypeStats, 1, 0)}, -1)
	t.Logf("%.0f Mbit/s, %d of %d segments again", float64(len(data))*8e-6/time.Since(began).Seconds(), s.Retransmits, s.SegmentsSent)
	if s.Retransmits < 10 {
		t.Errorf("%d retransmissions: the link loses nothing", s.Retransmits)
	}
}

const breakOut = "HEDDLE_TEST_BREAK_OUT"

// tryToBreakOut tries what a tenant's process that somebody has taken over would try, and prints
// what succeeds.
func tryToBreakOut() {
	status, err := os.Open("/proc/self/status")
	if err == nil {
		err = shutOff()
	}
	if err != nil {
		fmt.Println("shut off:", err)
		return
	}
	for name, try := range map[string]func() error{
		"open": func() error { _, err := unix.Open("/", unix.O_RDONLY, 0); return err },
		"a file of the node": func() error {
			_, err := unix.Openat(unix.AT_FDCWD, "../../../etc/passwd", unix.O_RDONLY, 0)
			return err
		},
		"socket":      func() error { _, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); return err },
		"unix socket": func() error { _, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err },
		"execve":      func() error { return unix.Exec("/proc/self/exe", []string{"x"}, nil) },
		"fork": func() error {
			_, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
			if errno == 0 {
				return nil
			}
			return errno
		},
		"kill the host": func() error { return unix.Kill(os.Getppid(), 0) },
		"ptrace":        func() error { return unix.PtraceAttach(os.Getppid()) },
		"setuid":        func() error { return unix.Setuid(0) },
		"bpf": func() error {
			_, _, errno := unix.Syscall(unix.SYS_BPF, 0, 0, 0)
			if errno == unix.EPERM {
				return errno
			}
			return nil
		},
	} {
		if err := try(); err == nil {
			fmt.Println("works:", name)
		}
	}
	// getuid() is not there either.
	text, err := io.ReadAll(status)
	_, users, _ := strings.Cut(string(text), "\nUid:")
	_, groups, _ := strings.Cut(users, "\nGid:")
	if fields := strings.Fields(users); err == nil && len(fields) > 4 {
		fmt.Println("users", strings.Join(fields[:4], " "), strings.Join(strings.Fields(groups)[:4], " "))
	}
	fmt.Println("tried everything")
}

// TestTenantIsShutOff: who takes over a tenant's process has the tenant's descriptors, and nothing
// else of the node. No two have the same user: they could signal each other, and the kernel bounds
// what a user has.
func TestTenantIsShutOff(t *testing.T) {
	testutil.NeedRoot(t, "a tenant's process becomes another user")
	var users [2]int
	for i := range users {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), breakOut+"=1")
		out, err := cmd.CombinedOutput()
		_, err2 := fmt.Sscanf(string(out), "users %d", &users[i])
		its := strings.Repeat(fmt.Sprint(" ", users[i]), 8) // real, effective, saved and of files; and groups
		if want := "users" + its + "\ntried everything\n"; err != nil || err2 != nil || string(out) != want || users[i] < firstUser {
			t.Errorf("%v, %v\n%s", err, err2, out)
		}
	}
	if users[0] == users[1] {
		t.Errorf("both are user %d", users[0])
	}
}
