package stacks

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// guestLab is a lab whose containers preload the guest library, beside the others.
type guestLab struct {
	*testing.T
	name, script string
}

func newGuestLab(t *testing.T, suffix, choice string, more ...string) guestLab {
	t.Helper()
	script, err := filepath.Abs("testdata/neighbours.py")
	testutil.NoError(t, err)
	l := guestLab{t, lab.Name + suffix, script}
	t.Cleanup(func() {
		if out, err := l.command(context.Background(), "lab", "down").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	l.must(append([]string{"lab", "up", "--nodes", "1", "--containers", "2", "--guest"}, more...)...)
	l.choose(choice)
	return l
}

// choose has a profile be the containers'.
func (l guestLab) choose(choice string) {
	l.Helper()
	profile := filepath.Join(l.TempDir(), "near.yaml")
	lab.WriteFile(l, profile, []byte("apiVersion: heddle.dev/v1\nkind: StackProfile\nname: near\nselector: {}\n"+choice))
	l.must("stack", "apply", profile)
}

func (l guestLab) command(ctx context.Context, words ...string) *exec.Cmd {
	at := len(words)
	if words[0] == "lab" {
		at = 2 // what follows may be a command of the container
	}
	return exec.CommandContext(ctx, lab.Bin, slices.Insert(slices.Clone(words), at, "--lab", l.name)...)
}

func (l guestLab) must(words ...string) string {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	out, err := l.command(ctx, words...).CombinedOutput()
	if err != nil {
		l.Fatalf("%v: %v\n%s", words, err, out)
	}
	return string(out)
}

// in gives a command of a container, with the library or without.
func (l guestLab) in(ctx context.Context, container string, library bool, words ...string) *exec.Cmd {
	args := []string{"lab", "exec", container, "--", "env"}
	if !library {
		args = append(args, "-u", "LD_PRELOAD")
	}
	return l.command(ctx, append(args, words...)...)
}

// serve starts a program in a container, waits until it says that it listens, and gives what it
// said once it has ended.
func (l guestLab) serve(container string, library bool, words ...string) (output func() string) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	cmd := l.in(ctx, container, library, words...)
	out, err := cmd.StdoutPipe()
	testutil.NoError(l, err)
	cmd.Stderr = cmd.Stdout
	testutil.NoError(l, cmd.Start())
	first := make([]byte, len("listens\n"))
	if _, err := io.ReadFull(out, first); err != nil || string(first) != "listens\n" {
		l.Fatalf("%v: %q", err, first)
	}
	// The program outlives `heddle lab exec`, which ctx ends, and has the pipe open.
	var waits atomic.Pointer[string]
	context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			waits.Store(new(whereItWaits(words)))
		}
		_ = out.Close()
	})
	var said bytes.Buffer
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(&said, out)
		done <- err
	}()
	return func() string {
		defer cancel()
		if err := <-done; err != nil {
			l.Error(err)
		}
		if where := waits.Load(); where != nil {
			l.Errorf("%v has not ended:\n%s", words, *where)
		}
		if err := cmd.Wait(); err != nil {
			l.Errorf("%v: %v", words, err)
		}
		return said.String()
	}
}

// whereItWaits says of each thread of a program what it waits for in the kernel.
func whereItWaits(words []string) string {
	var all strings.Builder
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err != nil || !strings.HasSuffix(string(line), strings.Join(words, "\x00")+"\x00") {
			continue
		}
		tasks, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "task/*"))
		for _, task := range tasks {
			fmt.Fprintf(&all, "%s:", task)
			for _, name := range []string{"comm", "wchan", "syscall"} {
				said, _ := os.ReadFile(filepath.Join(task, name)) // of one that ends it says nothing
				fmt.Fprintf(&all, " %s", bytes.TrimSpace(said))
			}
			all.WriteByte('\n')
		}
	}
	return all.String()
}

// connections are those of path memory or of others, by what they sent.
func (l guestLab) connections(path model.Path) (all []model.Connection) {
	l.Helper()
	var listed []model.Connection
	testutil.NoError(l, json.Unmarshal([]byte(l.must("connections", "--output", "json")), &listed))
	for _, c := range listed {
		if c.Path == path {
			all = append(all, c)
		}
	}
	return all
}

