package node

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

// enforcer brings the planes to what the policies say. Of this node's endpoints it believes the agent, of everything
// else the store: an endpoint is in the tables before its container can open a socket.
type enforcer struct {
	planes  plane.Policy
	log     *slog.Logger
	self    string
	pool    []netip.Prefix
	prefix6 netip.Prefix

	// change serialises changes of the tables; what stands before mu is guarded by it.
	change   sync.Mutex
	compiler *policy.Compiler
	own      map[model.EndpointID]model.Endpoint
	ownGroup []model.Endpoint // of the last state compiled
	seen     store.State      // the last one
	local    []netip.Addr
	judged   *policy.State // the last one compiled; what of it has not changed is in the next one
	judgedBy store.State   // that it was made of
	// judgedNodes are the nodes of judged, by name.
	judgedNodes map[string]policy.Node
	ownNew      bool // own has changed since
	localNew    bool // local has
	counted     []*policy.Policy
	rules       int  // of counted
	inForce     bool // the tables in the kernel are the compiler's
	cutAgain    bool // connections that are forbidden may be alive
	cutErr      error
	recut       chan struct{} // says that a cut failed and must be tried again

	plain plainCut

	mu       sync.RWMutex // guards what follows
	state    *policy.State
	status   api.Policy
	reported chan struct{} // closed, and replaced, when state and status are new
}

func newEnforcer(planes plane.Policy, self string, pool []netip.Prefix, prefix6 netip.Prefix, log *slog.Logger) *enforcer {
	return &enforcer{planes: planes, log: log, self: self, pool: pool, prefix6: prefix6,
		compiler: policy.NewCompiler(self), own: make(map[model.EndpointID]model.Endpoint), judgedNodes: make(map[string]policy.Node), recut: make(chan struct{}, 1),
		reported: make(chan struct{})}
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
	return e.enforce()
}

// set brings the tables to an endpoint of this node that is new or has changed. When it returns without an error, the
// endpoint's class is in force.
func (e *enforcer) set(ep model.Endpoint) error {
	e.change.Lock()
	defer e.change.Unlock()
	before, had := e.own[ep.ID]
	e.own[ep.ID], e.ownNew = ep, true
	err := e.enforce()
	if err != nil && !had {
		delete(e.own, ep.ID)
	} else if err != nil {
		e.own[ep.ID] = before
	}
	e.ownNew = e.ownNew || err != nil
	return err
}

// know notes an endpoint of this node, which the next change of the tables will hold.
func (e *enforcer) know(ep model.Endpoint) {
	e.change.Lock()
	defer e.change.Unlock()
	e.own[ep.ID], e.ownNew = ep, true
}

// remove takes an endpoint of this node out of the tables. It is done when nothing can use its addresses any more.
func (e *enforcer) remove(id model.EndpointID) error {
	e.change.Lock()
	defer e.change.Unlock()
	if _, had := e.own[id]; !had {
		return nil
	}
	delete(e.own, id)
	e.ownNew = true
	return e.enforce()
}

// enforce compiles, applies what has changed, and ends the connections that are forbidden now. An error means that the
// tables are not in force. Connections that could not be ended are none: new ones are decided right, and one that the
// kernel cannot end must not keep containers from starting. The caller holds change.
func (e *enforcer) enforce() (err error) {
	began := time.Now()
	state := e.world()
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
		e.inForce, e.cutAgain = true, true
	}
	if !e.cutAgain {
		return nil
	}
	e.cut()
	return nil
}

// cut ends the connections that are forbidden. When it fails, it says so in the log, once for each reason, and asks for
// another try. The caller holds change.
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

// world gives what rules are judged by. Lists of it that have not changed are those of the last one, so that the compiler
// need not look at them.
func (e *enforcer) world() *policy.State {
	s := &policy.State{Pool: e.pool, Prefix6: e.prefix6, Self: e.self, Namespaces: e.seen.Namespaces, Policies: e.seen.Policies}
	if e.judged != nil && !e.localNew && same(e.seen.Nodes, e.judgedBy.Nodes) {
		s.Nodes = e.judged.Nodes
	} else {
		s.Nodes = e.nodes()
	}
	if e.judged != nil && !e.ownNew && e.seen.Endpoints.Same(e.judgedBy.Endpoints) {
		s.Endpoints = e.judged.Endpoints
	} else {
		s.Endpoints = e.endpoints()
	}
	e.judged, e.judgedBy, e.ownNew, e.localNew = s, e.seen, false, false
	return s
}

