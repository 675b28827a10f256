package paper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
	"heddle.dev/heddle/internal/bench/histogram"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/testutil"
)

func TestParseApps(t *testing.T) {
	all, err := ParseApps(nil)
	if err != nil || len(all) != len(Apps) {
		t.Fatalf("no names: %d apps, %v", len(all), err)
	}
	apps, err := ParseApps([]string{"pgbench", "nginx"})
	var names []string
	for _, a := range apps {
		names = append(names, a.Name)
	}
	if err != nil || strings.Join(names, " ") != "nginx-1k nginx-1m nginx-1k-free pgbench" {
		t.Errorf("a family and an app: %v, %v", names, err)
	}
	if _, err := ParseApps([]string{"nginx", "apache"}); err == nil || !strings.Contains(err.Error(), `"apache"`) {
		t.Errorf("an unknown name: %v", err)
	}
}

func TestMissingProgramsAreNamedWithTheirPackages(t *testing.T) {
	place := benchtest.LoopPlace{Prefix: func(bench.Mode, string) []string { t.Error("something was started"); return nil }}
	a := memcachedApp("memcached", "", 0)
	a.programs = []tool{program("no-such-program", "some-package")}
	_, err := Run(t.Context(), place, options(t, a))
	if err == nil || !strings.Contains(err.Error(), "no-such-program") || !strings.Contains(err.Error(), "some-package") {
		t.Errorf("got %v", err)
	}
}

// options is a short run on loopback.
func options(t *testing.T, apps ...App) Options {
	return Options{Apps: apps, Modes: []bench.Mode{bench.Host, bench.Heddle}, Rounds: 1, Duration: 500 * time.Millisecond, Scale: 0.1, Program: benchtest.Program(t),
		Kafka: t.TempDir()}
}

