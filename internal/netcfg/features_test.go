package netcfg

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

func TestFeatures(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	before, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	found, err := Features()
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != len(probes) {
		t.Errorf("%d outcomes of %d probes", len(found), len(probes))
	}
	for _, f := range found {
		t.Logf("%-26s %v", f.Name, f.Err)
		if !strings.HasPrefix(f.Name, "net_") || f.Detail == "" {
			t.Errorf("feature %+v: want the prefix net_ and a detail", f)
		}
	}
	after, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil || after != before {
		t.Errorf("network namespace: %s before, %s after (%v)", before, after, err)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "probe") {
			t.Errorf("device %s was made outside the throw-away namespace", l.Attrs().Name)
		}
	}
}

// The classifier probe reads the kernel's refusal: it must tell a classifier from one that does not
// exist.
func TestClassifierProbeTellsAbsence(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	err := inThrowAwayNetns(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		absent := tryClassifier(h, &netlink.GenericFilter{FilterAttrs: probeFilter, FilterType: "nonesuch"})
		if !errors.Is(absent, unix.ENOENT) {
			t.Errorf("classifier that no kernel has: got %v, want %v", absent, unix.ENOENT)
		}
		return tryClsBPF(h)
	})
	if err != nil {
		t.Errorf("classifier bpf: %v", err)
	}
}
