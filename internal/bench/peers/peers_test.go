package peers

import (
	"context"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

// TestBaselinesOnlyByName: others' networks are modes of the bench, but not of what runs in the
// lab's own containers only.
func TestBaselinesOnlyByName(t *testing.T) {
	modes, err := bench.ParseAllModes([]string{"docker", "bpf", "host"})
	if err != nil || !slices.Equal(modes, []bench.Mode{bench.Host, bench.Docker, bench.BPF}) {
		t.Errorf("%v, %v", modes, err)
	}
	if _, err := bench.ParseModes([]string{"host", "docker"}); err == nil {
		t.Error("docker is taken for a mode of the lab")
	}
	if _, err := bench.ParseAllModes([]string{"docker"}); err == nil {
		t.Error("docker without host: there is nothing to compare with")
	}
}

// TestNothingIsTunnelledOnOneNode: there the VXLAN variant is measured once, as the other.
func TestNothingIsTunnelledOnOneNode(t *testing.T) {
	o := bench.Options{Workloads: []bench.Workload{bench.WorkloadNamed("rr")}, Scopes: bench.Scopes, Modes: []bench.Mode{bench.Host, bench.BPF, bench.BPFVXLAN}, Runs: 1}
	var cells []string
	for _, c := range o.Schedule(1) {
		cells = append(cells, string(c.Scope)+" "+string(c.Mode))
	}
	want := []string{"inter bpf", "inter bpf-vxlan", "inter host", "intra bpf", "intra host"}
	if !slices.Equal(cells, want) {
		t.Errorf("%v, want %v", cells, want)
	}
	s := bench.NewSeries()
	for _, c := range o.Schedule(0) {
		sample := bench.Sample{}
		for _, m := range c.Workload.Metrics {
			sample[m.Name] = 1
		}
		if err := s.Add(c, sample); err != nil {
			t.Fatal(err)
		}
	}
	results, err := s.Results(o)
	if err != nil || len(results) != 5*len(o.Workloads[0].Metrics) {
		t.Errorf("%d results, %v", len(results), err)
	}
}

// named is a place that says who it is.
type named string

func (n named) Exec(ctx context.Context, _ bench.Mode, _ string, _ ...string) *exec.Cmd {
	return exec.CommandContext(ctx, string(n))
}

func (n named) IP(context.Context, bench.Mode, string) (netip.Addr, error) {
	return netip.ParseAddr(map[named]string{"lab": "192.0.2.1", "docker": "192.0.2.2"}[n])
}

func TestPlaces(t *testing.T) {
	p := bench.Places{Place: named("lab"), Of: map[bench.Mode]bench.Place{bench.Docker: named("docker")}}
	for mode, want := range map[bench.Mode]struct{ program, address string }{bench.Host: {"lab", "192.0.2.1"}, bench.Docker: {"docker", "192.0.2.2"}} {
		a, err := p.IP(t.Context(), mode, "n1/c1")
		if cmd := p.Exec(t.Context(), mode, "n1/c1"); cmd.Args[0] != want.program || err != nil || a.String() != want.address {
			t.Errorf("%s: %v, %v, %v", mode, cmd.Args, a, err)
		}
	}
}

// result is one run of round trips, in which a mode is skipped.
func result() Result {
	r := Result{Machine: "here", DurationS: 1, Networks: []Network{
		{Mode: bench.Host, Settings: []string{"MTU 1500", "a|b"}}, {Mode: bench.Docker}, {Mode: bench.Netkit, Skipped: "no such devices"},
	}}
	for _, s := range bench.Scopes {
		for i, m := range []bench.Mode{bench.Host, bench.Docker, bench.BPFVXLAN} {
			if !m.In(s) {
				continue
			}
			for _, metric := range bench.WorkloadNamed("rr").Metrics {
				v := float64(100 * (i + 1))
				r.Results = append(r.Results, bench.Result{Workload: "rr", Scope: s, Mode: m, Metric: metric.Name, Unit: metric.Unit,
					Median: v, Min: v - 1, Max: v + 1, Runs: 3, RatioToHost: v / 100})
			}
		}
	}
	return r
}

func TestWritePeersDoc(t *testing.T) {
	r := result()
	text, err := section(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\n| between nodes | host | docker | bpf-vxlan |\n|---|---|---|---|\n",
		"\n| on one node | host | docker |\n|---|---|---|\n",
		"| `rr` round trip p50, us ↓ | 100 (99.0..101) | **2.00** 200 (199..201) | **3.00** 300 (299..301) |\n",
		"| host | the node's own namespace | MTU 1500<br>a\\|b |\n",
		"| **not measured:** no such devices |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "kept the machine busy") {
		t.Error("an idle machine is called busy")
	}
	r.Background = 1
	if text, err := section(r); err != nil || !strings.Contains(text, "kept the machine busy") {
		t.Errorf("a busy machine is not named: %v", err)
	}
	if _, err := section(Result{}); err == nil {
		t.Error("a document was written of no results")
	}
}

func TestEveryModeHasWords(t *testing.T) {
	for _, m := range bench.AllModes {
		if whatModes[m] == "" {
			t.Errorf("mode %s: no words for the document", m)
		}
	}
}
