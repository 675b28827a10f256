package api

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
)

// fakeAgent keeps endpoints in a map, under mu. A set err is every call's answer.
type fakeAgent struct {
	mu        sync.Mutex
	endpoints map[string]model.Endpoint
	requests  []EndpointRequest
	filters   []ConnectionFilter
	err       error
	rdma      RDMA
	conns     []model.Connection
	edit      PolicyEdit
	services  []model.Service
	stackEdit StackEdit

	flowRequests []FlowRequest
	flowLines    []FlowLine
}

func newFakeAgent() *fakeAgent { return &fakeAgent{endpoints: map[string]model.Endpoint{}} }

var started = time.Date(2026, 11, 21, 14, 0, 0, 0, time.UTC)

func testNode() model.Node {
	return model.Node{Name: "n1", Underlay: netip.MustParseAddr("192.0.2.1"),
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, VTEPMAC: "02:00:00:00:00:01",
		Planes: model.NodePlanes{TCP: model.TCPNode{DirectPorts: model.DefaultDirectPorts}}}
}

func testStatus() Status {
	return Status{
		Node:    testNode(),
		Network: Network{ID: 1, Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, VNI: 7, VXLANPort: 4789},
		Version: "0.1.0", PID: 42, Started: started,
		Store:     Store{Kind: "embedded", Endpoints: []string{"http://192.0.2.1:2379"}, Healthy: true, Revision: 17},
		Endpoints: 2, Peers: 1, PeersAway: []string{"n9"},
		Encryption: &Encryption{Enabled: true, Device: "heddle-wg0", Key: model.PublicKey{1}, KeySince: started, Next: model.PublicKey{2}, Peers: []EncryptedPeer{
			{Node: "n2", State: PeerEncrypted, Key: model.PublicKey{3}, Handshake: started, Sent: 100, Received: 200},
			{Node: "n3", State: PeerLeftOut, Reason: model.PeerPlain}}},
		Direct: model.DirectPaths{
			Peers:   map[model.PeerState]int{model.PeerUnproven: 0, model.PeerProven: 0, model.PeerStripped: 0, model.PeerBlocked: 1},
			Overlay: []model.PeerPath{{Node: "n2", Underlay: netip.MustParseAddr("192.0.2.2"), State: model.PeerBlocked, Reason: "fallback_blocked", Detail: "of 4 ports 0 refuse the option, 4 are silent", Since: started, Probed: started, Next: started}},
			Probes:  map[string]uint64{"answered": 8, "refused": 0, "silent": 8},
		},
		Interception: Interception{Listeners: 3, Readers: 4, Answered: 100, Continued: 20,
			Failed: map[string]uint64{"caller_gone": 1}, PremadeHits: 90, PremadeMisses: 10, Batches: 5, BatchSockets: 320, EndpointSockets: 65536},
		Policy: Policy{Policies: 3, Rules: 8, Revision: 16, Addresses: 5, Pairs: 6, Took: 1500 * time.Millisecond, Cut: 11, Faults: []string{"a fault"}},
		Faults: []Fault{{Reason: FaultEndpoint, Endpoint: "n1/c1", Error: "no room", Since: started},
			{Reason: FaultEndpoint, Endpoint: "n1/c2", Error: "no room", Since: started}, {Reason: FaultLimits, Error: "no device", Since: started}},
		FaultReasons: FaultReasons,
		Flows: FlowStats{Counts: []FlowCount{{flow.Open, names.PathDirect, 7}, {flow.Deny, "", 3}}, Kept: 10, Followers: 2, Lost: 1,
			Export: &FlowExport{Endpoint: "https://h:4318/v1/logs", Sent: 8, Lost: map[string]uint64{"queue_full": 2, "refused": 0}}},
		Counters: CountersOf(names.Reasons, func(i int) uint64 { return uint64(i) * 10 }),
		Features: []Check{{Name: "bpf_btf", Status: CheckOK, Detail: "there"},
			{Name: "bpf_lsm", Status: CheckDegraded, Detail: "EPERM", Cost: "a lock", Remedy: "another kernel"}},
	}
}

func (a *fakeAgent) Status(context.Context) (Status, error) { return testStatus(), a.err }

func (a *fakeAgent) AcceptedKeys(_ context.Context, node string) (AcceptedKeys, error) {
	return AcceptedKeys{Sends: model.PublicKey{byte(len(node))}, Accepts: model.PublicKey{9}}, a.err
}

func (a *fakeAgent) RotateKey(context.Context) (Encryption, error) {
	return *testStatus().Encryption, a.err
}

func (a *fakeAgent) Endpoints(context.Context) ([]model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var list []model.Endpoint
	for _, e := range a.endpoints {
		list = append(list, e)
	}
	return list, a.err
}

