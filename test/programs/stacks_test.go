package programs

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// userSpaceProfile has a stack module run the TCP of endpoints with a label.
const userSpaceProfile = `apiVersion: heddle.dev/v1
kind: StackProfile
name: user-space
selector: {labels: {stack: user-space}}
stack: %s
`

// withEachStack runs a test in a lab whose n1/c1 has its TCP by smoltcp, and in one by netstack.
func withEachStack(t *testing.T, test func(*testing.T, stacksLab)) {
	for _, kind := range []string{"smoltcp", "netstack"} {
		t.Run(kind, func(t *testing.T) { test(t, newStacksLab(t, kind)) })
	}
}

// stacksLab is a lab whose n1/c1 has its TCP by a stack module.
type stacksLab struct {
	ownLab
	dir  string // the same in all containers
	kind string
}

func newStacksLab(t *testing.T, kind string, more ...string) stacksLab {
	t.Helper()
	l := stacksLab{newOwnLab(t, "s", append([]string{"--stacks"}, more...)...), lab.SharedDir(t), kind}
	file := filepath.Join(l.dir, "profile.yaml")
	testutil.NoError(t, os.WriteFile(file, fmt.Appendf(nil, userSpaceProfile, kind), 0o600))
	for _, args := range [][]string{{"endpoints", "label", "n1/c1", "stack=user-space"}, {"stack", "apply", file}} {
		cmd := exec.CommandContext(t.Context(), lab.Bin, append(args, "--api", l.socket())...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("heddle %v: %v\n%s", args, err, out)
		}
	}
	return l
}

func (l stacksLab) socket() string { return "/run/heddle/lab/" + l.name + "/n1/api.sock" }

// in is a command in a container, or, of the names "node" and "outside", in these network
// namespaces of the lab.
func (l stacksLab) in(ctx context.Context, where string, words ...string) *exec.Cmd {
	switch where {
	case "node", "outside":
		suffix := map[string]string{"node": "n1", "outside": "outside"}[where]
		return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + netns.Path(l.name+"-"+suffix)}, words...)...)
	}
	container, mode, _ := strings.Cut(where, " ")
	args := []string{"lab", "exec", "--lab", l.name, "--mode", "heddle"}
	if mode != "" {
		args[len(args)-1] = mode
	}
	cmd := exec.CommandContext(ctx, lab.Bin, append(append(args, container, "--"), words...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // passed on
	return cmd
}

func (l stacksLab) must(where string, words ...string) string {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), testutil.WaitTimeout)
	defer cancel()
	out, err := l.in(ctx, where, words...).CombinedOutput()
	if err != nil {
		l.Errorf("in %s: %s: %v\n%s", where, strings.Join(words, " "), err, out)
	}
	return string(out)
}

// run runs a program until the end of the test.
func (l stacksLab) run(where string, words ...string) *lab.Program {
	l.Helper()
	p := lab.StartCommand(l, words[0], l.in(context.WithoutCancel(l.Context()), where, words...))
	l.Cleanup(func() { // KILL would leave the program in the container
		_ = p.Cmd.Process.Signal(syscall.SIGTERM) // or it has ended
		p.WaitEnd()
	})
	return p
}

// start runs a program until the end of the test, and waits until somebody listens at a port.
func (l stacksLab) start(where, port string, words ...string) *lab.Program {
	l.Helper()
	p := l.run(where, words...)
	defer func() {
		if l.Failed() {
			l.Logf("%s in %s: %s", words[0], where, p.Output())
		}
	}()
	testutil.EventuallyTrue(l, where+" listens at "+port, func() bool {
		return l.in(l.Context(), where, "python3", "-c", "import socket; socket.create_connection(('127.0.0.1', "+port+"), 5)").Run() == nil
	})
	return p
}

