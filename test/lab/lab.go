// Package test holds the scenarios that need whole nodes: real agents, real containers and unmodified
// programs on a lab of two nodes, which TestMain brings up and takes down. Everything here needs root.
package test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// labName is this run's lab: HEDDLE_TEST_LAB, so that two runs can go on side by side, or "test". A run that was
// killed leaves its lab behind; the next one of that name takes it down first.
var labName = cmp.Or(os.Getenv("HEDDLE_TEST_LAB"), "test")

// patience bounds every wait: for a program to be ready, to answer or to end.
const patience = 30 * time.Second

// modes are the ways a program is run; what it prints must not depend on which.
var modes = []string{"overlay", "heddle"}

var heddleBin string

func TestMain(m *testing.M) { os.Exit(runAll(m)) }

func runAll(m *testing.M) int {
	if ran, err := runQUIC(os.Args); ran { // in a container
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	flag.Parse()
	if flag.Lookup("test.run").Value.String() == "^$" { // how gotestsum tries a run again that failed without a failed test
		fmt.Fprintln(os.Stderr, "no test is asked for: that cannot make good for a run that failed outside its tests; what it said stands above")
		return 1
	}
	if os.Geteuid() != 0 {
		fmt.Println("SKIP: all scenarios need root: they make network namespaces, containers and BPF programs")
		return 0
	}
	dir := os.Getenv("HEDDLE_BIN")
	if dir == "" {
		dir = "../bin"
	}
	var err error
	if heddleBin, err = filepath.Abs(filepath.Join(dir, "heddle")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if _, err := os.Stat(heddleBin); err != nil {
		fmt.Fprintf(os.Stderr, "%v: run `make build` first\n", err)
		return 1
	}
	down := func() error {
		if err := removeEngines(enginesRoot()); err != nil {
			return err
		}
		return labCommand("down")
	}
	if err := down(); err != nil {
		fmt.Fprintln(os.Stderr, "take an earlier lab down:", err)
		return 1
	}
	if err := labCommand("up", "--nodes", "2", "--containers", "2"); err != nil {
		fmt.Fprintln(os.Stderr, "bring the lab up:", err)
		_ = down()
		return 1
	}
	code := m.Run()
	_ = os.RemoveAll(builds.dir) // "": nothing was built
	if code != 0 {
		dump(os.Stderr)
	}
	if err := down(); err != nil {
		fmt.Fprintln(os.Stderr, "take the lab down:", err)
		return 1
	}
	return code
}

func labCommand(verb string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, heddleBin, append([]string{"lab", verb, "--lab", labName}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("heddle lab %s: %w\n%s", verb, err, out)
	}
	return nil
}

// dump prints what the nodes know, for a run that failed.
func dump(w io.Writer) {
	for _, args := range [][]string{{"status"}, {"endpoints"}, {"connections", "--listeners"}} {
		out, _ := exec.Command(heddleBin, append(args, "--lab", labName)...).CombinedOutput()
		fmt.Fprintf(w, "--- heddle %s\n%s\n", strings.Join(args, " "), out)
	}
	logs, _ := filepath.Glob("/run/heddle/lab/" + labName + "/*/heddled.log")
	for _, log := range logs {
		raw, _ := os.ReadFile(log)
		fmt.Fprintf(w, "--- %s\n%s\n", log, raw)
	}
}

// heddle runs the command line and gives its standard output; a failure fails the test.
func heddle(t testing.TB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, heddleBin, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("heddle %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

// address gives the address a peer dials to reach container in mode.
func address(t testing.TB, mode, container string) string {
	t.Helper()
	return strings.TrimSpace(heddle(t, "lab", "ip", "--lab", labName, "--mode", mode, container))
}

func labExec(ctx context.Context, mode, container string, argv []string) *exec.Cmd {
	args := append([]string{"lab", "exec", "--lab", labName, "--mode", mode, container, "--"}, argv...)
	cmd := exec.CommandContext(ctx, heddleBin, args...)
	// The program in the container must end with the test: TERM is passed on, KILL cannot be.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// result is what a program in a container did.
type result struct {
	stdout, stderr string
	code           int
}

// run runs a program in a container to its end. stdin may be nil.
func run(t testing.TB, mode, container string, stdin io.Reader, argv ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := labExec(ctx, mode, container, argv)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s in %s (%s) did not end within %s\n%s%s", argv[0], container, mode, patience, &stdout, &stderr)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s in %s (%s): %v", argv[0], container, mode, err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// mustRun is run for programs that must succeed; it gives their standard output.
func mustRun(t testing.TB, mode, container string, argv ...string) string {
	t.Helper()
	r := run(t, mode, container, nil, argv...)
	if r.code != 0 {
		t.Fatalf("%s in %s (%s): exit code %d\n%s%s", strings.Join(argv, " "), container, mode, r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// program is one that runs beside the test.
type program struct {
	t      testing.TB
	name   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	cancel context.CancelFunc
	done   chan struct{}

	mu  sync.Mutex // guards out, which the program's output is appended to
	out bytes.Buffer
}

// start runs a program in a container until stop, or the end of the test.
func start(t testing.TB, mode, container string, argv ...string) *program {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &program{t: t, name: fmt.Sprintf("%s in %s (%s)", argv[0], container, mode), cancel: cancel, done: make(chan struct{})}
	p.cmd = labExec(ctx, mode, container, argv)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	var err error
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("%s: %v", p.name, err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // how it ends is the test's to judge, from its output
	}()
	t.Cleanup(p.stop)
	return p
}

// Write collects the program's output.
func (p *program) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *program) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// stop ends the program and waits for it. It may be called again.
func (p *program) stop() {
	_ = p.stdin.Close()
	p.cancel()
	<-p.done
}

// waitFor waits until the program has printed text.
func (p *program) waitFor(text string) {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("%s to print %q", p.name, text), func() (bool, string) {
		out := p.output()
		if strings.Contains(out, text) {
			return true, ""
		}
		select {
		case <-p.done:
			p.t.Fatalf("%s ended before it printed %q:\n%s", p.name, text, out)
		default:
		}
		return false, out
	})
}

// waitEnd waits until the program has ended by itself.
func (p *program) waitEnd() {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("%s did not end within %s:\n%s", p.name, patience, p.output())
	}
}

// waitPort waits until something accepts connections on addr:port, asked from container in mode.
func waitPort(t testing.TB, mode, container, addr, port string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s:%s to accept from %s (%s)", addr, port, container, mode), func() (bool, string) {
		r := run(t, mode, container, nil, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%s", addr, port))
		return r.code == 0, r.stderr
	})
}

// eventually waits for a condition; when it gives up it prints what the condition saw last.
func eventually(t testing.TB, what string, condition func() (ok bool, saw string)) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		ok, saw := condition()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s\n%s", patience, what, saw)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatalf("test ended while waiting for %s", what)
		}
	}
}

// counters gives a node's counts by reason.
func counters(t testing.TB, node string) map[string]uint64 {
	t.Helper()
	var status []struct {
		Counters []struct {
			Name  string
			Value uint64
		}
	}
	raw := heddle(t, "status", "--lab", labName, "--node", node, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &status); err != nil || len(status) != 1 {
		t.Fatalf("status of %s: %v\n%s", node, err, raw)
	}
	out := make(map[string]uint64)
	for _, c := range status[0].Counters {
		out[c.Name] = c.Value
	}
	return out
}
