package bench

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

	"heddle.dev/heddle/internal/bench/histogram"
)

// PaperOptions say what of the paper's evaluation to repeat.
type PaperOptions struct {
	Apps     []PaperApp
	Modes    []Mode // host first; see ParseModes
	Rounds   int
	Duration time.Duration // of the measured window
	// Scale multiplies the fixed rates, for machines that are faster or slower than the one they were chosen on.
	Scale float64
	// Program is the command line that runs peer.Main inside the place.
	Program []string
	// Kafka is the folder with Kafka's jars.
	Kafka string
	// Progress, if set, hears of every measurement before it starts.
	Progress func(PaperProgress)
}

// Validate reports what is out of bounds.
func (o PaperOptions) Validate() error {
	switch {
	case o.Rounds < 1 || o.Rounds > MaxRuns:
		return fmt.Errorf("--rounds %d: want 1..%d", o.Rounds, MaxRuns)
	case o.Duration < 500*time.Millisecond || o.Duration > MaxDuration:
		return fmt.Errorf("--duration %s: want 500ms..%s", o.Duration, MaxDuration)
	case o.Scale < 0.001 || o.Scale > 1000:
		return fmt.Errorf("--scale %g: want 0.001..1000", o.Scale)
	}
	return nil
}

// PaperProgress is what is about to happen and how far the bench is.
type PaperProgress struct {
	What        string
	Done, Total int           // measurements
	Remaining   time.Duration // an estimate; 0 before the first
}

// paperSample is what one measurement yields.
type paperSample struct {
	metrics map[string]float64
	latency map[string]*histogram.Histogram
	begin   time.Time // of the window, if the client knows it
}

// paperLaunch is what the command lines of one measurement are made from.
type paperLaunch struct {
	program  []string
	dir      string         // the bench's folder, the same in the containers
	data     string         // the server's folder, in its container's memory
	address  netip.AddrPort // of the server
	number   int            // of the measurement
	rate     float64        // of a fixed rate, scaled
	warmUp   time.Duration
	duration time.Duration // of the window
	lifetime time.Duration // of a server, at most
	cpus     pinning
}

// paperOutput is what a client left.
type paperOutput struct {
	launch     paperLaunch
	stdout     []byte
	begin, end time.Time // of the window, for a client that does not know it: counted from its end
}

