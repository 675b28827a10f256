package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/planetest"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

// inNode says that this process is the one that TestAgentOfThreePlanes started in a node's
// namespaces.
const inNode = "HEDDLE_TEST_IN_NODE"

// TestAgentOfThreePlanes runs an agent with TCP's plane and two in miniature, in network and mount
// namespaces of its own.
func TestAgentOfThreePlanes(t *testing.T) {
	testutil.NeedRoot(t, "it makes namespaces, devices and BPF programs")
	if os.Getenv(inNode) != "" {
		agentOfThreePlanes(t)
		return
	}
	group := filepath.Join(cgroupRoot(t), "heddle-planes-"+strconv.Itoa(os.Getpid()))
	again := exec.Command("/proc/self/exe", "-test.run=^TestAgentOfThreePlanes$", "-test.v")
	again.Env = append(os.Environ(), inNode+"="+group)
	again.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET}
	out, err := again.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v\n%s", err, out)
	}
	if err := os.Remove(group); err != nil {
		t.Error(err)
	}
}

// nodeConfig makes the devices of a node in this network namespace, and gives what its agent is
// started with.
func nodeConfig(t *testing.T, calls *planetest.Calls, open func(...*planetest.Miniature)) Config {
	t.Helper()
	for _, args := range []string{"link set lo up", "link add u0 type veth peer name u1", "addr add 192.0.2.1/24 dev u0", "link set u0 up", "link set u1 up"} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", args, err, out)
		}
	}
	dir := t.TempDir()
	pins := filepath.Join(dir, "bpf")
	if err := errors.Join(os.Mkdir(pins, 0o700), unix.Mount("bpf", pins, "bpf", 0, "mode=700")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(pins, 0); err != nil {
			t.Error(err)
		}
	})
	return Config{
		Name: "n1", Underlay: netip.MustParseAddr("192.0.2.1"), DirectPorts: model.DefaultDirectPorts, Network: store.Network{ID: 1},
		Store: EmbeddedStore, StoreNoSync: true, StorePort: 2379, StateDir: filepath.Join(dir, "state"), PinDir: filepath.Join(pins, "heddle"),
		Cgroup: os.Getenv(inNode), APISocket: filepath.Join(dir, "api", "api.sock"), SeccompSocket: filepath.Join(dir, "seccomp", "seccomp.sock"), Log: quiet(),
		Planes: func(h plane.Host) ([]plane.Plane, error) {
			a, b := planetest.New("a", h.Faults, calls), planetest.New("b", h.Faults, calls)
			h.Traps.Handle(refuser{{Name: refusesReason}})
			open(a, b)
			return []plane.Plane{a, b}, nil
		},
	}
}

// refuser is a handler of trapped calls that never has any.
type refuser []trap.Reason

const refusesReason = "miniature_refuses"

func (r refuser) Owns(*trap.Data) bool    { return false }
func (r refuser) Answer(*trap.Call) error { return nil }
func (r refuser) Reasons() []*trap.Reason { return []*trap.Reason{&r[0]} }

