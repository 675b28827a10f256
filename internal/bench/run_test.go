package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestScheduleRotatesModesAndInterleaves(t *testing.T) {
	o := Options{Workloads: Workloads[:2], Scopes: Scopes, Modes: Modes}
	var first []Mode
	for run := range 3 {
		cells := o.schedule(run)
		if len(cells) != 2*2*3 {
			t.Fatalf("run %d: %d cells, want 12", run, len(cells))
		}
		first = append(first, cells[0].Mode)
		for i := 0; i < len(cells); i += 3 {
			seen := map[Mode]bool{}
			for _, c := range cells[i : i+3] {
				seen[c.Mode] = true
				if c.Workload.Name != cells[i].Workload.Name || c.Scope != cells[i].Scope {
					t.Errorf("run %d: modes of one cell are apart: %s and %s", run, c, cells[i])
				}
			}
			if len(seen) != 3 {
				t.Errorf("run %d: cells %d..%d have modes %v", run, i, i+2, seen)
			}
		}
	}
	if first[0] == first[1] || first[1] == first[2] || first[0] == first[2] {
		t.Errorf("first modes of the runs: %v, want each once", first)
	}
}

// TestRunThroughLab runs the small workloads through `heddle lab` (the test binary's), on loopback.
func TestRunThroughLab(t *testing.T) {
	o := quickOptions(t, "rr", "crr")
	o.Runs = 2
	var seen []Progress
	o.Progress = func(p Progress) { seen = append(seen, p) }
	place := Lab{Heddle: o.Program[0], Name: "loop"}
	words, remove, err := FindProgram(t.Context(), place, o.Program[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	o.Program = words
	results, err := Run(t.Context(), place, o)
	if err != nil {
		t.Fatal(err)
	}
	checkResults(t, o, results)
	if len(seen) != 8 || seen[7].Done != 7 || seen[7].Total != 8 || seen[0].Remaining != 0 || seen[7].Remaining <= 0 {
		t.Errorf("progress: %+v", seen)
	}
}

// checkResults wants every metric of every cell with a sound value.
func checkResults(t *testing.T, o Options, results []Result) {
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
		if r.Mode == Host && r.RatioToHost != 1 {
			t.Errorf("host's ratio to itself: %+v", r)
		}
	}
}

func TestLabThatIsNotUp(t *testing.T) {
	place := Lab{Heddle: testProgram(t)[0], Name: "none"}
	if err := place.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "no such lab") {
		t.Errorf("Ready: %v, want what the lab said", err)
	}
	if _, _, err := FindProgram(t.Context(), place, testProgram(t)[0]); err == nil || !strings.Contains(err.Error(), "root file system") {
		t.Errorf("FindProgram: %v, want a remedy", err)
	}
}

func TestFailedRunSaysWhichAndWhy(t *testing.T) {
	missing := errors.New("no route table")
	tests := []struct {
		name  string
		place loopPlace
		want  []string
	}{
		{"server dies", loopPlace{prefix: func(_ Mode, c string) []string {
			if c == "n2/c1" {
				return []string{"sh", "-c", "echo no such container >&2; exit 3", "-"}
			}
			return nil
		}}, []string{"rr inter", "run 1", "in n2/c1", "before it listened", "no such container", "exit status 3", "heddle bench --workloads rr"}},
		{"client fails", loopPlace{prefix: func(_ Mode, c string) []string {
			if c == "n1/c1" {
				return []string{"sh", "-c", "echo socket: refused >&2; exit 9", "-"}
			}
			return nil
		}}, []string{"rr inter host", "client in n1/c1", "socket: refused", "exit status 9", "--scopes inter --modes host "}},
		{"client prints nonsense", loopPlace{prefix: func(_ Mode, c string) []string {
			if c == "n1/c1" {
				return []string{"echo"}
			}
			return nil
		}}, []string{"read rr"}},
		{"no address", loopPlace{ip: func(m Mode, _ string) (netip.Addr, error) {
			if m == Heddle {
				return netip.Addr{}, missing
			}
			return netip.MustParseAddr("127.0.0.1"), nil
		}}, []string{"rr inter heddle", "address of n2/c1", missing.Error(), "--modes host,heddle "}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			results, err := Run(t.Context(), tt.place, quickOptions(t, "rr"))
			var failed *RunError
			if !errors.As(err, &failed) || results != nil {
				t.Fatalf("got %v and %d results, want a RunError and none", err, len(results))
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q\ndoes not say %q", err, want)
				}
			}
		})
	}
}