func (a *fakeAgent) NetworkEndpoints(ctx context.Context, q EndpointQuery) (EndpointPage, error) {
	list, err := a.Endpoints(ctx)
	return q.Page(model.EndpointsOf(list...)), err
}

func (a *fakeAgent) CreateEndpoint(_ context.Context, req EndpointRequest) (model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, req)
	if a.err != nil {
		return model.Endpoint{}, a.err
	}
	e := model.Endpoint{ID: 1, Name: req.Name, Node: "n1", Addrs: []netip.Addr{req.Addr}, Planes: req.Planes(),
		NetnsPath: req.NetnsPath, Labels: req.Labels, Created: started}
	a.endpoints[req.Name] = e
	return e, nil
}

func (a *fakeAgent) DeleteEndpoint(_ context.Context, name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.endpoints[name]; !ok {
		return ErrNotFound
	}
	delete(a.endpoints, name)
	return a.err
}

func (a *fakeAgent) EndpointDevice(_ context.Context, name string) (EndpointDevice, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.endpoints[name]; !ok {
		return EndpointDevice{}, ErrNotFound
	}
	return EndpointDevice{Name: "eth0", MTU: 1450}, a.err
}

func (a *fakeAgent) SetLimits(_ context.Context, name string, change LimitsChange) (model.Endpoint, error) {
	l := change.Limits
	a.mu.Lock()
	defer a.mu.Unlock()
	e, ok := a.endpoints[name]
	if !ok {
		return model.Endpoint{}, ErrNotFound
	}
	if change.Was != nil && (e.Limits == nil && !change.Was.IsZero() || e.Limits != nil && !e.Limits.Equal(*change.Was)) {
		return e, HasChanged("limits of " + name)
	}
	e.Limits = &l
	a.endpoints[name] = e
	return e, a.err
}

func (a *fakeAgent) SetPorts(_ context.Context, name string, ports []model.PortRequest) (model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e, ok := a.endpoints[name]
	if !ok {
		return e, ErrNotFound
	}
	e.Ports = nil
	for _, p := range ports {
		e.Ports = append(e.Ports, p.PublishedPort)
	}
	a.endpoints[name] = e
	return e, a.err
}

func (a *fakeAgent) SetVerbs(_ context.Context, name string, change VerbsChange) (model.Endpoint, error) {
	v := change.VerbsEndpoint
	a.mu.Lock()
	defer a.mu.Unlock()
	e, ok := a.endpoints[name]
	if !ok {
		return model.Endpoint{}, ErrNotFound
	}
	if change.Was != nil && *change.Was != e.Planes.Verbs.VerbsEndpoint {
		return e, HasChanged("verbs of " + name)
	}
	e.Planes.Verbs.VerbsEndpoint = v
	a.endpoints[name] = e
	return e, a.err
}

func (a *fakeAgent) LimitUse(context.Context) ([]model.LimitUse, error) {
	return []model.LimitUse{{Endpoint: "n1/c1", Limits: model.Limits{Egress: 1e8}, Egress: model.QueueUse{Bytes: 1, Packets: 2, Dropped: 3, BacklogBytes: 4}}}, a.err
}

func (a *fakeAgent) Nodes(context.Context) ([]Node, error) {
	return []Node{testNodeState()}, a.err
}

func testNodeState() Node {
	return Node{Node: testNode(), Presence: Presence{State: NodeAway, Since: started, Seen: started.Add(time.Minute), Endpoints: 3}}
}

func (a *fakeAgent) AskNode(_ context.Context, node, target string) (*http.Response, error) {
	if node != "n2" {
		return nil, ErrNotFound
	}
	body := `{"connections": [], "asked": "` + target + `"}`
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body))}, a.err
}

func (a *fakeAgent) ForgetNode(_ context.Context, name string) error {
	if name != "n2" {
		return ErrNotFound
	}
	return a.err
}

func (a *fakeAgent) Connections(_ context.Context, f ConnectionFilter) ([]model.Connection, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.filters = append(a.filters, f)
	return a.conns, a.err
}

func testTraffic() model.Traffic {
	return model.Traffic{Endpoint: 1, Name: "n1/c1", Opened: 7, Accepted: 6, Refused: 5, TimedOut: 4, Failed: 3, Closed: 12, Broken: 2,
		Live: map[model.Path]uint64{names.PathDirect: 1}, BytesSent: 1001, BytesReceived: 1002, Retransmits: 9}
}

