package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/stack"
)

// updateGolden, if set in the environment, makes the golden tests write what they compare with.
const updateGolden = "HEDDLE_UPDATE_GOLDEN"

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv(updateGolden) != "" {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

var inspectNow = time.Date(2026, 11, 21, 17, 2, 3, 0, time.UTC)

// inspectStatus is node n1 or n2 with something in every field.
func inspectStatus(node string) api.Status {
	counts := map[int]uint64{1: 12, 11: 3, 19: 1, 25: 4}
	return api.Status{
		Node: model.Node{Name: node, Underlay: netip.MustParseAddr("192.0.2.1"),
			Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Planes: model.NodePlanes{TCP: model.TCPNode{DirectPorts: model.DefaultDirectPorts}}},
		Network: api.Network{ID: 1, Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
			Prefix6: model.DefaultPrefix6(1), VNI: 4718593, VXLANPort: 4789},
		IPv6:    api.IPv6{Enabled: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("fd48:6464:1::af4:100/120")}},
		Version: "0.1.0", PID: 42, Started: inspectNow.Add(-3*time.Hour - 2*time.Minute - 3*time.Second),
		Store:     api.Store{Kind: "embedded", Endpoints: []string{"http://192.0.2.1:2379"}, Healthy: true, Revision: 17},
		Endpoints: 2, Peers: 3, Packets: api.Packets{Mode: model.PacketsAuto, Redirected: true},
		Direct: model.DirectPaths{
			Peers: map[model.PeerState]int{model.PeerUnproven: 1, model.PeerProven: 1, model.PeerStripped: 0, model.PeerBlocked: 1},
			Overlay: []model.PeerPath{
				{Node: "n3", Underlay: netip.MustParseAddr("192.0.2.3"), State: model.PeerBlocked, Reason: "fallback_blocked",
					Detail: "of 4 ports 0 refuse the option, 1 are silent: 17450", Since: inspectNow.Add(-time.Minute),
					Probed: inspectNow.Add(-4 * time.Second), Next: inspectNow.Add(12 * time.Second)},
				{Node: "n4", Underlay: netip.MustParseAddr("192.0.2.4"), State: model.PeerUnproven, Reason: "fallback_unproven",
					Since: inspectNow, Next: inspectNow.Add(-time.Second)},
			},
		},
		Interception: api.Interception{Listeners: 3, Readers: 4, Answered: 100, Continued: 20,
			Failed: map[string]uint64{"caller_gone": 1, "answer": 0}, PremadeHits: 90, PremadeMisses: 10, Batches: 5, BatchSockets: 320,
			Unguarded: []model.SocketOwner{{PID: 4711, Endpoint: 7, Sockets: 2}}},
		Policy: api.Policy{Policies: 2, Rules: 9, Revision: 16, Addresses: 12, Pairs: 4, Took: 1500 * time.Microsecond, Cut: 3,
			Faults: []string{"policy x: member \"until\": held closed"}},
		Faults: []api.Fault{{Reason: api.FaultEndpoint, Endpoint: node + "/c2", Error: "no room", Since: inspectNow},
			{Reason: api.FaultLimits, Error: "no device", Since: inspectNow}},
		Mended: []api.Mended{{What: api.MendedFirewall, Times: 2, Last: inspectNow, Gone: "the table", By: "nft (process 4711)"},
			{What: api.MendedRouting, Times: 1, Last: inspectNow, Gone: "rule IPv4: fwmark 0x48640001 lookup 18532"}},
		Counters: api.CountersOf(names.Reasons, func(i int) uint64 { return counts[i] }),
		Features: []api.Check{{Name: "bpf_btf", Status: api.CheckOK}, {Name: "bpf_lsm", Status: api.CheckDegraded}},
	}
}

func inspectEndpoints(node string) []model.Endpoint {
	return []model.Endpoint{
		{ID: 2, Name: node + "/c2", Node: node, Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.3"), netip.MustParseAddr("fd48:6464:1::af4:103")},
			NetnsPath: "/run/netns/c2", Created: inspectNow},
		{ID: 1, Name: node + "/c1", Node: node, Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.2")}, Planes: model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: true}},
			NetnsPath: "/run/netns/c1", Labels: map[string]string{"app": "web", "a": "b"}, Created: inspectNow, Ports: []model.PublishedPort{{HostPort: 8080, Port: 80, Protocol: model.PortTCP}}},
	}
}

