package density

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"syscall"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/proc"
)

// fleetProcess is a peer's fleet that runs. One goroutine at a time may use it.
type fleetProcess struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	lines  *bufio.Scanner
	said   *proc.Tail
	thread chan struct{} // closed when the thread that started the process may end
}

// startFleet starts a fleet by the words that run loadgen.Main. It ends with this process, with all its connections.
func startFleet(ctx context.Context, program []string) (c *fleetProcess, err error) {
	words := bench.Command(program, "fleet")
	c = &fleetProcess{cmd: exec.CommandContext(ctx, words[0], words[1:]...), said: &proc.Tail{Limit: proc.TailLimit}, thread: make(chan struct{})}
	// Members are in system calls for long, and Go would signal them for it.
	c.cmd.Env = append(c.cmd.Environ(), "GODEBUG=asyncpreemptoff=1")
	c.cmd.Stderr = c.said
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := startTied(c.cmd, c.thread); err != nil {
		return nil, fmt.Errorf("start the fleet: %w", err)
	}
	c.lines = bufio.NewScanner(stdout)
	if !c.lines.Scan() || c.lines.Text() != loadgen.Ready {
		c.stop()
		return nil, proc.WithOutput(fmt.Errorf("start the fleet: it says %q", c.lines.Text()), c.said)
	}
	return c, nil
}

// startTied starts cmd on a thread that lives until ended is closed: the kernel tells the child of its parent thread's end.
func startTied(cmd *exec.Cmd, ended <-chan struct{}) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		started <- cmd.Start()
		<-ended
	}()
	return <-started
}

// do has the fleet do something. When ctx ends the process is killed, and so is what it does.
func (c *fleetProcess) do(ctx context.Context, command loadgen.FleetCommand) (reply loadgen.FleetReply, err error) {
	line, err := json.Marshal(command)
	if err != nil {
		return reply, err
	}
	if _, err := c.stdin.Write(append(line, '\n')); err != nil {
		return reply, errors.Join(ctx.Err(), proc.WithOutput(fmt.Errorf("fleet: %s: %w", command.Op, err), c.said))
	}
	if !c.lines.Scan() {
		_ = c.cmd.Wait() // for what it said
		return reply, errors.Join(ctx.Err(), proc.WithOutput(fmt.Errorf("fleet: %s: it ended", command.Op), c.said))
	}
	if err := json.Unmarshal(c.lines.Bytes(), &reply); err != nil {
		return reply, fmt.Errorf("fleet: %s: %w", command.Op, err)
	}
	if reply.Error != "" {
		return reply, fmt.Errorf("%s: %s", command.Op, reply.Error)
	}
	return reply, nil
}

// stop ends the process. Whatever it was doing, the kernel ends with it.
func (c *fleetProcess) stop() {
	defer close(c.thread)
	_ = c.stdin.Close() // it may be gone
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait() // says that it was killed
}
