package node

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

// enforcer brings the planes to what the policies say. Of this node's endpoints it believes the
// agent, of everything else the store: an endpoint is in the tables before its container can open a
// socket.
type enforcer struct {
	planes  plane.Policy
	log     *slog.Logger
	self    string
	pool    []netip.Prefix
	prefix6 netip.Prefix

	// change serialises changes of the tables; what stands before mu is guarded by it.
	change    sync.Mutex
	compiler  *policy.Compiler
	own       map[model.EndpointID]model.Endpoint
	ownGroups model.Endpoints // own, as it was in the last state compiled
	seen      store.State     // the last one
	local     []netip.Addr
	judged    *policy.State // the last one compiled; what of it has not changed is in the next one
	judgedBy  store.State   // that it was made of
	// judgedNodes are the nodes of judged, by name.
	judgedNodes map[string]policy.Node
	ownChanged  map[model.EndpointID]bool // of own, since
	localNew    bool                      // local has changed
	counted     []*policy.Policy
	rules       int  // of counted
	inForce     bool // the tables in the kernel are the compiler's
	cutAgain    bool // connections that are forbidden may be alive
	cutErr      error
	recut       chan struct{} // says that a cut failed and must be tried again

	plain plainCut
	// applying is the state that is being put in force, or was last: what ends by it is explained
	// by it, before it is reported.
	applying atomic.Pointer[policy.State]

	mu       sync.RWMutex // guards what follows
	state    *policy.State
	status   api.Policy
	reported chan struct{} // closed, and replaced, when state and status are new
}

func newEnforcer(planes plane.Policy, self string, pool []netip.Prefix, prefix6 netip.Prefix, log *slog.Logger) *enforcer {
	return &enforcer{planes: planes, log: log, self: self, pool: pool, prefix6: prefix6,
		compiler: policy.NewCompiler(self), own: make(map[model.EndpointID]model.Endpoint), ownChanged: make(map[model.EndpointID]bool), judgedNodes: make(map[string]policy.Node), recut: make(chan struct{}, 1),
		reported: make(chan struct{}), plain: plainCut{closed: make(chan struct{})}}
}

// follow brings the tables to a state of the store and the addresses that are local to this node.
func (e *enforcer) follow(state store.State, local []netip.Prefix) error {
	e.change.Lock()
	defer e.change.Unlock()
	e.seen = state
	var addrs []netip.Addr
	for _, p := range local {
		if p.IsSingleIP() {
			addrs = append(addrs, p.Addr())
		}
	}
	if !slices.Equal(addrs, e.local) {
		e.local, e.localNew = addrs, true
	}
	return e.enforce(false)
}

// set brings the tables to an endpoint of this node that is new or has changed. When it returns
// without an error, the endpoint's class is in force.
func (e *enforcer) set(ep model.Endpoint) error {
	e.change.Lock()
	defer e.change.Unlock()
	before, had := e.own[ep.ID]
	comes := !had && !e.hasAddrs(ep)
	e.own[ep.ID], e.ownChanged[ep.ID] = ep, true
	err := e.enforce(comes)
	if err == nil {
		return nil
	}
	if e.ownChanged[ep.ID] = true; had {
		e.own[ep.ID] = before
	} else {
		delete(e.own, ep.ID)
	}
	return err
}

// hasAddrs reports whether the tables say something of an endpoint's addresses. The caller holds
// change.
func (e *enforcer) hasAddrs(ep model.Endpoint) bool {
	byAddr := e.compiler.Tables().ByAddr
	return slices.ContainsFunc(ep.Addrs, func(a netip.Addr) bool { _, has := byAddr[a]; return has })
}

// know notes an endpoint of this node, which the next change of the tables will hold.
func (e *enforcer) know(ep model.Endpoint) {
	e.change.Lock()
	defer e.change.Unlock()
	e.own[ep.ID], e.ownChanged[ep.ID] = ep, true
}

// remove takes an endpoint of this node out of the tables. It is done when nothing can use its
// addresses any more.
func (e *enforcer) remove(id model.EndpointID) error {
	e.change.Lock()
	defer e.change.Unlock()
	if _, had := e.own[id]; !had {
		return nil
	}
	delete(e.own, id)
	e.ownChanged[id] = true
	return e.enforce(false)
}

// enforce compiles, applies what has changed, and ends the connections that are forbidden now. An
// error means that the tables are not in force. Connections that could not be ended are none: new
// ones are decided right, and one that the kernel cannot end must not keep containers from
// starting. comes says that all that is new is an endpoint of this node that has no network yet, at
// addresses of nobody's: no connection has become forbidden by it. The caller holds change.
func (e *enforcer) enforce(comes bool) (err error) {
	began := time.Now()
	state := e.nextSnapshot()
	e.applying.Store(state)
	change := e.compiler.Update(state)
	if !e.inForce {
		change = e.compiler.Whole()
	}
	changed := !empty(change)
	defer func() { e.report(state, changed, time.Since(began), err) }()
	if changed {
		e.inForce = false
		if err := e.planes.ApplyPolicy(change); err != nil {
			return err
		}
		e.inForce, e.cutAgain = true, e.cutAgain || !comes || change.Reset
	}
	if !e.cutAgain {
		return nil
	}
	e.cut()
	return nil
}

// cut ends the connections that are forbidden. When it fails, it says so in the log, once for each
// reason, and asks for another try. The caller holds change.
func (e *enforcer) cut() {
	cut, err := e.planes.CutForbidden()
	e.noteCut(cut)
	e.cutPlain()
	before := e.cutErr
	e.cutAgain, e.cutErr = err != nil, err
	if err == nil {
		return
	}
	if before == nil || before.Error() != err.Error() {
		e.log.Warn("policy: connections that are forbidden now may be alive; will try again", "err", err)
	}
	select {
	case e.recut <- struct{}{}:
	default: // it is asked for
	}
}