func (l stacksLab) address(where string) string {
	l.Helper()
	switch where {
	case "node":
		return "10.244.0.1"
	case "outside":
		out := l.must(where, "sh", "-c", "ip -4 -o addr show scope global | awk '{print $4; exit}'")
		addr, _, _ := strings.Cut(out, "/")
		return addr
	}
	container, _, _ := strings.Cut(where, " ")
	out, err := l.heddle(l.Context(), "lab", "ip", container).Output()
	testutil.NoError(l, err)
	return strings.TrimSpace(string(out))
}

// address6 is address for IPv6.
func (l stacksLab) address6(where string) string {
	l.Helper()
	switch where {
	case "node":
		prefix, err := netip.MustParseAddr(l.address6("n1/c1")).Prefix(model.Prefix6Bits)
		testutil.NoError(l, err)
		return model.Overlay6(prefix, netip.MustParseAddr(l.address(where))).String()
	case "outside":
		out := l.must(where, "sh", "-c", "ip -6 -o addr show scope global | awk '{print $4; exit}'")
		addr, _, _ := strings.Cut(out, "/")
		return addr
	}
	container, _, _ := strings.Cut(where, " ")
	out, err := l.heddle(l.Context(), "lab", "ip", "--family", "6", container).Output()
	testutil.NoError(l, err)
	return strings.TrimSpace(string(out))
}

// stackPeers are who communicates with a container whose TCP a module runs: a neighbour and a
// container of another node, intercepted and plain, its node, and who is outside.
var stackPeers = []string{"n1/c2", "n1/c2 overlay", "n2/c1", "n2/c1 overlay", "node", "outside"}

// nginxConfig serves a folder.
const nginxConfig = `daemon off; master_process off; pid none; error_log stderr; worker_rlimit_nofile 1024;
events { worker_connections 256; }
http { access_log off; server { listen %s; root %s; } }
`

// TestStacks: programs as they are, in a container whose TCP a module runs.
func TestStacks(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "nginx", "redis-server", "redis-cli", "iperf3", "curl", "python3")
	withEachStack(t, func(t *testing.T, l stacksLab) {
		copyPrograms(t, l.dir, "stack_names.py", "stack_buffers.py", "stack_echo.py", "stack_end.py", "stack_signals.py")
		t.Run("nginx and curl", l.testWeb)
		t.Run("listeners of both stacks", l.testBoth)
		t.Run("redis", l.testRedis)
		t.Run("iperf3", l.testIperf)
		t.Run("names", l.testNames)
		t.Run("buffers", l.testBuffers)
		t.Run("signals", l.testSignals)
		t.Run("capture", l.testCapture)
		t.Run("go", l.testGo)
		t.Run("lives", l.testLives)
		t.Run("gone", l.testGone)
	})
}

func (l stacksLab) with(t *testing.T) stacksLab {
	l.T = t
	return l
}

// testWeb has each peer fetch a file from the container, and the container from each peer, over IPv4
// and IPv6; and the same by processes of the container that are not intercepted, which have its own
// stack beside the module.
func (l stacksLab) testWeb(t *testing.T) {
	l = l.with(t)
	files := filepath.Join(l.dir, "files")
	testutil.NoError(t, os.Mkdir(files, 0o755))
	data := pattern(4 << 20)
	lab.WriteFile(t, filepath.Join(files, "file"), data)
	want := fmt.Sprintf("%x", sha256.Sum256(data))
	serve := func(where, port string) *lab.Program {
		config := filepath.Join(l.dir, "nginx-"+port+".conf")
		lab.WriteFile(t, config, fmt.Appendf(nil, nginxConfig, port+"; listen [::]:"+port, files))
		return l.start(where, port, "nginx", "-e", "stderr", "-c", config)
	}
	fetch := func(where, from, port string) {
		for _, host := range []string{l.address(from), "[" + l.address6(from) + "]"} {
			got := l.must(where, "sh", "-c", "curl -gsS -m 20 http://"+host+":"+port+"/file | sha256sum")
			if !strings.HasPrefix(got, want) {
				t.Errorf("%s from %s at %s: got %s, want %s", where, from, host, got, want)
			}
		}
	}
	serve("n1/c1", "8080")
	serve("n1/c1 overlay", "8079") // by the container's own stack
	fetch("n1/c1", "n1/c1", "8080")
	for _, peer := range stackPeers {
		if peer != "outside" { // containers are not reached from there
			fetch(peer, "n1/c1", "8080")
			fetch(peer, "n1/c1", "8079")
		}
	}
	for i, peer := range stackPeers {
		port := strconv.Itoa(8081 + i)
		serve(peer, port)
		fetch("n1/c1", peer, port)
		fetch("n1/c1 overlay", peer, port)
	}
}

