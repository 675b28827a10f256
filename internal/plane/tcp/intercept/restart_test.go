package intercept

import (
	"bufio"
	"context"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
)

// keeper runs a keeper in this process until the test ends.
func keeper(t *testing.T) (path string) {
	t.Helper()
	path = socketPath(t)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- fdkeep.Run(ctx, path) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	eventually(t, "keeper answers", func() bool { _, err := fdkeep.NewClient(path).TakeAll(); return err == nil })
	return path
}

func kept(t *testing.T, path string) int {
	t.Helper()
	all, err := fdkeep.NewClient(path).TakeAll()
	if err != nil {
		t.Fatal(err)
	}
	return listenersAmong(all)
}

// listenersAmong counts the listeners among what is kept, and closes everything.
func listenersAmong(all []fdkeep.Kept) (n int) {
	for _, p := range all {
		if p.Key != "hand-off socket" {
			n++
		}
		closeFD(p.FD)
		closeFD(p.Page)
	}
	return n
}

// agent starts an agent as a process of its own, to be killed. It returns the agent's output.
func agent(t *testing.T, socket, keeper string, env ...string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, childEnv+"=agent", "HEDDLE_SOCKET="+socket, "HEDDLE_KEEPER="+keeper)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { killAgent(cmd) })
	lines := bufio.NewScanner(out)
	says(t, cmd, lines, "ready")
	return cmd, lines
}

// says waits until an agent says this, for 60 s at most.
func says(t *testing.T, cmd *exec.Cmd, lines *bufio.Scanner, want string) {
	t.Helper()
	watchdog := time.AfterFunc(60*time.Second, func() { _ = cmd.Process.Kill() })
	defer watchdog.Stop()
	if !lines.Scan() || lines.Text() != want {
		t.Fatalf("agent said %q, want %q", lines.Text(), want)
	}
}

func killAgent(cmd *exec.Cmd) {
	if cmd.ProcessState == nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

func TestCallsWaitForTheNextServer(t *testing.T) {
	hp, path := keeper(t), socketPath(t)
	_, stop := serve(t, testConfig(path, hp, &testMaker{}))
	c := trapped(t, path, testName)
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	stop()
	c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
	eventually(t, "the call waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) > 0 })
	s, _ := serve(t, testConfig(path, hp, &testMaker{}))
	if o := c.hear(); o.Errno != 0 || o.Priority != int(testEndpoint) {
		t.Errorf("call made while no agent ran: %+v", o)
	}
	if st := s.Stats(); st.Listeners != 1 {
		t.Errorf("%+v", st)
	}
	c.kill()
	eventually(t, "listener is dropped everywhere", func() bool { return s.Stats().Listeners == 0 && kept(t, hp) == 0 })
}

// waitIn counts the threads of a child that sleep in a system call.
func waitIn(t *testing.T, c *child, call int) (n int) {
	t.Helper()
	process := "/proc/" + strconv.Itoa(c.cmd.Process.Pid) + "/task/"
	tasks, err := os.ReadDir(process)
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(process + task.Name() + "/syscall")
		if err == nil && strings.HasPrefix(string(b), strconv.Itoa(call)+" ") {
			n++
		}
	}
	return n
}

// A call that an agent received and did not live to answer is answered by the next agent.
func TestReceivedCallSurvivesItsAgent(t *testing.T) {
	hp, path := keeper(t), socketPath(t)
	a, lines := agent(t, path, hp, "HEDDLE_HANG=1")
	c := trapped(t, path, testName)
	says(t, a, lines, "received") // the prefiller's
	c.tell(command{Op: "socket", Family: unix.AF_INET6, Type: unix.SOCK_STREAM | unix.SOCK_NONBLOCK})
	says(t, a, lines, "received")
	killAgent(a)
	s, _ := serve(t, testConfig(path, hp, &testMaker{}))
	if o := c.hear(); o.Errno != 0 || o.Priority != int(testEndpoint) || !o.Nonblock {
		t.Errorf("call received by the dead agent: %+v", o)
	}
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Error(unix.Errno(o.Errno))
	}
	if n := s.Stats().Answered; n < 1 {
		t.Errorf("answered %d", n)
	}
}

