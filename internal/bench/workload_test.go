package bench

import (
	"strings"
	"testing"
)

func TestReaders(t *testing.T) {
	tests := []struct {
		workload, stdout string
		want             Sample // nil: an error is wanted
	}{
		{"iperf3", `{"busy_cpu_s":1.5,"output":"{\"end\":{\"sum_received\":{\"bytes\":3e9,\"bits_per_second\":8e9}}}"}`,
			Sample{"throughput_bps": 8e9, "cpu_s_per_gb": 0.5}},
		{"iperf3", `{"busy_cpu_s":1.5,"output":"{\"error\":\"unable to connect\"}"}`, nil},
		{"iperf3", `{"busy_cpu_s":1.5,"output":"{\"end\":{}}"}`, nil},
		{"iperf3", `{"busy_cpu_s":1.5,"output":"iperf3: usage"}`, nil},
		{"iperf3", ``, nil},
		{"rr", `{"transactions":1000,"elapsed_s":2,"busy_cpu_s":0.1,"rtt_p50_us":50,"rtt_p99_us":80}`,
			Sample{"rtt_p50_us": 50, "rtt_p99_us": 80, "transactions_per_s": 500, "cpu_us_per_transaction": 100}},
		{"rr", `{"transactions":0}`, nil},
		{"rr", `{`, nil},
		{"crr", `{"connections":10,"elapsed_s":1,"busy_cpu_s":0.001,"socket_p50_us":5,"socket_connect_p5_us":20,"socket_connect_p50_us":30,"socket_connect_p99_us":60}`,
			Sample{"socket_connect_p5_us": 20, "socket_connect_p50_us": 30, "socket_connect_p99_us": 60, "socket_p50_us": 5, "connections_per_s": 10, "cpu_us_per_connection": 100}},
		{"crr", `{}`, nil},
	}
	for _, tt := range tests {
		w := WorkloadNamed(tt.workload)
		got, err := w.read([]byte(tt.stdout))
		if tt.want == nil {
			if err == nil {
				t.Errorf("%s read %q: %v, want an error", tt.workload, tt.stdout, got)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s read %q: %v", tt.workload, tt.stdout, err)
		}
		for _, m := range w.Metrics {
			if got[m.Name] != tt.want[m.Name] || tt.want[m.Name] == 0 {
				t.Errorf("%s: %s = %v, want %v", tt.workload, m.Name, got[m.Name], tt.want[m.Name])
			}
		}
	}
}

// FuzzReaders feeds what a client might print to every reader: an answer or an error, never a
// panic, and an answer has every metric (and some that only one benchmark asks for).
func FuzzReaders(f *testing.F) {
	f.Add([]byte(`{"connections":4000,"slab_bytes":8000000,"transactions":3,"elapsed_s":1}`))
	f.Add([]byte(`{"output":"{\"end\":{\"sum_received\":{\"bytes\":3}}}"}`))
	f.Fuzz(func(t *testing.T, stdout []byte) {
		for _, w := range Workloads {
			sample, err := w.read(stdout)
			if err != nil {
				continue
			}
			for _, m := range w.Metrics {
				if _, has := sample[m.Name]; !has {
					t.Errorf("%s: %v has not the metric %s", w.Name, sample, m.Name)
				}
			}
		}
	})
}

func TestMetricsAreDistinct(t *testing.T) {
	seen := map[string]bool{} // within a workload, and titles among all: plots have no more
	for _, w := range Workloads {
		for _, m := range w.Metrics {
			if seen[w.Name+" "+m.Name] || seen[m.Title] || m.Title == "" || m.Unit == "" || strings.ContainsAny(m.Name, " -") {
				t.Errorf("%s: metric %+v", w.Name, m)
			}
			seen[w.Name+" "+m.Name], seen[m.Title] = true, true
		}
	}
}
