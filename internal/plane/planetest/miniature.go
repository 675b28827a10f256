// Package planetest has a plane in miniature for tests of what composes planes: its connections are
// entries of a table. It does what internal/plane says of every plane, and nothing with the kernel.
package planetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
)

// FaultRefused is the fault of an endpoint that the plane was told to refuse.
const FaultRefused api.FaultReason = "miniature_refused"

// ErrRefused is what Attach gives for such an endpoint, and ErrForbidden what Connect gives where
// policy forbids it.
var (
	ErrRefused   = errors.New("refused, as the test wants it")
	ErrForbidden = errors.New("policy forbids the connection")
)

// Miniature is the plane. Its methods may be called by any goroutine.
type Miniature struct {
	name   string
	faults plane.Faults
	calls  *Calls

	mu        sync.Mutex // guards the rest
	refused   map[string]bool
	endpoints map[model.EndpointID]attached
	limits    map[model.EndpointID]model.Limits
	nodes     []model.Node
	tables    model.PolicyTables
	live      []connection
	opened    map[model.EndpointID]uint64
	total     uint64
	runs      bool
}

type attached struct {
	model.Endpoint
	ifindex int
}

type connection struct {
	from, to model.EndpointID
	port     uint16
}

var _ plane.Plane = (*Miniature)(nil)

// Calls is what planes were told of endpoints, in order: "NAME attach ENDPOINT". Several planes may
// share one.
type Calls struct {
	mu  sync.Mutex // guards all
	all []string
}

func (c *Calls) add(plane, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, plane+" "+what)
}

// Take gives the calls since the last Take.
func (c *Calls) Take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.all
	c.all = nil
	return all
}

// New makes a plane.
func New(name string, faults plane.Faults, calls *Calls) *Miniature {
	return &Miniature{
		name: name, faults: faults, calls: calls, refused: make(map[string]bool), endpoints: make(map[model.EndpointID]attached),
		limits: make(map[model.EndpointID]model.Limits), opened: make(map[model.EndpointID]uint64),
	}
}

// Refuse has Attach and Await fail for an endpoint of that name, or not fail any more.
func (m *Miniature) Refuse(endpoint string, refused bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused[endpoint] = refused
}

// Connect makes a connection between two attached endpoints.
func (m *Miniature) Connect(from, to model.EndpointID, port uint16) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range []model.EndpointID{from, to} {
		if _, ok := m.endpoints[id]; !ok {
			return fmt.Errorf("endpoint %d is not attached", id)
		}
	}
	c := connection{from, to, port}
	if m.verdict(c) != model.VerdictAllow {
		return ErrForbidden
	}
	m.live = append(m.live, c)
	m.opened[from]++
	m.total++
	return nil
}

// Attached gives the names of the endpoints that the plane has, sorted.
func (m *Miniature) Attached() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.endpoints {
		names = append(names, e.Name)
	}
	slices.Sort(names)
	return names
}

// Nodes gives the names of the network's nodes, and Limits what an endpoint is held to.
func (m *Miniature) Nodes() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range m.nodes {
		names = append(names, n.Name)
	}
	return names
}

// Limits gives what an endpoint is held to; the zero Limits: to nothing.
func (m *Miniature) Limits(id model.EndpointID) model.Limits {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.limits[id]
}

// Runs reports whether the plane's Run runs.
func (m *Miniature) Runs() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs
}

// Name implements plane.Plane.
func (m *Miniature) Name() string { return m.name }

// Accepts implements plane.Endpoints.
func (m *Miniature) Accepts(model.EndpointPlanes) error { return nil }

// Guard implements plane.Endpoints.
func (m *Miniature) Guard(int) error { return nil }

// Await implements plane.Endpoints.
func (m *Miniature) Await(e model.Endpoint, ifindex int) error { return m.add("await", e, ifindex) }

// Attach implements plane.Endpoints.
func (m *Miniature) Attach(e model.Endpoint, dev netcfg.EndpointDevice) error {
	return m.add("attach", e, dev.Ifindex)
}

