package lab

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func testLab(t *testing.T) Lab {
	t.Helper()
	return Lab{name: "demo", root: t.TempDir()}
}

func TestOpenChecksName(t *testing.T) {
	for name, good := range map[string]bool{"lab": true, "a-1": true, "": false, "Lab": false, "a/b": false, "-a": false, strings.Repeat("a", 21): false, "..": false} {
		if _, err := Open(name); (err == nil) != good {
			t.Errorf("Open(%q): %v", name, err)
		}
	}
}

func TestNames(t *testing.T) {
	l := Lab{name: "demo", root: Root}
	c := container{"n2", "c1"}
	for _, x := range []struct{ got, want string }{
		{l.runcID(c, ModeHeddle), "demo-n2-c1"},
		{l.runcID(c, ModeOverlay), "demo-n2-c1-plain"},
		{l.runcID(c, ModeHost), "demo-n2-c1-host"},
		{l.netns(c.suffix()), "/run/netns/demo-n2-c1"},
		{l.cgroup(), "/heddle-demo"},
		{l.apiSocket("n1"), "/run/heddle/lab/demo/n1/api.sock"},
	} {
		if x.got != x.want {
			t.Errorf("%s, want %s", x.got, x.want)
		}
	}
	for name, ours := range map[string]bool{
		"demo-fabric": true, "demo-outside": true, "demo-n1": true, "demo-n12-c3": true, "demo-g1": true, "demo-g9-c3": true,
		"demo": false, "demo-": false, "demo-n1-c1-plain": false, "demo-two-n1": false, "demo-n1-n1": false, "other-n1": false, "demo-nx": false, "demo-g": false, "demo-g10": false,
	} {
		if l.ownsNetns(name) != ours {
			t.Errorf("ownsNetns(%s) = %v", name, !ours)
		}
	}
}

func TestLabsAddressesDiffer(t *testing.T) {
	a, b := State{Index: 0, Nodes: 2}, State{Index: 1, Nodes: 2}
	if got := a.nodeAddr("n2"); got != netip.MustParseAddr("172.31.77.2") {
		t.Errorf("n2 of lab 0: %v", got)
	}
	if got := b.nodeAddr("n1"); got != netip.MustParseAddr("172.31.78.1") {
		t.Errorf("n1 of lab 1: %v", got)
	}
	if last := (State{Index: maxLabs - 1}); !last.underlay(outsideHost).IsValid() || underlayFirst+last.Index > 255 {
		t.Errorf("lab %d: no address", last.Index)
	}
}

func TestStateIsKept(t *testing.T) {
	l := testLab(t)
	if _, err := l.Load(); !errors.Is(err, ErrNotUp) || !strings.Contains(err.Error(), "heddle lab up --lab demo") {
		t.Errorf("Load before prepare: %v", err)
	}
	s, err := l.prepare(Size{})
	if err != nil {
		t.Fatal(err)
	}
	if s.Nodes != 2 || s.Containers != 2 {
		t.Errorf("default size: %+v", s)
	}
	again, err := l.prepare(Size{Nodes: 2})
	if err != nil || !again.Created.Equal(s.Created) {
		t.Errorf("second prepare: %+v, %v", again, err)
	}
	if _, err := l.prepare(Size{Nodes: 3}); err == nil || !strings.Contains(err.Error(), "heddle lab down --lab demo") {
		t.Errorf("another size: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(l.Dir(), "*.new")); len(left) > 0 {
		t.Errorf("files left behind: %v", left)
	}
}

func TestIndexesAreNotShared(t *testing.T) {
	root := t.TempDir()
	var got []int
	for _, name := range []string{"a", "b", "c"} {
		s, err := Lab{name: name, root: root}.prepare(Size{})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, s.Index)
	}
	if err := os.RemoveAll(filepath.Join(root, "b")); err != nil {
		t.Fatal(err)
	}
	s, err := Lab{name: "d", root: root}.prepare(Size{Nodes: 1, Containers: 3})
	if err != nil {
		t.Fatal(err)
	}
	if got = append(got, s.Index); !slices.Equal(got, []int{0, 1, 2, 1}) {
		t.Errorf("indexes %v", got)
	}
	labs, err := list(root)
	if err != nil || len(labs) != 3 || labs[2].Name != "d" || labs[2].Containers != 3 {
		t.Errorf("list: %+v, %v", labs, err)
	}
}