func (l stacksLab) testRedis(t *testing.T) {
	l = l.with(t)
	l.start("n1/c1", "6379", "redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "")
	for _, where := range []string{"n1/c1", "n1/c2", "n2/c1"} {
		if got := l.must(where, "redis-cli", "-h", l.address("n1/c1"), "incrby", "count", "2"); got == "" {
			t.Errorf("%s: no answer", where)
		}
	}
	if got := strings.TrimSpace(l.must("n1/c1", "redis-cli", "get", "count")); got != "6" {
		t.Errorf("count is %q, want 6", got)
	}
}

func (l stacksLab) testIperf(t *testing.T) {
	l = l.with(t)
	server := l.run("n1/c1", "iperf3", "-s", "--forceflush")
	runs := 0
	for _, more := range [][]string{{}, {"-R"}, {"-P", "4"}} {
		for _, where := range []string{"n1/c2", "n2/c1"} {
			runs++ // it listens anew for each
			testutil.EventuallyTrue(t, "iperf3 listens", func() bool { return strings.Count(server.Output(), "Server listening") == runs })
			l.must(where, append([]string{"iperf3", "-t", "1", "-c", l.address("n1/c1")}, more...)...)
		}
	}
}

func (l stacksLab) testNames(t *testing.T) {
	l = l.with(t)
	l.start("n2/c1", "9001", "python3", filepath.Join(l.dir, "stack_echo.py"), "9001")
	l.must("n1/c1", "python3", filepath.Join(l.dir, "stack_names.py"), l.address("n2/c1"), "9001")
	// Attack: who has the other end of a pair, too, holds up the module.
	got := strings.TrimSpace(l.must("n1/c1", "python3", filepath.Join(l.dir, "stack_end.py"), l.address("n2/c1"), "9001"))
	if want := "EINVAL EINVAL ECONNREFUSED EAGAIN EAGAIN x"; got != want {
		t.Errorf("a program that looks for the other end of its pair: %s, want %s", got, want)
	}
}

// testBuffers has a program write more than buffers hold, whatever it has asked for as its send
// buffer: a writer that waits for room is woken, although the module leaves a byte in the pair.
func (l stacksLab) testBuffers(t *testing.T) {
	l = l.with(t)
	got := l.must("n1/c1", "python3", filepath.Join(l.dir, "stack_buffers.py"), l.address("n1/c1"))
	if lines := strings.Split(strings.TrimSpace(got), "\n"); len(lines) != 16 || strings.Contains(got, "HANGS") {
		t.Errorf("of 16 ways to send 3 MB:\n%s", got)
	}
}

// testSignals has signals interrupt accept(): no program has a connection twice, of which it would
// close one, and epoll tell it of that for ever. For a moment it may: the agent is a process that
// waits for its turn, too.
func (l stacksLab) testSignals(t *testing.T) {
	l = l.with(t)
	const count = "300"
	program := filepath.Join(l.dir, "stack_signals.py")
	server := l.run("n1/c1", "python3", program, "server", "9004", count)
	server.WaitFor("ready")
	l.must("n2/c1", "python3", program, "client", l.address("n1/c1"), "9004", count)
	server.WaitFor("closed ones that stay: 0 descriptors left: 0")
}

// testGo has a static program of Go serve, and another ask.
func (l stacksLab) testGo(t *testing.T) {
	l = l.with(t)
	buildGo(t, l.dir)
	program := filepath.Join(l.dir, "go-http")
	l.start("n1/c1", "8090", program, "server", "0.0.0.0:8090")
	l.start("n2/c1", "8090", program, "server", "0.0.0.0:8090")
	l.must("n1/c1", program, "client", l.address("n1/c1")+":8090")
	l.must("n2/c1", program, "client", l.address("n1/c1")+":8090")
	l.must("n1/c1", program, "client", l.address("n2/c1")+":8090")
}

// held is a connection of the node to the container's echo server.
type held struct{ net.Conn }

func (l stacksLab) connect(port int) (c held, err error) {
	at := net.JoinHostPort(l.address("n1/c1"), strconv.Itoa(port))
	err = netns.Do(netns.Path(l.name+"-n1"), func() error {
		c.Conn, err = net.DialTimeout("tcp", at, 2*time.Second)
		return err
	})
	if err == nil {
		l.Cleanup(func() { _ = c.Close() }) // or it has ended
	}
	return c, err
}

// echoes reports whether a byte comes back.
func (c held) echoes() error {
	if err := c.SetDeadline(time.Now().Add(testutil.WaitTimeout)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// testBoth: a listener of the container's own stack at the port of one of the module's gets new
// connections, and nothing of those that the module has.
func (l stacksLab) testBoth(t *testing.T) {
	l = l.with(t)
	const port = 9004
	echo := []string{"python3", filepath.Join(l.dir, "stack_echo.py"), strconv.Itoa(port)}
	l.start("n1/c1", echo[2], echo...)
	c, err := l.connect(port)
	testutil.NoError(t, err)
	testutil.NoError(t, c.echoes())
	l.start("n1/c1 overlay", echo[2], echo...)
	testutil.NoError(t, c.echoes())
	next, err := l.connect(port)
	testutil.NoError(t, err)
	testutil.NoError(t, next.echoes())
	testutil.NoError(t, c.echoes())
}

// testLives ends the agent, then the module.
func (l stacksLab) testLives(t *testing.T) {
	l = l.with(t)
	const port = 9002
	server := l.start("n1/c1", "9002", "python3", filepath.Join(l.dir, "stack_echo.py"), "9002")
	first, err := l.connect(port)
	testutil.NoError(t, err)
	testutil.NoError(t, first.echoes())
	out, err := l.heddle(t.Context(), "connections", "--node", "n1").CombinedOutput()
	if testutil.NoError(t, err); !strings.Contains(string(out), "stack") {
		t.Errorf("the connection is not listed by its path:\n%s", out)
	}
	if m := l.module(); m.PID == 0 || len(m.Tenants) != 1 || m.Tenants[0].Endpoint != "n1/c1" || m.Tenants[0].Profile != "user-space" ||
		m.Tenants[0].Connections == 0 || m.Tenants[0].RTT == 0 {
		t.Errorf("the module uses %+v", m)
	}
	l.endAgent()
	l.up()
	testutil.NoError(t, first.echoes())
	// The server has been waiting in accept() all the time.
	second, err := l.connect(port)
	testutil.NoError(t, err)
	testutil.NoError(t, second.echoes())
	third := l.outlives(first, port, "a module", l.killModule)
	testutil.EventuallyTrue(t, "the program has ECONNRESET", func() bool {
		return strings.Contains(server.Output(), fmt.Sprintf("ended %d", unix.ECONNRESET))
	})
	if l.kind == "netstack" {
		l.outlives(third, port, "a container's process", l.killTenant)
	}
}

// outlives ends what a connection is of, and gives the next one to the listener, which has to be
// there again.
func (l stacksLab) outlives(c held, port int, what string, end func()) (next held) {
	l.Helper()
	end()
	var err error
	testutil.EventuallyTrue(l, "its connection ends", func() bool { err = c.echoes(); return err != nil }) // with what the module has started
	if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		l.Errorf("connection of %s that was killed: %v", what, err)
	}
	began := time.Now()
	testutil.EventuallyTrue(l, "the listener is there again", func() bool {
		next, err = l.connect(port)
		return err == nil && next.echoes() == nil
	})
	if took := time.Since(began); took > 2*time.Second { // 1 s on a machine that has nothing else to do
		l.Errorf("new connections only after %s", took)
	}
	return next
}

// testGone: without the profile the tenant ends once nothing is left at the module, and the kernel
// has the container's TCP.
func (l stacksLab) testGone(t *testing.T) {
	l = l.with(t)
	l.start("n2/c1", "9003", "python3", filepath.Join(l.dir, "stack_echo.py"), "9003")
	connects := func(mode string) bool {
		program := fmt.Sprintf("import socket; socket.create_connection((%q, 9003), 1)", l.address("n2/c1"))
		return l.in(t.Context(), "n1/c1"+mode, "python3", "-c", program).Run() == nil
	}
	if out, err := l.heddle(t.Context(), "stack", "delete", "user-space").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	testutil.Eventually(t, "the tenant's end", func() (bool, string) {
		m := l.module()
		return len(m.Tenants) == 0, fmt.Sprintf("%+v", m)
	})
	for _, mode := range []string{"", " overlay"} {
		testutil.Eventually(t, "a connect of n1/c1"+mode, func() (bool, string) { return connects(mode), fmt.Sprintf("%+v", l.module()) })
	}
}

// module is what n1's agent says of its module.
func (l stacksLab) module() api.StackModule {
	l.Helper()
	all := l.stacks().Modules
	if len(all) != 1 {
		l.Fatalf("want one module: %+v", all)
	}
	return all[0]
}

// stacks is what n1's agent says of stacks.
func (l stacksLab) stacks() api.Stacks {
	l.Helper()
	out, err := l.heddle(l.Context(), "stack", "--node", "n1", "--output", "json").Output()
	testutil.NoError(l, err)
	var nodes []api.Stacks
	testutil.NoError(l, json.Unmarshal(out, &nodes))
	if len(nodes) != 1 {
		l.Fatalf("want one node:\n%s", out)
	}
	return nodes[0]
}

// processes gives those whose arguments have a word.
func (l stacksLab) process(words ...string) int {
	l.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	testutil.NoError(l, err)
	for _, path := range all {
		args, err := os.ReadFile(path)
		has := err == nil
		for _, w := range words {
			has = has && strings.Contains("\x00"+string(args), w)
		}
		if has {
			pid, err := strconv.Atoi(strings.Split(path, "/")[2])
			testutil.NoError(l, err)
			return pid
		}
	}
	l.Fatalf("no process %q", words)
	return 0
}

func (l stacksLab) killModule() {
	l.Helper()
	testutil.NoError(l, unix.Kill(l.module().PID, unix.SIGKILL))
}

// killTenant kills the process that netstack's module has for the container.
func (l stacksLab) killTenant() {
	l.Helper()
	out, err := exec.CommandContext(l.Context(), "pgrep", "-P", strconv.Itoa(l.module().PID)).Output()
	testutil.NoError(l, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	testutil.NoError(l, err)
	testutil.NoError(l, unix.Kill(pid, unix.SIGKILL))
}

func (l stacksLab) endAgent() {
	l.Helper()
	pid := l.process("heddled\x00", "/run/heddle/lab/"+l.name+"/n1/api.sock")
	testutil.NoError(l, unix.Kill(pid, unix.SIGTERM))
	testutil.EventuallyTrue(l, "the agent ends", func() bool { return unix.Kill(pid, 0) != nil })
}
