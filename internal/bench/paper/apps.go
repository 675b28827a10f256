package paper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/proc"
)

// App is an application of the paper's evaluation under one load: a row of Apps.
type App struct {
	Name  string // as in JSON and --workloads
	Title string
	// Rate is the operations a second that the client makes; 0 for as many as there can be.
	Rate float64

	family   string // apps of one family share what is prepared, and their name selects all of them
	programs []tool // that it needs
	skip     func(Options) (reason string)
	prepare  func(context.Context, *run) error
	server   func(launch) []string
	client   func(launch) []string
	// mark is what the client prints when its measured phase is over. Without it that phase is
	// taken from the client's end: it ends clientTail before that. So a client that is slow to
	// start does not matter.
	mark   string
	warmUp time.Duration
	start  time.Duration // that the server may take to listen, if more than usual
	ready  string        // what it prints then; "" if accepting is enough of a sign
	read   func(output) (sample, error)
}

// paperProgram is a program and the Debian package that has it.
type tool struct {
	find func() error
	name string
	deb  string
}

func program(name, deb string) tool {
	return tool{name: name, deb: deb, find: func() error { _, err := exec.LookPath(name); return err }}
}

func (a App) startLimit() time.Duration { return max(a.start, proc.ReadyTimeout) }

// The load of the paper's memtier_benchmark.
const (
	memcacheThreads     = 4
	memcacheConnections = 200
)

// Apps lists every application and load, in the order of reports.
var Apps = append(iperfApps(),
	memcachedApp("memcached", "memcached, 4 threads x 50 connections, SET:GET 1:10", 0),
	memcachedApp("memcached-rate", "memcached, the same at a fixed rate", 30_000),
	nginxApp("nginx-1k", "nginx, 1 KB, 2 threads, 100 connections", "1k", 12_000),
	nginxApp("nginx-1m", "nginx, 1 MB, 2 threads, 100 connections", "1m", 600),
	nginxApp("nginx-1k-free", "nginx, 1 KB, as fast as it goes", "1k", 0),
	postgresApp("pgbench", "PostgreSQL, pgbench (TPC-B), 1 M accounts, 4 threads, 100 connections", 400, 100),
	postgresApp("pgbench-connect", "PostgreSQL, pgbench -C (a connection a transaction), 10 clients", 0, 10, "-C"),
	kafkaApp(50_000),
)

// ParseApps reads names of apps or of families ("nginx"), and gives the apps in the order of
// reports; no names means all.
func ParseApps(names []string) ([]App, error) {
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == "" })
	if len(names) == 0 {
		return Apps, nil
	}
	wanted := make(map[string]bool)
	for _, n := range names {
		wanted[n] = true
	}
	var picked []App
	var known []string
	used := make(map[string]bool)
	for _, a := range Apps {
		known = append(known, a.Name)
		if wanted[a.Name] || wanted[a.family] {
			picked = append(picked, a)
			used[a.Name], used[a.family] = true, true
		}
	}
	for _, n := range names {
		if !used[n] {
			return nil, fmt.Errorf("--workloads %q: unknown; want some of %v", n, known)
		}
	}
	return picked, nil
}

// missingPrograms says before anything is started which programs the machine lacks, and the
// packages that have them.
func missingPrograms(apps []App) error {
	var missing, packages []string
	seen := make(map[string]bool)
	for _, a := range apps {
		for _, p := range a.programs {
			if seen[p.name] || p.find() == nil {
				continue
			}
			seen[p.name] = true
			missing = append(missing, fmt.Sprintf("%s (for %s)", p.name, a.family))
			packages = append(packages, p.deb)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("missing programs: %s\ninstall them: apt-get install --no-install-recommends %s\nor leave them out by --workloads",
		strings.Join(missing, ", "), strings.Join(packages, " "))
}

func memcachedApp(name, title string, rate float64) App {
	return App{
		Name: name, Title: title, Rate: rate, family: "memcached",
		programs: []tool{program("memcached", "memcached")},
		warmUp:   time.Second, mark: loadgen.Measured + "\n",
		server: func(l launch) []string {
			return []string{"memcached", "-u", "root", "-l", l.address.Addr().String(), "-p", port(l), "-U", "0", "-m", "256", "-t", "4"}
		},
		client: func(l launch) []string {
			return loadCommand(l, "memcache", memcacheThreads, memcacheConnections)
		},
		read: readLoad,
	}
}

func port(l launch) string { return strconv.Itoa(int(l.address.Port())) }

// loadCommand gives the command line of one of our own loads.
func loadCommand(l launch, protocol string, threads, connections int, more ...string) []string {
	words := bench.Command(l.program, protocol, "-to", l.address.String(), "-threads", strconv.Itoa(threads), "-connections", strconv.Itoa(connections),
		"-rate", strconv.FormatFloat(l.rate, 'f', -1, 64), "-warm-up", l.warmUp.String(), "-duration", l.duration.String())
	return append(words, more...)
}

// readLoad reads what one of our own loads printed: its result in the last line.
func readLoad(o output) (s sample, err error) {
	_, text, _ := strings.Cut(string(o.stdout), loadgen.Measured+"\n")
	var l loadgen.Load
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return s, fmt.Errorf("read load: %w", err)
	}
	if l.Operations <= 0 || l.ElapsedS <= 0 {
		return s, errors.New("load: no operations")
	}
	s = latencySample(l.Latency)
	s.begin = time.Unix(0, l.BeginNs)
	s.metrics[MetricRate] = float64(l.Operations) / l.ElapsedS
	if o.launch.rate > 0 {
		s.metrics[MetricUnkept] = float64(l.Unfinished) / float64(l.Operations+l.Unfinished)
	}
	return s, nil
}

// latencySample makes the metrics of latencies.
func latencySample(latency map[string]*histogram.Histogram) sample {
	s := sample{metrics: make(map[string]float64), latency: latency}
	micros := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	all := &histogram.Histogram{}
	for kind, h := range latency {
		all.Merge(h)
		s.metrics[LatencyMetric(kind, "mean")] = micros(h.Mean())
		for what, q := range map[string]float64{"p50": 0.5, "p99": 0.99, "p999": 0.999} {
			s.metrics[LatencyMetric(kind, what)] = micros(h.Quantile(q))
		}
	}
	s.metrics[LatencyMetric("all", "mean")] = micros(all.Mean())
	s.metrics[LatencyMetric("all", "p999")] = micros(all.Quantile(0.999))
	return s
}
