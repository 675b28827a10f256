// Package paper repeats the evaluation of the Slim paper (NSDI 2019) with real applications.
package paper

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// Options say what of the paper's evaluation to repeat.
type Options struct {
	Apps     []App
	Modes    []bench.Mode // host first; see ParseModes
	Rounds   int
	Duration time.Duration // of the measured window
	// Scale multiplies the fixed rates, for machines that are faster or slower than the one they
	// were chosen on.
	Scale float64
	// Program is the command line that runs loadgen.Main inside the place.
	Program []string
	// Kafka is the folder with Kafka's jars.
	Kafka string
	// Step, if set, hears of every measurement before it starts; of what comes before them, total
	// is 0.
	Step func(what string, done, total int, remaining time.Duration)
}

// Validate reports what is out of bounds.
func (o Options) Validate() error {
	switch {
	case o.Rounds < 1 || o.Rounds > bench.MaxRuns:
		return fmt.Errorf("--rounds %d: want 1..%d", o.Rounds, bench.MaxRuns)
	case o.Duration < 500*time.Millisecond || o.Duration > bench.MaxDuration:
		return fmt.Errorf("--duration %s: want 500ms..%s", o.Duration, bench.MaxDuration)
	case o.Scale < 0.001 || o.Scale > 1000:
		return fmt.Errorf("--scale %g: want 0.001..1000", o.Scale)
	}
	return nil
}

// sample is what one measurement yields.
type sample struct {
	metrics map[string]float64
	latency map[string]*histogram.Histogram
	begin   time.Time // of the window, if the client knows it
}

// launch is what the command lines of one measurement are made from.
type launch struct {
	program  []string
	dir      string         // the bench's folder, the same in the containers
	data     string         // the server's folder, in its container's memory
	address  netip.AddrPort // of the server
	number   int            // of the measurement
	rate     float64        // of a fixed rate, scaled
	warmUp   time.Duration
	duration time.Duration // of the window
	lifetime time.Duration // of a server, at most
	cpus     machine.Pinning
}

// output is what a client left.
type output struct {
	launch     launch
	stdout     []byte
	begin, end time.Time // of the window, for a client that does not know it: counted from its end
}

// Run measures every app in every mode, mode by mode and round by round, and gives one entry for
// each app. It stops at the first measurement that fails: ratios of half a comparison would
// mislead. Apps that cannot run here for want of something that is not a Debian package are left
// out with the reason.
func Run(ctx context.Context, place bench.Place, o Options) (result Result, err error) {
	if err := o.Validate(); err != nil {
		return result, err
	}
	if err := missingPrograms(o.Apps); err != nil {
		return result, err
	}
	p := &run{place: place, options: o, samples: make(map[string][]sample)}
	if p.cpus, err = machine.ChoosePinning(); err != nil {
		return result, err
	}
	// Containers have the machine's own /tmp.
	if p.dir, err = os.MkdirTemp("/tmp", "heddle-paper-"); err != nil {
		return result, fmt.Errorf("make folder: %w", err)
	}
	p.data = "/dev/shm/" + filepath.Base(p.dir)
	defer func() {
		// The context may be over; what was made must go all the same.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), proc.ReadyTimeout)
		defer cancel()
		err = errors.Join(err, p.clean(ctx))
	}()
	if err := os.Chmod(p.dir, 0o777); err != nil { // servers that refuse to be root write here
		return result, err
	}
	skipped := p.selectApps()
	if err := p.prepare(ctx); err != nil {
		return result, err
	}
	if err := p.rounds(ctx); err != nil {
		return result, err
	}
	for _, a := range o.Apps {
		if reason, out := skipped[a.Name]; out {
			result.Apps = append(result.Apps, Entry{Name: a.Name, Skipped: reason})
			continue
		}
		e, err := p.entry(a)
		if err != nil {
			return result, err
		}
		result.Apps = append(result.Apps, e)
	}
	return result, nil
}