// TestCancelEndsServers cancels a bench in its first measurement; the server must be gone when Run is back.
func TestCancelEndsServers(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var server *exec.Cmd
	place := hookedPlace{exec: func(c *exec.Cmd, container string) {
		if container == "n2/c1" {
			server = c
		} else {
			cancel() // the server is ready by now
		}
	}}
	_, err := Run(ctx, place, quickOptions(t, "rr"))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v, want context.Canceled", err)
	}
	if server == nil || server.ProcessState == nil {
		t.Error("server was not waited for")
	}
}

// hookedPlace is a loopPlace that shows each command before it runs.
type hookedPlace struct {
	loopPlace
	exec func(c *exec.Cmd, container string)
}

func (p hookedPlace) Exec(ctx context.Context, mode Mode, container string, args ...string) *exec.Cmd {
	c := p.loopPlace.Exec(ctx, mode, container, args...)
	p.exec(c, container)
	return c
}

func TestOptionsLimits(t *testing.T) {
	good := quickOptions(t, "rr")
	for name, change := range map[string]func(*Options){
		"--runs":     func(o *Options) { o.Runs = 0 },
		"--duration": func(o *Options) { o.Duration = 1 },
	} {
		o := good
		change(&o)
		if _, err := Run(t.Context(), loopPlace{}, o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s out of bounds: %v", name, err)
		}
	}
}

func TestParseNames(t *testing.T) {
	if m, err := ParseModes([]string{"heddle", "host"}); err != nil || fmt.Sprint(m) != "[host heddle]" {
		t.Errorf("ParseModes: %v, %v", m, err)
	}
	for _, bad := range [][]string{{"heddle"}, {"host", "slim"}, {}} {
		if m, err := ParseModes(bad); err == nil || !strings.Contains(err.Error(), "--modes") {
			t.Errorf("ParseModes(%v): %v, %v", bad, m, err)
		}
	}
	if s, err := ParseScopes([]string{"intra"}); err != nil || fmt.Sprint(s) != "[intra]" {
		t.Errorf("ParseScopes: %v, %v", s, err)
	}
	w, err := ParseWorkloads(nil)
	if err != nil || len(w) != 3 || w[0].Name != "iperf3" || w[2].Name != "crr" {
		t.Errorf("ParseWorkloads: %v, %v", w, err)
	}
	if w, err = ParseWorkloads([]string{"memory"}); err != nil || len(w) != 1 {
		t.Errorf("ParseWorkloads(memory): %v, %v", w, err)
	}
}

func TestCopyProgram(t *testing.T) {
	self := testProgram(t)[0]
	path, remove, err := copyProgram(self, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := exec.Command(path, "bench", "peer", "check").Run(); err != nil {
		t.Errorf("run the copy: %v", err)
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("copy after remove: %v", err)
	}
}

func TestBackgroundSeesALoop(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	spinning := make(chan struct{})
	go func() {
		defer close(spinning)
		for ctx.Err() == nil {
		}
	}()
	busy, err := Background(t.Context())
	cancel()
	<-spinning
	// The loop may have had to share its processor.
	if err != nil || busy < QuietMachine || busy > float64(1<<10) {
		t.Errorf("got %v, %v", busy, err)
	}
	if _, err := Background(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel: %v", err)
	}
}
