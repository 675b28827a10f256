package loadgen

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// RoundTrips is what rr measures on one connection.
type RoundTrips struct {
	Transactions int     `json:"transactions"`
	ElapsedS     float64 `json:"elapsed_s"`
	BusyCPUS     float64 `json:"busy_cpu_s"` // whole machine, see CPUTime
	RTTP50Us     float64 `json:"rtt_p50_us"`
	RTTP99Us     float64 `json:"rtt_p99_us"`
}

// Warm-up before the measured phase: caches, pools of sockets and neighbour entries are then in the
// state they have in a program that runs for longer than a second.
const (
	warmUpRoundTrips  = 1000
	warmUpConnections = 200 // of each caller
)

// maxSamples bounds a measured phase (and its memory): 10 s at 10 us a round trip.
const maxSamples = 1 << 20

// newSamples makes room for n latencies in nanoseconds and touches it, so that no page fault is
// measured.
func newSamples(n int) []int64 {
	s := make([]int64, n)
	for i := 0; i < len(s); i += 512 {
		s[i] = 1
	}
	return s[:0]
}

// percentileUs gives the p-th percentile (0..100) of sorted nanoseconds in microseconds.
func percentileUs(sorted []int64, p int) float64 {
	return float64(sorted[min(len(sorted)*p/100, len(sorted)-1)]) / 1e3
}

// metered gives how long f takes and the processor time of the machine meanwhile.
func metered(f func() error) (elapsed, busy time.Duration, err error) {
	before, err := ReadCPUTime()
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	if err := f(); err != nil {
		return 0, 0, err
	}
	elapsed = time.Since(start)
	after, err := ReadCPUTime()
	if err != nil {
		return 0, 0, err
	}
	return elapsed, after.BusySince(before), nil
}

// phase runs step until the duration or the room for so many samples is used up. step gets the time
// since the start of the phase and gives the same at its own end, so that each instant is read
// once.
func phase(duration time.Duration, room int, step func(now time.Duration) (time.Duration, error)) (err error) {
	var now time.Duration
	for n := 0; n < room && now < duration; n++ {
		if now, err = step(now); err != nil {
			return err
		}
	}
	return nil
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
	if err := noDelay(fd); err != nil {
		return RoundTrips{}, err
	}
	message := make([]byte, s.size)
	return measureTrips(s, func() error {
		if err := writeFull(fd, message); err != nil {
			return err
		}
		return readFull(fd, message)
	})
}

// measureTrips measures round trips.
func measureTrips(s settings, trip func() error) (RoundTrips, error) {
	for range warmUpRoundTrips {
		if err := trip(); err != nil {
			return RoundTrips{}, fmt.Errorf("warm up: %w", err)
		}
	}
	samples := newSamples(maxSamples)
	elapsed, busy, err := metered(func() error {
		start := time.Now()
		return phase(s.duration, maxSamples, func(began time.Duration) (time.Duration, error) {
			if err := trip(); err != nil {
				return 0, fmt.Errorf("round trip %d: %w", len(samples), err)
			}
			now := time.Since(start)
			samples = append(samples, int64(now-began))
			return now, nil
		})
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