// RunPaper measures every app in every mode, mode by mode and round by round, and gives one entry for each app. It stops at
// the first measurement that fails: ratios of half a comparison would mislead. Apps that cannot run here for want of
// something that is not a Debian package are left out with the reason.
func RunPaper(ctx context.Context, place Place, o PaperOptions) (result PaperResult, err error) {
	if err := o.Validate(); err != nil {
		return result, err
	}
	if err := missingPrograms(o.Apps); err != nil {
		return result, err
	}
	p := &paperRun{place: place, options: o, samples: make(map[string][]paperSample)}
	if p.cpus, err = choosePinning(); err != nil {
		return result, err
	}
	// Containers have the machine's own /tmp.
	if p.dir, err = os.MkdirTemp("/tmp", "heddle-paper-"); err != nil {
		return result, fmt.Errorf("make folder: %w", err)
	}
	p.data = "/dev/shm/" + filepath.Base(p.dir)
	defer func() {
		// The context may be over; what was made must go all the same.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readyTimeout)
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
			result.Apps = append(result.Apps, PaperEntry{Name: a.Name, Skipped: reason})
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

// paperRun is the state of one RunPaper; only its goroutine uses it.
type paperRun struct {
	place   Place
	options PaperOptions
	cpus    pinning
	dir     string
	data    string // exists in the server's container only once something has made it
	apps    []PaperApp
	samples map[string][]paperSample // by app and mode
	serial  int
}

// The containers of a measurement.
var paperClient, paperServer = Inter.Ends()

// selectApps keeps the apps that can run, and gives the reasons of the others.
func (p *paperRun) selectApps() (skipped map[string]string) {
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

func (p *paperRun) progress(what string, done, total int, remaining time.Duration) {
	if p.options.Progress != nil {
		p.options.Progress(PaperProgress{What: what, Done: done, Total: total, Remaining: remaining})
	}
}

// prepare makes the files of all apps; those that share them prepare once.
func (p *paperRun) prepare(ctx context.Context) error {
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
func (p *paperRun) inServer(ctx context.Context, args ...string) error {
	_, err := runClient(p.place.Exec(ctx, Overlay, paperServer, args...))
	return err
}

func (p *paperRun) clean(ctx context.Context) error {
	return errors.Join(p.inServer(ctx, "rm", "-rf", p.data), os.RemoveAll(p.dir))
}

// rounds measures. A round takes each app in all modes next to each other, in an order that rotates.
func (p *paperRun) rounds(ctx context.Context) error {
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

// paperStop is what a server may take to end: a database closes its files.
const paperStop = 20 * time.Second

// measure runs one app in one mode once.
func (p *paperRun) measure(ctx context.Context, a PaperApp, mode Mode) (sample paperSample, err error) {
	l := paperLaunch{
		program: p.options.Program, dir: p.dir, data: p.data, number: p.serial, rate: a.Rate * p.options.Scale, warmUp: a.warmUp,
		duration: p.options.Duration, lifetime: p.options.Duration + a.warmUp + a.startLimit() + clientSlack, cpus: p.cpus,
	}
	p.serial++
	ctx, cancel := context.WithTimeout(ctx, l.lifetime+paperStop)
	defer cancel()
	ip, err := p.place.IP(ctx, mode, paperServer)
	if err != nil {
		return sample, fmt.Errorf("address of %s: %w", paperServer, err)
	}
	l.address = netip.AddrPortFrom(ip, uint16(firstPort+l.number%portCount))
	words, ready := command(l.program, "guard", "-lifetime", l.lifetime.String()), a.ready
	if ready == "" {
		words, ready = append(words, "-until", l.address.String()), peerReadyLine
	}
	cmd := p.place.Exec(ctx, mode, paperServer, append(append(words, "--"), a.server(l)...)...)
	server, err := startServerBy(ctx, cmd, ready, cmd.Start, a.startLimit())
	if err != nil {
		return sample, fmt.Errorf("in %s: %w", paperServer, err)
	}
	defer func() {
		if stopErr := server.stopWithin(paperStop); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("in %s: %w", paperServer, stopErr))
		}
	}()
	readings, output, err := p.watch(ctx, a, mode, l, server)
	if err != nil {
		return sample, fmt.Errorf("%w (server said: %q)", err, server.output)
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
func (p *paperRun) watch(ctx context.Context, a PaperApp, mode Mode, l paperLaunch, server *serverProcess) (readings []cpuReading, out paperOutput, err error) {
	client, err := startLoad(p.place.Exec(ctx, mode, paperClient, a.client(l)...), a.mark)
	if err != nil {
		return nil, out, fmt.Errorf("client in %s: %w", paperClient, err)
	}
	defer func() { err = errors.Join(err, client.kill()) }()
	for over := false; ; {
		r, err := readCPU(server.cmd.Process.Pid, client.cmd.Process.Pid)
		if err != nil {
			return nil, out, err
		}
		if readings = append(readings, r); over {
			break
		}
		if over, err = client.runsFor(ctx, readingPause, a.mark == ""); err != nil {
			return nil, out, fmt.Errorf("client in %s to %s: %w", paperClient, l.address, err)
		}
	}
	out = paperOutput{launch: l, end: time.Now().Add(-clientTail)}
	out.begin = out.end.Add(-l.duration)
	if out.stdout, err = client.finish(ctx); err != nil {
		return nil, out, fmt.Errorf("client in %s to %s: %w", paperClient, l.address, err)
	}
	return readings, out, nil
}

// entry aggregates what was measured of an app.
func (p *paperRun) entry(a PaperApp) (PaperEntry, error) {
	e := PaperEntry{
		Name: a.Name, Title: a.Title, Rounds: p.options.Rounds, DurationS: p.options.Duration.Seconds(), Rate: a.Rate * p.options.Scale,
	}
	host := p.samples[a.Name+" "+string(Host)]
	for _, mode := range p.options.Modes {
		samples := p.samples[a.Name+" "+string(mode)]
		m := PaperMode{Mode: mode, Metrics: make(map[string]PaperValue), Latency: make(map[string]*histogram.Histogram)}
		for name := range samples[0].metrics {
			v, h := valuesOf(samples, name), valuesOf(host, name)
			if slices.ContainsFunc(v, func(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) }) {
				return e, fmt.Errorf("%s, %s: %s: no usable value in %v", a.Name, mode, name, v)
			}
			value := PaperValue{Median: median(v), Min: slices.Min(v), Max: slices.Max(v), Values: v}
			if of := median(h); of > 0 {
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

func valuesOf(samples []paperSample, metric string) (v []float64) {
	for _, s := range samples {
		v = append(v, s.metrics[metric])
	}
	return v
}