func (m *Miniature) add(what string, e model.Endpoint, ifindex int) error {
	m.calls.add(m.name, what+" "+e.Name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refused[e.Name] {
		m.faults.Set(FaultRefused, e.Name, ErrRefused)
		return ErrRefused
	}
	m.faults.Clear(FaultRefused, e.Name)
	m.endpoints[e.ID] = attached{e, ifindex}
	return nil
}

// Recall implements plane.Endpoints: it answers no calls.
func (m *Miniature) Recall(model.Endpoint, uint64) bool { return true }

// LeaveNetns implements plane.Endpoints: connections go by endpoint, not by namespace.
func (m *Miniature) LeaveNetns(model.EndpointID) error { return nil }

// Detach implements plane.Endpoints.
func (m *Miniature) Detach(e model.Endpoint) error {
	m.calls.add(m.name, "detach "+e.Name)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.remove(e.ID)
	return nil
}

// remove is called with mu held.
func (m *Miniature) remove(id model.EndpointID) {
	delete(m.endpoints, id)
	delete(m.limits, id)
	delete(m.opened, id)
	m.cut(func(c connection) bool { return c.from == id || c.to == id })
}

// cut is called with mu held.
func (m *Miniature) cut(which func(connection) bool) (cut int) {
	before := len(m.live)
	m.live = slices.DeleteFunc(m.live, which)
	return before - len(m.live)
}

// Keep implements plane.Endpoints.
func (m *Miniature) Keep(keep map[model.EndpointID]bool) (removed map[string]int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	removed = make(map[string]int)
	for id := range maps.Clone(m.endpoints) {
		if !keep[id] {
			m.remove(id)
			removed["endpoints"]++
		}
	}
	return removed, nil
}

// InUse implements plane.Endpoints.
func (m *Miniature) InUse() (map[model.EndpointID]bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	used := make(map[model.EndpointID]bool)
	for _, c := range m.live {
		used[c.from], used[c.to] = true, true
	}
	return used, nil
}

// CutLeaving implements plane.Endpoints.
func (m *Miniature) CutLeaving(e model.Endpoint) (cut int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cut(func(c connection) bool { return c.from == e.ID || c.to == e.ID }), nil
}

// SetTopology implements plane.Network.
func (m *Miniature) SetTopology(_ []netip.Prefix, nodes []model.Node, _ model.Endpoints) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nodes = nodes
	return nil
}

// Heard implements plane.Network: the plane has nothing between nodes.
func (m *Miniature) Heard(model.Node) time.Time { return time.Time{} }

// ApplyPolicy implements plane.Policy.
func (m *Miniature) ApplyPolicy(change model.PolicyChange) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if change.Reset || m.tables.ByAddr == nil {
		m.tables = model.PolicyTables{
			ByAddr: make(map[netip.Addr]model.ClassInfo), ByPrefix: make(map[netip.Prefix]model.ClassInfo), Pairs: make(map[model.ClassPair]model.PairVerdict),
		}
	}
	for _, a := range change.DeleteAddrs {
		delete(m.tables.ByAddr, a)
	}
	for _, p := range change.DeletePrefixes {
		delete(m.tables.ByPrefix, p)
	}
	for _, p := range change.DeletePairs {
		delete(m.tables.Pairs, p)
	}
	maps.Copy(m.tables.ByAddr, change.Set.ByAddr)
	maps.Copy(m.tables.ByPrefix, change.Set.ByPrefix)
	maps.Copy(m.tables.Pairs, change.Set.Pairs)
	return nil
}

// verdict is called with mu held.
func (m *Miniature) verdict(c connection) model.Verdict {
	from, to := m.class(m.endpoints[c.from].Addr4()), m.class(m.endpoints[c.to].Addr4())
	pair, ok := m.tables.Pairs[model.ClassPair{From: from.Class, To: to.Class}]
	if !ok {
		return from.Egress.Worse(to.Ingress)
	}
	for _, p := range pair.Ports {
		if p.Protocol == model.ProtocolTCP && p.First <= c.port && c.port <= p.Last {
			return p.Verdict
		}
	}
	return pair.Default
}

