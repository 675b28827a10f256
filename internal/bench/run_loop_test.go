package bench_test

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
	"heddle.dev/heddle/internal/bench/session"
)

// TestRunThroughLab runs the small workloads through `heddle lab` (the test binary's), on loopback.
func TestRunThroughLab(t *testing.T) {
	o := benchtest.QuickOptions(t, "rr", "crr")
	o.Runs = 2
	var seen []bench.Progress
	o.Progress = func(p bench.Progress) { seen = append(seen, p) }
	place := session.Lab{Heddle: o.Program[0], Name: "loop"}
	words, remove, err := session.FindProgram(t.Context(), place, o.Program[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	o.Program = words
	results, err := bench.Run(t.Context(), place, o)
	if err != nil {
		t.Fatal(err)
	}
	benchtest.CheckResults(t, o, results)
	if len(seen) != 8 || seen[7].Done != 7 || seen[7].Total != 8 || seen[0].Remaining != 0 || seen[7].Remaining <= 0 {
		t.Errorf("progress: %+v", seen)
	}
}

func TestLabThatIsNotUp(t *testing.T) {
	place := session.Lab{Heddle: benchtest.Program(t)[0], Name: "none"}
	if _, err := place.IP(t.Context(), bench.Heddle, "n1/c1"); err == nil || !strings.Contains(err.Error(), "no such lab") {
		t.Errorf("IP: %v, want what the lab said", err)
	}
	if _, _, err := session.FindProgram(t.Context(), place, benchtest.Program(t)[0]); err == nil || !strings.Contains(err.Error(), "root file system") {
		t.Errorf("FindProgram: %v, want a remedy", err)
	}
}

func TestFailedRunSaysWhichAndWhy(t *testing.T) {
	missing := errors.New("no route table")
	tests := []struct {
		name  string
		place benchtest.LoopPlace
		want  []string
	}{
		{"server dies", benchtest.LoopPlace{Prefix: func(_ bench.Mode, c string) []string {
			if c == "n2/c1" {
				return []string{"sh", "-c", "echo no such container >&2; exit 3", "-"}
			}
			return nil
		}}, []string{"rr inter", "run 1", "in n2/c1", "before it listened", "no such container", "exit status 3", "heddle bench --workloads rr"}},
		{"client fails", benchtest.LoopPlace{Prefix: func(_ bench.Mode, c string) []string {
			if c == "n1/c1" {
				return []string{"sh", "-c", "echo socket: refused >&2; exit 9", "-"}
			}
			return nil
		}}, []string{"rr inter host", "client in n1/c1", "socket: refused", "exit status 9", "--scopes inter --modes host "}},
		{"client prints nonsense", benchtest.LoopPlace{Prefix: func(_ bench.Mode, c string) []string {
			if c == "n1/c1" {
				return []string{"echo"}
			}
			return nil
		}}, []string{"read rr"}},
		{"no address", benchtest.LoopPlace{Address: func(m bench.Mode, _ string) (netip.Addr, error) {
			if m == bench.Heddle {
				return netip.Addr{}, missing
			}
			return netip.MustParseAddr("127.0.0.1"), nil
		}}, []string{"rr inter heddle", "address of n2/c1", missing.Error(), "--modes host,heddle "}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			results, err := bench.Run(t.Context(), tt.place, benchtest.QuickOptions(t, "rr"))
			var failed *bench.RunError
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

// TestCancelEndsServers cancels a bench in its first measurement; the server must be gone when Run
// is back.
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
	_, err := bench.Run(ctx, place, benchtest.QuickOptions(t, "rr"))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v, want context.Canceled", err)
	}
	if server == nil || server.ProcessState == nil {
		t.Error("server was not waited for")
	}
}

// hookedPlace is a loopPlace that shows each command before it runs.
type hookedPlace struct {
	benchtest.LoopPlace
	exec func(c *exec.Cmd, container string)
}

func (p hookedPlace) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	c := p.LoopPlace.Exec(ctx, mode, container, args...)
	p.exec(c, container)
	return c
}

func TestOptionsLimits(t *testing.T) {
	good := benchtest.QuickOptions(t, "rr")
	for name, change := range map[string]func(*bench.Options){
		"--runs":     func(o *bench.Options) { o.Runs = 0 },
		"--duration": func(o *bench.Options) { o.Duration = 1 },
	} {
		o := good
		change(&o)
		if _, err := bench.Run(t.Context(), benchtest.LoopPlace{}, o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s out of bounds: %v", name, err)
		}
	}
}
