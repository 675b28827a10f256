package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestVerbsCard: each thing that is not there is named, with what to do.
func TestVerbsCard(t *testing.T) {
	h := host{root: t.TempDir()}
	write := func(file, text string) {
		t.Helper()
		file = filepath.Join(h.root, file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	says := func(want string) {
		t.Helper()
		if f := h.verbsCard("mlx5_0"); f.err == nil || !strings.Contains(f.err.Error(), want) {
			t.Errorf("%v, want %q", f.err, want)
		}
	}
	says("and no other: load its driver")
	write("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n")
	says("there are: rxe0")
	write("sys/class/infiniband/mlx5_0/node_type", "1: CA\n")
	says("apt-get install libibverbs1")
	write("etc/ld.so.cache", "libibverbs.so.1.14\x00/lib/x/libibverbs.so.1.14\x00")
	says("apt-get install libibverbs1")
	write("etc/ld.so.cache", "libibverbs.so.1\x00/lib/x/libibverbs.so.1\x00")
	says("read the state of port 1 of mlx5_0")
	write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
	says("port 1 of mlx5_0 is not active (1: DOWN)")
	write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
	if f := h.verbsCard("mlx5_0"); f.err != nil {
		t.Error(f.err)
	}
	write("etc/ld.so.cache", "")
	write("usr/lib64/libibverbs.so.1", "")
	if f := h.verbsCard("mlx5_0"); f.err != nil {
		t.Errorf("without the loader's cache: %v", f.err)
	}
}
