package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench/loadgen"
)

// ReadyLine is what the guard of a server prints once the server accepts.
const ReadyLine = loadgen.Ready + "\n"

// Load is a client that runs while its machine is watched.
type Load struct {
	Cmd            *exec.Cmd
	stdin          interface{ Close() error }
	stdout, stderr *Tail
	marked         chan struct{} // closed when its mark came
	exited         chan struct{} // closed when it has ended, after err was set
	err            error
}

// StartLoad starts a client. mark is what it prints when its measured phase is over, "" if it does
// not say.
func StartLoad(cmd *exec.Cmd, mark string) (*Load, error) {
	Prepare(cmd)
	c := &Load{Cmd: cmd, stdout: &Tail{Limit: outputLimit}, stderr: &Tail{Limit: TailLimit}, marked: make(chan struct{}), exited: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = c.stdout, c.stderr
	if mark != "" {
		cmd.Stdout = &readiness{mark: []byte(mark), seen: c.marked, rest: c.stdout}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("open input: %w", err)
	}
	c.stdin = stdin
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	go func() {
		c.err = cmd.Wait()
		close(c.exited)
	}()
	return c, nil
}

// RunsFor waits for a while; over says that the measured phase is: by the client's mark or, if
// byExit is set, by its end.
func (c *Load) RunsFor(ctx context.Context, d time.Duration, byExit bool) (over bool, err error) {
	select {
	case <-c.marked:
		return true, nil
	case <-c.exited:
		if byExit && c.err == nil {
			return true, nil
		}
		// The end of ctx ends the client, and both are there to be seen.
		return false, c.explain(errors.Join(ctx.Err(), fmt.Errorf("ended before the measured phase did: %w", ErrOrEnd(c.err))))
	case <-ctx.Done():
		return false, c.explain(ctx.Err())
	case <-time.After(d):
		return false, nil
	}
}

// Finish lets the client end and gives what it printed.
func (c *Load) Finish(ctx context.Context) ([]byte, error) {
	// It fails only if the process is gone already.
	_ = c.stdin.Close()
	select {
	case <-c.exited:
	case <-time.After(ClientSlack):
		return nil, c.explain(fmt.Errorf("not ended %s after the measured phase", ClientSlack))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if c.err != nil {
		return nil, c.explain(errors.Join(ctx.Err(), c.err))
	}
	if c.stdout.lost {
		return nil, fmt.Errorf("printed more than %d bytes", outputLimit)
	}
	return c.stdout.kept, nil
}

// Kill makes sure that the client has ended: by the end of its input, SIGTERM, or death.
func (c *Load) Kill() error {
	_ = c.stdin.Close()
	select {
	case <-c.exited:
		return nil
	default:
	}
	_ = c.Cmd.Cancel() // gone in the meantime, if it fails
	select {
	case <-c.exited:
		return nil
	case <-time.After(stopTimeout):
	}
	if err := c.Cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill client: %w", err)
	}
	<-c.exited
	return nil
}

func (c *Load) explain(err error) error {
	said := strings.TrimSpace(c.stderr.String() + "\n" + LastBytes(c.stdout.String(), TailLimit/2))
	if said == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, said)
}

func LastBytes(s string, n int) string { return s[max(0, len(s)-n):] }
