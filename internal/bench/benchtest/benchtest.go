// Package benchtest has what tests of benchmarks share: a test binary that stands in for heddle,
// and places on loopback.
package benchtest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
)

// The test binary stands in for the heddle program: `bench loadgen` is the real load generator, and
// `lab` is a lab whose every container is this machine's loopback.
func Main(m *testing.M) {
	args := os.Args[1:]
	var err error
	switch {
	case len(args) > 1 && args[0] == "bench" && args[1] == "loadgen":
		err = loadgen.Main(context.Background(), args[2:], loadgen.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	case len(args) > 1 && args[0] == "lab":
		err = fakeLab(args[1], args[2:])
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// fakeLab answers `lab ip` and `lab exec` for the lab named "loop" and knows no other.
func fakeLab(verb string, args []string) error {
	if len(args) < 2 || args[0] != "--lab" || args[1] != "loop" {
		return fmt.Errorf("lab %v: no such lab", args)
	}
	switch verb {
	case "ip":
		fmt.Println("127.0.0.1")
		return nil
	case "exec":
		words := args[slices.Index(args, "--")+1:]
		path, err := exec.LookPath(words[0])
		if err != nil {
			return err
		}
		return syscall.Exec(path, words, os.Environ())
	default:
		return fmt.Errorf("lab %s: unknown", verb)
	}
}

// Program gives the words that run the peer in this test binary.
func Program(t *testing.T) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{self, "bench", "loadgen"}
}

// LoopPlace runs everything on this machine's loopback, through a prefix for each command.
type LoopPlace struct {
	Prefix  func(mode bench.Mode, container string) []string
	Address func(mode bench.Mode, container string) (netip.Addr, error)
}

func (p LoopPlace) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	if p.Prefix != nil {
		args = append(slices.Clone(p.Prefix(mode, container)), args...)
	}
	return exec.CommandContext(ctx, args[0], args[1:]...)
}

func (p LoopPlace) IP(_ context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	if p.Address != nil {
		return p.Address(mode, container)
	}
	return netip.MustParseAddr("127.0.0.1"), nil
}

// QuickOptions is a bench that takes a second or so.
func QuickOptions(t *testing.T, workloads ...string) bench.Options {
	t.Helper()
	w, err := bench.ParseWorkloads(workloads)
	if err != nil {
		t.Fatal(err)
	}
	return bench.Options{
		Workloads: w, Scopes: []bench.Scope{bench.Inter}, Modes: []bench.Mode{bench.Host, bench.Heddle}, Runs: 1,
		Duration: 200 * time.Millisecond, Program: Program(t),
	}
}

// SampleResults makes results of three runs: overlay is twice as slow as host, heddle 4 % faster.
func SampleResults(t testing.TB, workloads ...string) []bench.Result {
	t.Helper()
	w, err := bench.ParseWorkloads(workloads)
	if err != nil {
		t.Fatal(err)
	}
	o := bench.Options{Workloads: w, Scopes: bench.Scopes, Modes: bench.Modes}
	factor := map[bench.Mode]float64{bench.Host: 1, bench.Overlay: 2, bench.Heddle: 0.96}
	base := map[bench.Unit]float64{bench.BitsPerSecond: 33e9, bench.SecondsPerGB: 0.3, bench.Microseconds: 60, bench.PerSecond: 15000}
	s := bench.NewSeries()
	for _, spread := range []float64{1, 0.9, 1.2} {
		for _, cell := range o.Schedule(0) {
			sample := bench.Sample{}
			for _, m := range cell.Workload.Metrics {
				v := base[m.Unit] * spread * factor[cell.Mode]
				if m.Higher {
					v = base[m.Unit] * spread / factor[cell.Mode]
				}
				sample[m.Name] = v
			}
			if err := s.Add(cell, sample); err != nil {
				t.Fatal(err)
			}
		}
	}
	results, err := s.Results(o)
	if err != nil {
		t.Fatal(err)
	}
	return results
}

// CheckResults wants every metric of every cell with a sound value.
func CheckResults(t *testing.T, o bench.Options, results []bench.Result) {
	t.Helper()
	want := 0
	for _, w := range o.Workloads {
		want += len(w.Metrics) * len(o.Scopes) * len(o.Modes)
	}
	if len(results) != want {
		t.Errorf("%d results, want %d", len(results), want)
	}
	for _, r := range results {
		if r.Median <= 0 || r.Min > r.Median || r.Max < r.Median || r.Runs != o.Runs || r.RatioToHost <= 0 {
			t.Errorf("unsound result %+v", r)
		}
		if r.Mode == bench.Host && r.RatioToHost != 1 {
			t.Errorf("host's ratio to itself: %+v", r)
		}
	}
}