// TestLocks: commands on one lab wait for each other, those on others do not; the choice of an
// index waits for neither.
func TestLocks(t *testing.T) {
	root := t.TempDir()
	a, b := Lab{name: "a", root: root}, Lab{name: "b", root: root}
	lock := func(l Lab) func() {
		t.Helper()
		unlock, err := l.lock()
		if err != nil {
			t.Fatal(err)
		}
		return unlock
	}
	unlock := lock(a)
	lock(b)()
	if _, err := a.prepare(Size{}); err != nil {
		t.Fatal(err)
	}
	second := make(chan struct{})
	go func() {
		defer close(second)
		if u, err := a.lock(); err != nil {
			t.Error(err)
		} else {
			u()
		}
	}()
	for range 100 { // as far as one can see that something does not happen
		select {
		case <-second:
			t.Fatal("two commands on one lab at once")
		case <-time.After(time.Millisecond):
		}
	}
	unlock()
	<-second
}

func TestLoadRefusesDamage(t *testing.T) {
	for _, text := range []string{``, `{`, `{}`, `{"name":"other","nodes":2,"containers":2}`, `{"name":"demo","nodes":-1,"containers":2}`, `{"name":"demo","nodes":2,"containers":2,"index":999}`} {
		l := testLab(t)
		if err := os.MkdirAll(l.Dir(), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(l.statePath(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Load(); err == nil || errors.Is(err, ErrNotUp) || !strings.Contains(err.Error(), "lab down --lab demo") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestSizeLimits(t *testing.T) {
	for _, z := range []Size{{Nodes: -1}, {Nodes: MaxNodes + 1}, {Containers: -1}, {Containers: MaxContainers + 1}} {
		if _, err := testLab(t).prepare(z); err == nil || !strings.Contains(err.Error(), "--") {
			t.Errorf("%+v: %v", z, err)
		}
	}
}

func TestAddr(t *testing.T) {
	l := testLab(t)
	s, err := l.prepare(Size{Nodes: 2, Containers: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Addr("n1/c1", ModeHeddle, IPv4); err == nil || !strings.Contains(err.Error(), "lab up") {
		t.Errorf("before it is up: %v", err)
	}
	s.Overlay["n1/c1"], s.Ready = netip.MustParseAddr("10.244.0.2"), true
	s.Overlay6["n1/c1"] = netip.MustParseAddr("fd48:6464:1::af4:2")
	if err := l.save(s); err != nil {
		t.Fatal(err)
	}
	for m, want := range map[Mode][2]string{
		ModeHeddle: {"10.244.0.2", "fd48:6464:1::af4:2"}, ModeOverlay: {"10.244.0.2", "fd48:6464:1::af4:2"}, ModeHost: {"172.31.77.1", "fd48:6500:4d::1"},
	} {
		for i, f := range []Family{IPv4, IPv6} {
			if got, err := l.Addr("n1/c1", m, f); err != nil || got.String() != want[i] {
				t.Errorf("Addr(%s, IPv%d) = %v, %v, want %s", m, f, got, err, want[i])
			}
		}
	}
	if got, err := l.Addr("n1/c1", ModeOverlay, 5); err == nil || !strings.Contains(err.Error(), "4 or 6") {
		t.Errorf("family 5: %v, %v", got, err)
	}
	s.Overlay["n2/c1"] = netip.MustParseAddr("10.244.1.2")
	if err := l.save(s); err != nil {
		t.Fatal(err)
	}
	if got, err := l.Addr("n2/c1", ModeOverlay, IPv6); err == nil || !strings.Contains(err.Error(), "heddle status --lab demo") {
		t.Errorf("node without IPv6: %v, %v", got, err)
	}
	for _, name := range []string{"n1/c2", "n3/c1", "n1", ""} {
		if _, err := l.Addr(name, ModeHeddle, IPv4); err == nil || !strings.Contains(err.Error(), "n1/c1, n2/c1") {
			t.Errorf("Addr(%q): %v: want an error that lists the containers", name, err)
		}
	}
}

func TestPrefix6OfALab(t *testing.T) {
	for _, bad := range []string{"auto", "fd00::/64", "10.0.0.0/8", "fd00::1/96"} {
		if _, err := testLab(t).prepare(Size{Prefix6: bad}); err == nil || !strings.Contains(err.Error(), "--prefix6") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, good := range []string{"", NoPrefix6, "fd00:1::/96"} {
		l := testLab(t)
		s, err := l.prepare(Size{Prefix6: good})
		if err != nil {
			t.Fatalf("%q: %v", good, err)
		}
		if again, err := l.prepare(Size{}); err != nil || again.Prefix6 != good {
			t.Errorf("%q: again: %q, %v", good, again.Prefix6, err)
		}
		if _, err := l.prepare(Size{Prefix6: "fd00:2::/96"}); err == nil || !strings.Contains(err.Error(), "lab down") {
			t.Errorf("%q: another prefix: %v", good, err)
		}
		args := strings.Join(l.agentArgs(s, "n1", "/cg"), " ")
		if strings.Contains(args, "--prefix6") != (good != "") || !strings.Contains(args, good) {
			t.Errorf("%q: agent's arguments %s", good, args)
		}
		if got := len(s.fabricAddrs(1)); (got == 1) != (good == NoPrefix6) {
			t.Errorf("%q: %d addresses on the fabric", good, got)
		}
		_, err = l.Addr("n1/c1", ModeHost, IPv6)
		if (err != nil) != (good == NoPrefix6) {
			t.Errorf("%q: address of the node: %v", good, err)
		}
	}
}

func TestParseMode(t *testing.T) {
	for _, m := range Modes {
		if got, err := ParseMode(string(m)); got != m || err != nil {
			t.Errorf("ParseMode(%s) = %s, %v", m, got, err)
		}
	}
	if _, err := ParseMode("none"); err == nil {
		t.Error("ParseMode(none): no error")
	}
}

func TestExecArgs(t *testing.T) {
	env := map[string]string{"PATH": "/bin", "HOME": "/root", "SECRET": "x", "EXTRA": "a,b"}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	got := execArgs(Command{Args: []string{"ls", "-l", "--", "x"}, Env: []string{"A=1", "EXTRA", "NONE"}, User: "1:2", Dir: "/w"}, "id", lookup, true)
	want := "exec --cwd /w --tty --user 1:2 --env PATH=/bin --env HOME=/root --env A=1 --env EXTRA=a,b id ls -l -- x"
	if strings.Join(got, " ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, " "), want)
	}
}

func TestSpec(t *testing.T) {
	l := Lab{name: "demo", root: Root}
	c := container{"n1", "c2"}
	heddle, plain, host := l.spec(c, ModeHeddle, "/bin/heddle", 0), l.spec(c, ModeOverlay, "/bin/heddle", 77), l.spec(c, ModeHost, "/bin/heddle", 77)
	if heddle.Annotations["io.heddle.endpoint"] != "n1/c2" || heddle.Annotations["io.heddle.seccomp-socket"] != l.seccompSocket("n1") {
		t.Errorf("annotations %v", heddle.Annotations)
	}
	if len(plain.Annotations)+len(host.Annotations) != 0 {
		t.Error("a container that is not intercepted has Heddle's annotations")
	}
	text := func(v any) string { b, _ := json.Marshal(v); return string(b) }
	if s := text(host.Linux.Namespaces); !strings.Contains(s, `"/run/netns/demo-n1"`) || !strings.Contains(s, "/proc/77/ns/pid") {
		t.Errorf("host mode: namespaces %s", s)
	}
	for _, spec := range []string{text(heddle), text(plain)} {
		if !strings.Contains(spec, `"/run/netns/demo-n1-c2"`) || strings.Contains(spec, `"type":"user"`) {
			t.Errorf("spec %s", spec)
		}
	}
	if heddle.Root.Path != plain.Root.Path || heddle.Linux.CgroupsPath == plain.Linux.CgroupsPath {
		t.Error("modes must share the root file system, and not the cgroup")
	}
}

func TestMountinfo(t *testing.T) {
	got := parseMountinfo("31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - tmpfs tmpfs rw\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" +
		"38 31 0:31 / /sys/fs/cgroup/unified rw master:1 propagate_from:2 - cgroup2 cgroup2 rw\n" +
		"39 31 0:32 / /mnt/a\\040b\\134c rw - ext4 /dev/x rw\nrubbish\n\n1 2 - x\n")
	want := []mountPoint{{"/sys/fs/cgroup", "tmpfs"}, {"/sys/fs/cgroup/cpu", "cgroup"}, {"/sys/fs/cgroup/unified", "cgroup2"}, {`/mnt/a b\c`, "ext4"}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if c := selectCgroups(got); c.v2 != "/sys/fs/cgroup/unified" || !slices.Equal(c.v1, []string{"/sys/fs/cgroup/cpu"}) {
		t.Errorf("cgroups %+v", c)
	}
	if c := selectCgroups(got[:2]); c.v2 != "" {
		t.Errorf("cgroups of a version 1 host: %+v", c)
	}
}

func TestEachStopsAfterAnError(t *testing.T) {
	var calls atomic.Int32
	broken := errors.New("broken")
	err := each(context.Background(), make([]int, 100), func(context.Context, int) error {
		calls.Add(1)
		return broken
	})
	if !errors.Is(err, broken) || calls.Load() > 2*parallel {
		t.Errorf("%d calls, %v", calls.Load(), err)
	}
	calls.Store(0)
	if err := each(context.Background(), make([]int, 100), func(context.Context, int) error { calls.Add(1); return nil }); err != nil || calls.Load() != 100 {
		t.Errorf("%d calls, %v", calls.Load(), err)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if got := tail(path); !strings.Contains(got, path) {
		t.Errorf("no log: %q", got)
	}
	if err := os.WriteFile(path, []byte("1\n2\n3\n4\n5\n6\n7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := tail(path); !strings.Contains(got, "3\n  4\n  5\n  6\n  7") || strings.Contains(got, "2\n") {
		t.Errorf("tail: %q", got)
	}
}