// sent gives how many bytes connections of a path sent.
func (l guestLab) sent(path model.Path) (n uint64) {
	for _, c := range l.connections(path) {
		n += c.BytesSent
	}
	return n
}

func (l guestLab) address(container string) string {
	l.Helper()
	return strings.TrimSpace(l.must("lab", "ip", container))
}

// TestGuest: neighbours whose bytes go through memory see the same of their connections as with
// TCP; rules hold.
func TestGuest(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "iperf3", "redis-server", "redis-benchmark", "python3")
	l := newGuestLab(t, "g", "stack: shared-memory\n")
	t.Run("same", l.testSame)
	t.Run("one library", l.testOneLibrary)
	t.Run("iperf3", l.testIperf)
	t.Run("redis", func(t *testing.T) { l.testRedis(t, "20000") })
	t.Run("rules", l.testRules)
	t.Run("agent", l.testAgent)
}

// both runs the two programs, and gives what they said.
func (l guestLab) both(server, client bool, scenarios ...string) string {
	l.Helper()
	said := l.serve("n1/c2", server, append([]string{"python3", l.script, "server", "-"}, scenarios...)...)
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	out, err := l.in(ctx, "n1/c1", client, append([]string{"python3", l.script, "client", l.address("n1/c2")}, scenarios...)...).CombinedOutput()
	if err != nil {
		l.Errorf("client: %v", err)
	}
	return said() + string(out)
}

func (l guestLab) testSame(t *testing.T) {
	l.T = t
	want, got := l.both(false, false), l.both(true, true)
	if want != got {
		t.Errorf("through memory:\n%s\nby TCP:\n%s", got, want)
	}
	if n := strings.Count(want, "AF_INET"); n != 62 {
		t.Errorf("%d scenarios ran, want 31 at either end", n)
	}
}

// testOneLibrary: a program without the library gets all of what one with it sends, and the other
// way round.
func (l guestLab) testOneLibrary(t *testing.T) {
	l.T = t
	some := []string{"bulk", "back", "both", "half_close"}
	want := l.both(false, false, some...)
	for _, server := range []bool{false, true} {
		if got := l.both(server, !server, some...); got != want {
			t.Errorf("library at the server's end: %v:\n%s\nby TCP:\n%s", server, got, want)
		}
	}
}

