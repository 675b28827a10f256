package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// StartCommand is start for a program that is in no container.
func StartCommand(t testing.TB, name string, cmd *exec.Cmd) *Program {
	t.Helper()
	p := &Program{t: t, Name: name, Cmd: cmd, done: make(chan struct{}), cancel: func() { _ = cmd.Process.Kill() }}
	if cmd.Stderr = p; cmd.Stdout == nil {
		cmd.Stdout = p
	}
	cmd.WaitDelay = 5 * time.Second
	var err error
	if p.Stdin, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	go func() {
		defer close(p.done)
		_ = cmd.Wait()
	}()
	t.Cleanup(p.Stop)
	return p
}

func labExec(ctx context.Context, mode, container string, argv []string) *exec.Cmd {
	args := append([]string{"lab", "exec", "--lab", Name, "--mode", mode, container, "--"}, argv...)
	cmd := exec.CommandContext(ctx, Bin, args...)
	// The program in the container must end with the test: TERM is passed on, KILL cannot be.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// result is what a program in a container did.
type result struct {
	Stdout, Stderr string
	Code           int
}

// Run runs a program in a container to its end. stdin may be nil.
func Run(t testing.TB, mode, container string, stdin io.Reader, argv ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	cmd := labExec(ctx, mode, container, argv)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s in %s (%s) did not end within %s\n%s%s", argv[0], container, mode, testutil.WaitTimeout, &stdout, &stderr)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s in %s (%s): %v", argv[0], container, mode, err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// MustRun is run for programs that must succeed; it gives their standard output.
func MustRun(t testing.TB, mode, container string, argv ...string) string {
	t.Helper()
	r := Run(t, mode, container, nil, argv...)
	if r.Code != 0 {
		t.Fatalf("%s in %s (%s): exit code %d\n%s%s", strings.Join(argv, " "), container, mode, r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// Program is one that runs beside the test.
type Program struct {
	t      testing.TB
	Name   string
	Cmd    *exec.Cmd
	Stdin  io.WriteCloser
	cancel context.CancelFunc
	done   chan struct{}

	mu  sync.Mutex // guards out, which the program's output is appended to
	out bytes.Buffer
}

// Start runs a program in a container until stop, or the end of the test.
func Start(t testing.TB, mode, container string, argv ...string) *Program {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &Program{t: t, Name: fmt.Sprintf("%s in %s (%s)", argv[0], container, mode), cancel: cancel, done: make(chan struct{})}
	p.Cmd = labExec(ctx, mode, container, argv)
	p.Cmd.Stdout, p.Cmd.Stderr = p, p
	var err error
	if p.Stdin, err = p.Cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.Cmd.Start(); err != nil {
		t.Fatalf("%s: %v", p.Name, err)
	}
	go func() {
		defer close(p.done)
		_ = p.Cmd.Wait() // how it ends is the test's to judge, from its output
	}()
	t.Cleanup(p.Stop)
	return p
}

// Write collects the program's output.
func (p *Program) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

// Output is what the program has printed so far.
func (p *Program) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// Stop ends the program and waits for it. It may be called again.
func (p *Program) Stop() {
	_ = p.Stdin.Close()
	p.cancel()
	<-p.done
}

// WaitFor waits until the program has printed text.
func (p *Program) WaitFor(text string) {
	p.t.Helper()
	testutil.Eventually(p.t, fmt.Sprintf("%s to print %q", p.Name, text), func() (bool, string) {
		out := p.Output()
		if strings.Contains(out, text) {
			return true, ""
		}
		select {
		case <-p.done:
			p.t.Fatalf("%s ended before it printed %q:\n%s", p.Name, text, out)
		default:
		}
		return false, out
	})
}

// WaitEnd waits until the program has ended by itself.
func (p *Program) WaitEnd() {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(testutil.WaitTimeout):
		p.t.Fatalf("%s did not end within %s:\n%s", p.Name, testutil.WaitTimeout, p.Output())
	}
}

// WaitPort waits until something accepts connections on addr:port, asked from container in mode.
func WaitPort(t testing.TB, mode, container, addr, port string) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("%s:%s to accept from %s (%s)", addr, port, container, mode), func() (bool, string) {
		r := Run(t, mode, container, nil, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%s", addr, port))
		return r.Code == 0, r.Stderr
	})
}

// Mask replaces what patterns match with "*": timings, dates, rates.
func Mask(s string, patterns ...*regexp.Regexp) string {
	for _, p := range patterns {
		s = p.ReplaceAllString(s, "*")
	}
	return s
}