// An answer is ended wherever the agent that gave it was killed: before the caller had its socket,
// after, and after the caller was told.
func TestAnswerIsEndedWhereItStopped(t *testing.T) {
	for name, done := range map[string]int{"noted": 0, "added": 1, "told": 2} {
		t.Run(name, func(t *testing.T) {
			hp, path := keeper(t), socketPath(t)
			c := startChild(t, nil)
			page, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			defer closeFD(page)
			// What agents of all versions have in common: a page of 4,096 bytes has four places, of
			// 128 bytes each, for struct seccomp_notif (80 bytes) and the socket's inode.
			if err := unix.Ftruncate(page, 4096); err != nil {
				t.Fatal(err)
			}
			memory, err := unix.Mmap(page, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Munmap(memory) }()
			place := memory[3*128:] // as good as any
			id := func() uint64 { return binary.NativeEndian.Uint64(place) }
			notify := func(request uint, arg unsafe.Pointer) (int, error) {
				n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), uintptr(request), uintptr(arg))
				if errno != 0 {
					return -1, errno
				}
				return int(n), nil
			}
			c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
			if _, err := notify(unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&place[0])); err != nil {
				t.Fatal(err)
			}
			s, err := makeSocket(&testMaker{}, testEndpoint, unix.AF_INET)
			if err != nil {
				t.Fatal(err)
			}
			binary.NativeEndian.PutUint64(place[80:], s.inode)
			number := -1
			if done >= 1 {
				add := struct {
					id                           uint64
					flags, file, number, fdFlags uint32
				}{id: id(), file: uint32(s.fd)}
				if number, err = notify(unix.SECCOMP_IOCTL_NOTIF_ADDFD, unsafe.Pointer(&add)); err != nil {
					t.Fatal(err)
				}
			}
			if done >= 2 {
				send := struct {
					id           uint64
					value        int64
					errno, flags uint32
				}{id: id(), value: int64(number)}
				if _, err := notify(unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&send)); err != nil {
					t.Fatal(err)
				}
			}
			closeFD(s.fd)
			meta := []byte(`{"metadata":"` + testName + `"}`)
			if err := fdkeep.NewClient(hp).Put("k", meta, c.fd, page); err != nil {
				t.Fatal(err)
			}
			serve(t, testConfig(path, hp, &testMaker{}))
			if o := c.hear(); o.Errno != 0 || o.Priority != int(testEndpoint) || number >= 0 && o.FD != number {
				t.Errorf("%+v, want descriptor %d", o, number)
			}
			// The child closed the one it was told of: nothing may be left.
			if o := c.do(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: 1, N: 1}); o.OK != 1 || o.Open != 0 {
				t.Errorf("next call: %+v", o)
			}
		})
	}
}

// underLoad lets a trapped program call socket() from several threads while end ends one agent
// after the other, each once it has started answering, and returns what the program saw.
func underLoad(t *testing.T, calls, rounds int, end func(*exec.Cmd)) outcome {
	t.Helper()
	hp, path := keeper(t), socketPath(t)
	a, lines := agent(t, path, hp)
	c := trapped(t, path, testName)
	// An agent that ends before it has kept a listener takes it to the grave.
	eventually(t, "kept", func() bool { return kept(t, hp) == 1 })
	const threads = 4
	c.tell(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: threads, N: calls / threads})
	for range rounds {
		says(t, a, lines, "received")
		end(a)
		a, lines = agent(t, path, hp)
	}
	return c.hear()
}

// Every call gives a good socket, because Close lets each answer finish.
func TestRestartsUnderLoad(t *testing.T) {
	const calls = 12000
	o := underLoad(t, calls, 8, func(a *exec.Cmd) {
		if err := a.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := a.Wait(); err != nil {
			t.Errorf("agent: %v", err)
		}
	})
	if o.OK != calls || o.Errno != 0 || o.Strange != 0 {
		t.Errorf("%d good of %d, %d strange, first errno %v", o.OK, calls, o.Strange, unix.Errno(o.Errno))
	}
}

// No call hangs or fails, gives anything else than a socket of the agent's, or leaves a second one
// behind, wherever in an answer the SIGKILL falls.
func TestKillsUnderLoad(t *testing.T) {
	const calls, kills = 12000, 40
	o := underLoad(t, calls, kills, killAgent)
	if o.OK != calls || o.Errno != 0 || o.Strange != 0 || o.Open != 0 {
		t.Errorf("%d good of %d, %d strange, %d left open, first errno %v", o.OK, calls, o.Strange, o.Open, unix.Errno(o.Errno))
	}
}