func (l guestLab) testIperf(t *testing.T) {
	l.T = t
	ctx, cancel := context.WithTimeout(t.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	server := l.in(ctx, "n1/c2", true, "iperf3", "-s", "-1", "-p", "5301")
	testutil.NoError(t, server.Start())
	l.listens(":5301")
	forever, end := context.WithCancel(ctx)
	defer end()
	client := l.in(forever, "n1/c1", true, "iperf3", "-c", l.address("n1/c2"), "-p", "5301", "-t", "3600")
	client.Cancel = func() error { return client.Process.Signal(syscall.SIGTERM) } // which is passed on
	testutil.NoError(t, client.Start())
	testutil.EventuallyTrue(t, "most bytes go through memory", func() bool { return l.sent(Memory) > 1<<28 && l.sent(Memory) > l.sent("local") })
	end()
	if err := client.Wait(); err == nil {
		t.Error("a client that was told to end has sent for an hour")
	}
	_ = server.Wait() // it says that its client has gone
	server = l.in(ctx, "n1/c2", true, "iperf3", "-s", "-1", "-p", "5301")
	testutil.NoError(t, server.Start())
	l.listens(":5301")
	if out, err := l.in(ctx, "n1/c1", true, "iperf3", "-c", l.address("n1/c2"), "-p", "5301", "-n", "1G").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	testutil.NoError(t, server.Wait())
}

// Memory is the path of what goes through memory.
const Memory model.Path = "memory"

// listens waits for a listener.
func (l guestLab) listens(port string) {
	l.Helper()
	testutil.EventuallyTrue(l, "listener at "+port, func() bool {
		return strings.Contains(l.must("connections", "--all"), port+" ")
	})
}

func (l guestLab) testRedis(t *testing.T, requests string) {
	l.T = t
	ctx, cancel := context.WithTimeout(t.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	server := l.in(ctx, "n1/c2", true, "redis-server", "--port", "6390", "--save", "", "--protected-mode", "no")
	testutil.NoError(t, server.Start())
	defer func() {
		if err := server.Wait(); err != nil {
			t.Errorf("redis: %v", err)
		}
	}()
	l.listens(":6390")
	bench := l.must("lab", "exec", "n1/c1", "--", "redis-benchmark", "-h", l.address("n1/c2"), "-p", "6390", "-n", requests, "-c", "20", "-d", "3000", "-P", "4", "-q", "-t", "set,get,lrange_100")
	if !strings.Contains(bench, "GET: ") || !strings.Contains(bench, "LRANGE_100") {
		t.Errorf("%s", bench)
	}
	l.must("lab", "exec", "n1/c1", "--", "redis-cli", "-h", l.address("n1/c2"), "-p", "6390", "shutdown", "nosave")
}

// stream has the two programs send to each other until their connection ends, and waits until they
// do so through memory.
func (l guestLab) stream() (ended func() string) {
	l.Helper()
	server := l.serve("n1/c2", true, "python3", l.script, "server", "-", "stream")
	client := l.serve("n1/c1", true, "python3", l.script, "client", l.address("n1/c2"), "stream")
	l.moves(Memory, true)
	return func() string { return server() + client() }
}

// moves waits until connections of a path carry more, or nothing more for a while.
func (l guestLab) moves(path model.Path, more bool) {
	l.Helper()
	last, same := l.sent(path), 0
	testutil.EventuallyTrue(l, "bytes by "+string(path), func() bool {
		now := l.sent(path)
		if same++; now != last {
			same = 0
		}
		moved := now > last+100_000 // which doorbells would take long to be
		last = now
		return more && moved || !more && same > 5
	})
}

// testRules: an endpoint that gets a cap leaves memory, and comes back when it has none; so does one
// whose profile goes. A connection that policy forbids ends.
func (l guestLab) testRules(t *testing.T) {
	l.T = t
	ended := l.stream()
	l.must("limit", "set", "n1/c1", "--egress", "4gbit")
	l.moves(Memory, false)
	l.moves("local", true)
	l.must("limit", "clear", "n1/c1")
	l.moves(Memory, true)
	profile := filepath.Join(t.TempDir(), "kernel.yaml")
	lab.WriteFile(t, profile, []byte("apiVersion: heddle.dev/v1\nkind: StackProfile\nname: plain\npriority: 9\nselector: {}\nstack: kernel\n"))
	l.must("stack", "apply", profile)
	l.moves(Memory, false)
	l.must("stack", "delete", "plain")
	l.moves(Memory, true)

	l.forbid()
	if said := ended(); strings.Count(said, "cut") != 2 {
		t.Errorf("%s", said)
	}
	testutil.EventuallyTrue(t, "nothing is left of them", func() bool { return len(l.connections(Memory)) == 0 })
	l.must("policy", "delete", "none")
}

// forbid has policy forbid everything.
func (l guestLab) forbid() {
	l.Helper()
	policy := filepath.Join(l.TempDir(), "policy.yaml")
	lab.WriteFile(l, policy, []byte("apiVersion: heddle.dev/v1\nkind: Policy\nname: none\nsubject: {}\ningress: {default: deny}\n"))
	l.must("policy", "apply", "-f", policy)
}

// killAgent has another agent take its place.
func (l guestLab) killAgent() {
	l.Helper()
	var status []struct{ PID int }
	testutil.NoError(l, json.Unmarshal([]byte(l.must("status", "--node", "n1", "--output", "json")), &status))
	testutil.NoError(l, lab.KillAgent(status[0].PID, syscall.SIGKILL))
	l.must("lab", "up")
}

// testAgent: when the agent is killed connections go on, and in the end by TCP: the next one does
// not know of their memory. New ones have some again.
func (l guestLab) testAgent(t *testing.T) {
	l.T = t
	ended := l.stream()
	l.killAgent()
	l.moves("local", true)
	if n := len(l.connections(Memory)); n != 0 {
		t.Errorf("%d connections with memory of an agent that is gone", n)
	}
	l.forbid()
	if said := ended(); strings.Count(said, "cut") != 2 {
		t.Errorf("%s", said)
	}
	l.must("policy", "delete", "none")
	ended = l.stream()
	l.forbid()
	ended()
	l.must("policy", "delete", "none")
}
