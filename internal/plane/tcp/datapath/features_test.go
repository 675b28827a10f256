package datapath

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"heddle.dev/heddle/internal/testutil"
)

// A probe must tell a hook that exists from one that does not: one that always says yes finds
// nothing.
func TestProbesTellPresentFromAbsent(t *testing.T) {
	testutil.NeedRoot(t, "loads BPF programs")
	if err := sockAddr(ebpf.AttachCGroupInet4Connect)(); err != nil {
		t.Errorf("connect4 (Linux 4.17): %v", err)
	}
	if err := sockAddr(ebpf.AttachType(1000))(); err == nil {
		t.Error("a hook number that no kernel has was found")
	}
	if err := helpers(ebpf.SchedCLS, asm.FnSkAssign)(); err != nil {
		t.Errorf("sk_assign in tc (Linux 5.7): %v", err)
	}
	if err := helpers(ebpf.SchedCLS, asm.FnStoreHdrOpt)(); !errors.Is(err, ebpf.ErrNotSupported) {
		t.Errorf("store_hdr_opt in a tc program: got %v, want not supported", err)
	}
}

func TestFeatures(t *testing.T) {
	testutil.NeedRoot(t, "loads BPF programs")
	seen := map[string]bool{}
	for _, f := range Features() {
		t.Logf("%-26s %v", f.Name, f.Err)
		if !strings.HasPrefix(f.Name, "bpf_") && f.Name != "sock_destroy" || f.Detail == "" || seen[f.Name] {
			t.Errorf("feature %+v: want a name of its own with the prefix bpf_, and a detail", f)
		}
		seen[f.Name] = true
		if f.Err != nil && strings.Contains(f.Err.Error(), "\n") {
			t.Errorf("feature %s: error of several lines: %v", f.Name, f.Err)
		}
	}
}
