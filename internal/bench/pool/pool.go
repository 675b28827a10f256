// Package pool measures new connections of a dynamically linked program with and without the
// preloaded pool of sockets.
package pool

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
)

// Workloads are what is measured with and without the pool.
var Workloads = report.ConnectWorkloads

// clientSource is the source of a client that is dynamically linked: only such a one can have a
// library preloaded.
//
//go:embed client/crr.c
var clientSource []byte

// Place is a lab whose containers have the preloaded pool of sockets. It runs the workloads crr
// with a dynamically linked client, in all modes, and without the pool in all but bench.Pooled.
type Place struct {
	session.Lab
	Client string // path of the client
}

// buildClient compiles the client into dir, which containers must see, too.
func buildClient(ctx context.Context, dir string) (client string, err error) {
	source := filepath.Join(dir, "crr.c")
	if err := os.WriteFile(source, clientSource, 0o644); err != nil {
		return "", fmt.Errorf("write client: %w", err)
	}
	client = filepath.Join(dir, "crr")
	out, err := exec.CommandContext(ctx, "cc", "-O2", "-pthread", "-o", client, source).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("compile client: %w: install Debian's packages gcc and libc6-dev", err)
	}
	if err != nil {
		return "", fmt.Errorf("compile client: %w\n%s", err, out)
	}
	return client, nil
}

// Exec runs the load generator's arguments in the container, with the other client.
func (p Place) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	if i := slices.Index(args, "crr"); i >= 0 {
		args = append([]string{p.Client}, args[i+1:]...)
	}
	switch mode {
	case bench.Pooled:
		return p.Lab.Exec(ctx, bench.Heddle, container, args...)
	case bench.Heddle:
		args = append([]string{"env", "-u", "LD_PRELOAD"}, args...)
	}
	return p.Lab.Exec(ctx, mode, container, args...)
}

// IP asks the lab.
func (p Place) IP(ctx context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	if mode == bench.Pooled {
		mode = bench.Heddle
	}
	return p.Lab.IP(ctx, mode, container)
}

// HasPool reports whether the lab's containers have the pool; the error says what to do.
func (p Place) HasPool(ctx context.Context) error {
	if _, err := proc.Output(p.Lab.Exec(ctx, bench.Heddle, "n1/c1", "sh", "-c", `test -n "$LD_PRELOAD"`)); err != nil {
		return fmt.Errorf("the lab's containers have no pool: make it anew with --socket-pool, or use --up: %w", err)
	}
	return nil
}

// Result is what `heddle bench pool` found.
type Result struct {
	Machine    string         `json:"machine"`
	Background float64        `json:"background"` // processors that other programs kept busy before
	Results    []bench.Result `json:"results"`
}

// section writes the table of the document.
func section(r Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; other programs kept %.1f processors busy before.", r.Machine, r.Background)
	if r.Background > machine.QuietMachine {
		b.WriteString(" **That is a busy machine: not to judge by.**")
	}
	fmt.Fprintf(&b, " Goals with the pool: %s.\n\n", goals(r))
	t := report.ConnectTable(r.Results, []bench.Mode{bench.Host, bench.Overlay, bench.Heddle, bench.Pooled})
	b.WriteString(strings.TrimPrefix(t.Text(), "\n"))
	return b.String()
}

// goals says which goals were reached with the pool.
func goals(r Result) string {
	return report.SummarizeConnects(report.JudgeConnects(r.Results, bench.Pooled, report.WithPool))
}

// summarize writes what the page of results has.
func summarize(d *report.Document) (string, error) {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return "", err
	}
	var b strings.Builder
	report.RatioTable(&b, r.Results, bench.Scopes, []bench.Mode{bench.Host, bench.Overlay, bench.Heddle, bench.Pooled}, report.ConnectRows())
	fmt.Fprintf(&b, "\nGoals with the pool: %s. %s.\n", goals(r), r.Machine)
	return b.String(), nil
}

// File is the name of the committed results.
const File = "pool.json"

// Command is `heddle bench pool`.
func Command() session.Command {
	var o bench.Options
	return session.Benchmark[Result]{
		Name:  "pool",
		Short: "Measure new connections of a dynamically linked program, with and without the preloaded pool of sockets",
		Long: `Compiles a client (with cc) and measures new connections by 1, 8 and 64 callers on the host, in the overlay, with Heddle, and with Heddle
and the pool. The lab must have been made with --socket-pool; --up does that.`,
		Lab: session.Needs{Program: true, Size: lab.Size{SocketPool: true}},
		Flags: func(f session.Flags) {
			f.Modes = []string{string(bench.Host), string(bench.Overlay), string(bench.Heddle)}
			f.DeclareWorkloads(Workloads, "some of crr, crr8, crr64")
			f.DeclareScopes()
			f.DeclareRuns(5, "runs of each workload, scope and mode")
			f.DeclareDuration(time.Second, "length of a run")
		},
		Check: func(s *session.Session) (err error) {
			o, err = s.Options()
			o.Modes = append(o.Modes, bench.Pooled)
			return err
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			r = Result{Machine: plot.Subtitle(o), Background: s.Background}
			o.Program = s.Program
			r.Results, err = run(ctx, s.Lab, o)
			return r, err
		},
		Print: func(w io.Writer, _ *session.Session, r Result) error { return report.WriteTable(w, r.Results) },
		Report: func(d *report.Document) error {
			var r Result
			if err := d.Read(File, &r); err != nil {
				return err
			}
			return d.Section("", section(r))
		},
		Summaries: []session.Summary{{Part: "pool", Write: summarize}},
	}.Command()
}

// run compiles the client and measures with it.
func run(ctx context.Context, place session.Lab, o bench.Options) (results []bench.Result, err error) {
	dir, err := os.MkdirTemp("/tmp", "heddle-bench-pool-") // containers have the machine's /tmp
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	p := Place{Lab: place}
	if p.Client, err = buildClient(ctx, dir); err != nil {
		return nil, err
	}
	if err := p.HasPool(ctx); err != nil {
		return nil, err
	}
	return bench.Run(ctx, p, o)
}
