package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/netcfg"
)

// Run must work on whatever machine the tests run on, and leave the process as it was.
func TestRunHere(t *testing.T) {
	before := processState(t)
	checks := Run(t.Context(), "none")
	seen := map[string]bool{}
	for _, c := range checks {
		t.Logf("%-8s %-24s %s", c.Status, c.Name, c.Detail)
		if seen[c.Name] {
			t.Errorf("check %s is reported twice", c.Name)
		}
		seen[c.Name] = true
		if _, ok := meanings[c.Name]; !ok {
			t.Errorf("check %s has no meaning", c.Name)
		}
		if (c.Status == api.CheckOK) != (c.Remedy == "") || (c.Status == api.CheckOK) != (c.Cost == "") {
			t.Errorf("check %+v: a cost and a remedy belong to what is not ok, and to nothing else", c)
		}
		if c.Detail == "" || strings.Contains(c.Detail, "\n") {
			t.Errorf("check %s: detail %q, want one line", c.Name, c.Detail)
		}
	}
	if after := processState(t); after != before {
		t.Errorf("probing changed the process:\n%s\n%s", before, after)
	}
	if checks[0].Name != "privileges" || checks[0].Status != api.CheckOK {
		if !strings.Contains(checks[0].Remedy, "root") {
			t.Errorf("without privileges: %+v, want a remedy that names root", checks[0])
		}
		t.Skip("needs root: the other checks were left out")
	}
	for name := range meanings {
		// What runc says of its library shows only where there is a runc.
		if !seen[name] && name != "runc_libseccomp" {
			t.Errorf("check %s has a meaning and was not made", name)
		}
	}
}

// processState is what a probe could change for the threads that other goroutines run on.
func processState(t *testing.T) string {
	t.Helper()
	var s strings.Builder
	for _, ns := range []string{"net", "mnt"} {
		link, err := os.Readlink("/proc/thread-self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		s.WriteString(link + " ")
	}
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "Seccomp") {
			s.WriteString(line)
		}
	}
	return s.String()
}

func TestMeaningsAreComplete(t *testing.T) {
	for name, m := range meanings {
		if m.cost == "" || m.remedy == "" {
			t.Errorf("%s: %+v: want a cost and a remedy", name, m)
		}
	}
}

func TestFindingsGetTheirMeaning(t *testing.T) {
	got := checks([]finding{
		{name: "kernel", detail: "Linux 6.6"},
		{name: "cgroup2", detail: "unused", err: os.ErrNotExist},
		{name: "bpf_lsm", err: os.ErrPermission},
		{name: "nobody_knows", err: os.ErrInvalid},
	})
	want := []api.CheckStatus{api.CheckOK, api.CheckMissing, api.CheckDegraded, api.CheckMissing}
	for i, c := range got {
		if c.Status != want[i] {
			t.Errorf("%s: %s, want %s", c.Name, c.Status, want[i])
		}
	}
	if got[1].Detail != os.ErrNotExist.Error() || !strings.Contains(got[1].Remedy, "cgroup2") {
		t.Errorf("cgroup2 check: %+v", got[1])
	}
	if m := Missing(got); strings.Join(m, " ") != "cgroup2 nobody_knows" {
		t.Errorf("Missing = %v", m)
	}
}