// run is the state of one Run; only its goroutine uses it.
type run struct {
	place   bench.Place
	options Options
	cpus    machine.Pinning
	dir     string
	data    string // exists in the server's container only once something has made it
	apps    []App
	samples map[string][]sample // by app and mode
	serial  int
}

// The containers of a measurement.
var clientContainer, serverContainer = bench.Inter.Ends()

// selectApps keeps the apps that can run, and gives the reasons of the others.
func (p *run) selectApps() (skipped map[string]string) {
	skipped = make(map[string]string)
	for _, a := range p.options.Apps {
		if a.skip != nil {
			if reason := a.skip(p.options); reason != "" {
				skipped[a.Name] = reason
				p.progress("skipping "+a.Name+": "+reason, 0, 0, 0)
				continue
			}
		}
		p.apps = append(p.apps, a)
	}
	return skipped
}

func (p *run) progress(what string, done, total int, remaining time.Duration) {
	if p.options.Step != nil {
		p.options.Step(what, done, total, remaining)
	}
}

// prepare makes the files of all apps; those that share them prepare once.
func (p *run) prepare(ctx context.Context) error {
	done := map[string]bool{}
	for _, a := range p.apps {
		if a.prepare == nil || done[a.family] {
			continue
		}
		done[a.family] = true
		p.progress("preparing "+a.family, 0, 0, 0)
		if err := a.prepare(ctx, p); err != nil {
			return fmt.Errorf("prepare %s: %w", a.family, err)
		}
	}
	return nil
}

// inServer runs a command in the server's container to its end.
func (p *run) inServer(ctx context.Context, args ...string) error {
	_, err := proc.Output(p.place.Exec(ctx, bench.Overlay, serverContainer, args...))
	return err
}

func (p *run) clean(ctx context.Context) error {
	return errors.Join(p.inServer(ctx, "rm", "-rf", p.data), os.RemoveAll(p.dir))
}

// rounds measures. A round takes each app in all modes next to each other, in an order that
// rotates.
func (p *run) rounds(ctx context.Context) error {
	start, done, total := time.Now(), 0, p.options.Rounds*len(p.apps)*len(p.options.Modes)
	for round := range p.options.Rounds {
		for _, a := range p.apps {
			for i := range p.options.Modes {
				mode := p.options.Modes[(i+round)%len(p.options.Modes)]
				var remaining time.Duration
				if done > 0 {
					remaining = time.Since(start) / time.Duration(done) * time.Duration(total-done)
				}
				p.progress(fmt.Sprintf("round %d: %s, %s", round+1, a.Name, mode), done, total, remaining)
				sample, err := p.measure(ctx, a, mode)
				if err != nil {
					return fmt.Errorf("%s, %s, round %d: %w\nto see it alone: heddle bench paper --workloads %s --rounds 1", a.Name, mode, round+1, err, a.Name)
				}
				key := a.Name + " " + string(mode)
				p.samples[key] = append(p.samples[key], sample)
				done++
			}
		}
	}
	return nil
}

// stop is what a server may take to end: a database closes its files.
const stop = 20 * time.Second