// left lists what the paper's bench has made and not removed.
func left(t *testing.T) (left []string) {
	t.Helper()
	for _, dir := range []string{"/tmp", "/dev/shm"} {
		found, err := filepath.Glob(dir + "/heddle-paper-*")
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	return left
}

func TestRunPaper(t *testing.T) {
	before := left(t)
	free, fixed := memcachedApp("memcached", "free", 0), memcachedApp("memcached-rate", "fixed", 10_000)
	free.warmUp, fixed.warmUp = 100*time.Millisecond, 50*time.Millisecond
	o := options(t, free, fixed, kafkaApp(1))
	var said []string
	o.Step = func(what string, _, _ int, _ time.Duration) { said = append(said, what) }
	result, err := Run(t.Context(), benchtest.LoopPlace{}, o)
	for ; errors.Is(err, errBusy) && o.Duration < time.Minute; result, err = Run(t.Context(), benchtest.LoopPlace{}, o) {
		t.Logf("again for longer: %v", err)
		said, o.Duration = nil, 4*o.Duration
	}
	testutil.NoError(t, err)
	if left := left(t); !reflect.DeepEqual(left, before) {
		t.Errorf("left behind: %v, before %v", left, before)
	}
	if len(said) != 1+2*2 || !strings.Contains(said[0], "kafka") {
		t.Errorf("progress: %q", said)
	}
	for _, name := range []string{"memcached", "memcached-rate"} {
		e, ok := result.Find(name)
		if !ok || len(e.Modes) != 2 {
			t.Fatalf("%s: %+v", name, e)
		}
		for _, m := range e.Modes {
			for _, metric := range []string{MetricRate, MetricCPU, MetricCPUPerOp, "get_p999_us", "set_mean_us", "all_mean_us"} {
				if v := m.Metrics[metric]; v.Median <= 0 || len(v.Values) != 1 || v.Min > v.Median || v.Max < v.Median || v.RatioToHost <= 0 {
					t.Errorf("%s, %s: %s is %+v", name, m.Mode, metric, v)
				}
			}
			if h := m.Latency[loadgen.KindGet]; h == nil || h.Count() == 0 {
				t.Errorf("%s, %s: no latencies of GETs", name, m.Mode)
			}
		}
	}
	// A slow machine may not keep the rate, or makes up in the window for what it did not do before;
	// but nothing exceeds it.
	whole := (fixed.warmUp + o.Duration).Seconds()
	if rate, _ := result.Apps[1].Median(bench.Host, MetricRate); rate*o.Duration.Seconds() > 1000*whole+1 {
		t.Errorf("%.0f operations/s at a rate of 1,000", rate)
	}
	if e := result.Apps[2]; !strings.Contains(e.Skipped, "make kafka") && !strings.Contains(e.Skipped, "java") {
		t.Errorf("kafka without its jars: %+v", e)
	}
	var b bytes.Buffer
	if err := WriteJSON(&b, result); err != nil {
		t.Fatal(err)
	}
	var read Result
	if err := json.Unmarshal(b.Bytes(), &read); err != nil || !reflect.DeepEqual(read, result) {
		t.Errorf("read back as something else, %v", err)
	}
	var table strings.Builder
	if err := WriteTable(&table, result); err != nil || !strings.Contains(table.String(), "GET p99.9") || !strings.Contains(table.String(), "kafka: skipped") {
		t.Errorf("table:\n%s%v", &table, err)
	}
}

func TestRunPaperCleansUpAfterTrouble(t *testing.T) {
	before := left(t)
	o := options(t, memcachedApp("memcached", "", 0))
	o.Apps[0].server = func(launch) []string { return []string{"sh", "-c", "echo no luck >&2; exit 3"} }
	if _, err := Run(t.Context(), benchtest.LoopPlace{}, o); err == nil || !strings.Contains(err.Error(), "no luck") || !strings.Contains(err.Error(), "memcached, host, round 1") {
		t.Errorf("a server that ends: %v", err)
	}
	o.Apps[0] = memcachedApp("memcached", "", 0)
	o.Apps[0].client = func(launch) []string { return []string{"sh", "-c", "echo bad day >&2; exit 3"} }
	if _, err := Run(t.Context(), benchtest.LoopPlace{}, o); err == nil || !strings.Contains(err.Error(), "bad day") {
		t.Errorf("a client that ends: %v", err)
	}
	// ^C in the middle of a measurement.
	ctx, cancel := context.WithCancel(t.Context())
	o.Apps[0] = memcachedApp("memcached", "", 0)
	client := o.Apps[0].client
	o.Apps[0].client = func(l launch) []string {
		time.AfterFunc(200*time.Millisecond, cancel)
		return client(l)
	}
	if _, err := Run(ctx, benchtest.LoopPlace{}, o); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	if left := left(t); !reflect.DeepEqual(left, before) {
		t.Errorf("left behind: %v, before %v", left, before)
	}
}

func TestMergePaper(t *testing.T) {
	old := Result{Apps: []Entry{{Name: "kafka", Rounds: 1}, {Name: "memcached", Rounds: 1}}}
	merged := old.Merge(Result{Apps: []Entry{{Name: "kafka", Skipped: "no jars"}, {Name: "memcached", Rounds: 2}, {Name: "pgbench", Rounds: 2}}})
	want := []Entry{{Name: "memcached", Rounds: 2}, {Name: "pgbench", Rounds: 2}, {Name: "kafka", Rounds: 1}}
	if !reflect.DeepEqual(merged.Apps, want) {
		t.Errorf("got %+v, want %+v", merged.Apps, want)
	}
}

func TestReadPgLog(t *testing.T) {
	const log = "0 1 900 0 100 0 5\n1 1 1500 0 100 500000\n1 2 skipped 0 100 500001\n2 1 2500 0 101 0\n"
	h := &histogram.Histogram{}
	if err := readPgLog(strings.NewReader(log), time.Unix(100, 1), time.Unix(101, 0), h); err != nil || h.Count() != 1 || h.Mean() != 1500*time.Microsecond {
		t.Errorf("%d transactions of %s, %v: want the one in the window", h.Count(), h.Mean(), err)
	}
	for _, bad := range []string{"0 1 900 0 100\n", "0 1 x 0 100 0\n", "0 1 9 0 x 0\n"} {
		if err := readPgLog(strings.NewReader(bad), time.Unix(0, 0), time.Unix(200, 0), h); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestReadKafka(t *testing.T) {
	o := output{launch: launch{rate: 50000}, stdout: []byte(`250108 records sent, 50021.6 records/sec (4.77 MB/sec), 1.6 ms avg latency, 212.0 ms max latency.
500000 records sent, 49000.0 records/sec (4.67 MB/sec), 0.93 ms avg latency, 212.00 ms max latency, 1 ms 50th, 2 ms 95th, 6 ms 99th, 87 ms 99.9th.
`)}
	s, err := readKafka(o)
	want := map[string]float64{MetricRate: 49000, MetricUnkept: 0.02, "record_mean_us": 930, "record_p50_us": 1000, "record_p99_us": 6000, "record_p999_us": 87000}
	for name, v := range want {
		if got := s.metrics[name]; got < v*0.999 || got > v*1.001 {
			t.Errorf("%s is %v, want %v (%v)", name, got, v, err)
		}
	}
	if _, err := readKafka(output{stdout: []byte("Exception")}); err == nil {
		t.Error("an exception was read")
	}
}

// TestWindow puts a window between readings that are not at its ends.
func TestWindow(t *testing.T) {
	start := time.Unix(1000, 0)
	var readings []cpuReading
	for i := range 6 { // a second apart; the server uses i ms in second i
		readings = append(readings, cpuReading{at: start.Add(time.Duration(i) * time.Second), server: time.Duration(i*(i+1)/2) * time.Millisecond})
	}
	w, err := windowOf(readings, start.Add(1500*time.Millisecond), 2*time.Second)
	if want := (2.0/2 + 3 + 4.0/2) / 1000; err != nil || w.wall != 2 || w.server < 0.999*want || w.server > 1.001*want {
		t.Errorf("%+v, %v: want %v s of the server in 2 s", w, err, want)
	}
	if _, err := windowOf(readings[:2], start.Add(500*time.Millisecond), 2*time.Second); err == nil {
		t.Error("a window of which a quarter was watched")
	}
}

// TestTreeTimeSeesChildren spends time in a child's child and in one that has ended.
func TestTreeTimeSeesChildren(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; echo done; read x")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Error(err)
	}
	r, err := readCPU(cmd.Process.Pid, os.Getpid())
	if err != nil || r.server <= 0 || r.client < r.server {
		t.Errorf("%s below the shell, %s below this process, %v", r.server, r.client, err)
	}
	_ = in.Close()
	_ = cmd.Wait() // read fails at the end of the input
}
