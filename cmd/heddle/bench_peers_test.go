package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

func TestReportPeers(t *testing.T) {
	folder := t.TempDir()
	r := bench.PeersResult{Machine: "here", DurationS: 1}
	for _, mode := range bench.AllModes {
		n := bench.Network{Mode: mode}
		if mode == bench.Netkit {
			n.Skipped = "no such devices"
		} else {
			r.Results = append(r.Results, bench.Result{Workload: "rr", Scope: bench.Inter, Mode: mode, Metric: "rtt_p50_us",
				Unit: bench.Microseconds, Median: 50, Min: 49, Max: 52, Runs: 3, RatioToHost: 1})
		}
		r.Networks = append(r.Networks, n)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	document := filepath.Join(folder, "doc.md")
	for file, text := range map[string]string{filepath.Join(folder, "peers.json"): string(raw), document: "# A\n" + bench.PeersDocBegin + bench.PeersDocEnd + "end\n"} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time replaces what the first wrote
		if err := reportPeers(folder, document, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	written, err := os.ReadFile(document)
	if err != nil || strings.Count(string(written), "| between nodes |") != 1 || !strings.HasSuffix(string(written), bench.PeersDocEnd+"end\n") {
		t.Errorf("%v, document:\n%s", err, written)
	}
	picture, err := os.ReadFile(filepath.Join(folder, "peers.svg"))
	if err != nil || !strings.Contains(string(picture), ">bpf-vxlan<") || strings.Contains(string(picture), ">netkit<") {
		t.Errorf("plot: %v", err)
	}
	if err := os.WriteFile(document, []byte("# A\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := reportPeers(folder, document, io.Discard); err == nil {
		t.Error("a document without marks was written to")
	}
}
