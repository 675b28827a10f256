package node

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
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
		DirectPorts: model.DefaultDirectPorts, Mark: model.Mark, OverlayMark: model.OverlayMark, DropMark: model.DropMark, RejectMark: model.RejectMark, ServiceMark: model.ServiceMark,
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
	a.halfDone["half"] = halfDone{Endpoint: name(2)}
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

// recalls is a plane that recalls one endpoint, in one network namespace.
type recalls struct {
	plane.Plane
	id    model.EndpointID
	netns uint64
}

func (r recalls) Recall(e model.Endpoint, netns uint64) bool { return e.ID == r.id && netns == r.netns }

// TestRecalledByMaps: the programs' maps say whether an endpoint is as an earlier agent left it.
func TestRecalledByMaps(t *testing.T) {
	d := openDatapath(t)
	e := endpointOf(1, "e", "10.244.1.2")
	if d.Recall(e, 77) {
		t.Error("one that is not there is recalled")
	}
	if err := d.SetEndpoint(e, 901, datapath.ContainerSide{Netns: 77}); err != nil {
		t.Fatal(err)
	}
	moved, later, plain := e, e, e
	moved.Addrs, later.Created = []netip.Addr{netip.MustParseAddr("10.244.1.3")}, e.Created.Add(time.Second)
	plain.Planes.TCP.Intercepted = false
	for what, changed := range map[string]model.Endpoint{"address": moved, "creation": later, "interception": plain} {
		if d.Recall(changed, 77) {
			t.Errorf("one with another %s is recalled", what)
		}
	}
	if d.Recall(e, 78) {
		t.Error("one in another namespace is recalled")
	}
	if !d.Recall(e, 77) {
		t.Error("not recalled")
	}
}