func inspectConnections(node string) []model.Connection {
	ap := netip.MustParseAddrPort
	return []model.Connection{
		{Endpoint: 1, Name: node + "/c1", State: "ESTABLISHED", Local: ap("10.244.1.2:40000"), Remote: ap("10.244.2.2:80"),
			NodeLocal: ap("192.0.2.1:40000"), NodeRemote: ap("192.0.2.2:17440"), Path: names.PathDirect,
			BytesSent: 1536, BytesReceived: 3 << 30, Cookie: 7},
		{Endpoint: 1, Name: node + "/c1", State: "ESTABLISHED", Local: ap("10.244.1.2:1234"), Remote: ap("10.244.2.3:80"),
			NodeLocal: ap("10.244.1.2:1234"), NodeRemote: ap("10.244.2.3:80"), Path: names.PathOverlay, Reason: "fallback_bound", Cookie: 8},
		{Endpoint: 1, Name: node + "/c1", State: "LISTEN", Local: ap("10.244.1.2:80"), NodeLocal: ap("10.244.1.2:80"), Path: model.PathListen, Cookie: 9},
	}
}

// inspectedAgent is the agent of one node. What it does not have is what inspecting must not call.
type inspectedAgent struct {
	api.Agent
	node string
}

func (a inspectedAgent) Status(context.Context) (api.Status, error) {
	return inspectStatus(a.node), nil
}
func (a inspectedAgent) Endpoints(context.Context) ([]model.Endpoint, error) {
	return inspectEndpoints(a.node), nil
}
func (a inspectedAgent) CreateEndpoint(context.Context, api.EndpointRequest) (model.Endpoint, error) {
	return model.Endpoint{}, errors.New("inspecting must create nothing")
}
func (a inspectedAgent) DeleteEndpoint(context.Context, string) error {
	return errors.New("inspecting must delete nothing")
}
func (a inspectedAgent) SetLimits(context.Context, string, api.LimitsChange) (model.Endpoint, error) {
	return model.Endpoint{}, errors.New("inspecting must change nothing")
}
func (a inspectedAgent) LimitUse(context.Context) ([]model.LimitUse, error) { return nil, nil }
func (a inspectedAgent) Nodes(context.Context) ([]api.Node, error)          { return inspectNodes(), nil }
func (a inspectedAgent) ForgetNode(_ context.Context, name string) error {
	return forgetInspected(name)
}
func (a inspectedAgent) Connections(_ context.Context, f api.ConnectionFilter) ([]model.Connection, error) {
	if f.Endpoint != "" && f.Endpoint != a.node+"/c1" {
		return nil, api.ErrNotFound
	}
	list := inspectConnections(a.node)
	if !f.Listeners {
		list = list[:2]
	}
	return list, nil
}

func (a inspectedAgent) RDMA(context.Context) (api.RDMA, error) { return inspectRDMA()[0].RDMA, nil }

func (a inspectedAgent) Stacks(context.Context) (api.Stacks, error) { return api.Stacks{}, nil }

func (a inspectedAgent) Traffic(context.Context) ([]model.Traffic, error) {
	return inspectTraffic(a.node), nil
}

func inspectTraffic(node string) []model.Traffic {
	return []model.Traffic{
		{Endpoint: 2, Name: node + "/c2"},
		{Endpoint: 1, Name: node + "/c1", Opened: 100, Accepted: 20, Refused: 3, TimedOut: 2, Failed: 1, Closed: 118, Broken: 4,
			Live: map[model.Path]uint64{names.PathLocal: 1, names.PathDirect: 1}, BytesSent: 1536, BytesReceived: 3 << 30, Retransmits: 5},
	}
}

