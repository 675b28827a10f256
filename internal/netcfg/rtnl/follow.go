package rtnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Subscription says which of the kernel's messages somebody follows, and how.
type Subscription struct {
	Protocol int    // of netlink: unix.NETLINK_...
	Groups   uint32 // bit i-1 for group i
	// Filter is a classic BPF program that the kernel runs on each message: 0 leaves it out. So
	// what others change costs nothing here.
	Filter []unix.SockFilter
	// Pause is how long at least is between two looks, however many messages come.
	Pause time.Duration
	// Every is when the next look is at the latest, Retry after one that failed.
	Every, Retry time.Duration
}

// Follow calls look at once, again after messages in the calling thread's network namespace, and
// from time to time without any, until ctx ends. note sees each message before; nil: nobody wants
// to. Messages that are lost, because there were too many, are followed by a look, too.
func (s Subscription) Follow(ctx context.Context, note func(syscall.NetlinkMessage), look func() error) error {
	sock, err := s.open()
	if err != nil {
		return err
	}
	defer sock.Close()
	defer context.AfterFunc(ctx, func() { _ = sock.Close() })()
	raw, err := sock.SyscallConn()
	if err != nil {
		return fmt.Errorf("follow netlink: %w", err)
	}
	message := make([]byte, AnswerBytes)
	for {
		next := s.Every
		if look() != nil {
			next = s.Retry
		}
		select {
		case <-time.After(s.Pause):
		case <-ctx.Done():
			return nil
		}
		err := sock.SetReadDeadline(time.Now().Add(next))
		if err == nil {
			err = readAll(raw, message, note)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("follow netlink: %w", err)
		}
	}
}

// open gives a socket that is told of what s says.
func (s Subscription) open() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, s.Protocol)
	if err != nil {
		return nil, fmt.Errorf("follow netlink: open: %w", err)
	}
	program := unix.SockFprog{Len: uint16(len(s.Filter)), Filter: unsafe.SliceData(s.Filter)}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: s.Groups})
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("follow netlink: %w", err)
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// readAll waits for a message, and takes it with all that are there.
func readAll(raw syscall.RawConn, message []byte, note func(syscall.NetlinkMessage)) error {
	var failed error
	err := raw.Read(func(fd uintptr) (done bool) {
		for {
			n, _, err := unix.Recvfrom(int(fd), message, 0)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EAGAIN):
				return done
			case errors.Is(err, unix.ENOBUFS): // some are lost
			case err != nil:
				failed = err
				return true
			case note != nil:
				all, err := syscall.ParseNetlinkMessage(message[:n])
				for _, m := range all {
					note(m)
				}
				failed = errors.Join(failed, err)
			}
			done = true
		}
	})
	return errors.Join(err, failed)
}

// OfTypes is a Filter for messages of one of types.
func OfTypes(types ...uint16) []unix.SockFilter {
	program := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 4}}
	for i, t := range types {
		raw := binary.NativeEndian.AppendUint16(nil, t)
		program = append(program, unix.SockFilter{
			Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: uint8(len(types) - i), K: uint32(binary.BigEndian.Uint16(raw)),
		})
	}
	return append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: AnswerBytes})
}