// machine makes a host whose files are given by their paths.
func machine(t *testing.T, files map[string]string) host {
	t.Helper()
	h := host{root: t.TempDir()}
	for name, content := range files {
		path := filepath.Join(h.root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func TestCgroup2(t *testing.T) {
	const (
		pure    = "24 1 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
		v1      = "30 25 0:27 / /sys/fs/cgroup/cpu rw shared:10 - cgroup cgroup rw,cpu\n"
		unified = "26 25 0:23 / /sys/fs/cgroup/unified rw shared:11 master:2 - cgroup2 none rw\n"
		part    = "26 25 0:23 /system.slice /sys/fs/cgroup rw - cgroup2 none rw\n"
	)
	for name, tc := range map[string]struct{ mounts, detail, err string }{
		"pure":         {pure, "at /sys/fs/cgroup", ""},
		"hybrid":       {v1 + unified, "at /sys/fs/cgroup/unified, beside v1 (hybrid)", ""},
		"v1 only":      {v1, "", "only cgroup v1 is mounted"},
		"none":         {"22 1 0:5 / /dev rw - devtmpfs none rw\n", "", "no cgroup file system is mounted"},
		"part only":    {part, "", "no cgroup file system is mounted"},
		"broken lines": {"x\n - \n1 2 3 - cgroup2\n" + pure, "at /sys/fs/cgroup", ""},
	} {
		h := machine(t, map[string]string{"proc/self/mountinfo": tc.mounts, "sys/fs/cgroup/unified/cgroup.procs": ""})
		f := h.cgroup2()
		if f.detail != tc.detail && tc.err == "" || errText(f.err) != tc.err {
			t.Errorf("%s: detail %q, error %v; want %q, %q", name, f.detail, f.err, tc.detail, tc.err)
		}
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestSettings(t *testing.T) {
	ipv4, ipv6 := "proc/sys/net/ipv4/", "proc/sys/net/ipv6/conf/"
	for _, tc := range []struct {
		name  string
		files map[string]string
		probe func(host) finding
		ok    bool
	}{
		{"kernel 5.13", map[string]string{"proc/sys/kernel/osrelease": "5.13.19-amd64\n"}, host.kernel, false},
		{"kernel 5.14", map[string]string{"proc/sys/kernel/osrelease": "5.14.0\n"}, host.kernel, true},
		{"kernel 10.1", map[string]string{"proc/sys/kernel/osrelease": "10.1\n"}, host.kernel, true},
		{"kernel unreadable", map[string]string{"proc/sys/kernel/osrelease": "tomorrow\n"}, host.kernel, false},
		{"fwmark_accept on", map[string]string{ipv4 + "tcp_fwmark_accept": "1\n"}, host.fwmarkAccept, false},
		{"fwmark_accept off", map[string]string{ipv4 + "tcp_fwmark_accept": "0\n"}, host.fwmarkAccept, true},
		{"syncookies off", map[string]string{ipv4 + "tcp_syncookies": "0\n"}, host.synCookies, false},
		{"syncookies absent", nil, host.synCookies, false},
		{"syncookies always", map[string]string{ipv4 + "tcp_syncookies": "2\n"}, host.synCookies, true},
		{"forwarding off, can be set", map[string]string{ipv4 + "ip_forward": "0\n"}, host.ipForward, true},
		{"forwarding absent", nil, host.ipForward, false},
		{"IPv6 on", map[string]string{ipv6 + "all/disable_ipv6": "0\n", ipv6 + "lo/disable_ipv6": "0\n"}, host.ipv6Enabled, true},
		{"IPv6 off", map[string]string{ipv6 + "all/disable_ipv6": "1\n", ipv6 + "lo/disable_ipv6": "0\n"}, host.ipv6Enabled, false},
		{"IPv6 off on lo", map[string]string{ipv6 + "all/disable_ipv6": "0\n", ipv6 + "lo/disable_ipv6": "1\n"}, host.ipv6Enabled, false},
		{"IPv6 absent", nil, host.ipv6Enabled, false},
		{"IPv6 host, 6.17", map[string]string{ipv6 + "all/forwarding": "0\n", ipv6 + "all/force_forwarding": "0\n"}, host.ipv6Forwarding, true},
		{"IPv6 host, 6.16", map[string]string{ipv6 + "all/forwarding": "0\n"}, host.ipv6Forwarding, false},
		{"IPv6 router, 6.16", map[string]string{ipv6 + "all/forwarding": "1\n"}, host.ipv6Forwarding, true},
		{"IPv6 forwarding absent", nil, host.ipv6Forwarding, false},
		{"sysctls absent", nil, host.sysctlsWritable, false},
	} {
		f := tc.probe(machine(t, tc.files))
		if (f.err == nil) != tc.ok {
			t.Errorf("%s: error %v, want ok %v", tc.name, f.err, tc.ok)
		}
		if _, known := meanings[f.name]; !known {
			t.Errorf("%s: check %q has no meaning", tc.name, f.name)
		}
	}
}

// TestCardSettings: a card without GRO or GSO is named, in whatever order; larger frames are advice.
func TestCardSettings(t *testing.T) {
	good := netcfg.Card{Name: "eth0", MTU: 9000, On: []string{"TSO", "GSO", "GRO", "checksums"}}
	small := good
	small.MTU = 1500
	slow := netcfg.Card{Name: "eth1", MTU: 9000, On: []string{"checksums"}, Off: []string{"TSO", "GSO", "GRO"}}
	for _, tc := range []struct {
		cards       []netcfg.Card
		detail, err string
	}{
		{nil, "no network card is up here", ""},
		{[]netcfg.Card{good}, "eth0: TSO GSO GRO checksums on, MTU 9000", ""},
		{[]netcfg.Card{small}, "eth0: TSO GSO GRO checksums on, MTU 1500; 9000 is better where all of the network takes it", ""},
		{[]netcfg.Card{good, slow}, "", "eth1: GRO off, eth1: GSO off"},
	} {
		f := cardSettings(tc.cards, nil)
		if errText(f.err) != tc.err || tc.err == "" && f.detail != tc.detail {
			t.Errorf("%v: %q, %v; want %q, %q", tc.cards, f.detail, f.err, tc.detail, tc.err)
		}
	}
	if f := cardSettings(nil, os.ErrPermission); !errors.Is(f.err, os.ErrPermission) {
		t.Errorf("unreadable cards: %+v", f)
	}
}

func TestRuncVersion(t *testing.T) {
	for _, tc := range []struct {
		out             string
		runcOK, libOK   bool
		wantLibsFinding bool
	}{
		{"runc version 1.1.5+ds1\ncommit: x\nlibseccomp: 2.5.4\n", true, false, true},
		{"runc version 1.5.0\nspec: 1.3\nlibseccomp: 2.6.0\n", true, true, true},
		{"runc version 1.0.3\nlibseccomp: 2.10.0\n", false, true, true},
		{"runc version 1.3.0\nspec: 1.2\n", false, false, true},
		{"runc version ?\nlibseccomp: ?\n", false, false, true},
		{"crun version 1.8.1\n", true, false, false},
		{"", true, false, false},
	} {
		found := runcVersion("/usr/sbin/runc", tc.out)
		if (found[0].err == nil) != tc.runcOK {
			t.Errorf("%q: runc error %v, want ok %v", tc.out, found[0].err, tc.runcOK)
		}
		if hasLib := len(found) == 2; hasLib != tc.wantLibsFinding || hasLib && (found[1].err == nil) != tc.libOK {
			t.Errorf("%q: findings %+v, want libseccomp %v, ok %v", tc.out, found, tc.wantLibsFinding, tc.libOK)
		}
	}
}

// TestRuntimeOfTheNode: an agent in a container finds the node's runtime, not the container's.
func TestRuntimeOfTheNode(t *testing.T) {
	root := t.TempDir()
	t.Setenv("HEDDLE_RUNC", "")
	if path, err := findRuntime(root); err == nil {
		t.Errorf("found %s in an empty root", path)
	}
	if err := os.MkdirAll(filepath.Join(root, "usr/sbin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "usr/sbin/runc"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if path, err := findRuntime(root); path != "/usr/sbin/runc" || err != nil {
		t.Errorf("found %q, %v", path, err)
	}
	t.Setenv("HEDDLE_RUNC", "/opt/other")
	if path, err := findRuntime(root); err == nil {
		t.Errorf("found %s, which is not there", path)
	}
}

// TestLeastKernel: the least kernel is that of the last thing that is required, and what the pages
// say.
func TestLeastKernel(t *testing.T) {
	if got := LeastKernel(); got != "5.17" { // bpf_loop's
		t.Errorf("least kernel %s, want 5.17", got)
	}
	for _, page := range []string{"kernels.md", "not-supported.md", "howto/install-debian.md"} {
		text, err := os.ReadFile(filepath.Join("../../docs", page))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), LeastKernel()) {
			t.Errorf("docs/%s does not name Linux %s", page, LeastKernel())
		}
	}
}
