package bench

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestDensityOptions(t *testing.T) {
	good := DensityOptions{Containers: []int{1, 10}, Connections: []int{0, 100}, Rates: []float64{1000}, Scopes: Scopes, Rounds: 1, Duration: time.Second}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*DensityOptions){
		"--containers [10 1]":       func(o *DensityOptions) { o.Containers = []int{10, 1} },
		"--containers [0]":          func(o *DensityOptions) { o.Containers = []int{0} },
		"--containers [2000]":       func(o *DensityOptions) { o.Containers = []int{2000} },
		"--containers []":           func(o *DensityOptions) { o.Containers = nil },
		"--connections [1]":         func(o *DensityOptions) { o.Connections = []int{1} },
		"--connections [0 9 8]":     func(o *DensityOptions) { o.Connections = []int{0, 9, 8} },
		"--connections [0 1000000]": func(o *DensityOptions) { o.Connections = []int{0, 1000000} },
		"--rates 0":                 func(o *DensityOptions) { o.Rates = []float64{0} },
		"--scopes":                  func(o *DensityOptions) { o.Scopes = nil },
		"--duration":                func(o *DensityOptions) { o.Duration = time.Millisecond },
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
	if got, err := parseMeminfo([]byte(text), "Slab", "Percpu"); err != nil || got != 6*1024 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "Slab: 5 kB\n", "Slab: x kB\nPercpu: 1 kB\n"} {
		if _, err := parseMeminfo([]byte(bad), "Slab", "Percpu"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	const caches = "slabinfo - version: 2.1\n# name <active_objs>\n" +
		"sock_inode_cache    8781   9177    832   19    4 : tunables    0    0    0 : slabdata    483    480      0\n"
	if got, err := parseSlabinfo([]byte(caches), "sock_inode_cache"); err != nil || got != float64(4*480*os.Getpagesize()) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", strings.Replace(caches, " 480 ", " x ", 1), "sock_inode_cache 1 2 3\n"} {
		if _, err := parseSlabinfo([]byte(bad), "sock_inode_cache"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if got, err := parseSwitches([]byte("Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t3\n")); err != nil || got != 17 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := parseSwitches([]byte("Name:\tx\n")); err == nil {
		t.Error("a status without switches is taken")
	}
	if got := unifiedGroup([]byte("8:pids:/\n0::/heddle-x/n2\n")); got != "/heddle-x/n2" {
		t.Errorf("group %q", got)
	}
	if got := turned([]int{1, 2, 3}, 4); !reflect.DeepEqual(got, []int{2, 3, 1}) {
		t.Errorf("turned: %v", got)
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 100050: "100,050", 1000000: "1,000,000"} {
		if got := Thousands(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

// densityResult is a small result with everything in it.
func densityResult() DensityResult {
	one := Spread{Median: 1, Min: 1, Max: 1}
	var latency []DensityLatency
	r := DensityResult{Machine: "here", Rounds: 1, DurationS: 1}
	for i, mode := range Modes {
		latency = append(latency, DensityLatency{Mode: mode, Clients: "one", P50Us: Spread{Median: float64(10 * (i + 1)), Min: 1, Max: 99}, P99Us: one, Socket: one})
	}
	for _, n := range []int{10, 1000} {
		r.Containers = append(r.Containers, DensityStep{Containers: n, EndpointBytes: 42000, Latency: latency,
			Accept: []DensityAccept{{Host, 30000}, {Overlay, 20000}, {Heddle, 10000}},
			Paced:  []DensityPaced{{Callers: 1, Rate: 1000, PerS: 1000, CPU: 0.05, CPUUs: 50}, {Callers: min(n, manyCallers), Rate: 10000, PerS: 8000, CPU: 0.4, CPUUs: 50}}})
	}
	for _, mode := range Modes {
		r.Connections = append(r.Connections, DensityLive{Scope: Intra, Mode: mode, Connections: 100000, Containers: 1000, KernelBytes: 8200, Latency: latency,
			Accept: DensityAccept{mode, 5000}})
	}
	return r
}

func TestDensityDoc(t *testing.T) {
	r := densityResult()
	var text bytes.Buffer
	if err := WriteDensityDoc(&text, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| containers | 10 | 1,000 |", "| 42.0 | 42.0 |", "| heddle, ratio to host | 3.00 | 3.00 |", "| heddle, ratio to overlay | 1.50 | 1.50 |",
		"30,000 / 20,000 / 10,000", "| 0.400 (50.0); 0.0, by 10, reached 8,000/s | 0.400 (50.0); 0.0, reached 8,000/s |",
		"Live connections on one node, of 1,000 containers", "| 100,000 | 8.2 / 8.2 / 8.2 |", "10.0 / 20.0 / 30.0", "the machine otherwise idle",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, &text)
		}
	}
	if strings.Contains(text.String(), "between nodes, of") {
		t.Error("a table of a scope that was not measured")
	}
	r.Background = 1
	text.Reset()
	if err := WriteDensityDoc(&text, r); err != nil || !strings.Contains(text.String(), "**1.0 processors busy") {
		t.Errorf("%v\n%s", err, &text)
	}
	document := "a\n" + PaperDocBegin + "p\n" + PaperDocEnd + "b\n" + DensityDocBegin + "old\n" + DensityDocEnd + "c\n"
	changed, err := ReplaceDensityDoc([]byte(document), []byte("new\n"))
	if want := strings.Replace(document, "old", "new", 1); err != nil || string(changed) != want {
		t.Errorf("%v\n%s", err, changed)
	}
	if changed, err := ReplacePaperDoc([]byte(document), []byte("new\n")); err != nil || string(changed) != strings.Replace(document, "p\n"+PaperDocEnd, "new\n"+PaperDocEnd, 1) {
		t.Errorf("%v\n%s", err, changed)
	}
	if _, err := ReplaceDensityDoc([]byte(PaperDocBegin+PaperDocEnd), nil); err == nil {
		t.Error("a document without its marks is changed")
	}
	if err := WriteDensityTable(&text, r); err != nil {
		t.Error(err)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := ReadDensity(bytes.NewReader(raw)); err != nil || !reflect.DeepEqual(back, r) {
		t.Errorf("%v: %+v", err, back)
	}
	if _, err := ReadDensity(strings.NewReader("{}")); err == nil {
		t.Error("a result without containers is taken")
	}
}