// startAgent serves node's agent on socket until the test ends.
func startAgent(t *testing.T, socket, node string) {
	t.Helper()
	ln, err := api.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- api.ServeOn(ctx, ln, api.NewHandler(inspectedAgent{node: node}, nil, slog.New(slog.DiscardHandler)))
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func runInspect(t *testing.T, cmd *cobra.Command, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceErrors = true
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestInspectTables(t *testing.T) {
	print := func(f func(*bytes.Buffer) error) string {
		t.Helper()
		var b bytes.Buffer
		if err := f(&b); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	sick := inspectStatus("n2")
	sick.IPv6 = api.IPv6{Reason: "ipv6_forwarding", Detail: "net.ipv6.conf.all.forwarding = 0"}
	sick.Packets = api.Packets{Mode: model.PacketsAuto, Reason: "nftables chain ip filter FORWARD has rules"}
	sick.Store.Healthy, sick.Store.Error = false, "context deadline exceeded"
	sick.Node.Planes.TCP.DirectPorts = model.PortRange{}
	sick.Counters, sick.Features, sick.Interception = api.CountersOf(names.Reasons, func(int) uint64 { return 0 }), nil, api.Interception{}
	golden(t, "status.txt", print(func(b *bytes.Buffer) error {
		busy := nodeStatus{Status: inspectStatus("n1")}
		for _, tr := range inspectTraffic("n1") {
			busy.Traffic.Add(tr)
		}
		return printStatus(b, []nodeStatus{busy, {Status: sick}}, false, inspectNow)
	}))
	var endpoints []endpointTraffic
	for i, e := range inspectEndpoints("n1") {
		endpoints = append(endpoints, endpointTraffic{e, endpointExtras{Traffic: &inspectTraffic("n1")[i]}})
	}
	endpoints[0].Planes.Verbs.Wanted = true
	endpoints[0].Stack = &api.EndpointStack{Profile: "wan", Stack: stack.Kernel}
	golden(t, "stacks.txt", print(func(b *bytes.Buffer) error { return printStacks(b, inspectStacks()) }))
	golden(t, "endpoints.txt", print(func(b *bytes.Buffer) error { return printEndpoints(b, endpoints, false) }))
	golden(t, "endpoints-stats.txt", print(func(b *bytes.Buffer) error { return printTraffic(b, endpoints, true) }))
	dscp := uint8(8)
	limited := []model.LimitUse{{Endpoint: "n1/c1"}, {Endpoint: "n1/c2",
		Limits: model.Limits{Egress: 1e8, Ingress: 2.5e9, ConnectionEgress: 2e7, ConnectionIngress: 1e6, Priority: model.PriorityLow, DSCP: &dscp, Verbs: model.VerbsLimits{QPs: 16, Messages: 1000}},
		Egress: model.QueueUse{Dropped: 7}, Ingress: model.QueueUse{Dropped: 8}}}
	golden(t, "limits.txt", print(func(b *bytes.Buffer) error { return printLimits(b, limited) }))
	golden(t, "rdma.txt", print(func(b *bytes.Buffer) error { return printRDMA(b, inspectRDMA()) }))
	var conns []nodeConnection
	for _, c := range inspectConnections("n1") {
		conns = append(conns, nodeConnection{"n1", c})
	}
	golden(t, "connections.txt", print(func(b *bytes.Buffer) error { return printConnections(b, conns, false) }))
	golden(t, "connections-lab.txt", print(func(b *bytes.Buffer) error { return printConnections(b, conns, true) }))
	golden(t, "connections-container.txt", print(func(b *bytes.Buffer) error { return printContainerConnections(b, conns) }))
	golden(t, "doctor.txt", print(func(b *bytes.Buffer) error {
		return printChecks(b, []api.Check{
			{Name: "kernel", Status: api.CheckOK, Detail: "Linux 6.6"},
			{Name: "bpf_lsm", Status: api.CheckDegraded, Detail: "not permitted", Cost: "a second lock", Remedy: "another kernel"},
			{Name: "cgroup2", Status: api.CheckMissing, Detail: "only cgroup v1 is mounted", Cost: "everything", Remedy: "mount one"},
		})
	}))
}

func TestStatusAllShowsEveryReason(t *testing.T) {
	var b bytes.Buffer
	if err := printStatus(&b, []nodeStatus{{Status: inspectStatus("n1")}}, true, inspectNow); err != nil {
		t.Fatal(err)
	}
	for _, r := range names.Reasons {
		if !strings.Contains(b.String(), " "+r.Name+" ") {
			t.Errorf("--all does not show %s", r.Name)
		}
	}
}

func TestByteCount(t *testing.T) {
	for n, want := range map[uint64]string{0: "0B", 1023: "1023B", 1024: "1.0KiB", 1536: "1.5KiB", 1<<20 - 1: "1.0MiB",
		1 << 30: "1.0GiB", 1<<64 - 1: "16.0EiB"} {
		if got := byteCount(n); got != want {
			t.Errorf("byteCount(%d) = %s, want %s", n, got, want)
		}
	}
}

func TestInspectOneAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	startAgent(t, socket, "n1")
	out, err := runInspect(t, newStatusCmd(), "--api", socket, "--output", "json")
	var statuses []api.Status
	if jerr := json.Unmarshal([]byte(out), &statuses); err != nil || jerr != nil || len(statuses) != 1 || statuses[0].Node.Name != "n1" {
		t.Errorf("status as JSON: %s (%v, %v)", out, err, jerr)
	}
	out, err = runInspect(t, newEndpointsCmd(), "--api", socket)
	if lines := strings.Split(out, "\n"); err != nil || len(lines) < 3 || !strings.HasPrefix(lines[1], "n1/c1 ") {
		t.Errorf("endpoints, sorted by name: %s (%v)", out, err)
	}
	out, err = runInspect(t, newConnectionsCmd(), "--api", socket, "-o", "json", "--all", "--endpoint", "n1/c1")
	var conns []map[string]any
	if jerr := json.Unmarshal([]byte(out), &conns); err != nil || jerr != nil || len(conns) != 3 {
		t.Fatalf("connections as JSON: %s (%v, %v)", out, err, jerr)
	}
	for _, field := range []string{"node", "endpoint", "state", "local", "remote", "node_local", "node_remote", "path", "bytes_sent", "bytes_received"} {
		if _, ok := conns[0][field]; !ok {
			t.Errorf("connection has no field %s: %v", field, conns[0])
		}
	}
	for _, who := range []string{"n1/c1", "10.244.1.2", "1"} {
		out, err = runInspect(t, newConnectionsCmd(), "--api", socket, "--container", who)
		if lines := strings.Split(strings.TrimSpace(out), "\n"); err != nil || len(lines) != 3 || strings.Contains(out, "192.0.2.1") {
			t.Errorf("connections of %s: %s (%v)", who, out, err)
		}
	}
	out, err = runInspect(t, newConnectionsCmd(), "--api", socket, "--container", "n1/c1", "--listening")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); err != nil || len(lines) != 2 || !strings.HasPrefix(lines[1], "LISTEN ") {
		t.Errorf("listeners of n1/c1: %s (%v)", out, err)
	}
	for old, now := range map[string]string{"--listeners": "--all", "--listen": "--listening"} {
		before, err := runInspect(t, newConnectionsCmd(), "--api", socket, old)
		want, err2 := runInspect(t, newConnectionsCmd(), "--api", socket, now)
		if err != nil || err2 != nil || !strings.Contains(before, "use "+now) || !strings.HasSuffix(before, want) {
			t.Errorf("connections %s: (%v) %s\nconnections %s: (%v) %s", old, err, before, now, err2, want)
		}
	}
	for _, args := range [][]string{{"--state", "sleeping"}, {"--container", "n1/c1", "--endpoint", "n1/c1"}} {
		if out, err = runInspect(t, newConnectionsCmd(), append(args, "--api", socket)...); err == nil {
			t.Errorf("connections %v: no error: %s", args, out)
		}
	}
	out, err = runInspect(t, newConnectionsCmd(), "--api", socket, "-o", "json", "--state", "listen,fin-wait-1")
	if jerr := json.Unmarshal([]byte(out), &conns); err != nil || jerr != nil || len(conns) != 1 || conns[0]["state"] != "LISTEN" {
		t.Errorf("listeners by state: %s (%v, %v)", out, err, jerr)
	}
	for _, who := range []string{"n1/c9", "10.244.1.9", "9", "0"} {
		if out, err = runInspect(t, newConnectionsCmd(), "--api", socket, "--container", who); !errors.Is(err, api.ErrNotFound) {
			t.Errorf("container %s: %v: %s", who, err, out)
		}
	}
	if _, err = runInspect(t, newConnectionsCmd(), "--api", socket, "--endpoint", "n1/c9"); !errors.Is(err, api.ErrNotFound) {
		t.Errorf("unknown endpoint: %v", err)
	}
	for _, args := range [][]string{{"--output", "xml"}, {"--api", socket, "--lab", "x"}, {"--lab", "../x"}, {"--node", "*"}, {"stray"}} {
		if out, err = runInspect(t, newStatusCmd(), args...); err == nil {
			t.Errorf("status %v: no error: %s", args, out)
		}
	}
}

// TestRDMAOfOneContainer: a container is named as for the connections.
func TestRDMAOfOneContainer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	startAgent(t, socket, "n1")
	for _, who := range []string{"n1/c1", "10.244.1.2", "1"} {
		out, err := runInspect(t, newRDMACmd(), "--api", socket, "--container", who)
		if err != nil || !strings.Contains(out, "n1/c1 ") || strings.Contains(out, "n1/c2 ") {
			t.Errorf("RDMA of %s: %s (%v)", who, out, err)
		}
	}
	if out, err := runInspect(t, newRDMACmd(), "--api", socket, "--container", "n1/c9"); !errors.Is(err, api.ErrNotFound) {
		t.Errorf("RDMA of a container that is not there: %v: %s", err, out)
	}
}

