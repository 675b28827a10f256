// Package proc runs the processes of a measurement: servers that say when they listen, clients
// whose output is read, and ends that are soft first.
package proc

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

// Run runs a program to its end.
func Run(ctx context.Context, name string, args ...string) error {
	if _, err := Output(exec.CommandContext(ctx, name, args...)); err != nil {
		return fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return nil
}

// The limits of one process of a measurement.
const (
	ReadyTimeout = 15 * time.Second // from starting a server to its ready line
	stopTimeout  = 5 * time.Second  // from the end of a server's input to its exit
	ClientSlack  = 60 * time.Second // what a client may take beyond its measured phase
	outputLimit  = 4 << 20          // bytes kept of a client's standard output
	TailLimit    = 2 << 10          // bytes kept of what is shown when something fails
)

// Tail keeps the last bytes written to it. It is safe for concurrent use.
type Tail struct {
	mu    sync.Mutex
	Limit int
	kept  []byte
	lost  bool // something was dropped
}

// Write never fails.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.Limit; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
		t.lost = true
	}
	return len(p), nil
}

func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.kept))
}

// readiness passes output on to a tail and closes seen when the mark has appeared. Only the
// goroutine that copies the process's output writes to it.
type readiness struct {
	mark  []byte
	seen  chan struct{}
	done  bool
	carry []byte // output not yet searched to the end
	rest  *Tail
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

// Prepare gives a command a soft end: first SIGTERM, then, after a while, SIGKILL.
func Prepare(cmd *exec.Cmd) {
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTimeout
}

// Server is a server that has said it is ready.
type Server struct {
	Cmd    *exec.Cmd
	Stdin  interface{ Close() error }
	Exited chan error // receives the process's end, once
	Output *Tail
}

// Start starts cmd and waits for its ready mark.
func Start(ctx context.Context, cmd *exec.Cmd, mark string) (*Server, error) {
	return StartBy(ctx, cmd, mark, cmd.Start, ReadyTimeout)
}

// startServerBy is startServer with another way to start cmd, and another time that it may take to
// be ready.
func StartBy(ctx context.Context, cmd *exec.Cmd, mark string, start func() error, timeout time.Duration) (*Server, error) {
	Prepare(cmd)
	s := &Server{Cmd: cmd, Exited: make(chan error, 1), Output: &Tail{Limit: TailLimit}}
	ready := &readiness{mark: []byte(mark), seen: make(chan struct{}), rest: s.Output}
	cmd.Stdout, cmd.Stderr = ready, s.Output
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("open server input: %w", err)
	}
	s.Stdin = stdin
	if err := start(); err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	go func() { s.Exited <- cmd.Wait() }()
	select {
	case <-ready.seen:
		return s, nil
	case err := <-s.Exited:
		s.Exited <- err
		return nil, fmt.Errorf("server ended before it listened: %w", s.Explain(ErrOrEnd(err)))
	case <-time.After(timeout):
		return nil, errors.Join(fmt.Errorf("server not ready after %s: %w", timeout, s.Explain(context.DeadlineExceeded)), s.Stop())
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), s.Stop())
	}
}

var errEnded = errors.New("exit code 0")

func ErrOrEnd(err error) error {
	if err == nil {
		return errEnded
	}
	return err
}

// Explain adds what the server printed.
func (s *Server) Explain(err error) error { return WithOutput(err, s.Output) }

// Stop ends the server by ending its input, and by force if it does not listen to that.
func (s *Server) Stop() error { return s.StopWithin(stopTimeout) }

func (s *Server) StopWithin(timeout time.Duration) error {
	// It fails only if the process is gone already, which is the aim.
	_ = s.Stdin.Close()
	select {
	case <-s.Exited:
		return nil
	case <-time.After(timeout):
	}
	if err := s.Cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill server: %w", err)
	}
	<-s.Exited
	return fmt.Errorf("server did not end within %s and was killed", timeout)
}

// runClient runs cmd to its end and gives its standard output.
func Output(cmd *exec.Cmd) ([]byte, error) {
	Prepare(cmd)
	out, trouble := &Tail{Limit: outputLimit}, &Tail{Limit: TailLimit}
	cmd.Stdout, cmd.Stderr = out, trouble
	if err := cmd.Run(); err != nil {
		return nil, WithOutput(err, trouble)
	}
	if out.lost {
		return nil, fmt.Errorf("client printed more than %d bytes", outputLimit)
	}
	return out.kept, nil
}

func WithOutput(err error, output *Tail) error {
	if said := output.String(); said != "" {
		return fmt.Errorf("%w: %s", err, said)
	}
	return err
}

func Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