// same reports whether two lists of states of the store are one.
func same[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// nodes gives the nodes, this one first: an address that another claims, too, is still this one's here. Those that have not changed
// are copies of the last ones, which the compiler goes by.
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
	if e.ownNew {
		e.ownGroup = make([]model.Endpoint, 0, len(e.own))
		for _, id := range slices.Sorted(maps.Keys(e.own)) {
			e.ownGroup = append(e.ownGroup, e.own[id])
		}
	}
	return e.seen.Endpoints.With(map[string][]model.Endpoint{e.self: e.ownGroup})
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

// Policies lists the network's policies and namespaces as this agent compiled them last.
func (a *Agent) Policies(context.Context) (api.PolicyDocuments, error) {
	_, state := a.enforcer.snapshot()
	if state == nil {
		return api.PolicyDocuments{}, nil
	}
	return api.PolicyDocuments{Policies: slices.Clone(state.Policies), Namespaces: slices.Clone(state.Namespaces)}, nil
}

// EditPolicies changes policies in the store, and waits until this node enforces them.
func (a *Agent) EditPolicies(ctx context.Context, edit api.PolicyEdit) ([]api.PolicyOutcome, error) {
	limited, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	made, err := a.store.EditPolicies(limited, store.PolicyEdit{
		Put: edit.Policies, PutNamespaces: edit.Namespaces, Delete: edit.Delete, DeleteNamespaces: edit.DeleteNamespaces, Source: edit.Source})
	if err != nil {
		return nil, policyError(err)
	}
	out := make([]api.PolicyOutcome, len(made))
	for i, o := range made {
		out[i] = api.PolicyOutcome(o)
	}
	return out, a.awaitPolicies(limited, edit)
}

// awaitPolicies returns when this node enforces an edit that the store has, or something later.
func (a *Agent) awaitPolicies(ctx context.Context, edit api.PolicyEdit) error {
	var looked *policy.State
	for {
		news := a.enforcer.news()
		status, state := a.enforcer.snapshot()
		if status.Error == "" && state != nil && (looked == nil || !same(looked.Policies, state.Policies) || !same(looked.Namespaces, state.Namespaces)) {
			if holds(state, edit) {
				return nil
			}
			looked = state
		}
		select {
		case <-ctx.Done():
			return &api.Error{Code: api.CodeUnavailable, Message: "the store has the change, but it is not in force on this node: " + cmp.Or(status.Error, "no news from the store"),
				Remedy: "see heddle status"}
		case <-news:
		}
	}
}

// holds reports whether state has what an edit leads to.
func holds(state *policy.State, edit api.PolicyEdit) bool {
	policies := make(map[string]*policy.Policy, len(state.Policies))
	for _, p := range state.Policies {
		policies[p.Name] = p
	}
	namespaces := make(map[string]policy.Namespace, len(state.Namespaces))
	for _, n := range state.Namespaces {
		namespaces[n.Name] = n
	}
	for _, p := range edit.Policies {
		if have := policies[p.Name]; have == nil || !sameJSON(have, p) {
			return false
		}
	}
	for _, n := range edit.Namespaces {
		if have, there := namespaces[n.Name]; !there || !sameJSON(have, n) {
			return false
		}
	}
	for _, name := range edit.Delete {
		if p := policies[name]; p != nil && (edit.Source == "" || p.Source == edit.Source) {
			return false
		}
	}
	for _, name := range edit.DeleteNamespaces {
		if n, there := namespaces[name]; there && (edit.Source == "" || n.Source == edit.Source) {
			return false
		}
	}
	return true
}

func sameJSON(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// policyError gives a failed edit its code on the wire.
func policyError(err error) error {
	var unknown *store.UnknownPolicyError
	var limit *store.PolicyLimitError
	switch {
	case errors.As(err, &unknown):
		return &api.Error{Code: api.CodeNotFound, Field: "delete", Message: err.Error()}
	case errors.As(err, &limit):
		return &api.Error{Code: api.CodeExhausted, Message: err.Error()}
	}
	return storeError(err)
}

// LabelEndpoint changes labels of an endpoint of this node.
func (a *Agent) LabelEndpoint(ctx context.Context, name string, req api.LabelRequest) (model.Endpoint, error) {
	a.change.Lock()
	defer a.change.Unlock()
	e, ok := a.known.named(name)
	if !ok {
		return e, api.ErrNotFound
	}
	labels := maps.Clone(e.Labels)
	if labels == nil {
		labels = make(map[string]string)
	}
	for _, k := range req.Remove {
		delete(labels, k)
	}
	maps.Copy(labels, req.Set)
	if err := (api.LabelRequest{Set: labels, Remove: []string{""}}).Validate(); err != nil {
		return e, err
	}
	e.Labels = labels
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := a.store.PutEndpoint(ctx, e); err != nil {
		return e, storeError(err)
	}
	if err := a.enforcer.set(e); err != nil {
		return e, fmt.Errorf("policy: %w", err)
	}
	a.known.add(e)
	a.saveRecord(0)
	return e, nil
}

// giveBack stores the policies that this node knew and a store does not have that was lost: without them the network
// would be open. It gives their number, described namespaces included.
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

// ExplainPolicy says what the rules make of a connection. From and to are names of endpoints or addresses.
func (a *Agent) ExplainPolicy(_ context.Context, q api.ExplainRequest) (api.Explanation, error) {
	_, state := a.enforcer.snapshot()
	if state == nil {
		return api.Explanation{}, &api.Error{Code: api.CodeUnavailable, Message: "the agent has not compiled policy yet", Remedy: "try again"}
	}
	from, err := ends("from", q.From, state)
	if err != nil {
		return api.Explanation{}, err
	}
	to, err := ends("to", q.To, state)
	if err != nil {
		return api.Explanation{}, err
	}
	probe := policy.Probe{Protocol: q.Ports.Protocol, Port: q.Ports.First}
	for _, probe.From = range from {
		for _, probe.To = range to {
			if probe.From.Is4() == probe.To.Is4() {
				return api.ExplanationOf(probe, policy.Explain(state, probe)), nil
			}
		}
	}
	return api.Explanation{}, &api.Error{Code: api.CodeInvalid, Field: "to", Message: fmt.Sprintf("%s and %s have no address family in common", q.From, q.To)}
}

// ends gives the addresses that a name or an address means.
func ends(field, s string, state *policy.State) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	var found []model.Endpoint
	for e := range state.Endpoints.All() {
		if e.Name == s {
			found = append(found, e)
		}
	}
	switch len(found) {
	case 0:
		return nil, &api.Error{Code: api.CodeNotFound, Field: field, Message: fmt.Sprintf("no endpoint %.80q in the network, and no address", s)}
	case 1:
		return found[0].Addrs, nil
	}
	return nil, &api.Error{Code: api.CodeInvalid, Field: field, Message: fmt.Sprintf("endpoint %s is on several nodes", s),
		Remedy: fmt.Sprintf("give an address, such as %s of node %s", found[0].Addr4(), found[0].Node)}
}
