package density

import (
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
)

func TestDensityOptions(t *testing.T) {
	good := Options{Containers: []int{1, 10}, Connections: []int{0, 100}, Rates: []float64{1000}, Scopes: bench.Scopes, Rounds: 1, Duration: time.Second}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Options){
		"--containers [10 1]":       func(o *Options) { o.Containers = []int{10, 1} },
		"--containers [0]":          func(o *Options) { o.Containers = []int{0} },
		"--containers [2000]":       func(o *Options) { o.Containers = []int{2000} },
		"--containers []":           func(o *Options) { o.Containers = nil },
		"--connections [1]":         func(o *Options) { o.Connections = []int{1} },
		"--connections [0 9 8]":     func(o *Options) { o.Connections = []int{0, 9, 8} },
		"--connections [0 1000000]": func(o *Options) { o.Connections = []int{0, 1000000} },
		"--rates 0":                 func(o *Options) { o.Rates = []float64{0} },
		"--scopes":                  func(o *Options) { o.Scopes = nil },
		"--duration":                func(o *Options) { o.Duration = time.Millisecond },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}

func TestDensityParsers(t *testing.T) {
	const text = "MemTotal:   9 kB\nSlab:       5 kB\nSUnreclaim: 4 kB\nPercpu:     1 kB\n"
	if got, err := machine.ParseMeminfo([]byte(text), "Slab", "Percpu"); err != nil || got != 6*1024 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "Slab: 5 kB\n", "Slab: x kB\nPercpu: 1 kB\n"} {
		if _, err := machine.ParseMeminfo([]byte(bad), "Slab", "Percpu"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	const caches = "slabinfo - version: 2.1\n# name <active_objs>\n" +
		"sock_inode_cache    8781   9177    832   19    4 : tunables    0    0    0 : slabdata    483    480      0\n"
	if got, err := machine.ParseSlabinfo([]byte(caches), "sock_inode_cache"); err != nil || got != float64(4*480*os.Getpagesize()) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", strings.Replace(caches, " 480 ", " x ", 1), "sock_inode_cache 1 2 3\n"} {
		if _, err := machine.ParseSlabinfo([]byte(bad), "sock_inode_cache"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if got, err := machine.ParseSwitches([]byte("Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t3\n")); err != nil || got != 17 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := machine.ParseSwitches([]byte("Name:\tx\n")); err == nil {
		t.Error("a status without switches is taken")
	}
	if got := machine.UnifiedGroup([]byte("8:pids:/\n0::/heddle-x/n2\n")); got != "/heddle-x/n2" {
		t.Errorf("group %q", got)
	}
	if got := turned([]int{1, 2, 3}, 4); !reflect.DeepEqual(got, []int{2, 3, 1}) {
		t.Errorf("turned: %v", got)
	}
}

// result is a small result with everything in it.
func result() Result {
	one := bench.Spread{Median: 1, Min: 1, Max: 1}
	var latency []Latency
	r := Result{Machine: "here", Rounds: 1, DurationS: 1}
	for i, mode := range bench.Modes {
		latency = append(latency, Latency{Mode: mode, Clients: "one", P50Us: bench.Spread{Median: float64(10 * (i + 1)), Min: 1, Max: 99}, P99Us: one, Socket: one})
	}
	for _, n := range []int{10, 1000} {
		r.Containers = append(r.Containers, Step{Containers: n, EndpointBytes: 42000, Latency: latency,
			Accept: []Accept{{bench.Host, 30000}, {bench.Overlay, 20000}, {bench.Heddle, 10000}},
			Paced:  []Paced{{Callers: 1, Rate: 1000, PerS: 1000, CPU: 0.05, CPUUs: 50}, {Callers: min(n, manyCallers), Rate: 10000, PerS: 8000, CPU: 0.4, CPUUs: 50}}})
	}
	for _, mode := range bench.Modes {
		r.Connections = append(r.Connections, Live{Scope: bench.Intra, Mode: mode, Connections: 100000, Containers: 1000, KernelBytes: 8200, Latency: latency,
			Accept: Accept{mode, 5000}})
	}
	return r
}

func TestDensityDoc(t *testing.T) {
	r := result()
	text := section(r)
	for _, want := range []string{
		"| containers | 10 | 1,000 |", "| 42.0 | 42.0 |", "| heddle, ratio to host | 3.00 | 3.00 |", "| heddle, ratio to overlay | 1.50 | 1.50 |",
		"30,000 / 20,000 / 10,000", "| 0.400 (50.0); 0.0, by 10, reached 8,000/s | 0.400 (50.0); 0.0, reached 8,000/s |",
		"Live connections on one node, of 1,000 containers", "| 100,000 | 8.2 / 8.2 / 8.2 |", "10.0 / 20.0 / 30.0", "the machine otherwise idle",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "between nodes, of") {
		t.Error("a table of a scope that was not measured")
	}
	r.Background = 1
	if text := section(r); !strings.Contains(text, "**1.0 processors busy") {
		t.Errorf("a busy machine is not named:\n%s", text)
	}
	if err := report.Print(io.Discard, r.tables(), false); err != nil {
		t.Error(err)
	}
	folder, document := t.TempDir(), "a\n"+report.Mark("bench density report", "")+"old\n<!-- to here -->\nb\n"
	for name, r := range map[string]Result{"whole": r, "without containers": {}} {
		if err := report.WriteFile(filepath.Join(folder, File), func(w io.Writer) error { return report.WriteJSON(w, r) }); err != nil {
			t.Fatal(err)
		}
		written, err := benchtest.Report(t, Command().WriteReport, folder, document)
		if want := strings.Replace(document, "old\n", text, 1); name == "whole" && (err != nil || !strings.Contains(written, "| 42.0 | 42.0 |") || len(written) < len(want)) {
			t.Errorf("%v\n%s", err, written)
		} else if name != "whole" && err == nil {
			t.Error("a result without containers is taken")
		}
	}
}
