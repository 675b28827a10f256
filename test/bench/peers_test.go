package bench

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/peers"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// benchPeers runs a `heddle bench peers` of a moment in this lab, and checks that it leaves nothing
// there.
func benchPeers(t *testing.T, modes string) peers.Result {
	t.Helper()
	result := benchCommand[peers.Result](t, 6*testutil.WaitTimeout, t.TempDir(), "peers", "--modes", modes, "--workloads", "rr", "--runs", "1",
		"--duration", "100ms")
	for _, pattern := range []string{"/run/netns/" + lab.Name + "-g*", "/run/heddle/lab/" + lab.Name + "/g*",
		"/sys/fs/cgroup/heddle-" + lab.Name + "/g*", "/sys/fs/cgroup/*/heddle-" + lab.Name + "/g*"} {
		if left, err := filepath.Glob(pattern); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), "/run/heddle/lab/"+lab.Name+"/g") {
		t.Errorf("mounts are left: %v", err)
	}
	ports, err := exec.Command("ip", "-n", lab.Name+"-fabric", "-br", "link").Output()
	if err != nil || strings.Contains(string(ports), "\ng1@") {
		t.Errorf("a port of the fabric is left: %v\n%s", err, ports)
	}
	return result
}

// measured counts the cells of a mode that have a round trip, and gives why there are none.
func measured(result peers.Result, mode bench.Mode) (cells int, skipped string) {
	for _, r := range result.Results {
		if r.Mode == mode && r.Metric == "rtt_p50_us" && r.Median > 0 {
			cells++
		}
	}
	for _, n := range result.Networks {
		if n.Mode == mode {
			skipped = n.Skipped
		}
	}
	return cells, skipped
}

// TestBenchPeers: hosts without Heddle and the BPF data path are measured between nodes and on one,
// its VXLAN variant between nodes; what cannot run is named.
func TestBenchPeers(t *testing.T) {
	result := benchPeers(t, "host,bare,bpf,bpf-vxlan,netkit")
	for mode, want := range map[bench.Mode]int{bench.Host: 2, bench.Bare: 2, bench.BPF: 2, bench.BPFVXLAN: 1} {
		if cells, skipped := measured(result, mode); cells != want || skipped != "" {
			t.Errorf("%s: %d of %d cells measured; left out: %q", mode, cells, want, skipped)
		}
	}
	if cells, skipped := measured(result, bench.Netkit); cells != 0 || skipped == "" {
		t.Errorf("netkit: %d cells, reason %q", cells, skipped)
	}
}

// TestBenchPackets: each workload that is not TCP gives figures, in the lab's containers and on a
// host.
func TestBenchPackets(t *testing.T) {
	lab.NeedPrograms(t, "the bench of packets", "dnsperf", "unbound", "gtlsclient", "gtlsserver")
	modes := []bench.Mode{bench.Host, bench.Overlay, bench.Bare}
	result := benchCommand[peers.Result](t, 6*testutil.WaitTimeout, t.TempDir(), "packets", "--modes", "host,overlay,bare", "--scopes", "inter",
		"--runs", "1", "--duration", "100ms")
	cells := map[bench.Mode]int{}
	for _, r := range result.Results {
		metric, known := bench.MetricNamed(r.Workload, r.Metric)
		if known && metric.Plot && r.Median > 0 {
			cells[r.Mode]++
		}
	}
	for _, m := range modes {
		if cells[m] != len(bench.PacketWorkloads) {
			t.Errorf("%s: %d of %d workloads measured", m, cells[m], len(bench.PacketWorkloads))
		}
	}
}

// TestDockerBench: Docker's own networks are measured, in a swarm of the bench's own.
func TestDockerBench(t *testing.T) {
	lab.NeedPrograms(t, "Docker", "dockerd", "docker", "containerd", "iptables")
	result := benchPeers(t, "host,docker")
	cells, skipped := measured(result, bench.Docker)
	if strings.Contains(skipped, context.DeadlineExceeded.Error()) {
		t.Skipf("this machine is too slow for Docker: %s", skipped)
	}
	if cells != 2 || skipped != "" {
		t.Errorf("%d of 2 cells measured; left out: %q", cells, skipped)
	}
	if out, err := exec.Command("pgrep", "-f", "/run/heddle/lab/"+lab.Name+"/g").Output(); err == nil {
		t.Errorf("processes are left: %s", out)
	}
}
