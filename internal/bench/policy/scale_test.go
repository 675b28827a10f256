package policy

import (
	"math"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/populate"
	"heddle.dev/heddle/internal/bench/report"
)

// TestScalePolicies: they are valid, have as many rules as the experiment says, and name apps that
// populate makes up.
func TestScalePolicies(t *testing.T) {
	if scaleAppLabel != populate.AppLabel || scaleAppSize != populate.AppSize || populate.AppName(7) != "a7" {
		t.Error("the rules speak of other endpoints than those that are made up")
	}
	named := make(map[string]bool)
	for i := range 20 {
		for _, shifted := range []bool{false, true} {
			p := scalePolicy(i, 1000, shifted)
			if err := p.Validate(); err != nil || p.RuleCount() != scalePolicyRules {
				t.Fatalf("%s: %d rules, %v", p.Name, p.RuleCount(), err)
			}
			if p.Ingress != nil {
				for _, r := range p.Ingress.Rules[1:] {
					named[r.Peers[0].Endpoints.Labels[scaleAppLabel]] = true
				}
			}
		}
	}
	if len(named) < 500 {
		t.Errorf("%d apps are named in ten policies", len(named))
	}
	if err := togglePolicy(scaleWatchPort).Validate(); err != nil {
		t.Error(err)
	}
}

func TestScaleOptions(t *testing.T) {
	good := ScaleOptions{Rules: ScaleRules, Rounds: 1, Duration: time.Second, Changes: 1}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for what, spoil := range map[string]func(*ScaleOptions){
		"no rules":      func(o *ScaleOptions) { o.Rules = nil },
		"not from none": func(o *ScaleOptions) { o.Rules = []int{100} },
		"descending":    func(o *ScaleOptions) { o.Rules = []int{0, 1000, 100} },
		"odd":           func(o *ScaleOptions) { o.Rules = []int{0, 150} },
		"many":          func(o *ScaleOptions) { o.Rules = []int{0, maxScaleRules + scalePolicyRules} },
		"no rounds":     func(o *ScaleOptions) { o.Rounds = 0 },
		"no changes":    func(o *ScaleOptions) { o.Changes = 0 },
		"no time":       func(o *ScaleOptions) { o.Duration = 0 },
	} {
		o := good
		spoil(&o)
		if o.Validate() == nil {
			t.Errorf("%s: taken", what)
		}
	}
}

// TestScaleResult: ratios are of figures of one round.
func TestScaleResult(t *testing.T) {
	r := &scaleRun{options: ScaleOptions{Rules: []int{0, 100}, Scopes: []bench.Scope{bench.Inter}, Rounds: 3},
		p50: make(map[scaleCell][]float64), p99: make(map[scaleCell][]float64),
		latency: map[changeCell][2][]float64{{100, 0}: {{3, 4}, {5}}}, cpu: map[changeCell][2][]float64{{100, 0}: {{1}, {2}}},
		grow: map[int][]float64{100: {1, 2}}, memory: map[int][]float64{}}
	// The second round is ten times slower, for everything.
	for mode, us := range map[bench.Mode]float64{bench.Host: 20, bench.Overlay: 40, bench.Heddle: 30} {
		r.p50[scaleCell{0, bench.Inter, mode}] = []float64{us, 10 * us, us}
		r.p50[scaleCell{100, bench.Inter, mode}] = []float64{us * 1.1, 11 * us, us * 1.1}
	}
	out := r.result()
	for _, c := range out.Connects {
		want := 1.0
		if c.Rules > 0 {
			want = 1.1
		}
		for _, v := range []float64{c.RatioToNone.Median, c.RatioToNone.Min, c.RatioToNone.Max} {
			if math.Abs(v-want) > 1e-9 {
				t.Errorf("%+v: ratio to no rules %v, want %v", c, v, want)
			}
		}
		if c.Mode == bench.Heddle && (math.Abs(c.RatioToHost.Max-1.5) > 1e-9 || math.Abs(c.RatioToOverlay.Min-0.75) > 1e-9) {
			t.Errorf("%+v", c)
		}
	}
	if len(out.Changes) != 1 || out.Changes[0].AppliedMs.Median != 3.5 || out.Changes[0].SecondCPUMs.Median != 2 {
		t.Errorf("%+v", out.Changes)
	}
	var b strings.Builder
	if err := report.Print(&b, out.tables()); err != nil || !strings.Contains(b.String(), "3.50 (3.00..4.00)") || !strings.Contains(b.String(), "1.10") {
		t.Errorf("%v:\n%s", err, b.String())
	}
}