func empty(c model.PolicyChange) bool {
	return !c.Reset && len(c.Set.ByAddr)+len(c.Set.ByPrefix)+len(c.Set.Pairs)+len(c.DeleteAddrs)+len(c.DeletePrefixes)+len(c.DeletePairs) == 0
}

// nextSnapshot gives what rules are judged by. Lists of it that have not changed are those of the
// last one, so that the compiler need not look at them.
func (e *enforcer) nextSnapshot() *policy.State {
	s := &policy.State{Pool: e.pool, Prefix6: e.prefix6, Self: e.self, Namespaces: e.seen.Namespaces, Policies: e.seen.Policies}
	if e.judged != nil && !e.localNew && same(e.seen.Nodes, e.judgedBy.Nodes) {
		s.Nodes = e.judged.Nodes
	} else {
		s.Nodes = e.nodes()
	}
	if e.judged != nil && len(e.ownChanged) == 0 && e.seen.Endpoints.Same(e.judgedBy.Endpoints) {
		s.Endpoints = e.judged.Endpoints
	} else {
		s.Endpoints = e.endpoints()
	}
	e.judged, e.judgedBy, e.localNew = s, e.seen, false
	e.ownChanged = make(map[model.EndpointID]bool) // an emptied one is as long to go through as when it was fullest
	return s
}

// same reports whether two lists of states of the store are one.
func same[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// nodes gives the nodes, this one first: an address that another has, too, is still this one's
// here. Those that have not changed are copies of the last ones, which the compiler goes by.
func (e *enforcer) nodes() []policy.Node {
	for _, c := range model.ChangedNodes(e.judgedBy.Nodes, e.seen.Nodes) {
		delete(e.judgedNodes, c.Name())
	}
	if e.localNew {
		delete(e.judgedNodes, e.self)
	}
	out := make([]policy.Node, 1, len(e.seen.Nodes)+1)
	for _, n := range e.seen.Nodes {
		node, known := e.judgedNodes[n.Name]
		if !known {
			node = policy.Node{Name: n.Name, Addrs: []netip.Addr{n.Underlay}}
			for _, p := range model.WithOverlay6(e.prefix6, n.Prefixes) {
				node.Addrs = append(node.Addrs, model.Gateway(p))
			}
			if n.Name == e.self {
				node.Addrs = append(node.Addrs, e.local...)
			}
			e.judgedNodes[n.Name] = node
		}
		if n.Name == e.self {
			out[0] = node
		} else {
			out = append(out, node)
		}
	}
	if out[0].Name == "" {
		return out[1:] // a state may lack it
	}
	return out
}

// endpoints gives the store's endpoints of other nodes with the agent's of this one.
func (e *enforcer) endpoints() model.Endpoints {
	if len(e.ownChanged) > 0 {
		now := make(map[model.EndpointID]*model.Endpoint, len(e.ownChanged))
		for id := range e.ownChanged {
			if ep, there := e.own[id]; there {
				now[id] = &ep
			} else {
				now[id] = nil
			}
		}
		e.ownGroups = e.ownGroups.Patched(now)
	}
	return e.seen.Endpoints.WithGroups(map[string]model.Endpoints{e.self: e.ownGroups})
}

// report notes the outcome for Status and Explain.
func (e *enforcer) report(state *policy.State, changed bool, took time.Duration, err error) {
	rules := e.rules
	if !same(state.Policies, e.counted) {
		rules = 0
		for _, p := range state.Policies {
			rules += p.RuleCount()
		}
		e.rules, e.counted = rules, state.Policies
	}
	tables := e.compiler.Tables()
	e.mu.Lock()
	defer e.mu.Unlock()
	defer func() {
		close(e.reported)
		e.reported = make(chan struct{})
	}()
	e.state = state
	e.status.Policies, e.status.Rules, e.status.Faults = len(state.Policies), rules, e.seen.PolicyFaults
	e.status.Addresses, e.status.Pairs = len(tables.ByAddr)+len(tables.ByPrefix), len(tables.Pairs)
	e.status.Error, e.status.CutError = "", ""
	if e.cutErr != nil {
		e.status.CutError = e.cutErr.Error()
	}
	if err != nil {
		e.status.Error = err.Error()
		return
	}
	e.status.Revision = e.seen.Revision
	if changed {
		e.status.Took = took
	}
}

// snapshot gives the status, and the state that was compiled last.
func (e *enforcer) snapshot() (api.Policy, *policy.State) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.status, e.state
}

// news gives a channel that is closed when there is another snapshot.
func (e *enforcer) news() <-chan struct{} {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.reported
}

// giveBack stores the policies that this node knew and a store does not have that was lost: without
// them the network would be open. It gives their number, described namespaces included.
func (e *enforcer) giveBack(ctx context.Context, s store.Store, state store.State) (lost int, err error) {
	e.change.Lock()
	seen := e.seen
	e.change.Unlock()
	there := make(map[string]bool)
	for _, p := range state.Policies {
		there[p.Name] = true
	}
	var edit store.PolicyEdit
	for _, p := range seen.Policies {
		if !there[p.Name] {
			edit.Put = append(edit.Put, p)
		}
	}
	for _, n := range seen.Namespaces {
		if !slices.ContainsFunc(state.Namespaces, func(m policy.Namespace) bool { return m.Name == n.Name }) {
			edit.PutNamespaces = append(edit.PutNamespaces, n)
		}
	}
	if lost = len(edit.Put) + len(edit.PutNamespaces); lost == 0 {
		return 0, nil
	}
	_, err = s.EditPolicies(ctx, edit)
	return lost, err
}
