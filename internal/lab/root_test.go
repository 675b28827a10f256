package lab

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// cli runs the programs as users do, on a lab of the test's own.
type cli struct {
	heddle string
	lab    Lab
}

// newCLI takes the lab down when the test ends. The programs are those in HEDDLE_BIN; without it
// they are built.
func newCLI(t *testing.T, letter string) *cli {
	t.Helper()
	testutil.NeedRoot(t, "brings a lab up")
	if _, err := findCgroups(); err != nil {
		t.Skip(err)
	}
	bin := os.Getenv("HEDDLE_BIN")
	if bin == "" {
		bin = t.TempDir()
		build := exec.Command("go", "build", "-o", bin)
		for _, p := range []string{"heddle", "heddled", "heddle-runtime"} {
			build.Args = append(build.Args, "heddle.dev/heddle/cmd/"+p)
		}
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
	}
	l, err := Open(fmt.Sprintf("%s%d", letter, os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	c := &cli{filepath.Join(bin, "heddle"), l}
	t.Cleanup(func() {
		if t.Failed() {
			logs, _ := filepath.Glob(filepath.Join(l.Dir(), "*/heddled.log"))
			for _, f := range logs {
				t.Log(tail(f))
			}
		}
		c.must(t, "down")
		c.checkGone(t)
	})
	return c
}

func (c *cli) command(verb string, args ...string) *exec.Cmd {
	return exec.Command(c.heddle, append([]string{"lab", verb, "--lab", c.lab.name}, args...)...)
}

// endWithin kills a command that runs for longer than any should: what waits for it, or for what it
// prints, then ends, too.
func endWithin(cmd *exec.Cmd) (stop func() bool) {
	return time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() }).Stop
}

// run gives what the command printed on both streams.
func (c *cli) run(verb string, args ...string) (string, error) {
	cmd := c.command(verb, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return "", err
	}
	defer endWithin(cmd)()
	err := cmd.Wait()
	return out.String(), err
}

func (c *cli) must(t *testing.T, verb string, args ...string) string {
	t.Helper()
	out, err := c.run(verb, args...)
	if err != nil {
		t.Fatalf("lab %s %v: %v\n%s", verb, args, err, out)
	}
	return strings.TrimSpace(out)
}

// checkGone looks for anything that carries the lab's name.
func (c *cli) checkGone(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(c.lab.Dir()); err == nil {
		t.Errorf("%s is left", c.lab.Dir())
	}
	spaces, _ := os.ReadDir(netns.Dir)
	for _, e := range spaces {
		if strings.HasPrefix(e.Name(), c.lab.name+"-") {
			t.Errorf("network namespace %s is left", e.Name())
		}
	}
	all, err := mounts()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if strings.HasPrefix(m.path, c.lab.Dir()+"/") {
			t.Errorf("mount %s is left", m.path)
		}
		if _, err := os.Stat(filepath.Join(m.path, c.lab.cgroup())); m.fstype == "cgroup" || m.fstype == "cgroup2" {
			if err == nil {
				t.Errorf("cgroup %s%s is left", m.path, c.lab.cgroup())
			}
		}
	}
}

// talk sends a line from one container to a TCP server in another, which answers with its client's
// address.
func (c *cli) talk(t *testing.T, mode Mode, server, client string) {
	t.Helper()
	addr := c.must(t, "ip", "--mode", string(mode), server)
	script := `import socket
s = socket.create_server(("", 7)); print("ready", flush=True)
c, peer = s.accept(); c.sendall(peer[0].encode()); c.close()`
	listen := c.command("exec", "--mode", string(mode), server, "--", "python3", "-c", script)
	out, err := listen.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := listen.Start(); err != nil {
		t.Fatal(err)
	}
	defer endWithin(listen)()
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatalf("server in %s, mode %s: %v", server, mode, err)
	}
	dial := `import socket, sys
print(socket.create_connection((sys.argv[1], 7), 5).recv(99).decode())`
	got := c.must(t, "exec", "--mode", string(mode), client, "--", "python3", "-c", dial, addr)
	if err := listen.Wait(); err != nil {
		t.Fatal(err)
	}
	if want := c.must(t, "ip", "--mode", string(mode), client); got != want {
		t.Errorf("mode %s: %s saw its client %s as %s, want %s", mode, server, client, got, want)
	}
}

func TestLab(t *testing.T) {
	t.Parallel()
	c := newCLI(t, "t")
	c.must(t, "up", "--nodes", "2", "--containers", "1")
	c.must(t, "up")
	for _, m := range Modes {
		c.talk(t, m, "n2/c1", "n1/c1")
	}
	t.Run("exec", c.testExec)
	t.Run("exec of what leaves a child", c.testExecOfParent)
	t.Run("killed from within", c.testKilledFromWithin)
	t.Run("errors", c.testErrors)
	t.Run("agent killed", c.testAgentKilled)
	t.Run("second lab", c.testSecondLab)
}

