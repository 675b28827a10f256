package loadgen

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Step is what `steps` prints after each of its steps.
type Step struct {
	Name       string  `json:"name"`
	Operations int     `json:"operations"`
	ElapsedS   float64 `json:"elapsed_s"`
}

// Steps are the names of the steps, in their order: sockets are made; each is connected; a byte
// goes there and back on each; their names are asked for; s.size bytes, and then LargeMessage, go
// there and back on one of them; all are closed.
var Steps = []string{"socket", "connect", "first byte", "names", "round trip", "large round trip", "close"}

const (
	// LargeMessage is the number of bytes of a large round trip.
	LargeMessage = 16 << 10
	// largeShare is how many round trips there are for each large one.
	largeShare = 10
)

// steps makes a connection's life in steps, many connections at a time, and each step only when it
// is told to by a line on its standard input: between two of them, somebody else can look at what
// the kernel has counted.
func steps(ctx context.Context, s settings, streams Streams) error {
	to, err := netip.ParseAddrPort(s.to)
	if err != nil {
		return fmt.Errorf("--to %q: want ADDRESS:PORT", s.to)
	}
	lines, done := make(chan struct{}), make(chan error, 1)
	go func() {
		in := bufio.NewScanner(streams.In)
		for in.Scan() {
			lines <- struct{}{}
		}
		close(lines)
	}()
	go func() { done <- newStepper(to, s).run(lines, streams) }()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("steps to %s: %w", to, ctx.Err())
	}
}

// stepper is used by one goroutine.
type stepper struct {
	to       *rawAddress
	settings settings
	fds      []int
	message  []byte
	large    []byte
}

func newStepper(to netip.AddrPort, s settings) *stepper {
	return &stepper{to: newRawAddress(to), settings: s, fds: make([]int, 0, s.connections), message: make([]byte, s.size), large: make([]byte, LargeMessage)}
}

func (p *stepper) run(lines <-chan struct{}, streams Streams) error {
	if err := pin(p.settings.cpu); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return err
	}
	for i, step := range []func() (int, error){
		p.sockets, p.connect, p.firstByte, p.names,
		func() (int, error) { return p.trips(p.message, p.settings.trips) },
		func() (int, error) { return p.trips(p.large, max(p.settings.trips/largeShare, 1)) },
		p.closeAll,
	} {
		if _, more := <-lines; !more {
			return errors.New("steps: the standard input ended")
		}
		start := time.Now()
		n, err := step()
		elapsed := time.Since(start)
		if err != nil {
			return fmt.Errorf("step %s: %w", Steps[i], err)
		}
		if err := json.NewEncoder(streams.Out).Encode(Step{Name: Steps[i], Operations: n, ElapsedS: elapsed.Seconds()}); err != nil {
			return err
		}
	}
	return nil
}

func (p *stepper) sockets() (int, error) {
	for range p.settings.connections {
		fd, err := openSocket(p.to.family)
		if err != nil {
			return 0, err
		}
		p.fds = append(p.fds, fd)
	}
	return len(p.fds), nil
}

// each does something with every connection.
func (p *stepper) each(do func(fd int) error) (int, error) {
	for i, fd := range p.fds {
		if err := do(fd); err != nil {
			return 0, fmt.Errorf("connection %d: %w", i, err)
		}
	}
	return len(p.fds), nil
}

func (p *stepper) connect() (int, error) {
	return p.each(func(fd int) error { return rawConnect(fd, p.to) })
}

func (p *stepper) trip(fd int, b []byte) error {
	if err := writeFull(fd, b); err != nil {
		return err
	}
	return readFull(fd, b)
}

func (p *stepper) firstByte() (int, error) {
	return p.each(func(fd int) error { return p.trip(fd, p.message[:1]) })
}

// names asks for both names of each connection.
func (p *stepper) names() (int, error) {
	return p.each(func(fd int) error {
		for _, call := range []uintptr{unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME} {
			var name [unix.SizeofSockaddrInet6]byte
			length := uint32(len(name))
			if _, _, e := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&name)), uintptr(unsafe.Pointer(&length))); e != 0 {
				return e
			}
		}
		return nil
	})
}

func (p *stepper) trips(message []byte, n int) (int, error) {
	for i := range n {
		if err := p.trip(p.fds[0], message); err != nil {
			return 0, fmt.Errorf("round trip %d: %w", i, err)
		}
	}
	return n, nil
}

// closeAll closes in order: the server sees the end and closes its own.
func (p *stepper) closeAll() (int, error) { return p.each(rawClose) }
