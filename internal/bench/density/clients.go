package density

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/proc"
)

// fleetProcess is a fleet of clients that runs. One goroutine at a time may use it.
type fleetProcess struct {
	*proc.Dialog
	thread chan struct{} // closed when the thread that started the process may end
}

// startFleet starts a fleet by the words that run loadgen.Main. It ends with this process, with all
// its connections.
func startFleet(ctx context.Context, program []string) (c *fleetProcess, err error) {
	words := bench.Command(program, "fleet")
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	// Members are in system calls for long, and Go would signal them for it.
	cmd.Env = append(cmd.Environ(), "GODEBUG=asyncpreemptoff=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c = &fleetProcess{thread: make(chan struct{})}
	if c.Dialog, err = proc.Talk(cmd, func() error { return startTied(cmd, c.thread) }, loadgen.Ready); err != nil {
		close(c.thread)
		return nil, fmt.Errorf("start the fleet: %w", err)
	}
	return c, nil
}

// startTied starts cmd on a thread that lives until ended is closed: the kernel tells the child of
// its parent thread's end.
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
	answer, err := c.Ask(string(line))
	if err != nil {
		return reply, errors.Join(ctx.Err(), c.Explain(fmt.Errorf("fleet: %s: %w", command.Op, err)))
	}
	if err := json.Unmarshal(answer, &reply); err != nil {
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
	c.Kill()
}