func (c *cli) testExec(t *testing.T) {
	cat := c.command("exec", "n1/c1", "--", "sh", "-c", "cat; echo $A >&2; exit 7")
	cat.Args = append(cat.Args[:5], append([]string{"-e", "A=b,c"}, cat.Args[5:]...)...)
	var stdout, stderr bytes.Buffer
	cat.Stdin, cat.Stdout, cat.Stderr = strings.NewReader("in\n"), &stdout, &stderr
	var exit *exec.ExitError
	if err := cat.Run(); !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("exit: %v, want 7", err)
	}
	if stdout.String() != "in\n" || stderr.String() != "b,c\n" {
		t.Errorf("stdout %q, stderr %q", stdout.String(), stderr.String())
	}
	// A signal to `heddle lab exec` reaches the command.
	wait := c.command("exec", "n1/c1", "--", "sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done")
	out, err := wait.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := wait.Start(); err != nil {
		t.Fatal(err)
	}
	defer endWithin(wait)()
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatal(err)
	}
	if err := wait.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := wait.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("after SIGTERM: %v, want exit status 3", err)
	}
	dir := t.TempDir() // below /tmp, which containers share
	pwd := c.command("exec", "n1/c1", "--", "pwd")
	pwd.Dir = dir
	if got, err := pwd.Output(); err != nil || strings.TrimSpace(string(got)) != dir {
		t.Errorf("working directory %s, %v, want %s", got, err, dir)
	}
}

func (c *cli) testErrors(t *testing.T) {
	for _, x := range []struct{ verb, arg, want string }{
		{"ip", "n9/c1", "n1/c1, n2/c1"},
		{"exec", "n1/c9", "n1/c1, n2/c1"},
		{"exec", "n1/c1", "no command"},
		{"up", "--nodes=3", "lab down"},
		{"up", "--nodes=0", "--nodes"},
	} {
		if out, err := c.run(x.verb, x.arg); err == nil || !strings.Contains(out, x.want) {
			t.Errorf("lab %s %s: %v, %q, want %q", x.verb, x.arg, err, out, x.want)
		}
	}
	up := c.command("up")
	up.Env = append(os.Environ(), "HEDDLE_RUNC=/none")
	if out, err := up.CombinedOutput(); err == nil || !strings.Contains(string(out), "HEDDLE_RUNC") {
		t.Errorf("no runc: %v, %q", err, out)
	}
	up = c.command("up")
	up.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	up.Args[0], up.Path = "heddle", "/proc/self/fd/3"
	self, err := os.Open(c.heddle)
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	up.ExtraFiles = []*os.File{self}
	if out, err := up.CombinedOutput(); err == nil || !strings.Contains(string(out), "needs root") {
		t.Errorf("not root: %v, %q", err, out)
	}
}

// testAgentKilled: `up` starts what is missing; containers live on if their listeners do, and are
// made anew if not.
func (c *cli) testAgentKilled(t *testing.T) {
	groups, err := findCgroups()
	if err != nil {
		t.Fatal(err)
	}
	group := c.lab.agentCgroup(groups, "n1")
	agents, _, err := agentProcesses(group)
	if err != nil || len(agents) != 1 {
		t.Fatalf("agents of n1: %v, %v", agents, err)
	}
	first := c.must(t, "exec", "n1/c1", "--", "readlink", "/proc/1/ns/pid")
	if err := syscall.Kill(agents[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.must(t, "up")
	c.talk(t, ModeHeddle, "n1/c1", "n2/c1")
	if again := c.must(t, "exec", "n1/c1", "--", "readlink", "/proc/1/ns/pid"); again != first {
		t.Error("the container was made anew although its listener was kept")
	}
	if err := killCgroup(group, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	c.must(t, "up")
	c.talk(t, ModeHeddle, "n1/c1", "n2/c1")
}

func (c *cli) testSecondLab(t *testing.T) {
	l, err := Open(c.lab.name + "b")
	if err != nil {
		t.Fatal(err)
	}
	two := &cli{c.heddle, l}
	defer func() {
		two.must(t, "down")
		two.checkGone(t)
	}()
	two.must(t, "up", "--nodes", "1", "--containers", "2")
	two.talk(t, ModeHeddle, "n1/c1", "n1/c2")
	two.must(t, "down")
	c.talk(t, ModeHeddle, "n2/c1", "n1/c1")
}

// TestKilledCommandsCanBeRepeated kills `up` and `down` after ever longer times.
func TestKilledCommandsCanBeRepeated(t *testing.T) {
	t.Parallel()
	c := newCLI(t, "k")
	killAfter := func(d time.Duration, verb string, args ...string) {
		cmd := c.command(verb, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(d, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		_ = cmd.Wait() // killed or not
	}
	for i, d := 0, 20*time.Millisecond; d < 2*time.Second; i, d = i+1, 2*d {
		killAfter(d, "up", "--containers", "1")
		c.must(t, "up", "--containers", "1")
		c.must(t, "exec", "n1/c1", "--", "true")
		killAfter(d/20, "down")
		if i%2 == 0 {
			c.must(t, "down")
			c.checkGone(t)
		}
	}
	c.must(t, "up", "--containers", "1")
	c.talk(t, ModeHeddle, "n2/c1", "n1/c1")
}
