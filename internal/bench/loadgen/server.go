package loadgen

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"golang.org/x/sys/unix"
)

// server echoes whatever its clients send, until its standard input or its lifetime ends.
func server(ctx context.Context, s settings, streams Streams) (err error) {
	address, err := netip.ParseAddrPort(s.listen)
	if err != nil {
		return fmt.Errorf("--listen %q: want ADDRESS:PORT", s.listen)
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make stop event: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(stop)) }()
	e, err := newEcho(address, stop)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return errors.Join(err, e.close())
	}
	finished := make(chan error, 1)
	go func() {
		if err := pin(s.cpu); err != nil {
			finished <- errors.Join(err, e.close())
			return
		}
		finished <- errors.Join(e.run(), e.close())
	}()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	select {
	case err := <-finished:
		return err
	case <-ended(streams.In):
	case <-ctx.Done():
	}
	if _, err := unix.Write(stop, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		return fmt.Errorf("signal stop event: %w", err)
	}
	return <-finished
}

// ended gives a channel that closes when in does. The goroutine reads in for the life of the
// process.
func ended(in io.Reader) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Any end of the input, orderly or not, means that whoever started us is gone.
		_, _ = io.Copy(io.Discard, in)
	}()
	return done
}

// echo is an epoll loop over one listener and its connections. Only the goroutine in run uses it.
type echo struct {
	epoll, listener, stop int
	buffer                []byte
}

const backlog = 4096

func newEcho(address netip.AddrPort, stop int) (made *echo, err error) {
	e := &echo{epoll: -1, listener: -1, stop: stop, buffer: make([]byte, maxSize)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.listener, err = listen(address, backlog); err != nil {
		return nil, err
	}
	// A client may be gone again before it is accepted, and accept must not block on that.
	if err = unix.SetNonblock(e.listener, true); err != nil {
		return nil, fmt.Errorf("make listener non-blocking: %w", err)
	}
	if e.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	for _, fd := range []int{e.listener, e.stop} {
		if err = e.watch(fd); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// listen makes a blocking listener.
func listen(address netip.AddrPort, backlog int) (listener int, err error) {
	sa, family := sockaddr(address)
	fd, err := openSocket(family)
	if err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, rawClose(fd))
		}
	}()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return -1, fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	// Accepted sockets inherit it; setting it on each would cost a system call a connection.
	if err := noDelay(fd); err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, sa); err != nil {
		return -1, fmt.Errorf("bind %s: %w", address, err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return -1, fmt.Errorf("listen on %s: %w", address, err)
	}
	return fd, nil
}

func (e *echo) watch(fd int) error {
	event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	if err := unix.EpollCtl(e.epoll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
}

// close ends the listener and the epoll; connections still open end with the process.
func (e *echo) close() error {
	var errs []error
	for _, fd := range []int{e.listener, e.epoll} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// run serves until the stop event fires.
func (e *echo) run() error {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := rawEpollWait(e.epoll, events)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for sockets: %w", err)
		}
		for _, event := range events[:n] {
			switch fd := int(event.Fd); fd {
			case e.stop:
				return nil
			case e.listener:
				if err := e.accept(); err != nil {
					return err
				}
			default:
				if err := e.answer(fd); err != nil {
					return err
				}
			}
		}
	}
}

func (e *echo) accept() error {
	fd, err := rawAccept(e.listener)
	switch err {
	case nil:
		return e.watch(fd)
	case unix.EAGAIN, unix.EINTR, unix.ECONNABORTED:
		return nil
	default:
		return fmt.Errorf("accept: %w", err)
	}
}

// answer sends back what fd has received and closes it at its end. Messages are small and answered
// one at a time, so the send buffer has room; a client that does not read loses its connection.
func (e *echo) answer(fd int) error {
	n, err := rawRead(fd, e.buffer)
	// A file that was closed is told of for as long as another process looks at it, as who reads
	// /proc/PID/fdinfo does.
	if err == unix.EAGAIN || err == unix.EINTR || err == unix.EBADF {
		return nil
	}
	if err == nil && n > 0 {
		var sent int
		if sent, err = rawWrite(fd, e.buffer[:n]); err == nil && sent == n {
			return nil
		}
	}
	if err := rawClose(fd); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}
