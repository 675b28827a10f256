package node

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// openDatapath loads the programs for a node that has nothing but a BPF file system and a cgroup.
func openDatapath(t *testing.T) *datapath.Datapath {
	t.Helper()
	root := cgroupRoot(t)
	bpf := t.TempDir()
	if err := unix.Mount("bpf", bpf, "bpf", 0, "mode=700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpf, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	group, err := os.MkdirTemp(root, "heddle-node-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(group); err != nil {
			t.Error(err)
		}
	})
	d, err := datapath.Open(datapath.Config{
		PinDir: filepath.Join(bpf, "heddle"), Cgroup: group, NetworkID: 7, Underlay: netip.MustParseAddr("192.0.2.2"),
		DirectPorts: model.DefaultDirectPorts, Mark: model.Mark, OverlayMark: model.OverlayMark, DropMark: model.DropMark, RejectMark: model.RejectMark,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestMapsAreCompared: what the maps have of an endpoint that the agent does not have goes while
// the agent runs, and is counted. Endpoints that the agent has, or has still to undo, stay.
func TestMapsAreCompared(t *testing.T) {
	orphaned := slices.IndexFunc(names.Reasons, func(r model.Reason) bool { return r.Name == "mend_stray_entry" })
	d := openDatapath(t)
	name := func(id model.EndpointID) model.Endpoint {
		return model.Endpoint{ID: id, Name: "e", Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 0, byte(id)})}}
	}
	for id := model.EndpointID(1); id <= 3; id++ {
		if err := d.SetEndpoint(name(id), 900+int(id), datapath.ContainerSide{}); err != nil {
			t.Fatal(err)
		}
	}
	a := compose(&host{cfg: Config{CompareMaps: time.Millisecond}, log: slog.New(slog.NewTextHandler(t.Output(), nil)), planes: plane.Set{mapsOnly{d: d}},
		known: newRegistry()})
	a.halfDone["half"] = name(2)
	one := name(1)
	one.Name = "one"
	a.known.add(one)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.restorer.compareMaps(ctx) }()
	defer func() { cancel(); <-ended }()
	for deadline := time.Now().Add(time.Minute); ; {
		counts, err := d.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if counts[orphaned] > 0 { // counted when all are removed
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing removed")
		}
		<-time.After(time.Millisecond)
	}
	cancel() // or it removes what the next call is to count
	<-ended
	left, err := d.KeepEndpoints(nil)
	if err != nil || left["endpoint_by_id"] != 2 || left["endpoint_by_addr"] != 2 || left["sockets_by_endpoint"] != 2 {
		t.Errorf("left were %v, %v", left, err)
	}
	for name, n := range left {
		if n != 2 {
			t.Errorf("%s had %d entries, want those of two endpoints", name, n)
		}
	}
}

// mapsOnly is a plane that has programs' maps and nothing else.
type mapsOnly struct {
	plane.Plane
	d *datapath.Datapath
}

func (mapsOnly) Name() string { return "maps" }

func (m mapsOnly) Keep(keep map[model.EndpointID]bool) (map[string]int, error) {
	return m.d.KeepEndpoints(keep)
}
