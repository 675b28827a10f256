package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"heddle.dev/heddle/internal/bench/histogram"
)

// Measured is the line that a load prints when its measured phase is over, before its result.
const Measured = "measured"

// Load is what memcache and http measure.
type Load struct {
	Operations int     `json:"operations"` // that ended in the measured phase
	ElapsedS   float64 `json:"elapsed_s"`
	// BeginNs is when that began, in nanoseconds since 1970.
	BeginNs int64 `json:"begin_ns"`
	// Connections is how many were made, those that replaced others included.
	Connections int `json:"connections"`
	// Unfinished is how many operations were due by the schedule of a fixed rate and had not ended:
	// the rate was too high.
	Unfinished int `json:"unfinished"`
	// Hits is how many GETs found their key.
	Hits int `json:"hits"`
	// Latency by kind of operation. At a fixed rate it counts from when the operation was due, not
	// from when it was sent: a server that stalls is charged with all that waited meanwhile (no
	// coordinated omission).
	Latency map[string]*histogram.Histogram `json:"latency"`
}

// exchange is a protocol on one connection, with one operation at a time.
type exchange interface {
	// request appends the next operation's bytes to b and gives its kind.
	request(b []byte) (out []byte, kind string)
	// feed takes bytes received; done says that they end the operation's answer. More than the
	// answer is an error.
	feed(b []byte) (done bool, err error)
	// closing reports whether the server ends the connection after the answer just taken: the next
	// operation needs a new one.
	closing() bool
	// hits counts operations that found what they asked for.
	hits() int
}

// load makes the action of a protocol: connections on a few threads, each with its own epoll, all
// busy at once (rate 0) or by a schedule.
func load(protocol func(settings, int) exchange) action {
	return func(ctx context.Context, s settings, streams Streams) error {
		to, err := netip.ParseAddrPort(s.to)
		if err != nil {
			return fmt.Errorf("--to %q: want ADDRESS:PORT", s.to)
		}
		// Every loop holds a processor of the Go scheduler while it waits in the kernel, see
		// raw.go.
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(s.threads + runtime.NumCPU()))
		ctx, cancel := context.WithTimeout(ctx, s.warmUp+s.duration+slack)
		defer cancel()
		l := &loadRun{settings: s, connected: make(chan error, s.threads), begin: make(chan time.Time), done: make(chan error, s.threads)}
		for i := range s.threads {
			share := (s.connections + s.threads - 1 - i) / s.threads
			l.loops = append(l.loops, &loop{settings: s, number: i, exchanges: make([]exchange, share)})
			for k := range share {
				l.loops[i].exchanges[k] = protocol(s, k*s.threads+i)
			}
		}
		result, err := l.run(ctx, to)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(streams.Out, Measured); err != nil {
			return err
		}
		if err := json.NewEncoder(streams.Out).Encode(result); err != nil {
			return err
		}
		// Whoever measures this process must find it alive when its window ends.
		select {
		case <-ended(streams.In):
		case <-ctx.Done():
		}
		return nil
	}
}

// loadRun is the loops of one load and how they are told to begin.
type loadRun struct {
	settings
	loops     []*loop
	connected chan error
	begin     chan time.Time
	done      chan error
}

// run connects everything, then starts all loops at once and collects what they measured.
func (l *loadRun) run(ctx context.Context, to netip.AddrPort) (Load, error) {
	for _, each := range l.loops {
		go func() {
			if err := each.open(to); err != nil {
				l.connected <- errors.Join(err, each.close())
				return
			}
			l.connected <- nil
			l.done <- errors.Join(each.run(<-l.begin), each.close())
		}()
	}
	wait := func(from <-chan error) error {
		select {
		case err := <-from:
			return err
		case <-ctx.Done():
			return fmt.Errorf("load %s: no end: %w", to, ctx.Err())
		}
	}
	for range l.loops {
		if err := wait(l.connected); err != nil {
			return Load{}, err // the process ends, and with it the loops that wait
		}
	}
	start := time.Now()
	for range l.loops {
		l.begin <- start
	}
	var errs []error
	for range l.loops {
		errs = append(errs, wait(l.done))
	}
	if err := errors.Join(errs...); err != nil {
		return Load{}, err
	}
	result := Load{ElapsedS: l.duration.Seconds(), BeginNs: start.Add(l.warmUp).UnixNano(), Latency: make(map[string]*histogram.Histogram)}
	for _, each := range l.loops {
		each.addTo(&result)
	}
	return result, nil
}
