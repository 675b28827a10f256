package rdma

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
)

// What perftest of Debian 12 (4.5+0.17) printed in a lab.
var (
	//go:embed testdata/wbw.txt
	bandwidth []byte
	//go:embed testdata/wlat.txt
	latency []byte
)

// The last lines of `ib_write_lat -D 1`, and of rstream.
const (
	latencyByTime = " #bytes        #iterations       t_avg[usec]    tps average\n 2             30            16850.29        29.67  \n"
	piped         = "Now starting the main loop\n  0:   65536 bytes    200 times -->   1290.02 Mbps in     387.59 usec\n"
	streamed      = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer\ncustom    64k     20k     1       2.4g       15.02s      1.40     375.58\n"
)

func TestParse(t *testing.T) {
	for name, tt := range map[string]struct {
		parse func([]byte) (Figure, error)
		out   []byte
		want  Figure
	}{
		"bandwidth":       {ParsePerftest, bandwidth, Figure{BytesPerS: 7.05 * (1 << 20), MessagesPerS: 115549}},
		"latency":         {ParsePerftest, latency, Figure{LatencyUs: 6.07, LatencyP99Us: 37730.06}},
		"latency by time": {ParsePerftest, []byte(latencyByTime), Figure{LatencyUs: 16850.29}},
		"NetPIPE":         {ParseNetpipe, []byte(piped), Figure{BytesPerS: 1290.02 * (1 << 20) / 8, LatencyUs: 387.59}},
		"rstream":         {ParseRstream, []byte(streamed), Figure{BytesPerS: 1.4e9 / 8}},
	} {
		got, err := tt.parse(tt.out)
		if got.MessagesPerS = float64(int(got.MessagesPerS + .5)); err != nil || got != tt.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, tt.want)
		}
		// What ends before its row, or has another one, is an error.
		row := bytes.LastIndexByte(bytes.TrimRight(tt.out, "-\n"), '\n')
		for _, bad := range [][]byte{nil, tt.out[:row], append(slices.Clone(tt.out[:row+1]), "64 what\n"...), append(slices.Clone(tt.out[:row+1]), "1 2 3 4 5 6 NaN nan -1\n"...)} {
			if got, err := tt.parse(bad); err == nil {
				t.Errorf("%s: %q gave %+v", name, bad, got)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, out := range [][]byte{bandwidth, latency, []byte(latencyByTime), []byte(streamed), []byte(piped)} {
		f.Add(out)
	}
	f.Fuzz(func(t *testing.T, out []byte) {
		for _, parse := range []func([]byte) (Figure, error){ParsePerftest, ParseRstream, ParseNetpipe} {
			if got, err := parse(out); err == nil && min(got.BytesPerS, got.MessagesPerS, got.LatencyUs, got.LatencyP99Us) < 0 {
				t.Errorf("%q: %+v", out, got)
			}
		}
	})
}

func TestCases(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Cases(bench.Scopes) {
		if seen[c.String()] {
			t.Errorf("%s twice", c)
		}
		seen[c.String()] = true
	}
	c := Case{Program: "ib_write_bw", Bytes: 64, QPs: 64, Batch: 32, Events: true}
	if got, want := strings.Join(c.words(7, []string{"-D", "1"}), " "), "ib_write_bw -F -x 0 -p 7 -s 64 -D 1 -q 64 -l 32 -e"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if a, b := fills(time.Second, Figure{LatencyUs: 50}), fills(time.Second/2, Figure{MessagesPerS: 5000}); a != 10000 || b != 2500 {
		t.Errorf("%d round trips of 100 us in a second, %d messages in half of one", a, b)
	}
	for _, span := range []int{3000, 8000} {
		if got := copyBytes(3000, span); got[bytesPerS] < 1e6 {
			t.Errorf("copies %v", got)
		}
	}
}

// sample is a run in which every case took the same time for a message.
func sample(processors int, routerMicros float64) Result {
	r := Result{Processors: processors, Runs: 1}
	for _, c := range Cases(bench.Scopes) {
		v := map[string]bench.Spread{}
		for metric, value := range map[string]float64{
			bytesPerS: float64(c.Bytes) * 1e6, messagesPerS: 1e6, latencyUs: 1, machineUs: 2, routerUs: routerMicros, programsUs: 1, jain: .5, stepMs: 40, mpiMs: 30,
		} {
			if c.isApp() || (metric == latencyUs) == (c.latency() || c.Program == "spin") {
				v[metric] = bench.Spread{Median: value, Min: value, Max: value}
			}
		}
		r.Rows = append(r.Rows, Row{Case: c, Metrics: v})
	}
	return r
}

func TestGoals(t *testing.T) {
	verdicts := func(r Result) (found []string) {
		for _, g := range r.Goals() {
			found = append(found, g.Found+" "+strings.SplitN(g.Verdict, ":", 2)[0])
		}
		return found
	}
	same := "1.00 reached"
	want := []string{same, same, same, same, same, same, same, same, same, same, same, "1.00 not reached", "0.00 reached", same, same, "1.00 not reached", "1.00 not reached", "1.00 not reached", "1.00 not reached"}
	if got := verdicts(sample(4, 1)); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	want[11], want[12] = "4.00 reached", "0.00 cannot be shown"
	if got := verdicts(sample(2, .25)); !slices.Equal(got, want) {
		t.Errorf("two processors: got  %q\nwant %q", got, want)
	}
	for _, v := range verdicts(Result{Processors: 4}) {
		if !strings.HasPrefix(v, " not measured") {
			t.Errorf("of nothing: %q", v)
		}
	}
}

// TestDocuments writes both documents without results, and with some.
func TestDocuments(t *testing.T) {
	dir := t.TempDir()
	page := filepath.Join(dir, "page.md")
	write := func() string {
		t.Helper()
		text := report.Mark("bench rdma report", "") + "old\n<!-- to here -->\n"
		if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Command().WriteReport(dir, page, t.Output()); err != nil {
			t.Fatal(err)
		}
		d, err := report.OpenDocument(page, dir, "")
		if err != nil {
			t.Fatal(err)
		}
		short, err := summarize(d)
		written, err2 := os.ReadFile(page)
		if err != nil || err2 != nil || strings.Contains(string(written), "old") {
			t.Fatalf("%s, %v, %v", written, err, err2)
		}
		return string(written) + short
	}
	if got := write(); strings.Count(got, notYet) != 2 {
		t.Errorf("without results: %s", got)
	}
	raw, err := json.Marshal(sample(2, .25))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, File), raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	got := write()
	for _, want := range []string{"| `ib_write_bw intra 64 KiB` | 65536 ", "| WRITE on one node, QPs: 64 | 2.05 | 8.19 | 65.5 |  |", "cannot be shown: ",
		"| 512 | 8192 ", "| 100 Mb/s | 655 ", "| rsocket (librspreload) | 1.00 ", "| training: 8 MiB of gradients added up | 40", "| of it in MPI's calls | 30"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
}

func TestJain(t *testing.T) {
	for want, last := range map[float64]map[uint32]uint64{
		1: {1: 11, 2: 12}, 0.5: {1: 31, 2: 2}, 0: {1: 1, 2: 2},
	} {
		if got := jainOf(map[uint32]uint64{1: 1, 2: 2}, last); got != want {
			t.Errorf("of %v: %v, want %v", last, got, want)
		}
	}
}

func TestReadJob(t *testing.T) {
	if got, err := readJob([]byte(`{"steps": 4, "elapsed_s": 1, "mpi_s": 0.5, "bytes": 8, "good": true}`)); err != nil || got[stepMs] != 250 || got[mpiMs] != 125 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", `{"steps": 4, "elapsed_s": 1, "mpi_s": 1, "good": false}`,
		`{"steps": 0, "elapsed_s": 1, "mpi_s": 1, "good": true}`, `{"steps": 4, "elapsed_s": 1, "good": true}`} {
		if got, err := readJob([]byte(bad)); err == nil {
			t.Errorf("%q gave %v", bad, got)
		}
	}
}
