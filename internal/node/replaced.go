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

// nameDoubt is how long after the store's content was replaced another owner of this node's name
// lease is not believed: a restored store says what was when its snapshot was taken, until the
// leases of then have run out.
const nameDoubt = 3 * store.HoldTime

// recovery tells a store that was lost or replaced what it does not know of this node. It has no
// state of its own; it holds endpoints.change.
type recovery struct {
	*host
	endpoints *endpoints
}

// reconcileReplaced tells a store that was restored from a snapshot what has become of this node
// since that was taken, and gives back policies that it lost. It reports whether it did: then a
// state comes that has all of it. What the store knows of other nodes, these tell it; policies that
// it has in another version are as it has them.
func (rc *recovery) reconcileReplaced(ctx context.Context, state store.State) (told bool, err error) {
	rc.endpoints.change.Lock()
	defer rc.endpoints.change.Unlock()
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if !slices.ContainsFunc(state.Nodes, func(n model.Node) bool {
		n.Moved = nil // moves say that, not the node
		return reflect.DeepEqual(n, rc.ownRecord())
	}) {
		if _, err := rc.store.JoinNode(ctx, rc.ownRecord()); err != nil {
			return false, fmt.Errorf("join a store that was replaced: %w", err)
		}
		told = true
	}
	mine := rc.known.all()
	r := record{Node: rc.self.Name, Moves: rc.known.moves()}
	put, remove := ownDifferences(state, rc.self.Name, mine)
	var errs []error
	for _, id := range remove { // first: they may hold addresses of the others
		errs = append(errs, rc.store.DeleteEndpoint(ctx, rc.self.Name, id))
	}
	for _, e := range put {
		errs = append(errs, giveBack(ctx, rc.store, r, e))
	}
	lost, err := rc.enforcer.giveBack(ctx, rc.store, state)
	lostStacks, errStacks := rc.stacker.giveBack(ctx, rc.store, state)
	if err := errors.Join(append(errs, err, errStacks)...); err != nil {
		return false, fmt.Errorf("tell a store that was replaced of this node: %w", err)
	}
	rc.log.Warn("the store's content was replaced; told it of this node", "revision", state.Revision,
		"endpoints_put", len(put), "endpoints_removed", len(remove), "policies_given_back", lost, "stacks_given_back", lostStacks,
		"policies_in_another_version", rc.enforcer.otherPolicies(state))
	return told || len(put)+len(remove)+lost+lostStacks > 0, nil
}

// ownDifferences gives what a state has wrong of a node's endpoints: those to be put, and those
// that are gone, by id.
func ownDifferences(state store.State, node string, mine []model.Endpoint) (put []model.Endpoint, remove []model.EndpointID) {
	have := make(map[model.EndpointID]model.Endpoint, len(mine))
	for _, e := range mine {
		have[e.ID] = e
	}
	for e := range state.Endpoints.Groups(node).All() {
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

// rejoin tells a store that was lost, and replaced by an empty one, what it knew of this node.
func (rc *recovery) rejoin(ctx context.Context, state store.State) error {
	rc.endpoints.change.Lock()
	defer rc.endpoints.change.Unlock()
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if _, err := rc.store.InitNetwork(ctx, rc.network); err != nil {
		return fmt.Errorf("join a store that lost this node: %w", err)
	}
	if _, err := rc.store.JoinNode(ctx, rc.ownRecord()); err != nil {
		return fmt.Errorf("join a store that lost this node; restart the agent to let it take other prefixes: %w", err)
	}
	if _, err := rc.enforcer.giveBack(ctx, rc.store, state); err != nil {
		return fmt.Errorf("give policies back to a store that lost them: %w", err)
	}
	if _, err := rc.stacker.giveBack(ctx, rc.store, state); err != nil {
		return fmt.Errorf("give stack profiles back to a store that lost them: %w", err)
	}
	r := record{Node: rc.self.Name, Endpoints: rc.known.all(), Moves: rc.known.moves()}
	adopted := adopt(ctx, rc.store, r, state, alive, rc.log)
	rc.log.Warn("the store had lost this node; joined again", "endpoints", len(adopted))
	return nil
}
