// Package loadgen is the small program that both ends of a measurement run inside the places that
// are measured: an echo server, the round-trip and connection clients, and two wrappers that make
// somebody else's program (iperf3) measurable and mortal, and loads for servers of others
// (memcached, HTTP).
//
// The hot loops use blocking system calls on one locked thread, not package net: the Go poller
// would put its own wake-ups into the figures. Every command is bounded in time and in count,
// prints its result as one JSON object on standard output, and needs nothing but its arguments.
package loadgen

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// Ready is the line a server prints once it listens.
const Ready = "ready"

// slack is how much longer than its measured phase a client may take before it gives up.
const slack = 55 * time.Second

// Streams are the standard streams of a command.
type Streams struct {
	In  io.Reader // servers end when it does
	Out io.Writer // the result, or what the wrapped program prints
	Err io.Writer // what the wrapped program says about its trouble
}

type settings struct {
	listen      string
	to          string
	duration    time.Duration
	lifetime    time.Duration
	size        int
	connections int
	callers     int
	cpu         int
	pause       time.Duration
	trips       int // of steps
	// Of loads.
	threads  int
	rate     float64 // operations a second on all connections; 0: as many as there can be
	warmUp   time.Duration
	path     string
	answer   bool // of spin and copies
	segments bool // of datagrams: the kernel cuts up and joins
	// Of guard.
	until   string // address: ready when somebody accepts there
	provide string // what the command finds in the folder {}
	command []string
}

type action func(context.Context, settings, Streams) error

var actions = map[string]action{
	"check":  check,
	"server": server,
	"rr":     client(roundTrips),
	"crr":    client(connections),
	// A trapped crr, and what it becomes.
	"floor":   floor,
	"trapped": trapped,
	"fleet":   fleet,
	"meter":   meter,
	"guard":   guard,
	"watch":   watch,
	"steps":   steps,
	"spin":    spin,
	"copies":  copies,
	// Calls that have nothing to do with sockets.
	"syscalls": syscalls,
	// Loads of servers of others.
	"memcache": load(newMemcache),
	"http":     load(newHTTP),
	// By datagrams.
	"datagrams":   datagramServer,
	"datagram-rr": client(datagramTrips),
	"flow":        client(flow),
	"quic-server": quicServer,
	"quic":        quicClient(quicStream),
	"quic-rr":     quicClient(quicTrips),
}

// Main runs one command of actions, each with its own flags.
func Main(ctx context.Context, args []string, streams Streams) error {
	if len(args) == 0 || actions[args[0]] == nil {
		return fmt.Errorf("bench loadgen: want one of %s", strings.Join(slices.Sorted(maps.Keys(actions)), ", "))
	}
	// The loops allocate next to nothing, and a collection in one of them would be measured.
	debug.SetGCPercent(-1)
	var s settings
	flags := flag.NewFlagSet("bench loadgen "+args[0], flag.ContinueOnError)
	flags.SetOutput(streams.Err)
	flags.StringVar(&s.listen, "listen", "0.0.0.0:0", "address the server listens on")
	flags.StringVar(&s.to, "to", "", "address of the server")
	flags.DurationVar(&s.duration, "duration", time.Second, "length of the measured phase")
	flags.DurationVar(&s.lifetime, "lifetime", time.Minute, "a server or guarded program ends after this at the latest")
	flags.IntVar(&s.size, "size", 32, "bytes of a round trip")
	flags.IntVar(&s.connections, "connections", 1000, "connections of a load or of steps")
	flags.IntVar(&s.trips, "trips", 1000, "round trips of steps")
	flags.IntVar(&s.callers, "callers", 1, "threads that connect at the same time")
	flags.DurationVar(&s.pause, "pause", time.Millisecond, "pause of watch between two connects")
	flags.IntVar(&s.threads, "threads", 1, "threads of a load")
	flags.Float64Var(&s.rate, "rate", 0, "operations a second of a load; 0 for as many as there can be")
	flags.DurationVar(&s.warmUp, "warm-up", 0, "time of a load before the measured phase")
	flags.BoolVar(&s.answer, "answer", false, "be the end of spin that answers, or that of copies that asks")
	flags.BoolVar(&s.segments, "segments", false, "have the kernel cut up what flow sends, and join what datagrams receives")
	flags.StringVar(&s.provide, "provide", "", "what guard and meter make in a folder, which stands for {} in the command: certificate, queries, zone")
	flags.StringVar(&s.path, "path", "/", "what http asks for; the file that the two ends of spin or of copies share")
	flags.StringVar(&s.until, "until", "", "guard is ready once somebody accepts at this address")
	flags.IntVar(&s.cpu, "cpu", anyCPU, "processor to run the loop on; -1 leaves it to the scheduler")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	s.command = flags.Args()
	if err := s.validate(); err != nil {
		return err
	}
	return actions[args[0]](ctx, s, streams)
}

