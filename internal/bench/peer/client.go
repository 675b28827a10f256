package peer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// RoundTrips is what rr measures on one connection.
type RoundTrips struct {
	Transactions int     `json:"transactions"`
	ElapsedS     float64 `json:"elapsed_s"`
	BusyCPUS     float64 `json:"busy_cpu_s"` // whole machine, see CPUTime
	RTTP50Us     float64 `json:"rtt_p50_us"`
	RTTP99Us     float64 `json:"rtt_p99_us"`
}

// Connections is what crr measures: each connection is made, carries one byte there and back, and is
// reset.
type Connections struct {
	Connections        int     `json:"connections"`
	ElapsedS           float64 `json:"elapsed_s"`
	BusyCPUS           float64 `json:"busy_cpu_s"`
	SocketP50Us        float64 `json:"socket_p50_us"`
	SocketConnectP50Us float64 `json:"socket_connect_p50_us"`
	SocketConnectP99Us float64 `json:"socket_connect_p99_us"`
}

// Warm-up before the measured phase: caches, pools of sockets and neighbour entries are then in the state
// they have in a program that runs for longer than a second.
const (
	warmUpRoundTrips  = 1000
	warmUpConnections = 200
)

// maxSamples bounds a measured phase (and its memory): 10 s at 10 us a round trip.
const maxSamples = 1 << 20

// newSamples makes room for latencies in nanoseconds and touches it, so that no page fault is measured.
func newSamples() []int64 {
	s := make([]int64, maxSamples)
	for i := 0; i < len(s); i += 512 {
		s[i] = 1
	}
	return s[:0]
}

// percentileUs gives the p-th percentile (0..100) of sorted nanoseconds in microseconds.
func percentileUs(sorted []int64, p int) float64 {
	return float64(sorted[min(len(sorted)*p/100, len(sorted)-1)]) / 1e3
}

// phase runs step until the duration or the room for samples is used up, and gives how long that took
// and the processor time of the machine meanwhile. step gets the time since the start of the phase and
// gives the same at its own end, so that each instant is read once.
func phase(duration time.Duration, step func(now time.Duration) (time.Duration, error)) (elapsed, busy time.Duration, err error) {
	before, err := ReadCPUTime()
	if err != nil {
		return 0, 0, err
	}
	var now time.Duration
	for n := 0; n < maxSamples && now < duration; n++ {
		if now, err = step(now); err != nil {
			return 0, 0, err
		}
	}
	after, err := ReadCPUTime()
	if err != nil {
		return 0, 0, err
	}
	return now, after.BusySince(before), nil
}

func roundTrips(to netip.AddrPort, s settings) (result RoundTrips, err error) {
	if err := pin(s.cpu); err != nil {
		return RoundTrips{}, err
	}
	fd, err := dial(sockaddr(to))
	if err != nil {
		return RoundTrips{}, err
	}
	defer func() { err = errors.Join(err, abort(fd)) }()
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return RoundTrips{}, fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	message := make([]byte, s.size)
	trip := func() error {
		if err := writeFull(fd, message); err != nil {
			return err
		}
		return readFull(fd, message)
	}
	for range warmUpRoundTrips {
		if err := trip(); err != nil {
			return RoundTrips{}, fmt.Errorf("warm up: %w", err)
		}
	}
	samples := newSamples()
	start := time.Now()
	elapsed, busy, err := phase(s.duration, func(began time.Duration) (time.Duration, error) {
		if err := trip(); err != nil {
			return 0, fmt.Errorf("round trip %d: %w", len(samples), err)
		}
		now := time.Since(start)
		samples = append(samples, int64(now-began))
		return now, nil
	})
	if err != nil {
		return RoundTrips{}, err
	}
	slices.Sort(samples)
	return RoundTrips{
		Transactions: len(samples), ElapsedS: elapsed.Seconds(), BusyCPUS: busy.Seconds(),
		RTTP50Us: percentileUs(samples, 50), RTTP99Us: percentileUs(samples, 99),
	}, nil
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

func connections(to netip.AddrPort, s settings) (Connections, error) {
	if err := pin(s.cpu); err != nil {
		return Connections{}, err
	}
	address := newRawAddress(to)
	message := make([]byte, 1)
	start := time.Now()
	for range warmUpConnections {
		if _, err := connectOnce(address, start, message); err != nil {
			return Connections{}, fmt.Errorf("warm up: %w", err)
		}
	}
	sockets, connects := newSamples(), newSamples()
	start = time.Now()
	elapsed, busy, err := phase(s.duration, func(time.Duration) (time.Duration, error) {
		t, err := connectOnce(address, start, message)
		if err != nil {
			return 0, fmt.Errorf("connection %d: %w", len(connects), err)
		}
		sockets = append(sockets, int64(t.hasSocket-t.began))
		connects = append(connects, int64(t.connected-t.began))
		return t.ended, nil
	})
	if err != nil {
		return Connections{}, err
	}
	slices.Sort(sockets)
	slices.Sort(connects)
	return Connections{
		Connections: len(connects), ElapsedS: elapsed.Seconds(), BusyCPUS: busy.Seconds(),
		SocketP50Us:        percentileUs(sockets, 50),
		SocketConnectP50Us: percentileUs(connects, 50),
		SocketConnectP99Us: percentileUs(connects, 99),
	}, nil
}
