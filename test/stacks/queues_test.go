package stacks

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestQueues: programs whose bytes a service of the node sends see the same of their connections as
// with their own system calls; rules hold; nothing that write() took is lost.
func TestQueues(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "iperf3", "python3")
	l := newGuestLab(t, "q", "stack: kernel\nsettings: {queues: true}\n")
	l.service()
	t.Run("same", l.testSame)
	if sent := l.queues().SentBytes; sent < 10<<20 {
		t.Errorf("the service sent %d bytes of the scenarios'", sent)
	}
	t.Run("iperf3", l.testQueuesIperf)
	t.Run("stalled service", l.testStalledService)
	t.Run("killed program", l.testKilledProgram)
	t.Run("rules", l.testQueuesRules)
	t.Run("killed service", l.testKilledService)
	t.Run("waits for a killed service", l.testWaitsForKilled)
	t.Run("killed agent and service", l.testKilledBoth)
	t.Run("service hangs", l.testServiceHangs)
}

// apart are the scenarios of the kernel's TCP that programs of a stack module see otherwise, with
// queues or without: sendfile() into a pair, urgent data, and a reset behind bytes that nobody reads.
var apart = []string{"files", "linger", "mixed", "urgent"}

// TestQueuesModules: so it is for programs whose TCP a stack module runs, which gets what the
// service sends for them.
func TestQueuesModules(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "iperf3", "python3", "redis-server", "redis-benchmark")
	for suffix, kind := range map[string]string{"qs": "smoltcp", "qn": "netstack"} {
		t.Run(kind, func(t *testing.T) {
			l := newGuestLab(t, suffix, "stack: "+kind+"\nsettings: {queues: true}\n", "--stacks")
			l.service()
			t.Run("same", l.testSameByModule)
			t.Run("iperf3", l.testQueuesIperf)
			t.Run("redis", func(t *testing.T) { l.testRedis(t, "1000") })
			t.Run("killed program", l.testKilledProgram)
			t.Run("cap", l.testQueuesCap)
			t.Run("listed", l.testQueuesListed)
			t.Run("rules", l.testQueuesRules)
			t.Run("killed service", l.testKilledService)
		})
	}
}

func (l guestLab) testSameByModule(t *testing.T) {
	l.T = t
	var all []string
	for _, one := range regexp.MustCompile(`\w+`).FindAllString(l.must("lab", "exec", "n1/c1", "--", "python3", l.script, "scenarios"), -1) {
		if !slices.Contains(apart, one) {
			all = append(all, one)
		}
	}
	before := l.queues().SentBytes
	want, got := l.both(false, false, all...), l.both(true, true, all...)
	if want != got {
		t.Errorf("by queues:\n%s\nby system calls:\n%s", got, want)
	}
	if n := strings.Count(want, "AF_INET"); n != 2*len(all) || len(all) < 20 {
		t.Errorf("%d of %d scenarios ran at either end", n, len(all))
	}
	if sent := l.queues().SentBytes - before; sent < 5<<20 {
		t.Errorf("the service sent %d bytes of the scenarios'", sent)
	}
}

// testQueuesCap: a cap holds for what goes by queues.
func (l guestLab) testQueuesCap(t *testing.T) {
	l.T = t
	l.must("limit", "set", "n1/c1", "--egress", "40mbit")
	defer l.must("limit", "clear", "n1/c1")
	began := time.Now()
	sent := l.iperf("10M")
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("10 MiB took %s", took)
	}
	if sent < 9<<20 {
		t.Errorf("the service sent %d bytes of 10 MiB", sent)
	}
}

// testQueuesListed: connections are the module's, with what it sent, and so are the accounts.
func (l guestLab) testQueuesListed(t *testing.T) {
	l.T = t
	ended := l.streamByQueues()
	var sum uint64
	testutil.EventuallyTrue(t, "both ends are listed", func() bool {
		sum = 0
		all := l.connections("stack")
		for _, c := range all {
			sum += c.BytesSent
		}
		return len(all) == 2 && sum > 0
	})
	l.forbid()
	ended()
	l.must("policy", "delete", "none")
}

// queues is what `heddle stack` says of the service.
type queues struct {
	Stack              string
	PID                int
	Ended, Connections uint64
	SentBytes          uint64 `json:"sent_bytes"`
}