func TestInspectNoAgent(t *testing.T) {
	dir := t.TempDir()
	_, err := agentFlags{}.findIn(filepath.Join(dir, "api.sock"), dir)
	if !errors.Is(err, api.ErrNoAgent) || !strings.Contains(err.Error(), "heddle lab up") {
		t.Errorf("nothing runs: %v", err)
	}
	out, err := runInspect(t, newEndpointsCmd(), "--api", filepath.Join(dir, "nobody.sock"), "-o", "json")
	if !errors.Is(err, api.ErrNoAgent) || !strings.Contains(err.Error(), "heddled") || strings.TrimSpace(out) != "[]" {
		t.Errorf("socket that is not there: %v, output %q", err, out)
	}
}

func TestInspectLabs(t *testing.T) {
	dir := t.TempDir()
	socket := func(lab, node string) string { return filepath.Join(dir, "lab", lab, node, "api.sock") }
	startAgent(t, socket("a", "n1"), "n1")
	startAgent(t, socket("a", "n2"), "n2")
	find := func(f agentFlags) (agents, error) {
		return f.findIn(filepath.Join(dir, "api.sock"), filepath.Join(dir, "lab"))
	}

	from, err := find(agentFlags{})
	if err != nil || !from.several || len(from.clients) != 2 {
		t.Fatalf("the only lab: %+v, %v", from, err)
	}
	list, err := askConnections(t.Context(), from, api.ConnectionFilter{Endpoint: "n2/c1"})
	if err != nil || len(list) != 2 || list[0].Node != "n2" || list[0].Local.Port() != 1234 {
		t.Errorf("connections of an endpoint of one node: %+v, %v", list, err)
	}
	if _, err := askConnections(t.Context(), from, api.ConnectionFilter{Endpoint: "n3/c1"}); !errors.Is(err, api.ErrNotFound) {
		t.Errorf("endpoint of no node: %v", err)
	}
	if from, err := find(agentFlags{node: "n2"}); err != nil || len(from.clients) != 1 || from.clients[0].SocketPath() != socket("a", "n2") {
		t.Errorf("--node n2: %+v, %v", from, err)
	}
	if _, err := find(agentFlags{node: "n3"}); err == nil || !strings.Contains(err.Error(), "n3") {
		t.Errorf("--node n3: %v", err)
	}
	if _, err := find(agentFlags{lab: "z"}); err == nil || !strings.Contains(err.Error(), "--lab z") {
		t.Errorf("--lab z: %v", err)
	}

	// One dead agent does not hide the others.
	if err := os.MkdirAll(filepath.Dir(socket("b", "n1")), 0o755); err != nil {
		t.Fatal(err)
	}
	startAgent(t, socket("b", "n2"), "n2")
	if err := os.WriteFile(socket("b", "n1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := find(agentFlags{}); err == nil || !strings.Contains(err.Error(), "a, b") {
		t.Errorf("two labs: %v", err)
	}
	from, err = find(agentFlags{lab: "b"})
	if err != nil {
		t.Fatal(err)
	}
	statuses, err := ask(t.Context(), from, func(ctx context.Context, c *api.Client) (api.Status, error) { return c.Status(ctx) })
	if len(statuses) != 1 || statuses[0].Node.Name != "n2" || !errors.Is(err, api.ErrNoAgent) {
		t.Errorf("one agent of two: %d answers, %v", len(statuses), err)
	}

	// The machine's own agent is asked before any lab.
	startAgent(t, filepath.Join(dir, "api.sock"), "host")
	if from, err := find(agentFlags{}); err != nil || from.several || len(from.clients) != 1 {
		t.Errorf("own agent and labs: %+v, %v", from, err)
	}
}

func TestDoctorCommand(t *testing.T) {
	out, err := runInspect(t, newDoctorCmd(), "--output", "json")
	var report doctorReport
	if jerr := json.Unmarshal([]byte(out), &report); jerr != nil || len(report.Checks) == 0 {
		t.Fatalf("doctor as JSON: %s (%v)", out, jerr)
	}
	if (err == nil) != report.OK {
		t.Errorf("error %v beside ok=%v: the exit code must tell", err, report.OK)
	}
	if os.Geteuid() != 0 && report.OK {
		t.Error("ok without root")
	}
}

// inspectStacks is what two nodes say of stacks, of which the second cannot serve all.
func inspectStacks() []nodeStacks {
	wan := &stack.Profile{Name: "wan", Priority: 10, Stack: stack.Kernel, Fallback: stack.Refuse, Changeable: []stack.Setting{stack.Congestion},
		Settings: stack.Settings{Congestion: "westwood", PacingRate: 12_000_000, Keepalive: &stack.KeepaliveTimes{Idle: 60e9, Interval: 10e9, Count: 5}}}
	of := func(node string, c api.CongestionControl, e api.EndpointStack) nodeStacks {
		c.Name, c.SHA256, c.Bytes = "westwood", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", 9000
		return nodeStacks{node, api.Stacks{Profiles: []*stack.Profile{wan}, Congestion: []api.CongestionControl{c}, Endpoints: []api.EndpointStack{e}, Behind: []string{"n3"}}}
	}
	first := of("n1", api.CongestionControl{State: api.CongestionRegistered}, api.EndpointStack{Endpoint: "n1/c1", Profile: "wan", Stack: stack.Kernel, Settings: wan.Settings.String()})
	use := api.StackUse{Processor: 1500 * time.Millisecond, Memory: 4096, Sockets: 1, Connections: 2, BytesSent: 1000, BytesReceived: 10, Retransmits: 3, SendQueue: 6, ReceiveQueue: 7, Dropped: 4, Refused: 5}
	tenant := api.StackTenant{Endpoint: "n1/c2", Profile: "far", StackUse: use}
	tenant.RTT = 1234567
	first.Endpoints[0].Intercepted = true
	first.Endpoints = append(first.Endpoints, api.EndpointStack{Endpoint: "n1/c3", Profile: "wan", Stack: stack.Kernel, Settings: wan.Settings.String(),
		Own: &api.OwnStack{Settings: "congestion=westwood,keepalive=1m0s/10s/5", Lacks: map[stack.Setting]string{stack.PacingRate: "only sockets of intercepted programs have it"}}})
	first.Modules = []api.StackModule{{Stack: stack.Smoltcp, PID: 77, Ended: 1, StackUse: use, Tenants: []api.StackTenant{tenant}}}
	return []nodeStacks{
		first,
		of("n2", api.CongestionControl{State: api.CongestionFailed, Error: "the kernel's verifier refuses it: invalid argument\nR1 !read_ok"},
			api.EndpointStack{Endpoint: "n2/c1", Profile: "wan", Fault: "this kernel has no congestion control westwood"}),
	}
}

// inspectRDMA are two nodes: one with devices, of which the router does not have one, and one whose
// agent has no verbs plane.
func inspectRDMA() []nodeRDMA {
	a, b := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("10.244.2.2")
	return []nodeRDMA{{Node: "n1", RDMA: api.RDMA{
		Router: &api.Router{State: api.RouterRuns, PID: 77, Endpoints: 2, Ended: 1},
		Devices: []api.RDMADevice{
			{Endpoint: "n1/c1", GIDs: []netip.Addr{a}, SpinMicros: 5, Known: true, Errors: 3,
				Used: map[string]uint64{"qps": 2, "cqs": 2, "mrs": 1, "memory_bytes": 300_000}, Limits: map[string]uint64{"qps": 1024, "cqs": 512, "mrs": 4096, "memory_bytes": 1 << 28},
				Traffic: map[api.RDMAPath]api.RDMATraffic{api.RDMAMemory: {BytesSent: 5000}, api.RDMATCP: {BytesSent: 10, BytesReceived: 2_000_000}}},
			{Endpoint: "n1/c2"},
		},
		QueuePairs: []api.QueuePair{
			{Endpoint: "n1/c1", Number: 9, PID: 100, Type: "UD", State: "RTS", Local: a, Path: api.RDMANone},
			{Endpoint: "n1/c1", Number: 8, PID: 100, Type: "RC", State: "ERR", Local: a, Peer: b, PeerNumber: 12, Path: api.RDMATCP, Errors: 3, LastError: "RETRY_EXC_ERR",
				RDMATraffic: api.RDMATraffic{Requests: 4, Served: 5, BytesSent: 10, BytesReceived: 2_000_000}},
		},
	}}, {Node: "n2"}}
}
