package loadgen

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Streamed is what stream measures on one connection: from its first byte to the server's word that
// it has read the last.
type Streamed struct {
	Bytes    int64   `json:"bytes"`
	ElapsedS float64 `json:"elapsed_s"`
	BusyCPUS float64 `json:"busy_cpu_s"` // whole machine, see CPUTime
}

// sinkBuffer is what sink reads at once.
const sinkBuffer = 128 << 10

// sockaddr gives where a server is: at an address, or, of AF_UNIX, at an abstract name that has the
// port in it.
func (s settings) sockaddr(a netip.AddrPort) (unix.Sockaddr, int) {
	if s.unix {
		return &unix.SockaddrUnix{Name: fmt.Sprintf("@heddle-bench-%d", a.Port())}, unix.AF_UNIX
	}
	return sockaddr(a)
}

// open makes a socket of the kind that was asked for.
func (s settings) open(family int) (int, error) {
	fd, err := openSocket(family)
	if err != nil || s.congestion == "" || s.unix {
		return fd, err
	}
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, s.congestion); err != nil {
		return -1, errors.Join(fmt.Errorf("--congestion %s: set TCP_CONGESTION: %w", s.congestion, err), rawClose(fd))
	}
	return fd, nil
}

// dial opens a connected socket of that kind; the caller closes it.
func (s settings) dial(to netip.AddrPort) (int, error) {
	sa, family := s.sockaddr(to)
	fd, err := s.open(family)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, sa); err != nil {
		return -1, errors.Join(fmt.Errorf("connect: %w", err), rawClose(fd))
	}
	return fd, nil
}

// noDelay has each write sent at once, of sockets that could wait.
func (s settings) noDelay(fd int) error {
	if s.unix {
		return nil
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return nil
}

// stream sends as fast as it goes, in writes of s.size, to a sink.
func stream(to netip.AddrPort, s settings) (result Streamed, err error) {
	if err := pin(s.cpu); err != nil {
		return Streamed{}, err
	}
	fd, err := s.dial(to)
	if err != nil {
		return Streamed{}, err
	}
	defer func() { err = errors.Join(err, rawClose(fd)) }()
	block, warm := make([]byte, s.size), int64(0)
	send := func(d time.Duration, sent *int64) error {
		for start := time.Now(); time.Since(start) < d; *sent += int64(len(block)) {
			if err := writeFull(fd, block); err != nil {
				return err
			}
		}
		return nil
	}
	if err := send(s.warmUp, &warm); err != nil {
		return Streamed{}, fmt.Errorf("warm up: %w", err)
	}
	var read [8]byte
	elapsed, busy, err := metered(func() error {
		if err := send(s.duration, &result.Bytes); err != nil {
			return err
		}
		if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
			return fmt.Errorf("shutdown: %w", err)
		}
		return readFull(fd, read[:])
	})
	if err != nil {
		return Streamed{}, err
	}
	if got := int64(binary.BigEndian.Uint64(read[:])); got != warm+result.Bytes {
		return Streamed{}, fmt.Errorf("the server read %d of %d bytes", got, warm+result.Bytes)
	}
	result.ElapsedS, result.BusyCPUS = elapsed.Seconds(), busy.Seconds()
	return result, nil
}

// sink reads what its clients send, one after the other, and tells each how much it was. It ends as
// server does.
func sink(ctx context.Context, s settings, streams Streams) (err error) {
	address, err := netip.ParseAddrPort(s.listen)
	if err != nil {
		return fmt.Errorf("--listen %q: want ADDRESS:PORT", s.listen)
	}
	listener, err := s.listener(address, 1)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return errors.Join(err, rawClose(listener))
	}
	finished := make(chan error, 1)
	go func() {
		err := pin(s.cpu)
		for err == nil {
			err = swallow(listener)
		}
		finished <- errors.Join(err, rawClose(listener))
	}()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	select {
	case err := <-finished:
		return err
	case <-ended(streams.In):
	case <-ctx.Done():
	}
	// It ends accept(); a connection that is left ends with its client, or with the process.
	if err := unix.Shutdown(listener, unix.SHUT_RDWR); err != nil {
		return fmt.Errorf("shutdown listener: %w", err)
	}
	return nil
}

// swallow takes one connection, reads it to its end and says how much it was.
func swallow(listener int) error {
	fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err == unix.EINTR || err == unix.ECONNABORTED {
		return nil
	}
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	buffer, total := make([]byte, sinkBuffer), uint64(0)
	for {
		n, err := rawRead(fd, buffer)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			break // a client that is reset has nothing to be told
		}
		total += uint64(n)
	}
	// The same holds for one that does not wait for the answer.
	_ = writeFull(fd, binary.BigEndian.AppendUint64(nil, total))
	return rawClose(fd)
}
