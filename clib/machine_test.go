package clib_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// The machine's container has the first address, its peer the second one, in a namespace of its own.
const machineAddress, peerAddress = "10.9.9.1", "10.9.9.2"

// machine stands for a virtual machine, without one: its monitor is a process that sleeps, and the
// guest's daemon and programs run beside it.
type machine struct {
	t                        *testing.T
	program, library, socket string
	own, peer                string // namespaces
	run, guest               *exec.Cmd
}

// output collects what a process prints.
type output struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.out.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.out.String()
}

func (o *output) waitFor(t *testing.T, text string) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("%q", text), func() (bool, string) { s := o.String(); return strings.Contains(s, text), s })
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	testutil.NeedRoot(t, "it makes network namespaces")
	bin := cmp.Or(os.Getenv("HEDDLE_BIN"), "../bin")
	program, err := filepath.Abs(filepath.Join(bin, "heddle-machine"))
	testutil.NoError(t, err)
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("run `make build` first: %v", err)
	}
	dir := t.TempDir()
	m := &machine{t: t, program: program, library: filepath.Join(dir, "libheddle-machine.so"), socket: filepath.Join(dir, "guest.sock")}
	if out, err := exec.Command("./build.sh", "machine", m.library).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	name := fmt.Sprintf("machine-%d", os.Getpid())
	for _, n := range []string{name, name + "-peer"} {
		testutil.NoError(t, netns.Create(n))
		t.Cleanup(func() { _ = netns.Delete(n) })
	}
	m.own, m.peer = netns.Path(name), netns.Path(name+"-peer")
	for _, c := range []string{
		"ip -n NAME link add eth0 type veth peer name eth0 netns NAME-peer",
		"ip -n NAME addr add " + machineAddress + "/24 dev eth0", "ip -n NAME link set eth0 up", "ip -n NAME link set lo up",
		"ip -n NAME-peer addr add " + peerAddress + "/24 dev eth0", "ip -n NAME-peer link set eth0 up", "ip -n NAME-peer link set lo up",
	} {
		words := strings.Fields(strings.ReplaceAll(c, "NAME", name))
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", c, err, out)
		}
	}
	m.boot()
	return m
}

// start starts a process in a namespace, until the end of the test.
func (m *machine) start(place string, cmd *exec.Cmd) *output {
	m.t.Helper()
	out := &output{}
	if cmd.Stdout == nil {
		cmd.Stdout = out
	}
	cmd.Stderr = out
	testutil.NoError(m.t, netns.Start(place, cmd))
	m.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return out
}

// boot starts the machine: its monitor says its number, of which it has the memory.
func (m *machine) boot() {
	m.t.Helper()
	m.run = exec.Command(m.program, "run", "--memory", "16", "--", "sh", "-c", "echo $$; exec sleep infinity")
	said, write := io.Pipe()
	m.run.Stdout = write
	m.start(m.own, m.run)
	var monitor int
	if _, err := fmt.Fscanln(said, &monitor); err != nil {
		m.t.Fatalf("the monitor says nothing: %v", err)
	}
	m.startGuest(fmt.Sprintf("/proc/%d/fd/3", monitor))
}

func (m *machine) startGuest(memory string) {
	m.t.Helper()
	m.guest = exec.Command(m.program, "guest", "--memory", memory, "--socket", m.socket)
	m.start(m.own, m.guest).waitFor(m.t, "there is a service")
}

// child gives the number of a process that another one has started, by its first arguments.
func child(t *testing.T, parent int, arguments string) (pid int) {
	t.Helper()
	testutil.Eventually(t, "a process with "+arguments, func() (bool, string) {
		out, _ := exec.Command("pgrep", "-P", strconv.Itoa(parent), "-f", arguments).Output()
		var err error
		pid, err = strconv.Atoi(strings.TrimSpace(string(out)))
		return err == nil, string(out)
	})
	return pid
}

// inside gives a program of the machine, which has no network but the library's.
func (m *machine) inside(args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(m.t.Context(), waitTimeout)
	m.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--net", "python3", "testdata/machine.py"}, args...)...)
	cmd.Env = append(os.Environ(), "LD_PRELOAD="+m.library, "HEDDLE_MACHINE_SOCKET="+m.socket)
	return cmd
}

// says runs such a program to its end.
func (m *machine) says(args ...string) string {
	m.t.Helper()
	out, err := m.inside(args...).CombinedOutput()
	if err != nil {
		m.t.Errorf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// outside runs fn in the peer's namespace.
func (m *machine) outside(fn func() error) {
	m.t.Helper()
	testutil.NoError(m.t, netns.Do(m.peer, fn))
}

// echoes listens at the peer and sends back what comes, each at its end.
func (m *machine) echoes() (port string) {
	var l net.Listener
	m.outside(func() (err error) { l, err = net.Listen("tcp4", peerAddress+":0"); return err })
	m.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				data, err := io.ReadAll(c)
				if err == nil {
					_, _ = c.Write(data)
				}
			}()
		}
	}()
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

