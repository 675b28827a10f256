package baseline

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

func TestHostsOf(t *testing.T) {
	for _, x := range []struct {
		modes []bench.Mode
		want  int
	}{
		{bench.Modes, 0},
		{[]bench.Mode{bench.Host, bench.Docker}, 2},
		{[]bench.Mode{bench.BPF, bench.BPFVXLAN}, 2},
		{[]bench.Mode{bench.Host, bench.Netkit}, 0},
		{[]bench.Mode{bench.Bare}, 2},
		{bench.AllModes, 6},
	} {
		if got := HostsOf(x.modes); got != x.want {
			t.Errorf("%v: %d hosts, want %d", x.modes, got, x.want)
		}
	}
}

// TestSkipped: what cannot run is named with its reason, and is not among the modes any more; an
// interrupt is an error.
func TestSkipped(t *testing.T) {
	s := &Site{Skipped: map[bench.Mode]string{}}
	if err := s.skip(t.Context(), bench.Docker, errors.New("no\n  dockerd")); err != nil {
		t.Fatal(err)
	}
	if got := s.Modes([]bench.Mode{bench.Host, bench.Docker}); len(got) != 1 || got[0] != bench.Host || s.Skipped[bench.Docker] != "no dockerd" {
		t.Errorf("%v, %q", got, s.Skipped)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.skip(over, bench.BPF, errors.New("killed")); err == nil || s.Skipped[bench.BPF] != "" {
		t.Errorf("interrupted: %v, %q", err, s.Skipped)
	}
	if _, err := Start(t.Context(), Options{Modes: bench.AllModes}); err == nil {
		t.Error("baselines without hosts were started")
	}
}

func TestReadWhatToolsPrint(t *testing.T) {
	n, err := countRules(`{"nftables": [{"metainfo": {}}, {"table": {"name": "nat"}}, {"rule": {"handle": 1}}, {"rule": {"handle": 2}}]}`)
	if err != nil || n != 2 {
		t.Errorf("%d rules, %v", n, err)
	}
	if _, err := countRules("table ip nat"); err == nil {
		t.Error("a listing that is no JSON was read")
	}
	route := "10.0.0.2 via 10.0.0.1 dev eth0 src 10.0.0.3 uid 0 \\    cache mtu 1450"
	for word, want := range map[string]string{"dev": "eth0", "mtu": "1450", "cache": "mtu", "1450": "", "via6": ""} {
		if got := wordAfter(route, word); got != want {
			t.Errorf("after %s: %q, want %q", word, got, want)
		}
	}
	if got := wordAfter("", "dev"); got != "" {
		t.Errorf("after nothing: %q", got)
	}
	if text, err := readOffloads("lo"); err != nil || !strings.Contains(text, " on") {
		t.Errorf("offloads of lo: %q, %v", text, err)
	}
}

func TestEmptyRoot(t *testing.T) {
	root, err := emptyRoot()
	if err != nil {
		t.Fatal(err)
	}
	links := map[string]string{}
	for r := tar.NewReader(strings.NewReader(root)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		links[h.Name] = h.Linkname
	}
	if _, ok := links["tmp/"]; !ok || links["bin"] != "usr/bin" {
		t.Errorf("%v", links)
	}
}

// testHosts makes two hosts that a veth pair joins.
func testHosts(t *testing.T) (hosts [2]Host) {
	t.Helper()
	testutil.NeedRoot(t, "makes network namespaces")
	var names []string
	for i := range hosts {
		name := fmt.Sprintf("hcont-%d-g%d", os.Getpid(), i+1)
		names = append(names, name)
		if err := netns.Create(name); err != nil {
			t.Fatal(err)
		}
		hosts[i] = Host{Netns: netns.Path(name), Device: "eth0", Dir: t.TempDir(),
			Underlay:  netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), 24),
			Container: func(n int) string { return fmt.Sprintf("%s-c%d", name, n) }}
		t.Cleanup(func() {
			left, err := filepath.Glob(netns.Path(name) + "*")
			for _, path := range left {
				err = errors.Join(err, netns.Delete(filepath.Base(path)))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	ip := func(netns, script string) {
		t.Helper()
		if _, err := runWith(t.Context(), script, "ip", "-n", netns, "-batch", "-"); err != nil {
			t.Fatal(err)
		}
	}
	ip(names[0], "link set lo up\nlink add eth0 type veth peer name eth0 netns "+names[1])
	for i, name := range names {
		ip(name, fmt.Sprintf("link set eth0 up\naddr add %s dev eth0", hosts[i].Underlay))
	}
	return hosts
}

// TestBPFCarries: each variant carries connections by the way it is there for, and none through the
// nodes' stacks.
func TestBPFCarries(t *testing.T) {
	hosts := testHosts(t)
	b, err := startBPF(t.Context(), hosts)
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.Skip(err) // the bench names it as the reason
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := b.check(); err == nil {
		t.Error("the check is content with a data path that carried nothing")
	}
	for _, x := range []struct {
		mode      bench.Mode
		container string
		path      baselineBaselinePath
	}{
		{bench.BPF, "n2/c1", baselineBaselinePathPATH_ROUTED},
		{bench.BPFVXLAN, "n2/c1", baselineBaselinePathPATH_TUNNELLED},
		{bench.BPF, "n1/c2", baselineBaselinePathPATH_DELIVERED},
	} {
		before, err := b.packets()
		if err != nil {
			t.Fatal(err)
		}
		b.exchange(t, x.mode, x.container)
		after, err := b.packets()
		if err != nil {
			t.Fatal(err)
		}
		if after[x.path] == before[x.path] {
			t.Errorf("%s to %s: no packet went the way of path %d", x.mode, x.container, x.path)
		}
	}
	if text, err := b.check(); err != nil {
		t.Errorf("%v: %s", err, text)
	}
	if _, err := b.IP(t.Context(), bench.BPFVXLAN, "n1/c2"); err == nil {
		t.Error("the VXLAN variant has a second container on the first node")
	}
	if err := b.Exec(t.Context(), bench.BPFVXLAN, "n1/c2", "true").Run(); err == nil {
		t.Error("a program ran in a container that is not there")
	}
	site := &Site{bpf: b}
	if lines, err := site.Describe(t.Context(), bench.BPF); err != nil || len(lines) < 5 {
		t.Errorf("settings: %q, %v", lines, err)
	}
}

// TestBare: programs run in the hosts' namespaces, at their addresses.
func TestBare(t *testing.T) {
	hosts := testHosts(t)
	b := bare{hosts}
	for container, want := range map[string]int{"n1/c1": 0, "n1/c2": 0, "n2/c1": 1} {
		a, err := b.IP(t.Context(), bench.Bare, container)
		if err != nil || a != hosts[want].Underlay.Addr() {
			t.Errorf("%s: %v, %v", container, a, err)
		}
		out, err := b.Exec(t.Context(), bench.Bare, container, "ip", "-br", "addr", "show", "dev", "eth0").CombinedOutput()
		if err != nil || !strings.Contains(string(out), a.String()+"/24") {
			t.Errorf("%s: %v: %s", container, err, out)
		}
	}
	for _, container := range []string{"n3/c1", "n1", ""} {
		if _, err := b.IP(t.Context(), bench.Bare, container); err == nil {
			t.Errorf("%q has an address", container)
		}
		if err := b.Exec(t.Context(), bench.Bare, container, "true").Run(); err == nil {
			t.Errorf("a program ran in %q", container)
		}
	}
	if lines, err := b.describe(t.Context()); err != nil || len(lines) != 3 || !strings.Contains(lines[1], "device lo") {
		t.Errorf("%q, %v", lines, err)
	}
}

// exchange sends a line there and back between n1/c1 and another container.
func (b *bpf) exchange(t *testing.T, mode bench.Mode, container string) {
	t.Helper()
	to, err := b.IP(t.Context(), mode, container)
	if err != nil {
		t.Fatal(err)
	}
	from, err := b.find(mode, "n1/c1")
	if err != nil {
		t.Fatal(err)
	}
	at, err := b.find(mode, container)
	if err != nil {
		t.Fatal(err)
	}
	echoBetween(t, netns.Path(from.netns), netns.Path(at.netns), netip.AddrPortFrom(to, 5201))
}

// TestJoined: a program is in the cgroups before it runs, and its own arguments may look like the
// shell's.
func TestJoined(t *testing.T) {
	dir := t.TempDir()
	words := joined([]string{dir}, "printf", "%s,", "--", "a b")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput()
	if err != nil || string(out) != "--,a b," {
		t.Errorf("%q, %v", out, err)
	}
	if raw, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")); err != nil || string(raw) != "0\n" {
		t.Errorf("%q, %v", raw, err)
	}
	words = joined([]string{dir + "/missing"}, "true")
	if err := exec.CommandContext(ctx, words[0], words[1:]...).Run(); err == nil {
		t.Error("a program ran outside its cgroup")
	}
}
