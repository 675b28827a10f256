package congestion

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
)

// compiled makes a congestion control called name, whose undo_cwnd gives n segments.
func compiled(t testing.TB, name, n string) *stack.Object {
	t.Helper()
	dir := t.TempDir()
	source := `#include "tcp.h"
SEC("struct_ops/s") __u32 BPF_PROG(s, struct sock *sk) { return 2; }
SEC("struct_ops/c") void BPF_PROG(c, struct sock *sk, __u32 ack, __u32 acked) { }
SEC("struct_ops/u") __u32 BPF_PROG(u, struct sock *sk) { return ` + n + `; }
SEC(".struct_ops.link") struct tcp_congestion_ops ops = {.ssthresh = (void *)s, .cong_avoid = (void *)c, .undo_cwnd = (void *)u, .name = "` + name + `"};
char _license[] SEC("license") = "GPL";
`
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, "a.bpf.c"), []byte(source), 0o600))
	cmd := exec.Command("clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", "-I../../../../bpf/cc", "-I/usr/include/x86_64-linux-gnu", "-c", filepath.Join(dir, "a.bpf.c"), "-o", filepath.Join(dir, "a.o"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("clang with libbpf's headers is not installed (`make check` does): %v %s", err, out)
	}
	elf, err := os.ReadFile(filepath.Join(dir, "a.o"))
	testutil.NoError(t, err)
	return &stack.Object{Name: name, SHA256: stack.Sum(elf), Object: elf}
}

// pins makes a BPF file system of its own until the end of the test.
func pins(t testing.TB) string {
	t.Helper()
	testutil.NeedRoot(t, "mounts a BPF file system")
	dir := t.TempDir()
	testutil.NoError(t, unix.Mount("bpf", dir, "bpf", 0, ""))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// available reports whether sockets can have a congestion control.
func available(t testing.TB, name string) bool {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	defer unix.Close(fd)
	return unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, name) == nil
}

// TestRegistry: two nodes of one kernel share a registration, which outlives the agents of both and
// is replaced in place; it goes with the last pin.
func TestRegistry(t *testing.T) {
	testutil.NeedRoot(t, "registers a congestion control")
	const name = "heddle_unit"
	o, newer := compiled(t, name, "2"), compiled(t, name, "3")
	dirs := []string{pins(t), pins(t)}
	for _, dir := range dirs {
		r := Open(dir)
		if s := r.Verify(o); s.Err != nil || s.Registered {
			t.Errorf("verified: %+v", s)
		}
		if s := r.Register(o); s.Err != nil || !s.Registered || !available(t, name) {
			t.Fatalf("registered: %+v", s)
		}
		testutil.NoError(t, r.Close())
	}
	if !available(t, name) {
		t.Error("it went with the agents")
	}
	a, b := Open(dirs[0]), Open(dirs[1])
	defer a.Close()
	defer b.Close()
	for _, r := range []*Registry{a, b} {
		if s := r.Register(o); s.Err != nil || !s.Registered {
			t.Errorf("taken over: %+v", s)
		}
	}
	for _, r := range []*Registry{a, b} {
		if s := r.Register(newer); s.Err != nil || !s.Registered {
			t.Errorf("replaced: %+v", s)
		}
	}
	testutil.NoError(t, a.Keep(map[string]bool{name: true}))
	testutil.NoError(t, a.Keep(nil))
	if !available(t, name) {
		t.Error("the other node lost it")
	}
	testutil.NoError(t, b.Keep(nil))
	if available(t, name) {
		t.Error("it is registered though nobody keeps it")
	}
	if s := a.Register(o); s.Err != nil || !s.Registered {
		t.Errorf("once more: %+v", s)
	}
	testutil.NoError(t, a.Keep(nil))
}

// TestTakenName: a name that is another's is no reason to take it away.
func TestTakenName(t *testing.T) {
	testutil.NeedRoot(t, "registers a congestion control")
	r := Open(pins(t))
	defer r.Close()
	if s := r.Register(compiled(t, "reno", "2")); s.Err == nil || !strings.Contains(s.Err.Error(), "already") {
		t.Errorf("%+v", s)
	}
}

// FuzzName: whatever an object is, it has a name that sockets may have, or is refused.
func FuzzName(f *testing.F) {
	o := compiled(f, "fuzzed", "2")
	f.Add(o.Object)
	f.Add(bytes.Replace(o.Object, []byte("fuzzed"), []byte("fuz ed"), 1))
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, elf []byte) {
		if name, err := Name(elf); err == nil && stack.ValidateCongestion(name) != nil {
			t.Errorf("name %q", name)
		}
	})
}
