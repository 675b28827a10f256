package lifecycle

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// chaosLoad is a program that keeps streams to several servers and calls them.
type chaosLoad struct {
	*lab.Program
	t    *testing.T
	what string
	seen int // lines of output that were read
	now  struct {
		Calls, AllCalls, Streams, Blocks, AllBlocks int
		Slowest, Gap                                float64
		Failures                                    []string
	}
}

// chaosServer is where a load's streams and calls go to.
type chaosServer struct {
	mode, container string
	program         *lab.Program
	port            int
}

// startChaosLoads starts servers and loads, so that there are streams and calls on every path. stop
// ends the servers, when the loads have finished, and fails the test if one has seen something
// wrong.
func startChaosLoads(t *testing.T) (loads []*chaosLoad, stop func()) {
	t.Helper()
	script, err := filepath.Abs("testdata/chaos.py")
	testutil.NoError(t, err)
	serve := func(mode, container, address string) chaosServer {
		port := lab.FreePort()
		argv := []string{lab.Python, script, "serve", address, fmt.Sprint(port)}
		s := chaosServer{mode: mode, container: container, port: port}
		if container == "outside" {
			s.program = lab.StartCommand(t, container, exec.Command("ip", append([]string{"netns", "exec", lab.Name + "-outside"}, argv...)...))
		} else {
			s.program = lab.Start(t, mode, container, argv...)
		}
		s.program.WaitFor("listening")
		return s
	}
	a, b := serve("heddle", "n1/c1", "::"), serve("heddle", "n2/c1", "::")
	// Not that of the intercepted processes of the same container: it would come to take a source
	// port that one of these has (docs/differences.md, two stacks).
	forPlain := serve("heddle", "n2/c1", "::")
	lo, plain := serve("heddle", "n1/c1", "127.0.0.1"), serve("overlay", "n2/c2", "0.0.0.0")
	out := serve("", "outside", "0.0.0.0")
	servers := []*lab.Program{a.program, b.program, forPlain.program, lo.program, plain.program, out.program}
	ip := func(s chaosServer) string { return lab.Address(t, s.mode, s.container) }
	load := func(what, mode, container string, targets ...any) *chaosLoad {
		argv := []string{lab.Python, script, "load"}
		for _, x := range targets {
			argv = append(argv, fmt.Sprint(x))
		}
		return &chaosLoad{Program: lab.Start(t, mode, container, argv...), t: t, what: what}
	}
	loads = []*chaosLoad{
		load("intercepted on n1: direct, direct from IPv6, relayed, loopback, outside", "heddle", "n1/c1",
			ip(b), b.port, 2, lab.Overlay6(t, "n2/c1"), b.port, 1, ip(plain), plain.port, 1, "127.0.0.1", lo.port, 1, lab.OutsideTarget(t), out.port, 1),
		load("intercepted on n1: local", "heddle", "n1/c2", ip(a), a.port, 2, lab.Overlay6(t, "n1/c1"), a.port, 1),
		load("intercepted on n2: direct, local", "heddle", "n2/c2", ip(a), a.port, 2, ip(b), b.port, 1),
		load("plain on n2: overlay to intercepted, veth to intercepted", "overlay", "n2/c2", ip(a), a.port, 2, ip(forPlain), forPlain.port, 1),
		load("node n1: to its container, and over the overlay", "host", "n1/c1", ip(a), a.port, 1, ip(b), b.port, 1),
	}
	for _, l := range loads {
		l.read()
	}
	return loads, func() {
		t.Helper()
		for _, s := range servers {
			s.Stop()
			if said := strings.TrimSpace(strings.TrimPrefix(s.Output(), "listening")); said != "" {
				t.Errorf("%s: %s", s.Name, said)
			}
		}
	}
}

// read waits for the next report.
func (l *chaosLoad) read() {
	l.t.Helper()
	testutil.Eventually(l.t, l.what+" to report", func() (bool, string) {
		out := l.Output()
		lines := strings.SplitAfter(out, "\n")
		if len(lines)-1 <= l.seen {
			return false, out
		}
		line := lines[l.seen]
		if strings.Contains(line, `{"failed"`) {
			l.t.Fatalf("%s: %s", l.what, out)
		}
		if err := json.Unmarshal([]byte(line), &l.now); err != nil {
			l.t.Fatalf("%s: %v\n%s", l.what, err, out)
		}
		l.seen++
		return true, ""
	})
	if len(l.now.Failures) > 0 {
		l.t.Fatalf("%s failed: %q", l.what, l.now.Failures)
	}
}

// moves waits until something more has come on every stream, and a call to every server been
// answered.
func (l *chaosLoad) moves() {
	l.t.Helper()
	ask := func() {
		if _, err := l.Stdin.Write([]byte("\n")); err != nil {
			l.t.Fatalf("%s: %v\n%s", l.what, err, l.Output())
		}
		l.read()
	}
	ask()
	calls, blocks, began := l.now.Calls, l.now.Blocks, time.Now()
	testutil.Eventually(l.t, l.what+" to go on", func() (bool, string) {
		ask()
		said := fmt.Sprintf("%+v, was at %d calls and %d blocks", l.now, calls, blocks)
		if time.Since(began) > testutil.WaitTimeout*2/3 {
			said += "\n" + openSockets()
		}
		return l.now.Calls > calls && l.now.Blocks > blocks, said
	})
}

// finish has the streams ended in good order, and waits for the last report.
func (l *chaosLoad) finish() {
	l.t.Helper()
	if err := l.Stdin.Close(); err != nil {
		l.t.Error(err)
	}
	l.read()
	l.WaitEnd()
}

func (l *chaosLoad) summary() string {
	return fmt.Sprintf("%s: %d streams, %d KiB received in order, longest pause %.2f s; %d calls, the slowest %.2f s",
		l.what, l.now.Streams, l.now.AllBlocks, l.now.Gap, l.now.AllCalls, l.now.Slowest)
}

// openSockets lists the TCP sockets of the lab that wait for something.
func openSockets() string {
	var b strings.Builder
	for _, node := range []string{"n1", "n2"} {
		for _, ns := range []string{lab.Name + "-" + node, lab.Name + "-" + node + "-c1", lab.Name + "-" + node + "-c2"} {
			out, err := exec.Command("ip", "netns", "exec", ns, "ss", "-tanoH", "state", "all", "exclude", "time-wait", "exclude", "listening").CombinedOutput()
			fmt.Fprintf(&b, "%s (%v):\n%s", ns, err, out)
		}
	}
	return b.String()
}
