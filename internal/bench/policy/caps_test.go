package policy

import (
	"strings"
	"testing"
	"time"
)

// What iperf3's server prints is read as it comes, and medians are those of samples within a phase.
func TestPolicySamples(t *testing.T) {
	r := &capsRun{}
	output := `-----------------------------------------------------------
Server listening on 5301 (test #1)
-----------------------------------------------------------
Accepted connection from 10.244.0.2, port 40312
[  5] local 10.244.1.2 port 5301 connected to 10.244.0.2 port 40316
[ ID] Interval           Transfer     Bitrate
[  5]   0.00-0.50   sec   298 MBytes  5004 Mbits/sec
[  5]   0.50-1.00   sec  1.21 GBytes  20705 Mbits/sec
[  5]   1.00-1.50   sec  0.00 Bytes  0.00 bits/sec
`
	ready := make(chan struct{})
	r.follow(strings.NewReader(output), "n1/c1", ready)
	select {
	case <-ready:
	default:
		t.Error("not ready after it said so")
	}
	if len(r.samples) != 0 {
		t.Errorf("samples before the experiment began: %v", r.samples)
	}
	r.began = time.Now()
	r.follow(strings.NewReader(strings.ReplaceAll(output, "Server listening", "")), "n1/c1", nil)
	if len(r.samples) != 2 || r.samples[0].BPS != 5004e6 || r.samples[1].BPS != 20705e6 {
		t.Errorf("samples %v", r.samples)
	}
	r.samples = nil
	for i, bps := range []float64{9, 9, 9, 2, 4, 3, 9} {
		r.samples = append(r.samples, CapsSample{Container: "n1/c1", AtS: float64(i), BPS: bps})
	}
	if got := r.median("n1/c1", CapsPhase{StartS: 1.5, EndS: 5}); got != 3 {
		t.Errorf("median %v, want 3", got)
	}
	if got := r.median("n1/c2", CapsPhase{EndS: 5}); got != 0 {
		t.Errorf("median of no samples %v", got)
	}
}