// A hand-off made while no agent runs waits in the socket, and so do the program's calls. A second
// agent does not get the socket, and one that finds its path taken away makes another.
func TestHandOffWithoutAgent(t *testing.T) {
	hp, path := keeper(t), socketPath(t)
	a, _ := agent(t, path, hp)
	eventually(t, "socket is kept", func() bool {
		all, err := fdkeep.NewClient(hp).TakeAll()
		n := len(all)
		return err == nil && n-listenersAmong(all) == 1
	})
	if s, err := listen(testConfig(path, hp, &testMaker{})); err == nil {
		s.Close()
		t.Error("a second agent got the socket")
	}
	killAgent(a)
	c := trapped(t, path, testName)
	c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
	eventually(t, "the call waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) > 0 })
	s, stop := serve(t, testConfig(path, hp, &testMaker{}))
	if o := c.hear(); o.Errno != 0 || o.Priority != int(testEndpoint) {
		t.Errorf("call of a program handed over without an agent: %+v", o)
	}
	eventually(t, "it is kept", func() bool { return s.Stats().Listeners == 1 && kept(t, hp) == 1 })
	stop()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	serve(t, testConfig(path, hp, &testMaker{}))
	if o := trapped(t, path, testName).tcp(unix.AF_INET); o.Errno != 0 {
		t.Errorf("after the socket was removed: %v", unix.Errno(o.Errno))
	}
}

// A keeper that is killed is replaced, and gets every listener, while the agent goes on; so the
// agent's own end loses nothing. A kill -9 of each, in turn.
func TestKeeperKilledThenAgent(t *testing.T) {
	hp, path := socketPath(t), socketPath(t)
	env := []string{"HEDDLE_START_KEEPER=1"}
	a, _ := agent(t, path, hp, env...)
	pid := func() (pid int) {
		eventually(t, "keeper runs", func() bool {
			for _, p := range children(t, a.Process.Pid) {
				if cmd, _ := os.ReadFile("/proc/" + strconv.Itoa(p) + "/environ"); strings.Contains(string(cmd), childEnv+"=keeper") {
					pid = p
				}
			}
			return pid != 0
		})
		return pid
	}
	t.Cleanup(func() { _ = fdkeep.NewClient(hp).Stop() })
	c, other := trapped(t, path, testName), trapped(t, path, testName)
	count := func() int {
		all, err := fdkeep.NewClient(hp).TakeAll()
		if err != nil {
			return -1
		}
		return listenersAmong(all)
	}
	eventually(t, "both are kept", func() bool { return count() == 2 })
	for round := range 3 {
		if err := unix.Kill(pid(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "both are kept with the next keeper", func() bool { return count() == 2 })
		if o := c.tcp(unix.AF_INET); o.Errno != 0 {
			t.Errorf("round %d: %v", round, unix.Errno(o.Errno))
		}
	}
	killAgent(a)
	c.tell(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM})
	eventually(t, "the call waits", func() bool { return waitIn(t, c, unix.SYS_SOCKET) > 0 })
	agent(t, path, hp, env...)
	for _, o := range []outcome{c.hear(), other.tcp(unix.AF_INET6)} {
		if o.Errno != 0 || o.Priority != int(testEndpoint) {
			t.Errorf("after the agent's end: %+v", o)
		}
	}
}

// children lists the processes a process has started.
func children(t *testing.T, pid int) (pids []int) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, _ := os.ReadFile(task) // the thread may have ended
		for word := range strings.FieldsSeq(string(b)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, n)
		}
	}
	return pids
}

func TestUnkeptListenerGivesENOSYS(t *testing.T) {
	path := socketPath(t)
	_, stop := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	stop()
	if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != unix.ENOSYS {
		t.Errorf("got %v; if the kernel's behaviour changed, the keeper may not be needed", unix.Errno(o.Errno))
	}
}

func TestKeeperAbsent(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, socketPath(t), &testMaker{}))
	c := trapped(t, path, testName)
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	// The socket and the listener.
	if f := s.Stats().Failed; f["park"] != 2 || f["resume"] != 1 {
		t.Errorf("counters %v", f)
	}
}

// An endpoint removed while no agent ran is refused by the next.
func TestResumeResolvesAgain(t *testing.T) {
	hp, path := keeper(t), socketPath(t)
	_, stop := serve(t, testConfig(path, hp, &testMaker{}))
	c := trapped(t, path, "n1/other")
	if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != unix.ENETDOWN {
		t.Fatal(unix.Errno(o.Errno))
	}
	stop()
	s, _ := serve(t, testConfig(path, hp, &testMaker{}))
	eventually(t, "resumed", func() bool { return s.Stats().Listeners == 1 })
	if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != unix.ENETDOWN {
		t.Errorf("after restart: %v", unix.Errno(o.Errno))
	}
	start := time.Now()
	c.kill()
	eventually(t, "dropped", func() bool { return kept(t, hp) == 0 })
	t.Logf("dropped after %v", time.Since(start))
}
