package loadgen

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Connections is what crr measures: each connection is made, carries one byte there and back, and
// is reset.
type Connections struct {
	Callers            int     `json:"callers"`
	Connections        int     `json:"connections"`
	ElapsedS           float64 `json:"elapsed_s"`
	BusyCPUS           float64 `json:"busy_cpu_s"`
	SocketP50Us        float64 `json:"socket_p50_us"`
	SocketConnectP5Us  float64 `json:"socket_connect_p5_us"` // what nothing else held up
	SocketConnectP50Us float64 `json:"socket_connect_p50_us"`
	SocketConnectP99Us float64 `json:"socket_connect_p99_us"`
}

// connectionTimes are the instants of one connection, as durations since some start.
type connectionTimes struct{ began, hasSocket, connected, ended time.Duration }

// connectOnce makes one connection, uses it and resets it. Time is read from start.
func connectOnce(to *rawAddress, start time.Time, b []byte) (t connectionTimes, err error) {
	t.began = time.Since(start)
	fd, err := openSocket(to.family)
	if err != nil {
		return t, err
	}
	t.hasSocket = time.Since(start)
	err = rawConnect(fd, to)
	t.connected = time.Since(start)
	if err != nil {
		err = fmt.Errorf("connect: %w", err)
	} else if err = writeFull(fd, b); err == nil {
		err = readFull(fd, b)
	}
	err = errors.Join(err, abort(fd))
	t.ended = time.Since(start)
	return t, err
}

// caller makes connections one after the other, on a thread of its own. Only its goroutine touches
// it while it runs.
type caller struct {
	sockets, connects []int64 // nanoseconds from its beginning to the socket, and to the connection
	err               error
}

// warm makes a thread of the goroutine, which must be a new one, and the connections that are not
// measured.
func (c *caller) warm(to *rawAddress, s settings) error {
	if err := pin(s.cpu); err != nil {
		return err
	}
	start, message := time.Now(), make([]byte, 1)
	for range warmUpConnections {
		if _, err := connectOnce(to, start, message); err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
	}
	return nil
}

func (c *caller) run(to *rawAddress, s settings) error {
	start, message := time.Now(), make([]byte, 1)
	return phase(s.duration, cap(c.connects), func(time.Duration) (time.Duration, error) {
		t, err := connectOnce(to, start, message)
		if err != nil {
			return 0, fmt.Errorf("connection %d: %w", len(c.connects), err)
		}
		c.sockets = append(c.sockets, int64(t.hasSocket-t.began))
		c.connects = append(c.connects, int64(t.connected-t.began))
		return t.ended, nil
	})
}

// connections measures s.callers callers that connect at the same time. All have warmed up before
// the first begins.
func connections(to netip.AddrPort, s settings) (Connections, error) {
	if s.callers < 1 {
		return Connections{}, fmt.Errorf("--callers %d: want 1 or more", s.callers)
	}
	// The measured system calls keep their processor of the Go scheduler while they wait (raw.go).
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + s.callers))
	address, callers := newRawAddress(to), make([]caller, s.callers)
	var warm, done sync.WaitGroup
	begin, failed := make(chan struct{}), false // failed is written before begin is closed
	for i := range callers {
		c := &callers[i]
		c.sockets, c.connects = newSamples(maxSamples/s.callers), newSamples(maxSamples/s.callers)
		warm.Add(1)
		done.Go(func() {
			c.err = c.warm(address, s)
			warm.Done()
			if <-begin; c.err == nil && !failed {
				c.err = c.run(address, s)
			}
		})
	}
	warm.Wait()
	failed = slices.ContainsFunc(callers, func(c caller) bool { return c.err != nil })
	elapsed, busy, err := metered(func() error {
		close(begin)
		done.Wait()
		return nil
	})
	var sockets, connects []int64
	for _, c := range callers {
		err = errors.Join(err, c.err)
		sockets, connects = append(sockets, c.sockets...), append(connects, c.connects...)
	}
	if err != nil {
		return Connections{}, err
	}
	slices.Sort(sockets)
	slices.Sort(connects)
	return Connections{
		Callers: s.callers, Connections: len(connects), ElapsedS: elapsed.Seconds(), BusyCPUS: busy.Seconds(),
		SocketP50Us:        percentileUs(sockets, 50),
		SocketConnectP5Us:  percentileUs(connects, 5),
		SocketConnectP50Us: percentileUs(connects, 50),
		SocketConnectP99Us: percentileUs(connects, 99),
	}, nil
}