func (l guestLab) queues() queues {
	l.Helper()
	var nodes []struct{ Modules []queues }
	testutil.NoError(l, json.Unmarshal([]byte(l.must("stack", "--output", "json")), &nodes))
	for _, n := range nodes {
		for _, m := range n.Modules {
			if m.Stack == "queues" {
				return m
			}
		}
	}
	return queues{}
}

// service waits for it.
func (l guestLab) service() (q queues) {
	l.Helper()
	testutil.EventuallyTrue(l, "the service runs", func() bool { q = l.queues(); return q.PID != 0 })
	return q
}

// testQueuesIperf: what a program sends in small pieces goes by the service.
func (l guestLab) testQueuesIperf(t *testing.T) {
	l.T = t
	if sent := l.iperf("500M"); sent < 400<<20 {
		t.Errorf("the service sent %d bytes of 500 MiB", sent)
	}
}

// iperf has iperf3 send so much, and gives what of it the service did.
func (l guestLab) iperf(amount string) (sent uint64) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	server := l.in(ctx, "n1/c2", true, "iperf3", "-s", "-1", "-p", "5301")
	testutil.NoError(l, server.Start())
	l.listens(":5301")
	client := l.in(ctx, "n1/c1", true, "iperf3", "-c", l.address("n1/c2"), "-p", "5301", "-l", "4K", "-n", amount)
	before := l.queues().SentBytes
	testutil.NoError(l, client.Start())
	testutil.NoError(l, client.Wait())
	testutil.NoError(l, server.Wait())
	return l.queues().SentBytes - before
}

