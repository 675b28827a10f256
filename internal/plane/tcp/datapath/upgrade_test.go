package datapath

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
)

// upgradeConfig gives the configuration of a node of this test's own: a BPF file system and an
// empty cgroup.
func upgradeConfig(t *testing.T) Config {
	t.Helper()
	testutil.NeedRoot(t, "loads BPF programs")
	bpf := t.TempDir()
	if err := unix.Mount("bpf", bpf, "bpf", 0, "mode=700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpf, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	group, err := os.MkdirTemp(root, "heddle-upgrade-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(group); err != nil {
			t.Error(err)
		}
	})
	return Config{
		PinDir: filepath.Join(bpf, "heddle"), Cgroup: group, NetworkID: 7, Underlay: underlayB,
		DirectPorts: model.PortRange{First: 17440, Last: 17455}, Mark: 1, OverlayMark: 2, DropMark: 3, RejectMark: 4, ServiceMark: 6,
	}
}

// older pins what a version with other maps would have: this one's, after change.
func older(t *testing.T, cfg Config, change func(*ebpf.CollectionSpec)) *Datapath {
	t.Helper()
	if err := CheckPinDir(cfg.PinDir); err != nil {
		t.Fatal(err)
	}
	spec, err := loadHeddle()
	if err != nil {
		t.Fatal(err)
	}
	if err := setVariables(spec, cfg); err != nil {
		t.Fatal(err)
	}
	change(spec)
	d := &Datapath{cfg: cfg}
	if err := d.load(spec, abiOf(spec), btf.NewCache()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func pinsOf(t *testing.T, cfg Config) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(cfg.PinDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// An agent of the same version takes over every map and hook; nothing is pinned twice or lost.
func TestSameVersionTakesOver(t *testing.T) {
	cfg := upgradeConfig(t)
	if err := CheckPins(cfg.PinDir); err != nil {
		t.Errorf("no pins: %v", err)
	}
	first, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.SetEndpoint(model.Endpoint{ID: 5, Name: "e", Addrs: []netip.Addr{overlayB}}, 9, ContainerSide{}); err != nil {
		t.Fatal(err)
	}
	if err := first.SetLastID(17); err != nil {
		t.Fatal(err)
	}
	pinned := pinsOf(t, cfg)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	var v heddleEndpoint
	if err := second.objs.EndpointById.Lookup(uint32(5), &v); err != nil || v.Ifindex != 9 {
		t.Errorf("endpoint of the first: %+v, %v", v, err)
	}
	if id, err := second.LastID(); err != nil || id != 17 {
		t.Errorf("last id %d, %v", id, err)
	}
	if got := pinsOf(t, cfg); !slices.Equal(got, pinned) {
		t.Errorf("pins %v, were %v", got, pinned)
	}
}

// swapMembers gives a struct of the same size whose first two members have each other's names.
func swapMembers(t btf.Type) btf.Type {
	c := *t.(*btf.Struct)
	c.Members = slices.Clone(c.Members)
	c.Members[0].Name, c.Members[1].Name = c.Members[1].Name, c.Members[0].Name
	return &c
}

// Maps of another layout, of the same or another size, of another version, or without a record are
// refused; what is pinned stays as it was.
func TestOtherVersionIsRefused(t *testing.T) {
	for name, v := range map[string]struct {
		older func(*ebpf.CollectionSpec)
		after breakage
		want  string
	}{
		"larger value": {older: func(s *ebpf.CollectionSpec) {
			s.Maps["wire_by_relay"].ValueSize += 4
			s.Maps["wire_by_relay"].Value = nil
		}, want: "wire_by_relay"},
		"fewer entries":       {older: func(s *ebpf.CollectionSpec) { s.Maps["flow_by_wire"].MaxEntries /= 2 }, want: "flow_by_wire"},
		"members of one size": {older: func(s *ebpf.CollectionSpec) { m := s.Maps["route_by_prefix"]; m.Value = swapMembers(m.Value) }, want: "route_by_prefix"},
		"meaning": {after: func(t *testing.T, cfg Config) {
			have, err := readABI(cfg.PinDir)
			if err != nil {
				t.Fatal(err)
			}
			have[versionEntry] = abiHash{1}
			if err := writeABI(cfg.PinDir, have); err != nil {
				t.Fatal(err)
			}
		}, want: "means something else"},
		"no record": {after: func(t *testing.T, cfg Config) {
			if err := os.Remove(filepath.Join(cfg.PinDir, abiPin)); err != nil {
				t.Fatal(err)
			}
		}, want: "no record"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := upgradeConfig(t)
			if v.older == nil {
				v.older = func(*ebpf.CollectionSpec) {}
			}
			older(t, cfg, v.older)
			if v.after != nil {
				v.after(t, cfg)
			}
			pinned := pinsOf(t, cfg)
			err := CheckPins(cfg.PinDir)
			if !errors.Is(err, ErrABI) || !strings.Contains(err.Error(), v.want) || !strings.Contains(err.Error(), "heddled teardown") {
				t.Errorf("CheckPins: %v; want %q and a remedy", err, v.want)
			}
			layout, err := Layout()
			if err := errors.Join(err, CheckLayout(cfg.PinDir, layout)); !errors.Is(err, ErrABI) || !strings.Contains(err.Error(), v.want) {
				t.Errorf("CheckLayout: %v; want %q", err, v.want)
			}
			if d, err := Open(cfg); !errors.Is(err, ErrABI) {
				t.Errorf("Open: %v, %v", d, err)
			}
			if got := pinsOf(t, cfg); !slices.Equal(got, pinned) {
				t.Errorf("pins %v, were %v", got, pinned)
			}
		})
	}
}

// breakage changes what an older version left.
type breakage func(*testing.T, Config)

// A version with more reasons carries the counters over; hooks and maps that it does not have are
// removed.
func TestNewerVersionCarriesOver(t *testing.T) {
	cfg := upgradeConfig(t)
	old := older(t, cfg, func(s *ebpf.CollectionSpec) { s.Maps[countersMap].MaxEntries = 5 })
	if err := putCounters(old.objs.CountByReason, []uint64{0, 10, 20, 30, 40}); err != nil {
		t.Fatal(err)
	}
	for _, stale := range []string{"link_gone", "map_of_before"} {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.Pin(filepath.Join(cfg.PinDir, stale)); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	totals, err := d.Counters()
	if err != nil || !slices.Equal(totals[:6], []uint64{0, 10, 20, 30, 40, 0}) || len(totals) != len(names.Reasons) {
		t.Errorf("counters %v, %v", totals, err)
	}
	for _, name := range pinsOf(t, cfg) {
		if name == "link_gone" || name == "map_of_before" {
			t.Errorf("%s is still pinned", name)
		}
	}
	if err := CheckPins(cfg.PinDir); err != nil {
		t.Errorf("after the upgrade: %v", err)
	}
}