// dial connects from the peer to the machine, once something listens there.
func (m *machine) dial(port string) (c *net.TCPConn) {
	m.t.Helper()
	testutil.EventuallyNil(m.t, "the machine to listen at "+port, func() error {
		return netns.Do(m.peer, func() error {
			got, err := net.Dial("tcp4", machineAddress+":"+port)
			if err == nil {
				c = got.(*net.TCPConn)
			}
			return err
		})
	})
	m.t.Cleanup(func() { c.Close() })
	return c
}

// fetch sends 1 MB to an echo in the machine and compares what comes back.
func fetch(t *testing.T, c *net.TCPConn) (sum string) {
	t.Helper()
	data := make([]byte, 1<<20)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(data)
	go func() { _, _ = c.Write(data); _ = c.CloseWrite() }()
	testutil.NoError(t, c.SetReadDeadline(time.Now().Add(waitTimeout)))
	back, err := io.ReadAll(c)
	testutil.NoError(t, err)
	if !bytes.Equal(back, data) {
		t.Errorf("%d bytes came back, and not the %d that were sent", len(back), len(data))
	}
	return fmt.Sprintf("%x", sha256.Sum256(data))
}

// TestMachine: programs of a machine without a network device connect, listen, and have their bytes
// whole, both ways, by a region of memory.
func TestMachine(t *testing.T) {
	m := newMachine(t)
	port := m.echoes()
	if out := m.says("send", peerAddress, port); !strings.Contains(out, "equal 1048576") {
		t.Errorf("%s", out)
	}
	if out := m.says("calls", peerAddress, port, "1"); !strings.Contains(out, "as they should be") {
		t.Errorf("%s", out)
	}
	out := m.start(m.own, m.inside("echo", "8000"))
	sum := fetch(t, m.dial("8000"))
	out.waitFor(t, "echoed 1048576 "+sum+" to "+peerAddress)
	for range 4 { // at once, and with itself
		t.Run("", func(t *testing.T) {
			t.Parallel()
			fetch(t, m.dial("8000"))
			if out := m.says("send", machineAddress, "8000"); !strings.Contains(out, "equal") {
				t.Errorf("%s", out)
			}
		})
	}
}

// TestMachineOwn: what listens in the machine's container beside it, its monitor's console say, is
// out of the machine's reach; its own listeners are not.
func TestMachineOwn(t *testing.T) {
	m := newMachine(t)
	var monitor net.Listener
	testutil.NoError(t, netns.Do(m.own, func() (err error) { monitor, err = net.Listen("tcp", ":0"); return err }))
	defer monitor.Close()
	_, port, _ := net.SplitHostPort(monitor.Addr().String())
	for _, to := range []string{"127.0.0.1", machineAddress, "0.0.0.0", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::ffff:" + machineAddress} {
		out, err := m.inside("hold", to, port).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "ConnectionRefusedError") {
			t.Errorf("a connect to %s: %v\n%s", to, err, out)
		}
	}
}

// TestMachineEnds: a service that is killed, a guest that is killed, and a machine that ends have
// their connections end at both sides, and what comes next begins anew.
func TestMachineEnds(t *testing.T) {
	m := newMachine(t)
	held, err := net.Listener(nil), error(nil)
	m.outside(func() error { held, err = net.Listen("tcp4", peerAddress+":0"); return err })
	defer held.Close()
	_, port, _ := net.SplitHostPort(held.Addr().String())
	hold := func() (*output, net.Conn) {
		out := m.start(m.own, m.inside("hold", peerAddress, port, "again"))
		out.waitFor(t, "connected from "+machineAddress)
		for { // the program before this one may have connected once more
			c, err := held.Accept()
			testutil.NoError(t, err)
			from := c.RemoteAddr().(*net.TCPAddr)
			if strings.Contains(out.String(), fmt.Sprintf("connected from %s %d", from.IP, from.Port)) {
				return out, c
			}
			_ = c.Close()
		}
	}
	reset := func(c net.Conn) {
		t.Helper()
		_ = c.SetReadDeadline(time.Now().Add(waitTimeout))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the peer reads %v, and not ECONNRESET", err)
		}
	}
	echo := m.start(m.own, m.inside("echo", "8000"))
	fetch(t, m.dial("8000"))

	// The service: another one takes its place, and listeners are there again.
	out, c := hold()
	testutil.NoError(t, syscall.Kill(child(t, m.run.Process.Pid, "serve"), syscall.SIGKILL))
	reset(c)
	out.waitFor(t, "read ends with ECONNRESET")
	fetch(t, m.dial("8000"))

	// The guest's daemon: its programs' sockets are over; another one serves the next.
	out, c = hold()
	memory := m.guest.Args[3]
	testutil.NoError(t, m.guest.Process.Kill())
	out.waitFor(t, "read ends with ECONNRESET")
	out.waitFor(t, "connect ends with ENETDOWN")
	reset(c)
	echo.waitFor(t, "accept")
	m.startGuest(memory)
	m.start(m.own, m.inside("echo", "8000"))
	fetch(t, m.dial("8000"))

	// The machine, and then its service without anybody who starts another one.
	out, c = hold()
	monitor := child(t, m.run.Process.Pid, "sleep infinity")
	testutil.NoError(t, syscall.Kill(monitor, syscall.SIGKILL))
	reset(c)
	out.waitFor(t, "read ends with ECONNRESET")
	out.waitFor(t, "connect ends with ENETDOWN")
}
