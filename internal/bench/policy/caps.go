package policy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/session"
)

// The experiment of figure 7 of "Slim: OS Kernel Support for a Low-Overhead Container Overlay
// Network" (NSDI 2019): two containers of one node send to another node, each over one connection.
// One is capped at 15, 10 and 5 units; then the cap is lifted and a rule bars it. A unit is a 37th
// of what both get without a cap, as it was there (18.5 Gbit/s each).
const (
	policyUnits    = 37
	policyInterval = 500 * time.Millisecond
	policyLimited  = "n1/c1"
	policyOther    = "n1/c2"
	policyServer   = "n2/c1"
	policyPort     = 5301 // and the next
	policyName     = "bench-figure-7"
)

// Caps are the caps of the limited container, in units, in the order of the experiment.
var Caps = []int{15, 10, 5}

// CapsPhase is a part of the experiment between two changes.
type CapsPhase struct {
	What   string  `json:"what"`
	StartS float64 `json:"start_s"`
	EndS   float64 `json:"end_s"`
	// CapBPS is the cap of the limited container in bits a second; 0: none.
	CapBPS float64 `json:"cap_bps"`
	// Barred says that the limited container may not talk to its peer.
	Barred bool `json:"barred"`
	// Medians of the samples that lie in the phase as a whole, but for the first.
	LimitedBPS float64 `json:"limited_median_bps"`
	OtherBPS   float64 `json:"other_median_bps"`
}

// CapsSample is what one container's connection carried in half a second before AtS.
type CapsSample struct {
	Container string  `json:"container"`
	AtS       float64 `json:"at_s"`
	BPS       float64 `json:"bps"`
}

// CapsResult is the outcome of RunCaps.
type CapsResult struct {
	UnitBPS float64      `json:"unit_bps"`
	Limited string       `json:"limited"`
	Other   string       `json:"other"`
	Phases  []CapsPhase  `json:"phases"`
	Samples []CapsSample `json:"samples"`
}

// policyRun is an experiment that goes on.
type capsRun struct {
	place  session.Lab
	barred bool // the rule may be in force

	mu      sync.Mutex // guards what follows
	began   time.Time  // zero until all connections are there
	samples []CapsSample
}

// RunCaps repeats the experiment on a lab that is up, with phases of length phase. Limits and rule
// are lifted when it returns.
func RunCaps(ctx context.Context, place session.Lab, phase time.Duration, progress io.Writer) (_ CapsResult, err error) {
	r := &capsRun{place: place}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() { err = errors.Join(err, r.lift()) }()
	for i, container := range []string{policyLimited, policyOther} {
		stop, err := r.send(ctx, container, policyPort+i, phase*time.Duration(len(Caps)+3))
		if err != nil {
			return CapsResult{}, fmt.Errorf("%s: %w", container, err)
		}
		defer stop()
	}
	r.mu.Lock()
	r.began = time.Now()
	r.mu.Unlock()
	out := CapsResult{Limited: policyLimited, Other: policyOther}
	during := func(p CapsPhase) (CapsPhase, error) {
		_, _ = fmt.Fprintf(progress, "%5.1f s: %s\n", time.Since(r.began).Seconds(), p.What) // a courtesy
		p.StartS = time.Since(r.began).Seconds()
		select {
		case <-time.After(phase):
		case <-ctx.Done():
			return p, ctx.Err()
		}
		p.EndS = time.Since(r.began).Seconds()
		p.LimitedBPS, p.OtherBPS = r.median(policyLimited, p), r.median(policyOther, p)
		out.Phases = append(out.Phases, p)
		return p, nil
	}
	first, err := during(CapsPhase{What: "no limits"})
	if err != nil {
		return out, err
	}
	out.UnitBPS = (first.LimitedBPS + first.OtherBPS) / policyUnits
	for _, units := range Caps {
		limit := float64(units) * out.UnitBPS
		if err := r.limit(ctx, "set", policyLimited, "--egress", strconv.FormatFloat(limit, 'f', 0, 64)+"bit"); err != nil {
			return out, err
		}
		if _, err := during(CapsPhase{What: fmt.Sprintf("cap of %d units", units), CapBPS: limit}); err != nil {
			return out, err
		}
	}
	if err := errors.Join(r.limit(ctx, "clear", policyLimited), r.bar(ctx)); err != nil {
		return out, err
	}
	if _, err := during(CapsPhase{What: "no cap; barred by a rule", Barred: true}); err != nil {
		return out, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	out.Samples = slices.Clone(r.samples)
	return out, nil
}

// send makes a container send over one connection until stop. What arrives is sampled at the other
// end.
func (r *capsRun) send(ctx context.Context, container string, port int, long time.Duration) (stop func(), err error) {
	server := r.place.Exec(ctx, bench.Heddle, policyServer, "iperf3", "-s", "-1", "-p", strconv.Itoa(port), "-f", "m", "-i", "0.5", "--forceflush")
	proc.Prepare(server)
	lines, err := server.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("open server output: %w", err)
	}
	if err := server.Start(); err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	ready, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		r.follow(lines, container, ready)
		_ = server.Wait() // a connection that is cut ends it with an error: that is what is shown
	}()
	select {
	case <-ready:
	case <-done:
		return nil, errors.New("server ended before it listened")
	case <-time.After(proc.ReadyTimeout):
		return nil, fmt.Errorf("server not ready after %s", proc.ReadyTimeout)
	}
	addr, err := r.place.IP(ctx, bench.Heddle, policyServer)
	if err != nil {
		return nil, err
	}
	client := r.place.Exec(ctx, bench.Heddle, container, "iperf3", "-c", addr.String(), "-p", strconv.Itoa(port),
		"-t", strconv.Itoa(int(long.Seconds())), "--connect-timeout", "5000")
	proc.Prepare(client)
	if err := client.Start(); err != nil {
		return nil, fmt.Errorf("start client: %w", err)
	}
	return func() {
		for _, cmd := range []*exec.Cmd{client, server} {
			_ = cmd.Cancel() // it may have ended
		}
		_ = client.Wait()
		<-done
	}, nil
}

