package node

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

// nameDoubt is how long after the store's content was replaced another holder of this node's name is not believed: a
// restored store says what was when its snapshot was taken, until the leases of then have run out.
const nameDoubt = 3 * store.HoldTime

// settleReplaced tells a store that was restored from a snapshot what has become of this node since that was taken, and
// gives back policies that it lost. It reports whether it did: then a state comes that has all of it. What the store knows
// of other nodes, these tell it; policies that it has in another version are as it has them.
func (a *Agent) settleReplaced(ctx context.Context, state store.State) (told bool, err error) {
	a.change.Lock()
	defer a.change.Unlock()
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if !slices.ContainsFunc(state.Nodes, func(n model.Node) bool {
		n.Moved = nil // moves say that, not the node
		return reflect.DeepEqual(n, a.self)
	}) {
		if _, err := a.store.JoinNode(ctx, a.self); err != nil {
			return false, fmt.Errorf("join a store that was replaced: %w", err)
		}
		told = true
	}
	mine := a.known.all()
	r := record{Node: a.self.Name, Moves: a.known.moves()}
	put, remove := ownDifferences(state, a.self.Name, mine)
	var errs []error
	for _, id := range remove { // first: they may hold addresses of the others
		errs = append(errs, a.store.DeleteEndpoint(ctx, a.self.Name, id))
	}
	for _, e := range put {
		errs = append(errs, giveBack(ctx, a.store, r, e))
	}
	lost, err := a.enforcer.giveBack(ctx, a.store, state)
	if err := errors.Join(append(errs, err)...); err != nil {
		return false, fmt.Errorf("tell a store that was replaced of this node: %w", err)
	}
	a.log.Warn("the store's content was replaced; told it of this node", "revision", state.Revision,
		"endpoints_put", len(put), "endpoints_removed", len(remove), "policies_given_back", lost,
		"policies_in_another_version", a.enforcer.otherPolicies(state))
	return told || len(put)+len(remove)+lost > 0, nil
}

// ownDifferences gives what a state has wrong of a node's endpoints: those to be put, and those that are gone, by id.
func ownDifferences(state store.State, node string, mine []model.Endpoint) (put []model.Endpoint, remove []model.EndpointID) {
	have := make(map[model.EndpointID]model.Endpoint, len(mine))
	for _, e := range mine {
		have[e.ID] = e
	}
	for _, e := range state.Endpoints.Of(node) {
		own, is := have[e.ID]
		if !is {
			remove = append(remove, e.ID)
		} else if sameJSON(own, e) {
			delete(have, e.ID)
		}
	}
	for _, e := range mine {
		if _, differs := have[e.ID]; differs {
			put = append(put, e)
		}
	}
	slices.SortFunc(put, func(x, y model.Endpoint) int { return int(x.ID) - int(y.ID) })
	return put, remove
}

// otherPolicies names the policies that a state has in another version than the last one.
func (e *enforcer) otherPolicies(state store.State) (names []string) {
	e.change.Lock()
	defer e.change.Unlock()
	before := make(map[string]*policy.Policy, len(e.seen.Policies))
	for _, p := range e.seen.Policies {
		before[p.Name] = p
	}
	for _, p := range state.Policies {
		if old := before[p.Name]; old == nil || !reflect.DeepEqual(old, p) {
			names = append(names, p.Name)
		}
	}
	return names
}
