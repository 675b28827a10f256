package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestContendersOnlyByName: others' networks are modes of the bench, but not of what runs in the lab's own containers only.
func TestContendersOnlyByName(t *testing.T) {
	modes, err := ParseAllModes([]string{"docker", "bpf", "host"})
	if err != nil || !slices.Equal(modes, []Mode{Host, Docker, BPF}) {
		t.Errorf("%v, %v", modes, err)
	}
	if _, err := ParseModes([]string{"host", "docker"}); err == nil {
		t.Error("docker is taken for a mode of the lab")
	}
	if _, err := ParseAllModes([]string{"docker"}); err == nil {
		t.Error("docker without host: there is nothing to compare with")
	}
}

// TestNothingIsTunnelledOnOneNode: there the VXLAN variant is measured once, as the other.
func TestNothingIsTunnelledOnOneNode(t *testing.T) {
	o := Options{Workloads: []Workload{workloadNamed("rr")}, Scopes: Scopes, Modes: []Mode{Host, BPF, BPFVXLAN}, Runs: 1}
	var cells []string
	for _, c := range o.schedule(1) {
		cells = append(cells, string(c.Scope)+" "+string(c.Mode))
	}
	want := []string{"inter bpf", "inter bpf-vxlan", "inter host", "intra bpf", "intra host"}
	if !slices.Equal(cells, want) {
		t.Errorf("%v, want %v", cells, want)
	}
	s := newSeries()
	for _, c := range o.schedule(0) {
		sample := Sample{}
		for _, m := range c.Workload.Metrics {
			sample[m.Name] = 1
		}
		if err := s.add(c, sample); err != nil {
			t.Fatal(err)
		}
	}
	results, err := s.results(o)
	if err != nil || len(results) != 5*len(o.Workloads[0].Metrics) {
		t.Errorf("%d results, %v", len(results), err)
	}
}

// named is a place that says who it is.
type named string

func (n named) Exec(ctx context.Context, _ Mode, _ string, _ ...string) *exec.Cmd {
	return exec.CommandContext(ctx, string(n))
}

func (n named) IP(context.Context, Mode, string) (netip.Addr, error) {
	return netip.ParseAddr(map[named]string{"lab": "192.0.2.1", "docker": "192.0.2.2"}[n])
}

func TestPlaces(t *testing.T) {
	p := Places{Place: named("lab"), Of: map[Mode]Place{Docker: named("docker")}}
	for mode, want := range map[Mode]struct{ program, address string }{Host: {"lab", "192.0.2.1"}, Docker: {"docker", "192.0.2.2"}} {
		a, err := p.IP(t.Context(), mode, "n1/c1")
		if cmd := p.Exec(t.Context(), mode, "n1/c1"); cmd.Args[0] != want.program || err != nil || a.String() != want.address {
			t.Errorf("%s: %v, %v, %v", mode, cmd.Args, a, err)
		}
	}
}

// peersResult is one run of round trips, in which a mode is skipped.
func peersResult() PeersResult {
	r := PeersResult{Machine: "here", DurationS: 1, Networks: []Network{
		{Mode: Host, Settings: []string{"MTU 1500", "a|b"}}, {Mode: Docker}, {Mode: Netkit, Skipped: "no such devices"},
	}}
	for _, s := range Scopes {
		for i, m := range []Mode{Host, Docker, BPFVXLAN} {
			if !m.in(s) {
				continue
			}
			for _, metric := range workloadNamed("rr").Metrics {
				v := float64(100 * (i + 1))
				r.Results = append(r.Results, Result{Workload: "rr", Scope: s, Mode: m, Metric: metric.Name, Unit: metric.Unit,
					Median: v, Min: v - 1, Max: v + 1, Runs: 3, RatioToHost: v / 100})
			}
		}
	}
	return r
}

func TestWritePeersDoc(t *testing.T) {
	raw, err := json.Marshal(peersResult())
	if err != nil {
		t.Fatal(err)
	}
	r, err := ReadPeers(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := WritePeersDoc(&b, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\n| between nodes | host | docker | bpf-vxlan |\n|---|---|---|---|\n",
		"\n| on one node | host | docker |\n|---|---|---|\n",
		"| `rr` round trip p50, us ↓ | 100 (99.0..101) | **2.00** 200 (199..201) | **3.00** 300 (299..301) |\n",
		"| host | the node's own namespace | MTU 1500<br>a\\|b |\n",
		"| **not measured:** no such devices |\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "kept the machine busy") {
		t.Error("an idle machine is called busy")
	}
	r.Background = 1
	b.Reset()
	if err := WritePeersDoc(&b, r); err != nil || !strings.Contains(b.String(), "kept the machine busy") {
		t.Errorf("a busy machine is not named: %v", err)
	}
	if err := WritePeersDoc(&b, PeersResult{}); err == nil {
		t.Error("a document was written of no results")
	}
	if _, err := ReadPeers(strings.NewReader("[]")); err == nil {
		t.Error("a list was read as results")
	}
}

func TestEveryModeHasWords(t *testing.T) {
	for _, m := range AllModes {
		if whatModes[m] == "" {
			t.Errorf("mode %s: no words for the document", m)
		}
	}
}