var policyLine = regexp.MustCompile(`sec +[0-9.]+ [KMG]?Bytes +([0-9.]+) Mbits/sec *$`)

// follow reads what the server prints and keeps a sample for each half second. ready is closed when
// it listens.
func (r *capsRun) follow(lines io.Reader, container string, ready chan<- struct{}) {
	for s := bufio.NewScanner(lines); s.Scan(); {
		if strings.HasPrefix(s.Text(), "Server listening") {
			close(ready)
		}
		m := policyLine.FindStringSubmatch(s.Text())
		if m == nil {
			continue
		}
		if mbit, err := strconv.ParseFloat(m[1], 64); err == nil {
			r.add(container, mbit*1e6)
		}
	}
}

// add keeps a sample that has just ended, once the experiment has begun.
func (r *capsRun) add(container string, bps float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.began.IsZero() {
		r.samples = append(r.samples, CapsSample{Container: container, AtS: time.Since(r.began).Seconds(), BPS: bps})
	}
}

// median is that of a container's samples in p, without the first, which began before it; 0 if
// there are none.
func (r *capsRun) median(container string, p CapsPhase) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	var in []float64
	for _, s := range r.samples {
		if s.Container == container && s.AtS > p.StartS+2*policyInterval.Seconds() && s.AtS <= p.EndS {
			in = append(in, s.BPS)
		}
	}
	if len(in) == 0 {
		return 0
	}
	slices.Sort(in)
	return in[len(in)/2]
}

// heddle runs the command line.
func (r *capsRun) heddle(ctx context.Context, stdin string, args ...string) error {
	if r.place.Name != "" {
		args = append(args, "--lab", r.place.Name)
	}
	cmd := exec.CommandContext(ctx, r.place.Heddle, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if _, err := proc.Output(cmd); err != nil {
		return fmt.Errorf("heddle %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func (r *capsRun) limit(ctx context.Context, verb string, args ...string) error {
	return r.heddle(ctx, "", append([]string{"limit", verb}, args...)...)
}

// bar puts the rule in force that keeps the limited container from its peer.
func (r *capsRun) bar(ctx context.Context) error {
	from, err := r.place.IP(ctx, bench.Heddle, policyLimited)
	if err != nil {
		return err
	}
	to, err := r.place.IP(ctx, bench.Heddle, policyServer)
	if err != nil {
		return err
	}
	document := map[string]any{
		"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": policyName,
		"subject": map[string]any{"prefixes": []string{from.String() + "/32"}},
		"egress": map[string]any{"rules": []any{map[string]any{
			"name": "barred", "action": "deny", "peers": []any{map[string]any{"prefix": to.String() + "/32"}},
		}}},
	}
	raw, err := json.Marshal(document)
	if err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	r.barred = true
	return r.heddle(ctx, string(raw), "policy", "apply", "-f", "-")
}

// lift undoes what the experiment set, whatever became of it.
func (r *capsRun) lift() error {
	ctx, cancel := context.WithTimeout(context.Background(), proc.ReadyTimeout)
	defer cancel()
	err := r.limit(ctx, "clear", policyLimited)
	if r.barred {
		err = errors.Join(err, r.heddle(ctx, "", "policy", "delete", policyName))
	}
	return err
}
