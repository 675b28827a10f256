package bench

import (
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench/machine"
)

func TestReadPackets(t *testing.T) {
	const perf = `{"busy_cpu_s":0.5,"output":"  Queries completed:    1000 (100.00%)\n  Response codes:       NOERROR 1000 (100.00%)\n` +
		`  Queries per second:   2000.5\n  Average Latency (s):  0.000250 (min 0.1)\n"}`
	for _, tt := range []struct {
		workload, stdout string
		want             Sample // nil: an error is wanted
	}{
		{"udp64", `{"datagrams":1000,"lost":3,"size":64,"elapsed_s":2,"busy_cpu_s":0.5}`, Sample{"packets_per_s": 500, "cpu_us_per_packet": 500}},
		{"udp64", `{"lost":1000,"elapsed_s":2}`, nil},
		{"udpgso", `{"datagrams":1000000,"size":1000,"elapsed_s":2,"busy_cpu_s":0.5}`, Sample{"throughput_bps": 4e9, "cpu_s_per_gb": 0.5}},
		{"udpgso", `nothing`, nil},
		{"quic", `{"bytes":1000000000,"elapsed_s":2,"busy_cpu_s":3}`, Sample{"throughput_bps": 4e9, "cpu_s_per_gb": 3}},
		{"quic", `{"bytes":0,"elapsed_s":2}`, nil},
		{"quicc", `{"elapsed_s":2,"busy_cpu_s":0.8,"output":""}`, Sample{"throughput_bps": ngtcp2Bytes * 4, "cpu_s_per_gb": 20}},
		{"quicc", `{"output":""}`, nil},
		{"dns", perf, Sample{"queries_per_s": 2000.5, "latency_us": 250, "cpu_us_per_query": 500}},
		{"dns", `{"output":"Queries completed: 3 (75.00%)\nQueries per second: 3\nAverage Latency (s): 1\nNOERROR 2 (66.67%), SERVFAIL 1"}`, nil},
		{"dns", `{"output":"Error: no queries"}`, nil},
	} {
		got, err := WorkloadNamed(tt.workload).read([]byte(tt.stdout))
		if tt.want == nil {
			if err == nil {
				t.Errorf("%s read %q: %v, want an error", tt.workload, tt.stdout, got)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s read %q: %v", tt.workload, tt.stdout, err)
		}
		for name, want := range tt.want {
			if got[name] != want {
				t.Errorf("%s: %s = %v, want %v", tt.workload, name, got[name], want)
			}
		}
	}
}

// TestPacketWorkloads: they run only by name, each has one bar in the plot, and the programs of
// both ends are run.
func TestPacketWorkloads(t *testing.T) {
	for _, name := range PacketWorkloads {
		w := WorkloadNamed(name)
		if w.Name == "" || !w.Optional {
			t.Errorf("workload %q: %+v", name, w)
			continue
		}
		for i, m := range w.Metrics {
			if m.Plot != (i == 0) {
				t.Errorf("%s: metric %s in the plot: %v", name, m.Name, m.Plot)
			}
		}
		l := Launch{Program: []string{"peer"}, duration: time.Second, Lifetime: time.Minute, CPUs: machine.Pinning{Client: 0, Server: 1}}
		for _, words := range [][]string{w.server(l), w.client(l)} {
			if words[0] != "peer" || len(words) < 5 {
				t.Errorf("%s: command line %q", name, words)
			}
		}
	}
}