func (m *Miniature) class(a netip.Addr) (found model.ClassInfo) {
	if info, ok := m.tables.ByAddr[a]; ok {
		return info
	}
	longest := -1
	for p, info := range m.tables.ByPrefix {
		if p.Contains(a) && p.Bits() > longest {
			longest, found = p.Bits(), info
		}
	}
	return found
}

// CutForbidden implements plane.Policy.
func (m *Miniature) CutForbidden() (cut int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cut(func(c connection) bool { return m.verdict(c) != model.VerdictAllow }), nil
}

// CutForbiddenIn implements plane.Policy: no process has connections of its own.
func (m *Miniature) CutForbiddenIn(string) (int, error) { return 0, nil }

// SetLimits implements plane.Limits.
func (m *Miniature) SetLimits(e model.Endpoint, all []model.Endpoint) error {
	what := "limit"
	if e.Limits == nil {
		what = "lift"
	}
	m.calls.add(m.name, what+" "+e.Name)
	return m.RestoreLimits(all)
}

// RestoreLimits implements plane.Limits.
func (m *Miniature) RestoreLimits(all []model.Endpoint) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.limits)
	for _, e := range all {
		m.limits[e.ID] = *e.Limits
	}
	return nil
}

// SpreadLimits implements plane.Limits: there are no devices.
func (m *Miniature) SpreadLimits() {}

// LimitUse implements plane.Limits: each connection is a packet that was sent.
func (m *Miniature) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]model.LimitUse, len(all))
	for i, e := range all {
		out[i] = model.LimitUse{Endpoint: e.Name, Limits: m.limits[e.ID], Egress: model.QueueUse{Packets: m.opened[e.ID]}}
	}
	return out, nil
}

// Declares implements plane.Reports.
func (m *Miniature) Declares() plane.Declaration {
	return plane.Declaration{
		Paths: []model.Path{m.path()}, Protocols: []string{m.name},
		Reasons: []model.Reason{{Name: m.name + "_connections", Kind: model.KindPath, Help: "connections of the plane " + m.name}},
	}
}

// path is that of all its connections.
func (m *Miniature) path() model.Path { return model.Path(m.name + "_table") }

// Counters implements plane.Reports.
func (m *Miniature) Counters() ([]api.Counter, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return api.CountersOf(m.Declares().Reasons, func(int) uint64 { return m.total }), nil
}

// Connections implements plane.Reports.
func (m *Miniature) Connections() ([]model.Connection, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]model.Connection, len(m.live))
	for i, c := range m.live {
		out[i] = model.Connection{Endpoint: c.from, Protocol: m.name, State: "ESTABLISHED", Path: m.path(), Local: netip.AddrPortFrom(m.endpoints[c.from].Addr4(), 0),
			Remote: netip.AddrPortFrom(m.endpoints[c.to].Addr4(), c.port)}
	}
	slices.SortFunc(out, func(a, b model.Connection) int { return cmp.Compare(a.Remote.Port(), b.Remote.Port()) })
	return out, nil
}

// Traffic implements plane.Reports.
func (m *Miniature) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]model.Traffic, len(endpoints))
	for i, e := range endpoints {
		out[i] = model.Traffic{Endpoint: e.ID, Name: e.Name, Opened: m.opened[e.ID]}
	}
	return out, nil
}

// Run implements plane.Plane.
func (m *Miniature) Run(ctx context.Context) error {
	set := func(runs bool) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.runs = runs
	}
	set(true)
	defer set(false)
	<-ctx.Done()
	return nil
}

// Close implements plane.Plane.
func (m *Miniature) Close() error {
	m.calls.add(m.name, "close")
	return nil
}
