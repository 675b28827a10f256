package paper

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
	"heddle.dev/heddle/internal/bench/report"
)

// Result is what Run found. Its JSON form is the project's record; other programs read it.
type Result struct {
	Apps []Entry `json:"apps"`
}

// Entry is one app.
type Entry struct {
	Name    string `json:"name"`
	Title   string `json:"title,omitempty"`
	Skipped string `json:"skipped,omitempty"` // why it was not measured; nothing else is set then
	// Machine says where and when; Background is how many processors other programs kept busy
	// before it began.
	Machine    string  `json:"machine,omitempty"`
	Background float64 `json:"background_cpus,omitempty"`

	Rounds    int     `json:"rounds,omitempty"`
	DurationS float64 `json:"duration_s,omitempty"`
	Rate      float64 `json:"rate,omitempty"` // that was asked for; 0: as fast as it goes
	Modes     []Mode  `json:"modes,omitempty"`
}

// Mode is one app in one mode, over all rounds.
type Mode struct {
	Mode    bench.Mode       `json:"mode"`
	Metrics map[string]Value `json:"metrics"`
	// Latency of all rounds together, by kind of operation.
	Latency map[string]*histogram.Histogram `json:"latency,omitempty"`
}

// Value is one metric.
type Value struct {
	Median      float64   `json:"median"`
	Min         float64   `json:"min"`
	Max         float64   `json:"max"`
	RatioToHost float64   `json:"ratio_to_host,omitempty"` // of the medians; 1 for host itself, 0 if host's is 0
	Values      []float64 `json:"values"`                  // by round
}

// The metrics that every app has. Processors are of the whole machine unless they are named for an
// end; an end's are those of its processes, with whatever softirqs ran while they did.
const (
	MetricRate      = "operations_per_s"
	MetricCPU       = "cpus"
	MetricUser      = "cpus_user"
	MetricSystem    = "cpus_system"
	MetricSoftIRQ   = "cpus_softirq"
	MetricServerCPU = "cpus_server"
	MetricClientCPU = "cpus_client"
	MetricCPUPerOp  = "cpu_us_per_operation"
	// MetricUnkept is the share of operations that were due at a fixed rate and did not happen in
	// time.
	MetricUnkept = "unkept_share"
)

// LatencyMetric names a latency in microseconds: of kind "get" and of what "mean", "p50", "p99" or
// "p999".
func LatencyMetric(kind, what string) string { return kind + "_" + what + "_us" }

// In gives the entry's results in a mode.
func (e Entry) In(mode bench.Mode) (Mode, bool) {
	i := slices.IndexFunc(e.Modes, func(m Mode) bool { return m.Mode == mode })
	if i < 0 {
		return Mode{}, false
	}
	return e.Modes[i], true
}

// Median gives the median of a metric in a mode.
func (e Entry) Median(mode bench.Mode, metric string) (float64, bool) {
	m, ok := e.In(mode)
	if !ok {
		return 0, false
	}
	v, ok := m.Metrics[metric]
	return v.Median, ok
}

// Ratio gives how much a metric is in one mode as a multiple of what it is in another.
func (e Entry) Ratio(metric string, of, to bench.Mode) (float64, bool) {
	a, okA := e.Median(of, metric)
	b, okB := e.Median(to, metric)
	if !okA || !okB || b == 0 {
		return 0, false
	}
	return a / b, true
}

// Find gives the entry of an app that was measured.
func (r Result) Find(name string) (Entry, bool) {
	for _, e := range r.Apps {
		if e.Name == name && e.Skipped == "" {
			return e, true
		}
	}
	return Entry{}, false
}

// Merge puts the entries of newer in the places of those of the same names, and keeps the others,
// all in the order of Apps. What was skipped does not take the place of what was measured.
func (r Result) Merge(newer Result) Result {
	var merged Result
	for _, a := range Apps {
		var entry *Entry
		for _, from := range []Result{r, newer} {
			for _, e := range from.Apps {
				if e.Name == a.Name && (entry == nil || e.Skipped == "") {
					entry = &e
				}
			}
		}
		if entry != nil {
			merged.Apps = append(merged.Apps, *entry)
		}
	}
	return merged
}

// WriteJSON writes results as JSON, a line for each application: histograms would be thousands of
// lines otherwise.
func WriteJSON(w io.Writer, r Result) error {
	text := []byte("{\"apps\": [")
	for i, e := range r.Apps {
		if i > 0 {
			text = append(text, ',')
		}
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("write results: %w", err)
		}
		text = append(append(text, '\n'), line...)
	}
	return report.WriteAll(w, string(text)+"\n]}\n")
}