// testStalledService: a send that does not want to wait does not, though its socket has room and the
// service has stopped with the ring full, and its program hears of an edge when there is room.
func (l guestLab) testStalledService(t *testing.T) {
	l.T = t
	service := l.service()
	server := l.serve("n1/c2", true, "python3", l.script, "server", "-", "stalled")
	ctx, cancel := context.WithTimeout(t.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	client := l.in(ctx, "n1/c1", true, "python3", l.script, "client", l.address("n1/c2"), "stalled")
	in, err := client.StdinPipe()
	testutil.NoError(t, err)
	out, err := client.StdoutPipe()
	testutil.NoError(t, err)
	testutil.NoError(t, client.Start())
	lines := bufio.NewScanner(out)
	says := func() string { lines.Scan(); return lines.Text() }
	if begins, stop := says(), says(); begins != "begins" || stop != "stop" {
		t.Fatalf("client: %q, %q", begins, stop)
	}
	testutil.NoError(t, syscall.Kill(service.PID, syscall.SIGSTOP))
	_, err = io.WriteString(in, "go on\n")
	testutil.NoError(t, err)
	// Nobody lets the service go on before the program has said so.
	if said := says(); said != "no room" {
		t.Errorf("with a service that does nothing: %q", said)
	}
	testutil.NoError(t, syscall.Kill(service.PID, syscall.SIGCONT))
	last := ""
	for lines.Scan() {
		last = lines.Text()
	}
	if !strings.HasSuffix(last, " sent") {
		t.Errorf("client: %q", last)
	}
	testutil.NoError(t, client.Wait())
	server()
}

// testKilledProgram: bytes that a program's sends took arrive though it is killed at once.
func (l guestLab) testKilledProgram(t *testing.T) {
	l.T = t
	want := l.gone(false)
	before := l.queues().SentBytes
	for range 5 {
		if got := l.gone(true); got != want {
			t.Errorf("by queues: %s\nby system calls: %s", got, want)
		}
	}
	if l.queues().SentBytes == before {
		t.Error("nothing went by the service")
	}
}

// gone has a program be killed after it has sent, and gives what its peer says.
func (l guestLab) gone(library bool) string {
	l.Helper()
	said := l.serve("n1/c2", library, "python3", l.script, "server", "-", "gone")
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	out, err := l.in(ctx, "n1/c1", library, "python3", l.script, "client", l.address("n1/c2"), "gone").CombinedOutput()
	var ended *exec.ExitError
	if !errors.As(err, &ended) {
		l.Errorf("client: %v, %s", err, out)
	}
	return said()
}

// testQueuesRules: without the profile bytes go by system calls, and by queues again with it; a
// connection that policy forbids ends.
func (l guestLab) testQueuesRules(t *testing.T) {
	l.T = t
	ended := l.streamByQueues()
	profile := filepath.Join(t.TempDir(), "plain.yaml")
	lab.WriteFile(t, profile, []byte("apiVersion: heddle.dev/v1\nkind: StackProfile\nname: plain\npriority: 9\nselector: {}\nstack: kernel\n"))
	l.must("stack", "apply", profile)
	l.sends(false)
	l.must("stack", "delete", "plain")
	l.sends(true)
	l.forbid()
	if said := ended(); strings.Count(said, "cut") != 2 {
		t.Errorf("%s", said)
	}
	testutil.EventuallyTrue(t, "nothing is left of them", func() bool { return l.queues().Connections == 0 })
	l.must("policy", "delete", "none")
}

// streamByQueues has the two programs send to each other until their connection ends, and waits
// until they do so by queues.
func (l guestLab) streamByQueues() (ended func() string) {
	l.Helper()
	server := l.serve("n1/c2", true, "python3", l.script, "server", "-", "pieces")
	client := l.serve("n1/c1", true, "python3", l.script, "client", l.address("n1/c2"), "pieces")
	l.sends(true)
	return func() string { return server() + client() }
}

// sends waits until the service sends more, or nothing more for a while.
func (l guestLab) sends(more bool) {
	l.Helper()
	last, same := l.queues().SentBytes, 0
	testutil.EventuallyTrue(l, fmt.Sprintf("the service sends: %v", more), func() bool {
		now := l.queues().SentBytes
		if same++; now != last {
			same = 0
		}
		moved := now > last
		last = now
		return more && moved || !more && same > 5
	})
}

// testKilledService: connections whose ring had bytes end, the others go on; the next service has
// new ones.
func (l guestLab) testKilledService(t *testing.T) {
	l.T = t
	before := l.service()
	ended := l.streamByQueues()
	testutil.NoError(t, syscall.Kill(before.PID, syscall.SIGKILL))
	testutil.EventuallyTrue(t, "another service runs", func() bool {
		now := l.queues()
		return now.PID != 0 && now.PID != before.PID && now.Ended == before.Ended+1
	})
	l.forbid() // what has not ended ends by that
	if said := ended(); strings.Count(said, "cut") != 2 {
		t.Errorf("%s", said)
	}
	l.must("policy", "delete", "none")
	ended = l.streamByQueues()
	l.forbid()
	ended()
	l.must("policy", "delete", "none")
}

// testWaitsForKilled: a program that waits for room when the service dies learns of the end.
func (l guestLab) testWaitsForKilled(t *testing.T) {
	l.T = t
	before := l.service()
	server := l.serve("n1/c2", true, "python3", l.script, "server", "-", "stuck")
	client := l.serve("n1/c1", true, "python3", l.script, "client", l.address("n1/c2"), "stuck")
	testutil.EventuallyTrue(t, "the service sends", func() bool { return l.queues().SentBytes > before.SentBytes })
	l.sends(false)
	testutil.NoError(t, syscall.Kill(before.PID, syscall.SIGKILL))
	if said := server() + client(); strings.Count(said, "cut") != 2 {
		t.Errorf("%s", said)
	}
}

// testKilledBoth: of a program that waits for room the agent that sees the service die may know
// nothing, because it came later. Both ends learn of the end all the same.
func (l guestLab) testKilledBoth(t *testing.T) {
	l.T = t
	before := l.service()
	server := l.serve("n1/c2", true, "python3", l.script, "server", "-", "stuck")
	client := l.serve("n1/c1", true, "python3", l.script, "client", l.address("n1/c2"), "stuck")
	testutil.EventuallyTrue(t, "the service sends", func() bool { return l.queues().SentBytes > before.SentBytes })
	l.sends(false)
	l.killAgent()
	if now := l.service(); now.PID != before.PID {
		t.Fatalf("the service was process %d and is %d", before.PID, now.PID)
	}
	testutil.NoError(t, syscall.Kill(before.PID, syscall.SIGKILL))
	if said := server() + client(); strings.Count(said, "cut") != 2 {
		t.Errorf("%s", said)
	}
}

// testServiceHangs: a service that does not answer is killed, and another one takes its place.
func (l guestLab) testServiceHangs(t *testing.T) {
	l.T = t
	before := l.service()
	testutil.NoError(t, syscall.Kill(before.PID, syscall.SIGSTOP))
	testutil.EventuallyTrue(t, "another service runs", func() bool {
		now := l.queues()
		return now.PID != 0 && now.PID != before.PID && now.Ended == before.Ended+1
	})
}
