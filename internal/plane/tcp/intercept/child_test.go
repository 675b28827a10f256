package intercept

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
)

// childEnv makes the test binary act as one of the programs of childMain instead.
const childEnv = "HEDDLE_INTERCEPT_CHILD"

// command is one line a test writes to a trapped child's standard input.
type command struct {
	Op      string // "socket", "storm", "euid", "nofile", "time", "unshare", "return", "hang", "batch", "ask", "pass", "interruptible", "priority", "others", "others ended"
	Family  int
	Type    int
	Proto   int
	N       int  // storm, time: calls each thread makes; euid: the id; nofile: the limit; hang: the ioctl; batch: sockets
	Threads int  // storm
	Signals bool // storm: a signal to each thread every millisecond meanwhile
}

// outcome is the child's answer.
type outcome struct {
	Errno    int // of socket(), or of the first bad call
	FD       int
	CloExec  bool
	Nonblock bool
	UID      uint32
	Priority int // the test's socket maker stores the endpoint id in it
	Protocol int
	OK       int // storm: calls that gave a good socket
	Strange  int // storm: calls that gave something else than a TCP socket of the agent's
	Open     int // storm: TCP sockets left open that no call returned
	Ended    int // storm: calls that a signal ended (EINTR)
	P50, P99 time.Duration
	Peer     string // batch: what it tells of who made it
}

// childMain runs the program childEnv names.
func childMain(name string) error {
	switch name {
	case "trapped":
		return trappedChild()
	case "agent":
		return agentChild()
	case "listen":
		return fdkeep.ListenInherited()
	case "keeper":
		return fdkeep.Run(context.Background(), os.Getenv("HEDDLE_KEEPER"))
	}
	return fmt.Errorf("no child program %q", name)
}

// trappedChild installs a seccomp filter as a runtime would, sends the listener over descriptor 3
// and obeys commands. HEDDLE_NO_FILTER leaves the filter out, for comparison; HEDDLE_INTERRUPTIBLE
// leaves out its WAIT_KILLABLE_RECV, as runtimes with a libseccomp before 2.6 do.
func trappedChild() error {
	runtime.LockOSThread()
	if os.Getenv("HEDDLE_NO_FILTER") == "" {
		fd, err := installFilter()
		if err != nil {
			return err
		}
		if err := unix.Sendmsg(3, []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
			return fmt.Errorf("send listener: %w", err)
		}
		closeFD(fd)
	}
	closeFD(3)
	out := json.NewEncoder(os.Stdout)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var c command
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			return err
		}
		if err := out.Encode(obey(c)); err != nil {
			return err
		}
	}
	return in.Err()
}

// others are calls that are trapped and not socket().
var others sync.WaitGroup

func obey(c command) outcome {
	switch c.Op {
	case "socket":
		o := trySocket(c)
		if o.Errno == 0 {
			closeFD(o.FD)
		}
		return o
	case "storm":
		return storm(c)
	case "time":
		return timeSockets(c)
	case "unshare", "return":
		if err := changeNetns(c.Op); err != nil {
			return outcome{Errno: int(errnoIn(err))}
		}
		return outcome{}
	case "hang":
		return hang(c)
	case "batch":
		return openBatch(c)
	case "ask":
		_, _, e := unix.Syscall6(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, 0, askKind, 0, ^uintptr(askKind))
		return outcome{Errno: int(e)}
	case "priority":
		n, _, e := unix.Syscall(unix.SYS_GETPRIORITY, uintptr(c.Type), uintptr(c.N), 0)
		return outcome{Errno: int(e), OK: int(n)}
	case "others":
		for range c.N {
			others.Go(func() { _, _, _ = unix.Syscall(unix.SYS_GETPRIORITY, 0, 0, 0) })
		}
		return outcome{}
	case "others ended":
		others.Wait()
		return outcome{}
	case "pass":
		return passFile()
	case "interruptible":
		return outcome{Errno: int(errnoIn(endCallsBySignal()))}
	case "euid":
		// The raw call changes this thread only, which is the one that calls socket().
		_, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(c.N), ^uintptr(0))
		return outcome{Errno: int(e)}
	case "nofile":
		lim := unix.Rlimit{Cur: uint64(c.N), Max: 4096}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
			return outcome{Errno: int(err.(unix.Errno))}
		}
		return outcome{}
	}
	return outcome{Errno: int(unix.ENOSYS)}
}