// TestRecalledFirst: calls of an endpoint are answered before its devices are looked at, unless
// more than the programs' maps is needed for that.
func TestRecalledFirst(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	name := fmt.Sprintf("hdt-%d-recall", os.Getpid())
	if err := netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	h := recordingHost(t.TempDir())
	h.stacker = newStacker("n1", newAway(func() {}), &h.faults, h.log)
	a := compose(h)
	plain := endpointOf(1, "plain", "10.244.1.2")
	plain.NetnsPath = netns.Path(name)
	inode, err := netcfg.NetnsInode(plain.NetnsPath)
	if err != nil {
		t.Fatal(err)
	}
	h.planes = plane.Set{recalls{id: plain.ID, netns: inode}}
	other, profile, unknown, gone := plain, plain, plain, plain
	other.ID, profile.ID, unknown.ID, gone.NetnsPath = 2, 3, 4, netns.Path("hdt-none")
	for _, e := range []model.Endpoint{plain, other} {
		h.stacker.chosen[e.ID] = stack.Choice{Stack: stack.Kernel}
	}
	h.stacker.chosen[profile.ID] = stack.Choice{Stack: stack.Kernel, Profile: &stack.Profile{Name: "p"}}
	for _, e := range []model.Endpoint{other, profile, unknown, gone} {
		if a.restorer.recall(e) {
			t.Errorf("endpoint %d waits for nothing", e.ID)
		}
	}
	if h.known.len() > 0 || len(a.restorer.left) > 0 {
		t.Errorf("known are %v, left %v", h.known.all(), a.restorer.left)
	}
	if !a.restorer.recall(plain) || len(a.restorer.left) != 1 {
		t.Fatalf("left are %v", a.restorer.left)
	}
	if id, err := a.attachments.resolve("plain", specs.ContainerProcessState{}); err != nil || id != plain.ID {
		t.Errorf("calls of %q are of %d, %v", "plain", id, err)
	}
	if _, ok := h.known.netnsOf(plain.ID); !ok {
		t.Error("its namespace is not known")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.restorer.finish(ended); err != nil || a.restorer.left != nil { // else it has no planes
		t.Errorf("left are %v, %v", a.restorer.left, err)
	}
}

// leftPlane is a plane that notes where the containers were of endpoints that it detaches.
type leftPlane struct {
	plane.Plane
	paths *[]string
}

func (leftPlane) Name() string                                { return "left" }
func (leftPlane) SetStack(model.Endpoint, stack.Choice) error { return nil }

func (l leftPlane) Detach(e model.Endpoint) error {
	*l.paths = append(*l.paths, e.NetnsPath)
	return nil
}

// forgetful is a store that endpoints are deleted from.
type forgetful struct {
	store.Store
	deleted []model.EndpointID
}

func (f *forgetful) DeleteEndpoint(_ context.Context, _ string, id model.EndpointID) error {
	f.deleted = append(f.deleted, id)
	return nil
}

// TestNetnsOfAnother: an endpoint whose container's process has ended is removed although another
// process has its number, and its path leads to that one's namespace. Nothing is done there, and an
// endpoint that is there stays.
func TestNetnsOfAnother(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	path := make(map[string]string) // to the namespace of a process
	for _, name := range []string{"was", "now"} {
		space := fmt.Sprintf("hdt-%d-%s", os.Getpid(), name)
		testutil.NoError(t, netns.Create(space))
		t.Cleanup(func() { testutil.NoError(t, netns.Delete(space)) })
		process := exec.Command("sleep", "infinity")
		testutil.NoError(t, netns.Start(netns.Path(space), process))
		t.Cleanup(func() { _ = process.Process.Kill(); _ = process.Wait() })
		path[name] = fmt.Sprintf("/proc/%d/ns/net", process.Process.Pid)
	}
	was, err := netcfg.IdentifyNetns(path["was"])
	testutil.NoError(t, err)
	now, err := netcfg.IdentifyNetns(path["now"])
	testutil.NoError(t, err)
	inode, err := netcfg.NetnsInode(path["now"])
	testutil.NoError(t, err)
	if id, err := identify(path["now"]); err != nil || id != now || now == was || now.Boot == "" {
		t.Errorf("identified as %+v, %v, want %+v", id, err, now)
	}
	if id, err := identify(netns.Path("hdt")); err != nil || id != (model.NetnsIdentity{}) {
		t.Errorf("a path that is a namespace's own is identified as %+v, %v", id, err)
	}
	earlier := now
	earlier.Boot = "00000000-0000-0000-0000-000000000000"
	for _, c := range []struct {
		name, path string
		netns      model.NetnsIdentity
		stays      bool
	}{
		{"another namespace", path["now"], was, false},
		{"the machine was started again", path["now"], earlier, false},
		{"a process of the node's", "/proc/self/ns/net", was, false},
		{"an earlier build made it", path["now"], model.NetnsIdentity{}, true}, // a fault
	} {
		t.Run(c.name, func(t *testing.T) {
			var left []string
			s := &forgetful{}
			h := recordingHost(t.TempDir())
			h.store, h.planes, h.traps = s, plane.Set{leftPlane{paths: &left}}, trap.New()
			h.stacker, h.enforcer = newStacker("n1", newAway(func() {}), &h.faults, h.log), newEnforcer(h.planes, "n1", nil, netip.Prefix{}, h.log)
			h.stacker.planes = h.planes
			a := compose(h)
			var err error
			a.leases, err = endpoint.New(endpoint.Config{Node: "n1", Prefixes: h.self.Prefixes, Busy: func(model.EndpointID) bool { return false }})
			testutil.NoError(t, err)
			lives, e := endpointOf(1, "lives", "10.244.1.2"), endpointOf(2, "ended", "10.244.1.3")
			e.NetnsPath, e.Netns = c.path, c.netns
			h.known.add(lives)
			h.known.setNetns(lives.ID, inode)
			if a.restorer.recall(e) && !c.stays {
				t.Error("recalled")
			}
			// In a namespace of the test's own, where no node is set up.
			testutil.NoError(t, netns.OnDiscardedThread(func() error {
				if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
					return err
				}
				if kept := a.restorer.takeOver(e); kept != c.stays {
					t.Errorf("kept: %v; faults %+v", kept, h.faults.List())
				}
				return nil
			}))
			if in, ok := h.known.inNetns(inode); !ok || in.ID != lives.ID {
				t.Errorf("in the namespace is %+v, %v", in, ok)
			}
			if c.stays {
				if f := h.faults.List(); len(f) != 1 || !strings.Contains(f[0].Error, "namespace of endpoint lives") {
					t.Errorf("faults %+v", f)
				}
			} else if !slices.Equal(s.deleted, []model.EndpointID{e.ID}) || !slices.Equal(left, []string{""}) {
				t.Errorf("deleted %v, left %q", s.deleted, left)
			}
		})
	}
}

// TestFinishSaysSo: an agent that starts says that it gets further with each endpoint that took long.
func TestFinishSaysSo(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	var left []string
	h := recordingHost(t.TempDir())
	h.store, h.planes, h.traps = &forgetful{}, plane.Set{leftPlane{paths: &left}}, trap.New()
	h.stacker, h.enforcer = newStacker("n1", newAway(func() {}), &h.faults, h.log), newEnforcer(h.planes, "n1", nil, netip.Prefix{}, h.log)
	h.stacker.planes = h.planes
	a := compose(h)
	calls := 0
	h.cfg.Progress = func() { calls++ }
	var err error
	a.leases, err = endpoint.New(endpoint.Config{Node: "n1", Prefixes: h.self.Prefixes, Busy: func(model.EndpointID) bool { return false }})
	testutil.NoError(t, err)
	for range 2 {
		e := endpointOf(2, "ended", "10.244.1.3")
		e.NetnsPath = "/proc/self/none"
		a.restorer.left = []model.Endpoint{e, e}
		// In a namespace of the test's own, where no node is set up.
		testutil.NoError(t, netns.OnDiscardedThread(func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			return a.restorer.finish(t.Context())
		}))
		a.restorer.progressed = a.restorer.progressed.Add(-ProgressEvery)
	}
	if calls != 2 {
		t.Errorf("%d calls, want 2", calls)
	}
}
