package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Program is the router's.
const Program = "heddle-rdma"

// Names of what the router has in the agent's state directory.
const (
	socketFile = "rdma.sock"
	logFile    = "rdma.log"
)

// StateFiles are the router's files in an agent's state directory.
var StateFiles = []string{socketFile, logFile}

// Arguments are those that the agent with this state directory starts its router with.
func Arguments(stateDir string) []string {
	return []string{"--agent", filepath.Join(stateDir, socketFile)}
}

// FindProgram gives the router's path: beside the program self, where the Debian package has it, or
// in PATH.
func FindProgram(self string) (string, error) {
	dir := filepath.Dir(self)
	for _, path := range []string{filepath.Join(dir, Program), filepath.Join(dir, "../lib/heddle", Program)} {
		if found, err := exec.LookPath(path); err == nil {
			return found, nil
		}
	}
	found, err := exec.LookPath(Program)
	if err != nil {
		return "", fmt.Errorf("%s is neither in %s, nor in ../lib/heddle beside that, nor in PATH: install it (`make build` builds it)", Program, dir)
	}
	return found, nil
}

// reach connects to the router that runs, or starts one. It lives on when this process ends.
func (p *Plane) reach() (*link, error) {
	socket := filepath.Join(p.cfg.StateDir, socketFile)
	if l, err := adopt(socket); err == nil {
		return l, nil
	}
	program, err := FindProgram(p.cfg.Self)
	if err != nil {
		return nil, err
	}
	// Nobody listens there: bind() would find it in its way.
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// A file, because the router outlives whoever would read a pipe.
	log, err := os.OpenFile(filepath.Join(p.cfg.StateDir, logFile), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(program, Arguments(p.cfg.StateDir)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // or it stays a zombie when it ends
	l, err := awaitRouter(socket, ended)
	if err != nil {
		_ = cmd.Process.Kill() // it may have ended
		return nil, fmt.Errorf("start %s: %w%s", program, err, tail(log.Name()))
	}
	return l, nil
}

// adopt connects to a router that an earlier agent started. Its parent is now whoever adopts
// orphans: if that is this process (the first one of a PID namespace), nobody else would wait for
// its end, and it would stay a zombie.
func adopt(socket string) (*link, error) {
	l, err := dial(socket)
	if err != nil {
		return nil, err
	}
	if router, err := os.FindProcess(l.pid); err == nil {
		go func() { _, _ = router.Wait() }() // at once, unless it is a child of this process
	}
	return l, nil
}

// awaitRouter waits until the router that was started answers.
func awaitRouter(socket string, ended <-chan error) (*link, error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(routerAnswers)
	for {
		l, err := dial(socket)
		if err == nil {
			return l, nil
		}
		select {
		case err := <-ended:
			if err == nil {
				err = errors.New("exit status 0")
			}
			return nil, fmt.Errorf("it ended at once: %w", err)
		case now := <-tick.C:
			if now.After(deadline) {
				return nil, fmt.Errorf("it does not answer within %s: %w", routerAnswers, err)
			}
		}
	}
}

// tail quotes the end of the router's log for an error.
func tail(path string) string {
	const most = 512
	data, err := os.ReadFile(path)
	data = bytes.TrimSpace(data)
	if err != nil || len(data) == 0 {
		return ""
	}
	return fmt.Sprintf(": %s", data[max(0, len(data)-most):])
}