// trySocket calls socket() and looks at what came.
func trySocket(c command) outcome {
	r, _, e := unix.Syscall(unix.SYS_SOCKET, uintptr(c.Family), uintptr(c.Type), uintptr(c.Proto))
	if e != 0 {
		return outcome{Errno: int(e), FD: -1}
	}
	o := outcome{FD: int(r)}
	fdFlags, _ := unix.FcntlInt(r, unix.F_GETFD, 0)
	flags, _ := unix.FcntlInt(r, unix.F_GETFL, 0)
	var st unix.Stat_t
	_ = unix.Fstat(o.FD, &st)
	o.CloExec, o.Nonblock, o.UID = fdFlags&unix.FD_CLOEXEC != 0, flags&unix.O_NONBLOCK != 0, st.Uid
	o.Priority, _ = unix.GetsockoptInt(o.FD, unix.SOL_SOCKET, unix.SO_PRIORITY)
	o.Protocol, _ = unix.GetsockoptInt(o.FD, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	return o
}

// storm calls socket() from many threads at once.
func storm(c command) (total outcome) {
	tids := make(chan int, c.Threads)
	if c.Signals {
		signal.Notify(make(chan os.Signal, 1), unix.SIGUSR1)
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() { defer close(ended); bother(ctx, tids, c.Threads) }()
		defer func() { cancel(); <-ended }()
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range c.Threads {
		wg.Go(func() {
			runtime.LockOSThread()
			tids <- unix.Gettid()
			for range c.N {
				o := trySocket(c)
				mu.Lock()
				switch {
				case o.Errno == int(unix.EINTR):
					total.Ended++
				case o.Errno != 0:
					if total.Errno == 0 {
						total.Errno = o.Errno
					}
				case o.FD < 3 || o.Priority != int(testEndpoint) || o.Protocol != unix.IPPROTO_TCP:
					total.Strange++
				default:
					total.OK++
				}
				mu.Unlock()
				if o.Errno == 0 && o.FD >= 3 {
					closeFD(o.FD)
				}
			}
		})
	}
	wg.Wait()
	for fd := range 256 {
		if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && p == unix.IPPROTO_TCP {
			total.Open++
		}
	}
	return total
}

// bother sends a signal to each of n threads every millisecond.
func bother(ctx context.Context, tids <-chan int, n int) {
	all := make([]int, n)
	for i := range all {
		all[i] = <-tids
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		for _, tid := range all {
			_ = unix.Tgkill(os.Getpid(), tid, unix.SIGUSR1) // a thread that is done has ended
		}
		<-tick.C
	}
}

// timeSockets measures socket()+close() one call at a time.
func timeSockets(c command) outcome {
	d := make([]time.Duration, 0, c.N)
	for range c.N {
		t := time.Now()
		r, _, e := unix.RawSyscall(unix.SYS_SOCKET, uintptr(c.Family), uintptr(c.Type), uintptr(c.Proto))
		if e != 0 {
			return outcome{Errno: int(e)}
		}
		_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, r, 0, 0)
		d = append(d, time.Since(t))
	}
	slices.Sort(d)
	return outcome{OK: c.N, P50: d[len(d)/2], P99: d[len(d)*99/100]}
}

// installFilter traps socket(AF_INET|AF_INET6, SOCK_STREAM|*), ioctls of network devices and
// getpriority(), which is no handler of the agent's, on all threads and returns the listener.
func installFilter() (int, error) {
	const nr, arg0, arg1 = 0, 16, 24 // offsets in struct seccomp_data (little endian: the low halves)
	load := func(off uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
	}
	jeq := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: k}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	prog := []unix.SockFilter{
		load(nr), jeq(unix.SYS_GETPRIORITY, 12, 0), jeq(unix.SYS_IOCTL, 0, 3),
		load(arg1), {Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xfffffd00}, jeq(0x8900, 8, 7),
		jeq(unix.SYS_SOCKET, 0, 6),
		load(arg0), jeq(unix.AF_INET, 1, 0), jeq(unix.AF_INET6, 0, 3),
		load(arg1), {Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xf}, jeq(unix.SOCK_STREAM, 1, 0),
		ret(unix.SECCOMP_RET_ALLOW), ret(unix.SECCOMP_RET_USER_NOTIF),
	}
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, fmt.Errorf("no_new_privs: %w", err)
	}
	flags := uintptr(unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH)
	if os.Getenv("HEDDLE_INTERRUPTIBLE") == "" {
		flags |= unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	}
	fd, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(prog)
	if e != 0 {
		return -1, fmt.Errorf("install filter: %w", e)
	}
	return int(fd), nil
}

// startKeeper makes sure that a keeper runs: this program, told so by its environment.
func startKeeper() error {
	// Ensure's child inherits the environment of this process, whose own role is decided already.
	if err := os.Setenv(childEnv, "keeper"); err != nil {
		return err
	}
	return fdkeep.Ensure("/proc/self/exe", os.Getenv("HEDDLE_KEEPER"), nil)
}

// agentChild is an agent that tests end: a Server on HEDDLE_SOCKET with the keeper at
// HEDDLE_KEEPER. It says "ready" once it serves and "received" for each of its first two sockets.
// With HEDDLE_HANG it makes none.
func agentChild() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	maker := &testMaker{}
	maker.entered = func() {
		if maker.calls.Load() <= 2 {
			fmt.Println("received")
		}
	}
	if os.Getenv("HEDDLE_HANG") != "" {
		maker.gate = make(chan struct{})
	}
	cfg := testConfig(os.Getenv("HEDDLE_SOCKET"), os.Getenv("HEDDLE_KEEPER"), maker)
	if os.Getenv("HEDDLE_START_KEEPER") != "" {
		cfg.StartKeeper = startKeeper
		if err := startKeeper(); err != nil {
			return err
		}
	}
	s, err := listen(cfg)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return s.Serve(ctx)
}
