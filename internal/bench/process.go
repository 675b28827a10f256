package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The limits of one process of a measurement.
const (
	readyTimeout = 15 * time.Second // from starting a server to its ready line
	stopTimeout  = 5 * time.Second  // from the end of a server's input to its exit
	clientSlack  = 20 * time.Second // what a client may take beyond its measured phase
	outputLimit  = 4 << 20          // bytes kept of a client's standard output
	tailLimit    = 2 << 10          // bytes kept of what is shown when something fails
)

// tail keeps the last bytes written to it. It is safe for concurrent use.
type tail struct {
	mu    sync.Mutex
	limit int
	kept  []byte
	lost  bool // something was dropped
}

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.limit; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
		t.lost = true
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.kept))
}

// readiness passes output on to a tail and closes seen when the mark has appeared. Only the goroutine
// that copies the process's output writes to it.
type readiness struct {
	mark  []byte
	seen  chan struct{}
	done  bool
	carry []byte // output not yet searched to the end
	rest  *tail
}

// Write never fails.
func (r *readiness) Write(p []byte) (int, error) {
	if !r.done {
		r.carry = append(r.carry, p...)
		if bytes.Contains(r.carry, r.mark) {
			r.done, r.carry = true, nil
			close(r.seen)
		} else if keep := len(r.mark); len(r.carry) > keep {
			r.carry = append(r.carry[:0], r.carry[len(r.carry)-keep:]...)
		}
	}
	return r.rest.Write(p)
}

// prepare gives a command a soft end: first SIGTERM, then, after a while, SIGKILL.
func prepare(cmd *exec.Cmd) {
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTimeout
}

// serverProcess is a server that has said it is ready.
type serverProcess struct {
	cmd    *exec.Cmd
	stdin  interface{ Close() error }
	exited chan error // receives the process's end, once
	output *tail
}

// startServer starts cmd and waits for its ready mark.
func startServer(ctx context.Context, cmd *exec.Cmd, mark string) (*serverProcess, error) {
	return startServerBy(ctx, cmd, mark, cmd.Start, readyTimeout)
}

// startServerBy is startServer with another way to start cmd, and another time that it may take to be ready.
func startServerBy(ctx context.Context, cmd *exec.Cmd, mark string, start func() error, timeout time.Duration) (*serverProcess, error) {
	prepare(cmd)
	s := &serverProcess{cmd: cmd, exited: make(chan error, 1), output: &tail{limit: tailLimit}}
	ready := &readiness{mark: []byte(mark), seen: make(chan struct{}), rest: s.output}
	cmd.Stdout, cmd.Stderr = ready, s.output
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("open server input: %w", err)
	}
	s.stdin = stdin
	if err := start(); err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	go func() { s.exited <- cmd.Wait() }()
	select {
	case <-ready.seen:
		return s, nil
	case err := <-s.exited:
		s.exited <- err
		return nil, fmt.Errorf("server ended before it listened: %w", s.explain(errOrEnd(err)))
	case <-time.After(timeout):
		return nil, errors.Join(fmt.Errorf("server not ready after %s: %w", timeout, s.explain(context.DeadlineExceeded)), s.stop())
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), s.stop())
	}
}

var errEnded = errors.New("exit code 0")

func errOrEnd(err error) error {
	if err == nil {
		return errEnded
	}
	return err
}

// explain adds what the server printed.
func (s *serverProcess) explain(err error) error { return withOutput(err, s.output) }

// stop ends the server by ending its input, and by force if it does not listen to that.
func (s *serverProcess) stop() error { return s.stopWithin(stopTimeout) }

func (s *serverProcess) stopWithin(timeout time.Duration) error {
	// It fails only if the process is gone already, which is the aim.
	_ = s.stdin.Close()
	select {
	case <-s.exited:
		return nil
	case <-time.After(timeout):
	}
	if err := s.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill server: %w", err)
	}
	<-s.exited
	return fmt.Errorf("server did not end within %s and was killed", timeout)
}

// runClient runs cmd to its end and gives its standard output.
func runClient(cmd *exec.Cmd) ([]byte, error) {
	prepare(cmd)
	out, trouble := &tail{limit: outputLimit}, &tail{limit: tailLimit}
	cmd.Stdout, cmd.Stderr = out, trouble
	if err := cmd.Run(); err != nil {
		return nil, withOutput(err, trouble)
	}
	if out.lost {
		return nil, fmt.Errorf("client printed more than %d bytes", outputLimit)
	}
	return out.kept, nil
}

func withOutput(err error, output *tail) error {
	if said := output.String(); said != "" {
		return fmt.Errorf("%w: %s", err, said)
	}
	return err
}
