package lockwait

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// processName is what the process is called. It is the caller's own program.
const processName = "heddled-lockwait"

// Frames, by their first byte: the agent sends calls, and gets the thread's number, what it brought
// and, last, its errno.
const (
	callFrame = iota + 1
	threadFrame
	gotFrame
	endFrame
)

// maxFrame is the longest frame, and maxPauses how often an iterator may pause.
const (
	maxFrame  = 1 << 16
	maxPauses = 1000
)

func init() {
	if len(os.Args) == 1 && os.Args[0] == processName {
		serve(3) // the first of exec.Cmd.ExtraFiles
		os.Exit(0)
	}
}

// serve makes calls, each in a thread of its own, until the agent has closed its end.
func serve(requests int) {
	for {
		frame, rights := make([]byte, maxFrame), make([]byte, unix.CmsgSpace(2*4))
		n, oobn, _, _, err := unix.Recvmsg(requests, frame, rights, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		control, err := unix.ParseSocketControlMessage(rights[:oobn])
		if err != nil || len(control) != 1 {
			return
		}
		fds, err := unix.ParseUnixRights(&control[0])
		if err != nil || len(fds) != 2 {
			return
		}
		go serveCall(fds[0], fds[1], frame[1:n])
	}
}

// serveCall makes one call. Nobody hears of an agent that is gone.
func serveCall(file, answers int, request []byte) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer unix.Close(answers)
	defer unix.Close(file)
	if send(answers, threadFrame, binary.NativeEndian.AppendUint32(nil, uint32(unix.Gettid()))) != nil {
		return
	}
	err := transact(file, answers, request)
	var errno unix.Errno
	errors.As(err, &errno)
	_ = send(answers, endFrame, binary.NativeEndian.AppendUint32(nil, uint32(errno)))
}

func transact(file, answers int, request []byte) error {
	if len(request) == 0 {
		return ReadAll(func(b []byte) (int, error) { return unix.Read(file, b) }, func(b []byte) error { return send(answers, gotFrame, b) })
	}
	if _, err := unix.Write(file, request); err != nil {
		return err
	}
	part := make([]byte, maxFrame-1)
	n, err := unix.Read(file, part)
	if err != nil {
		return err
	}
	return send(answers, gotFrame, part[:n])
}

// ReadAll reads to the end and hands on what comes. An iterator that has seen a million sockets,
// and had nothing to say of them, pauses with EAGAIN, and goes on from there when it is read again.
func ReadAll(read func([]byte) (int, error), to func([]byte) error) error {
	part := make([]byte, maxFrame-1)
	for pauses := 0; ; {
		n, err := read(part)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN) && pauses < maxPauses:
			pauses++
		case err != nil:
			return err
		case n == 0:
			return nil
		default:
			if err := to(part[:n]); err != nil {
				return err
			}
		}
	}
}

func send(to int, kind byte, content []byte) error {
	return unix.Sendmsg(to, append([]byte{kind}, content...), nil, nil, unix.MSG_NOSIGNAL)
}

// take adds a frame of an answer to what the call has brought.
func (c *call) take(frame []byte) (done bool, err error) {
	kind, content := frame[0], frame[1:]
	switch {
	case kind == gotFrame:
		c.got = append(c.got, content...)
	case kind == threadFrame && len(content) == 4:
		c.tid = int(binary.NativeEndian.Uint32(content))
	case kind == endFrame && len(content) == 4:
		if errno := unix.Errno(binary.NativeEndian.Uint32(content)); errno != 0 {
			return true, errno
		}
		return true, nil
	default:
		return false, fmt.Errorf("%s answers with a frame of kind %d and %d bytes", processName, kind, len(content))
	}
	return false, nil
}
