package intercept

import (
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// endCallsBySignal gives SIGUSR1 a handler without SA_RESTART.
func endCallsBySignal() error {
	signal.Notify(make(chan os.Signal, 1), unix.SIGUSR1)
	var act struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}
	set := func(to, old unsafe.Pointer) error {
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGUSR1), uintptr(to), uintptr(old), unsafe.Sizeof(act.mask), 0, 0); e != 0 {
			return e
		}
		return nil
	}
	if err := set(nil, unsafe.Pointer(&act)); err != nil {
		return err
	}
	const restart = 0x10000000 // SA_RESTART
	act.flags &^= restart
	return set(unsafe.Pointer(&act), nil)
}

// TestSignalEndsCall: a signal whose handler has no SA_RESTART ends a call by EINTR (decision
// 0050). With WAIT_KILLABLE_RECV only one that the agent has not received yet.
func TestSignalEndsCall(t *testing.T) {
	for name, c := range map[string]struct {
		env             []string
		received, lasts bool
	}{
		"not received":            {nil, false, false},
		"received":                {nil, true, true},
		"received, interruptible": {[]string{"HEDDLE_INTERRUPTIBLE=1"}, true, false},
	} {
		t.Run(name, func(t *testing.T) { trySignalEndsCall(t, c.received, c.lasts, c.env...) })
	}
}

func trySignalEndsCall(t *testing.T, received, lasts bool, env ...string) {
	path := socketPath(t)
	making := make(chan struct{}, 256)
	m := &testMaker{gate: make(chan struct{}), entered: func() { making <- struct{}{} }}
	caller := startChild(t, nil, env...)
	var s *testAgent
	if received {
		s, _ = serve(t, testConfig(path, "", m))
		caller.handOver(path, testName)
		<-making // the first of the IPv4 pool
	}
	if o := caller.do(command{Op: "interruptible"}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	caller.tell(command{Op: "socket", Family: unix.AF_INET6, Type: unix.SOCK_STREAM})
	if received {
		<-making
	} else {
		fds := []unix.PollFd{{Fd: int32(caller.fd), Events: unix.POLLIN}}
		eventually(t, "the call is there", func() bool { n, _ := unix.Poll(fds, 0); return n == 1 })
	}
	heard := make(chan outcome, 1)
	go func() { heard <- caller.hear() }()
	var o outcome
	over := false
	for range 50 { // one may come before the call sleeps
		_ = unix.Tgkill(caller.cmd.Process.Pid, caller.cmd.Process.Pid, syscall.SIGUSR1)
		select {
		case o = <-heard:
			over = true
		case <-time.After(10 * time.Millisecond):
		}
		if over {
			break
		}
	}
	if over == lasts || over && unix.Errno(o.Errno) != unix.EINTR {
		t.Errorf("ended %v by %v, want it to last: %v, else EINTR", over, unix.Errno(o.Errno), lasts)
	}
	close(m.gate)
	if !over {
		if o = <-heard; o.Errno != 0 {
			t.Errorf("a call that lasted: %v", unix.Errno(o.Errno))
		}
	}
	if received && !lasts {
		eventually(t, "the agent counts it", func() bool { return s.Stats().Failed["caller_gone"] == 1 })
	}
}
