// Package process has programs of the node run that planes need, and which live on when the agent
// ends: found beside the agent, started in its cgroup and in a session of their own, and reached by
// a Unix socket.
package process

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/patience"
)

// Answers bounds what a program may take for its start, and for one exchange.
var Answers = patience.For(5 * time.Second)

// ErrEnded says that a program ended as soon as it was started.
var ErrEnded = errors.New("it ended at once")

// ErrStranger says that somebody else listens where a confined program is to.
var ErrStranger = errors.New("it is not the program")

// Program is one.
type Program struct {
	// Name is the file's.
	Name string
	// Self is the agent's own program, beside which it is looked for.
	Self string
	// Socket and Log are paths: where it listens, and what its output goes to.
	Socket, Log string
	// More are arguments after those that every program gets.
	More []string
	// OwnNetns gives it an empty network namespace.
	OwnNetns bool
	// Path is the file; empty: Find looks for it.
	Path string
	// Confined keeps it from what is not its; nil: it is Heddle's own, and as the agent is.
	Confined *Confined
}

// Arguments are those that it is started with.
func (p Program) Arguments() []string {
	if p.Confined != nil {
		return ConfinedArguments
	}
	return append([]string{"--agent", p.Socket}, p.More...)
}

// Find gives the program's path: beside Self, where the Debian package has it, or in PATH.
func (p Program) Find() (string, error) {
	if p.Path != "" {
		return p.Path, nil
	}
	dir := filepath.Dir(p.Self)
	for _, path := range []string{filepath.Join(dir, p.Name), filepath.Join(dir, "../lib/heddle", p.Name)} {
		if found, err := exec.LookPath(path); err == nil {
			return found, nil
		}
	}
	found, err := exec.LookPath(p.Name)
	if err != nil {
		return "", fmt.Errorf("%s is neither in %s, nor in ../lib/heddle beside that, nor in PATH: install it (`make build` builds it)", p.Name, dir)
	}
	return found, nil
}

// Link is a connection to a program.
type Link interface {
	// Process gives the program's process.
	Process() int
}

// Reach connects to the program that runs, by dial, or starts one.
func Reach[L Link](p Program, dial func(socket string) (L, error)) (link L, err error) {
	if link, err = Adopt(p.Socket, dial); err == nil {
		return link, nil
	}
	if !Nobody(err) {
		return link, fmt.Errorf("reach %s: %w", p.Name, err)
	}
	program, err := p.Find()
	if err != nil {
		return link, err
	}
	// bind() would find it in its way.
	if err := os.Remove(p.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return link, err
	}
	// A file, because the program outlives whoever would read a pipe; one of an earlier build may
	// still write there.
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_WRONLY|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return link, err
	}
	defer log.Close()
	cmd := exec.Command(program, p.Arguments()...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if p.OwnNetns {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	if err := p.start(cmd); err != nil {
		return link, fmt.Errorf("start %s: %w", program, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // or it stays a zombie when it ends
	link, err = await(p.Socket, dial, ended)
	if err != nil {
		_ = cmd.Process.Kill() // it may have ended
		return link, fmt.Errorf("start %s: %w%s", program, err, tail(log.Name()))
	}
	return link, nil
}

// Nobody reports whether a dial failed because the program does not run. Other errors do not tell:
// this process may have no descriptor left, or the program not come to accept.
func Nobody(err error) bool {
	// What is no socket, or not of its kind, an own module may have put there.
	for _, none := range []error{unix.ECONNREFUSED, unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EPROTOTYPE, ErrStranger} {
		if errors.Is(err, none) {
			return true
		}
	}
	return false
}

// Adopt connects to a program that an earlier agent started. Its parent is now whoever adopts
// orphans: if that is this process (the first one of a PID namespace), nobody else would wait for
// its end, and it would stay a zombie.
func Adopt[L Link](socket string, dial func(string) (L, error)) (link L, err error) {
	if link, err = dial(socket); err != nil {
		return link, err
	}
	if program, err := os.FindProcess(link.Process()); err == nil {
		go func() { _, _ = program.Wait() }() // at once, unless it is a child of this process
	}
	return link, nil
}

// await waits until the program that was started answers.
func await[L any](socket string, dial func(string) (L, error), ended <-chan error) (link L, err error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(Answers)
	for {
		if link, err = dial(socket); err == nil {
			return link, nil
		}
		select {
		case end := <-ended:
			if end == nil {
				end = errors.New("exit status 0")
			}
			return link, fmt.Errorf("%w: %w", ErrEnded, end)
		case now := <-tick.C:
			if now.After(deadline) {
				return link, fmt.Errorf("it does not answer within %s: %w", Answers, err)
			}
		}
	}
}

// tail quotes the end of the program's log for an error.
func tail(path string) string {
	const most = 512
	data, err := os.ReadFile(path)
	data = bytes.TrimSpace(data)
	if err != nil || len(data) == 0 {
		return ""
	}
	return fmt.Sprintf(": %s", data[max(0, len(data)-most):])
}

// Runs reports whether a process runs the program at path: the same bytes, whatever file it was
// started from.
func Runs(pid int, path string) (bool, error) {
	running, err := os.Open(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false, err
	}
	defer running.Close()
	installed, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer installed.Close()
	a, err := running.Stat()
	if err != nil {
		return false, err
	}
	b, err := installed.Stat()
	if err != nil || os.SameFile(a, b) {
		return err == nil, err
	}
	if a.Size() != b.Size() {
		return false, nil
	}
	first, second := sha256.New(), sha256.New()
	if _, err = io.Copy(first, running); err == nil {
		_, err = io.Copy(second, installed)
	}
	return err == nil && bytes.Equal(first.Sum(nil), second.Sum(nil)), err
}

// Peer gives the process at the other end of a connection.
func Peer(conn *net.UnixConn) (pid int, err error) {
	peer, err := peer(conn)
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

func peer(conn *net.UnixConn) (of *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	ctl := raw.Control(func(fd uintptr) { of, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return of, errors.Join(ctl, err)
}
