package loadgen

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// The floor is what a trapped socket() costs whoever answers it: a caller in a network namespace of
// its own is given sockets of another one's, in two steps as by Heddle's agent, by a process that
// does nothing else. It has no endpoints, compares and counts nobody, and tags nothing.

// floor runs a command, in a network namespace of its own and behind the filter of an intercepted
// container, and answers its calls of socket() with sockets of this process's namespace.
func floor(ctx context.Context, s settings, streams Streams) (err error) {
	// Pdeathsig follows the thread that started the child, so that thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	s.command = append([]string{self, "bench", "loadgen", "trapped", "--"}, s.command...)
	cmd, err := wrapped(ctx, s)
	if err != nil {
		return err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket for the listener: %w", err)
	}
	there := os.NewFile(uintptr(pair[1]), "listener's way")
	cmd.ExtraFiles, cmd.SysProcAttr.Cloneflags = []*os.File{there}, unix.CLONE_NEWNET
	cmd.Stdout, cmd.Stderr = streams.Out, streams.Err
	err = cmd.Start()
	if err := errors.Join(err, there.Close()); err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", s.command[0], err), unix.Close(pair[0]))
	}
	listener, err := receiveListener(pair[0])
	if err == nil {
		err = answer(listener)
	}
	if err != nil {
		cancel()
	}
	return errors.Join(err, cmd.Wait())
}

// trapped has the kernel trap calls of socket(), hands the listener over, and becomes the command.
func trapped(_ context.Context, s settings, _ Streams) error {
	if len(s.command) == 0 {
		return errors.New("want a command: -- CMD ARG")
	}
	path, err := exec.LookPath(s.command[0])
	if err != nil {
		return err
	}
	runtime.LockOSThread() // the filter is this thread's, and the command's
	listener, err := installFilter()
	if err != nil {
		return err
	}
	const way = 3 // cmd.ExtraFiles
	if err := unix.Sendmsg(way, []byte{0}, unix.UnixRights(listener), nil, 0); err != nil {
		return fmt.Errorf("hand listener over: %w", err)
	}
	if err := errors.Join(unix.Close(way), unix.Close(listener)); err != nil {
		return err
	}
	return fmt.Errorf("run %s: %w", path, unix.Exec(path, s.command, os.Environ()))
}

// receiveListener gets the listener of trapped, and closes its way.
func receiveListener(way int) (listener int, err error) {
	defer func() { err = errors.Join(err, unix.Close(way)) }()
	var b [1]byte
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(way, b[:], rights, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("receive listener: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return -1, errors.Join(errors.New("no listener came"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, errors.Join(errors.New("no listener came"), err)
	}
	return fds[0], nil
}