// startAgent starts an agent and has it run until the end of the test or until stop is called.
func startAgent(t *testing.T, cfg Config) (a *Agent, stop func()) {
	t.Helper()
	a, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := errors.Join(<-done, a.Close()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return a, stop
}

func agentOfThreePlanes(t *testing.T) {
	// The names of its namespaces are in this mount namespace alone: a run that is killed leaves none.
	names := filepath.Dir(netns.Path("c1"))
	if err := os.MkdirAll(names, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("names", names, "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	var calls planetest.Calls
	var planes []*planetest.Miniature
	cfg := nodeConfig(t, &calls, func(opened ...*planetest.Miniature) { planes = opened })
	agent, stop := startAgent(t, cfg)
	t.Cleanup(func() {
		// The agent's cgroup is the parent's to remove.
		if err := os.WriteFile(filepath.Join(filepath.Dir(cfg.Cgroup), "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Error(err)
		}
	})
	var made []model.Endpoint
	for _, name := range []string{"c1", "c2"} {
		made = append(made, create(t, agent, name))
	}
	wantCalls(t, "create two", &calls, "a attach c1", "b attach c1", "a attach c2", "b attach c2")
	failsAtTheLastPlane(t, agent, planes, &calls)
	reportsOf(t, agent, planes, made)
	for _, p := range agent.planes {
		planetest.CheckReports(t, p)
	}
	wantCalls(t, "limit one, make what is there again, twice", &calls, "a limit c1", "b limit c1", "a attach c2", "b attach c2", "a attach c2", "b attach c2")
	arrivesWithLimits(t, agent, &calls)
	putsBack(t, agent)

	// A second agent takes over what the first left.
	stop()
	wantCalls(t, "stop", &calls, "b close", "a close")
	agent, stop = startAgent(t, cfg)
	wantCalls(t, "restore", &calls, "a attach c1", "b attach c1", "a attach c2", "b attach c2")
	if got := planes[1].Limits(made[0].ID); got.Egress != 1e6 {
		t.Errorf("limits after a restart: %+v", got)
	}
	if err := agent.DeleteEndpoint(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, "delete", &calls, "b detach c1", "a detach c1", "a lift c1", "b lift c1")
	leaveWithLimits(t, agent, stop)
	calls.Take()
	agent, stop = startAgent(t, cfg)
	wantCalls(t, "restore one of two", &calls, "b detach gone", "a detach gone", "a lift gone", "b lift gone", "a attach c2", "b attach c2")
	if use, err := agent.LimitUse(t.Context()); err != nil || len(use) != 1 || use[0].Endpoint != "c2" {
		t.Errorf("limits after a restart without a container: %+v, %v", use, err)
	}
	if err := agent.DeleteEndpoint(t.Context(), "c2"); err != nil {
		t.Fatal(err)
	}
	stop()
	deletesWithoutStore(t, cfg, &calls)
	createsWithoutStore(t, cfg)
	dropFails(t, cfg)
}

// awayStore is a store that does not answer deletions while it is away.
type awayStore struct {
	store.Store
	away bool
}

func (s *awayStore) DeleteEndpoint(ctx context.Context, node string, id model.EndpointID) error {
	if s.away {
		return fmt.Errorf("remove endpoint: %w", &etcd.UnreachableError{Reason: "a test"})
	}
	return s.Store.DeleteEndpoint(ctx, node, id)
}

// deletesWithoutStore: endpoints are deleted while the store does not answer. Nobody gets their
// addresses until it has heard of it, from this agent or the next.
func deletesWithoutStore(t *testing.T, cfg Config, calls *planetest.Calls) {
	t.Helper()
	a, end := startIdle(t, cfg)
	s := &awayStore{Store: a.store}
	a.store = s
	held := map[netip.Addr]bool{}
	calls.Take()
	names := []string{"d1", "d2", "d3", "d5", "d6", "d7"}
	for _, name := range names {
		held[create(t, a, name).Addr4()] = true
	}
	s.away = true
	for _, name := range names {
		for range 2 { // engines may repeat it
			if err := a.DeleteEndpoint(t.Context(), name); err != nil {
				t.Fatalf("delete without a store: %v", err)
			}
		}
	}
	if got := calls.Take(); !slices.Contains(got, "a detach d1") {
		t.Errorf("planes were told %q", got)
	}
	wantEndpoints := func(when string, s store.Store, inStore int) {
		t.Helper()
		known, err := a.Endpoints(t.Context())
		notes, _, errNotes := api.Deletions(cfg.APISocket)
		state, errStore := firstState(t.Context(), s)
		if err := errors.Join(err, errNotes, errStore); err != nil {
			t.Fatal(err)
		}
		if len(known) != 0 || len(notes) != inStore || len(state.Endpoints.Of("n1")) != inStore {
			t.Errorf("%s: the agent knows %d endpoints, %d are noted, the store has %d; want 0, %d, %d", when, len(known), len(notes), len(state.Endpoints.Of("n1")), inStore, inStore)
		}
	}
	wantEndpoints("without the store", s, len(names))
	for addr := range held {
		var said *api.Error
		if _, err := a.ReserveAddr(addr); !errors.As(err, &said) || said.Code != api.CodeUnavailable {
			t.Errorf("reserve %s, which the store still has: %v", addr, err)
		}
	}
	s.away = false
	for addr := range held { // nobody has told the store yet
		if got, err := a.ReserveAddr(addr); err != nil || got != addr {
			t.Errorf("reserve %s: %s, %v", addr, got, err)
		}
		a.ReleaseAddr(addr)
	}
	a.undoHalfDone()
	wantEndpoints("with it", s, 0)
	create(t, a, "d4")
	s.away = true
	if err := a.DeleteEndpoint(t.Context(), "d4"); err != nil {
		t.Fatal(err)
	}
	end()
	a, end = startIdle(t, cfg)
	wantEndpoints("with the next agent", a.store, 0)
	end()
}

// putsBack: what somebody takes of the node's nftables and routing is put back, told and counted,
// and what others do with theirs is not.
func putsBack(t *testing.T, a *Agent) {
	t.Helper()
	run := func(command string) string {
		t.Helper()
		out, err := exec.Command("sh", "-c", command).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		return string(out)
	}
	const state = "nft -s list table inet heddle; ip rule; ip -6 rule; ip route show type unreachable; ip -6 route show type unreachable"
	want := run(state)
	for times, damage := range []string{
		"nft flush ruleset; ip route flush type unreachable; ip rule del pref " + strconv.Itoa(rulePref) + "; ip -6 rule del pref " + strconv.Itoa(rulePref) + " || true",
		"nft add table inet others; nft flush table inet heddle; ip rule del pref " + strconv.Itoa(rulePref),
	} {
		run(damage)
		testutil.Eventually(t, damage+" to be mended", func() (bool, string) {
			st, err := a.Status(t.Context())
			counted := uint64(0)
			for _, c := range st.Counters {
				if c.Name == "mend_firewall" || c.Name == "mend_routing" {
					counted += c.Value
				}
			}
			mended := len(st.Mended) == 2 && st.Mended[0].Times == uint64(times+1) && strings.HasPrefix(st.Mended[0].By, "nft (process ") && st.Mended[1].Times >= uint64(times+1)
			return err == nil && mended && counted == st.Mended[0].Times+st.Mended[1].Times && len(st.Faults) == 0 && run(state) == want, fmt.Sprintf("%+v, %v, %d\n%s", st.Mended, err, counted, run(state))
		})
	}
}

// arrivesWithLimits: an endpoint that has migrated here with limits has them before its network, and
// as long as it has that.
func arrivesWithLimits(t *testing.T, a *Agent, calls *planetest.Calls) {
	t.Helper()
	other, err := a.store.JoinNode(t.Context(), model.Node{Name: "n2", Underlay: netip.MustParseAddr("192.0.2.2"), VTEPMAC: netcfg.VTEPMAC(netip.MustParseAddr("192.0.2.2")), ReadsSchema: store.Schema})
	if err != nil {
		t.Fatal(err)
	}
	moved := model.Endpoint{ID: 1, Name: "moved", Node: "n2", Addrs: []netip.Addr{model.Gateway(other.Prefixes[0]).Next()}, Limits: &model.Limits{Egress: 1e6}}
	if err := a.store.PutEndpoint(t.Context(), moved); err != nil {
		t.Fatal(err)
	}
	if _, err := a.store.GiveUpEndpoint(t.Context(), moved, "n1"); err != nil {
		t.Fatal(err)
	}
	if got := create(t, a, "moved"); got.Limits == nil || got.Limits.Egress != 1e6 || got.Addr4() != moved.Addr4() {
		t.Errorf("taken up as %+v", got)
	}
	if err := a.DeleteEndpoint(t.Context(), "moved"); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, "arrive with limits and go", calls, "a limit moved", "b limit moved", "a attach moved", "b attach moved",
		"b detach moved", "a detach moved", "a lift moved", "b lift moved")
	// So has one that is asked for with limits. Those of an earlier agent are taken over before.
	a.faults.Set(api.FaultLimits, "", errors.New("a test"))
	got, err := a.CreateEndpoint(t.Context(), api.EndpointRequest{Name: "capped", NetnsPath: namespace(t, "capped"), Intercepted: true, Limits: model.Limits{Ingress: 2e6}})
	if err != nil || got.Limits == nil || got.Limits.Ingress != 2e6 {
		t.Errorf("made as %+v, %v", got, err)
	}
	if a.faults.Has(api.FaultLimits) {
		t.Error("limits of an earlier agent were not taken over")
	}
	if err := a.DeleteEndpoint(t.Context(), "capped"); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, "be made with limits and go", calls, "a limit capped", "b limit capped", "a attach capped", "b attach capped",
		"b detach capped", "a detach capped", "a lift capped", "b lift capped")
}

// leaveWithLimits gives c2 caps for each connection, makes an endpoint with limits and a higher id,
// stops the agent, and ends that endpoint's container.
func leaveWithLimits(t *testing.T, a *Agent, stop func()) {
	t.Helper()
	name := "heddle-planes-" + strconv.Itoa(os.Getpid()) + "-gone"
	if err := netns.Create(name); err != nil {
		t.Fatal(err)
	}
	_, err := a.CreateEndpoint(t.Context(), api.EndpointRequest{Name: "gone", NetnsPath: netns.Path(name), Intercepted: true})
	for _, endpoint := range []string{"c2", "gone"} {
		if err == nil {
			_, err = a.SetLimits(t.Context(), endpoint, api.LimitsChange{Limits: model.Limits{ConnectionEgress: 1e6}})
		}
	}
	stop()
	if err := errors.Join(err, netns.Delete(name)); err != nil {
		t.Fatal(err)
	}
}

// create makes a network namespace and an endpoint of it.
func create(t *testing.T, a *Agent, name string) model.Endpoint {
	t.Helper()
	e, err := a.CreateEndpoint(t.Context(), api.EndpointRequest{Name: name, NetnsPath: namespace(t, name), Intercepted: true})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// namespace makes a network namespace until the end of the test and gives its path.
func namespace(t *testing.T, name string) string {
	t.Helper()
	name = "heddle-planes-" + strconv.Itoa(os.Getpid()) + "-" + name
	if err := netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	return netns.Path(name)
}

func wantCalls(t *testing.T, what string, calls *planetest.Calls, want ...string) {
	t.Helper()
	if got := calls.Take(); !slices.Equal(got, want) {
		t.Errorf("%s: planes were told %q, want %q", what, got, want)
	}
}

// failsAtTheLastPlane: an endpoint that the last plane refuses is undone in the planes before it,
// in the store, in the kernel and in the list, and can be made once the plane takes it.
func failsAtTheLastPlane(t *testing.T, a *Agent, planes []*planetest.Miniature, calls *planetest.Calls) {
	t.Helper()
	planes[1].Refuse("c3", true)
	req := api.EndpointRequest{Name: "c3", NetnsPath: namespace(t, "c3"), Intercepted: true}
	if _, err := a.CreateEndpoint(t.Context(), req); !errors.Is(err, planetest.ErrRefused) {
		t.Fatalf("refused by a plane: %v", err)
	}
	wantCalls(t, "refused", calls, "a attach c3", "b attach c3", "b detach c3", "a detach c3")
	if got := planes[0].Attached(); !slices.Equal(got, []string{"c1", "c2"}) {
		t.Errorf("after the undo the plane before has %q", got)
	}
	all, err := a.Endpoints(t.Context())
	if err != nil || len(all) != 2 {
		t.Errorf("endpoints after the undo: %+v, %v", all, err)
	}
	state, err := firstState(t.Context(), a.store)
	if err != nil || len(state.Endpoints.Of("n1")) != 2 {
		t.Errorf("the store after the undo: %+v, %v", state.Endpoints.Of("n1"), err)
	}
	links, err := exec.Command("ip", "-o", "link", "show", "type", "veth").Output()
	if err != nil || strings.Count(string(links), "hd") < 2 || strings.Contains(string(links), "hd3@") {
		t.Errorf("devices after the undo: %s, %v", links, err)
	}
	planes[1].Refuse("c3", false)
	if _, err := a.CreateEndpoint(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if err := a.DeleteEndpoint(t.Context(), "c3"); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, "made at last", calls, "a attach c3", "b attach c3", "b detach c3", "a detach c3")
}

// reportsOf: topology, limits and policy reach the planes in miniature, and their counters,
// connections and faults stand beside TCP's.
func reportsOf(t *testing.T, a *Agent, planes []*planetest.Miniature, made []model.Endpoint) {
	t.Helper()
	b := planes[1]
	if !b.Runs() || !slices.Equal(b.Nodes(), []string{"n1"}) {
		t.Errorf("runs %v, knows nodes %q", b.Runs(), b.Nodes())
	}
	if _, err := a.SetLimits(t.Context(), "c1", api.LimitsChange{Limits: model.Limits{Egress: 1e6}}); err != nil {
		t.Fatal(err)
	}
	if got := b.Limits(made[0].ID); got.Egress != 1e6 {
		t.Errorf("limits %+v", got)
	}
	if err := b.Connect(made[0].ID, made[1].ID, 80); err != nil {
		t.Fatal(err)
	}
	connections, err := a.Connections(t.Context(), api.ConnectionFilter{Endpoint: "c1"})
	if err != nil || len(connections) != 1 || connections[0].Name != "c1" || connections[0].Remote != netip.AddrPortFrom(made[1].Addr4(), 80) {
		t.Errorf("connections %+v, %v", connections, err)
	}
	b.Refuse("c2", true)
	if _, err := a.CreateEndpoint(t.Context(), api.EndpointRequest{Name: "c2", NetnsPath: made[1].NetnsPath, Intercepted: true}); !errors.Is(err, planetest.ErrRefused) {
		t.Errorf("attached again to a plane that refuses: %v", err)
	}
	status, err := a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	count := func(name string) (n uint64, found bool) {
		i := slices.IndexFunc(status.Counters, func(c api.Counter) bool { return c.Name == name })
		if i < 0 {
			return 0, false
		}
		return status.Counters[i].Value, true
	}
	if n, _ := count("b_connections"); n != 1 {
		t.Errorf("counters %+v", status.Counters)
	}
	if _, found := count("connect_direct"); !found {
		t.Errorf("TCP's counters are not there: %+v", status.Counters)
	}
	for _, reason := range []string{refusesReason, "socket_quota", "foreign_netns"} {
		if _, listed := status.Interception.Failed[reason]; !listed {
			t.Errorf("reasons of trapped calls lack %s: %v", reason, status.Interception.Failed)
		}
	}
	if len(status.Faults) != 1 || status.Faults[0].Reason != planetest.FaultRefused || status.Faults[0].Endpoint != "c2" {
		t.Errorf("faults %+v", status.Faults)
	}
	b.Refuse("c2", false)
	if _, err := a.CreateEndpoint(t.Context(), api.EndpointRequest{Name: "c2", NetnsPath: made[1].NetnsPath, Intercepted: true}); err != nil {
		t.Error(err)
	}
	closed := &policy.Policy{Name: "closed", Subject: policy.Subject{}, Ingress: &policy.Direction{Default: policy.DefaultDeny}}
	if _, err := a.EditPolicies(t.Context(), api.PolicyEdit{Policies: []*policy.Policy{closed}}); err != nil {
		t.Fatal(err)
	}
	if err := b.Connect(made[0].ID, made[1].ID, 80); !errors.Is(err, planetest.ErrForbidden) {
		t.Errorf("connect against policy: %v", err)
	}
	if connections, err := a.Connections(t.Context(), api.ConnectionFilter{}); err != nil || len(connections) != 0 {
		t.Errorf("connections that are forbidden: %+v, %v", connections, err)
	}
}