func (a *fakeAgent) Flows(_ context.Context, req FlowRequest, emit func(FlowLine) error) error {
	a.mu.Lock()
	a.flowRequests = append(a.flowRequests, req)
	lines, err := a.flowLines, a.err
	a.mu.Unlock()
	for _, line := range lines {
		if err := emit(line); err != nil {
			return err
		}
	}
	return err
}

func (a *fakeAgent) Trace(_ context.Context, req TraceRequest) (Trace, error) {
	return Trace{Policy: Explanation{Verdict: "allow"}, Steps: []TraceStep{{Name: "connect", Took: time.Millisecond, Error: req.To}}, Flow: &flow.Flow{Event: flow.Fail}}, a.err
}

func (a *fakeAgent) Traffic(context.Context) ([]model.Traffic, error) {
	return []model.Traffic{testTraffic()}, a.err
}

func (a *fakeAgent) LabelEndpoint(_ context.Context, name string, req LabelRequest) (model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e, ok := a.endpoints[name]
	if !ok {
		return e, ErrNotFound
	}
	e.Labels = req.Set
	return e, a.err
}

func (a *fakeAgent) Migrate(_ context.Context, name string, req MigrateRequest) (Migration, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.endpoints[name]; !ok {
		return Migration{}, ErrNotFound
	}
	delete(a.endpoints, name)
	return Migration{Move: testMove(name, req.To), Steps: []MigrationStep{{Name: StepStore, Took: 7}}}, a.err
}

func (a *fakeAgent) Moves(context.Context) ([]Move, error) {
	return []Move{testMove("n1/c1", "n2")}, a.err
}

func testMove(name, to string) Move {
	return Move{Waiting: true, Move: model.Move{Addr: netip.MustParseAddr("10.244.1.2"), Node: to, From: "n1", Home: "n1", Name: name,
		Labels: map[string]string{"app": "web"}, Since: started}}
}

func (a *fakeAgent) Policies(context.Context) (PolicyDocuments, error) {
	return PolicyDocuments{Policies: a.edit.Policies, Namespaces: a.edit.Namespaces}, a.err
}

func (a *fakeAgent) EditPolicies(_ context.Context, edit PolicyEdit) ([]PolicyOutcome, error) {
	a.edit = edit
	return []PolicyOutcome{{Kind: "policy", Name: "a", Change: "created"}}, a.err
}

func (a *fakeAgent) Services(context.Context) ([]model.Service, error) { return a.services, a.err }

func (a *fakeAgent) EditServices(_ context.Context, edit ServiceEdit) error {
	a.services = append(a.services, edit.Put...)
	return a.err
}

func (a *fakeAgent) ExplainPolicy(_ context.Context, q ExplainRequest) (Explanation, error) {
	return Explanation{Protocol: policy.ProtocolName(q.Ports.Protocol), Port: q.Ports.First, Verdict: q.From + q.To}, a.err
}

// panicAgent has a bug in one call.
type panicAgent struct{ *fakeAgent }

func (panicAgent) Nodes(context.Context) ([]Node, error) {
	panic(fmt.Sprint("a bug: ", started))
}

// serve runs agent on a socket of its own until the test ends.
func serve(t *testing.T, agent Agent) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "api.sock")
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- ServeOn(ctx, ln, NewHandler(agent, nil, slog.New(slog.DiscardHandler))) }()
	client := Dial(socket)
	t.Cleanup(func() {
		client.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return client
}

func (a *fakeAgent) Stacks(context.Context) (Stacks, error) {
	p := &stack.Profile{Name: "wan", Stack: stack.Kernel, Settings: stack.Settings{Congestion: "bbr", PacingRate: 12_000_000}}
	return Stacks{Profiles: []*stack.Profile{p}, Endpoints: []EndpointStack{{Endpoint: "n1/c1", Profile: "wan", Stack: stack.Kernel, Settings: p.Settings.String()}},
		Modules: []StackModule{{Stack: stack.Smoltcp, PID: 7, Ended: 1, StackUse: StackUse{Processor: 1500 * time.Millisecond, Retransmits: 3, Dropped: 4, Refused: 5},
			Tenants: []StackTenant{
				{Endpoint: "n1/c1", Profile: "wan", StackUse: StackUse{Processor: 250 * time.Millisecond, Memory: 10, Connections: 2, SendQueue: 6, ReceiveQueue: 7}},
				{Endpoint: "n1/c2", Profile: "wan", StackUse: StackUse{Memory: 1, Connections: 1}},
			}}}}, a.err
}

func (a *fakeAgent) EditStacks(_ context.Context, edit StackEdit) ([]PolicyOutcome, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stackEdit = edit
	return []PolicyOutcome{{"profile", "wan", "created"}}, a.err
}

func (a *fakeAgent) RDMA(context.Context) (RDMA, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rdma, a.err
}