// The limits of what may be asked for; they bound memory and time.
const (
	maxSize        = 1 << 20
	maxConnections = 1 << 17
	maxDuration    = 10 * time.Minute
	maxThreads     = 64
	minRate        = 0.01
	maxRate        = 1e7
)

func (s settings) validate() error {
	switch {
	case s.duration <= 0 || s.duration > maxDuration:
		return fmt.Errorf("--duration %s: want more than 0 and at most %s", s.duration, maxDuration)
	case s.lifetime <= 0 || s.lifetime > 2*maxDuration:
		return fmt.Errorf("--lifetime %s: want more than 0 and at most %s", s.lifetime, 2*maxDuration)
	case s.pause <= 0 || s.pause > maxDuration:
		return fmt.Errorf("--pause %s: want more than 0 and at most %s", s.pause, maxDuration)
	case s.size < 1 || s.size > maxSize:
		return fmt.Errorf("--size %d: want 1..%d", s.size, maxSize)
	case s.trips < 1 || s.trips > maxSamples:
		return fmt.Errorf("--trips %d: want 1..%d", s.trips, maxSamples)
	case s.connections < 1 || s.connections > maxConnections:
		return fmt.Errorf("--connections %d: want 1..%d", s.connections, maxConnections)
	case s.threads < 1 || s.threads > maxThreads || s.threads > s.connections:
		return fmt.Errorf("--threads %d: want 1..%d, and no more than connections", s.threads, maxThreads)
	case s.rate < 0 || s.rate > maxRate || s.rate > 0 && s.rate < minRate:
		return fmt.Errorf("--rate %g: want 0, or %g..%g", s.rate, minRate, maxRate)
	case s.warmUp < 0 || s.warmUp > maxDuration:
		return fmt.Errorf("--warm-up %s: want 0..%s", s.warmUp, maxDuration)
	}
	return nil
}

// check proves that the program can be run where it was asked to.
func check(_ context.Context, _ settings, streams Streams) error {
	_, err := fmt.Fprintln(streams.Out, Ready)
	return err
}

// client makes an action of a measurement: it runs it on a goroutine of its own, gives up when the
// time is over (the process then ends, and with it the blocked thread) and prints the result.
func client[R any](measure func(netip.AddrPort, settings) (R, error)) action {
	return func(ctx context.Context, s settings, streams Streams) error {
		to, err := netip.ParseAddrPort(s.to)
		if err != nil {
			return fmt.Errorf("--to %q: want ADDRESS:PORT", s.to)
		}
		type outcome struct {
			result R
			err    error
		}
		done := make(chan outcome, 1)
		go func() {
			r, err := measure(to, s)
			done <- outcome{r, err}
		}()
		ctx, cancel := context.WithTimeout(ctx, s.duration+slack)
		defer cancel()
		select {
		case o := <-done:
			if o.err != nil {
				return o.err
			}
			return json.NewEncoder(streams.Out).Encode(o.result)
		case <-ctx.Done():
			return fmt.Errorf("measure %s: no end after %s: %w", to, s.duration+slack, ctx.Err())
		}
	}
}