// measure runs one app in one mode once.
func (p *run) measure(ctx context.Context, a App, mode bench.Mode) (sample sample, err error) {
	l := launch{
		program: p.options.Program, dir: p.dir, data: p.data, number: p.serial, rate: a.Rate * p.options.Scale, warmUp: a.warmUp,
		duration: p.options.Duration, lifetime: p.options.Duration + a.warmUp + a.startLimit() + proc.ClientSlack, cpus: p.cpus,
	}
	p.serial++
	ctx, cancel := context.WithTimeout(ctx, l.lifetime+stop)
	defer cancel()
	ip, err := p.place.IP(ctx, mode, serverContainer)
	if err != nil {
		return sample, fmt.Errorf("address of %s: %w", serverContainer, err)
	}
	l.address = netip.AddrPortFrom(ip, bench.Port(l.number))
	words, ready := bench.Command(l.program, "guard", "-lifetime", l.lifetime.String()), a.ready
	if ready == "" {
		words, ready = append(words, "-until", l.address.String()), proc.ReadyLine
	}
	cmd := p.place.Exec(ctx, mode, serverContainer, append(append(words, "--"), a.server(l)...)...)
	server, err := proc.StartBy(ctx, cmd, ready, cmd.Start, a.startLimit())
	if err != nil {
		return sample, fmt.Errorf("in %s: %w", serverContainer, err)
	}
	defer func() {
		if stopErr := server.StopWithin(stop); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("in %s: %w", serverContainer, stopErr))
		}
	}()
	readings, output, err := p.watch(ctx, a, mode, l, server)
	if err != nil {
		return sample, fmt.Errorf("%w (server said: %q)", err, server.Output)
	}
	if sample, err = a.read(output); err != nil {
		return sample, err
	}
	if sample.begin.IsZero() {
		sample.begin = output.begin
	}
	w, err := windowOf(readings, sample.begin, l.duration)
	if err != nil {
		return sample, err
	}
	return sample, w.addTo(&sample)
}

// watch runs the client and reads the processors' time meanwhile.
func (p *run) watch(ctx context.Context, a App, mode bench.Mode, l launch, server *proc.Server) (readings []cpuReading, out output, err error) {
	client, err := proc.StartLoad(p.place.Exec(ctx, mode, clientContainer, a.client(l)...), a.mark)
	if err != nil {
		return nil, out, fmt.Errorf("client in %s: %w", clientContainer, err)
	}
	defer func() { err = errors.Join(err, client.Kill()) }()
	for over := false; ; {
		r, err := readCPU(server.Cmd.Process.Pid, client.Cmd.Process.Pid)
		if err != nil {
			return nil, out, err
		}
		if readings = append(readings, r); over {
			break
		}
		if over, err = client.RunsFor(ctx, readingPause, a.mark == ""); err != nil {
			return nil, out, fmt.Errorf("client in %s to %s: %w", clientContainer, l.address, err)
		}
	}
	out = output{launch: l, end: time.Now().Add(-clientTail)}
	out.begin = out.end.Add(-l.duration)
	if out.stdout, err = client.Finish(ctx); err != nil {
		return nil, out, fmt.Errorf("client in %s to %s: %w", clientContainer, l.address, err)
	}
	return readings, out, nil
}

// entry aggregates what was measured of an app.
func (p *run) entry(a App) (Entry, error) {
	e := Entry{
		Name: a.Name, Title: a.Title, Rounds: p.options.Rounds, DurationS: p.options.Duration.Seconds(), Rate: a.Rate * p.options.Scale,
	}
	host := p.samples[a.Name+" "+string(bench.Host)]
	for _, mode := range p.options.Modes {
		samples := p.samples[a.Name+" "+string(mode)]
		m := Mode{Mode: mode, Metrics: make(map[string]Value), Latency: make(map[string]*histogram.Histogram)}
		for name := range samples[0].metrics {
			v, h := valuesOf(samples, name), valuesOf(host, name)
			if slices.ContainsFunc(v, func(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) }) {
				return e, fmt.Errorf("%s, %s: %s: no usable value in %v", a.Name, mode, name, v)
			}
			value := Value{Median: bench.Median(v), Min: slices.Min(v), Max: slices.Max(v), Values: v}
			if of := bench.Median(h); of > 0 {
				value.RatioToHost = value.Median / of
			}
			m.Metrics[name] = value
		}
		for _, s := range samples {
			for kind, h := range s.latency {
				if m.Latency[kind] == nil {
					m.Latency[kind] = &histogram.Histogram{}
				}
				m.Latency[kind].Merge(h)
			}
		}
		e.Modes = append(e.Modes, m)
	}
	return e, nil
}

func valuesOf(samples []sample, metric string) (v []float64) {
	for _, s := range samples {
		v = append(v, s.metrics[metric])
	}
	return v
}
