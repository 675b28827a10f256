package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
)

// retryTopology is how long what could not be done waits for another try. For a state that cannot
// be applied it doubles from try to try, to lastRepair.
const retryTopology = time.Second

// topology brings the node to each state of the network: policy, routes, planes. The goroutine of
// followTopology owns it, and Start before that.
type topology struct {
	*host
	endpoints  *endpoints
	limiter    *limiter
	membership *membership
	migration  *migration
	recovery   *recovery

	overlay *netcfg.Overlay
	applied appliedTopology
	damaged chan struct{} // somebody takes routes away that are not his
}

// followTopology applies each state of the network that the store reports, and tries again what
// fails. Beside states it follows what is local to the node: a container that connects there must
// not pass for the node. It owns the overlay's routes and the datapath's topology.
func (tp *topology) followTopology(ctx context.Context, states <-chan store.State, locals <-chan []netip.Prefix) error {
	var (
		state store.State
		local []netip.Prefix
		known bool // a state has come
		retry <-chan time.Time
		recut <-chan time.Time
		fails fails

		history  int // of the store that knows this node
		replaced time.Time
	)
	for {
		select {
		case next, ok := <-states:
			if !ok {
				return nil
			}
			if known && next.History != state.History {
				replaced = time.Now()
			}
			state, known = next, true
			fails.pause = 0
		case local = <-locals:
			fails.pause = 0
			tp.limiter.spreadLimits()
		case <-retry:
		case <-recut:
		case <-tp.enforcer.recut:
			if recut == nil {
				recut = time.After(retryTopology)
			}
			continue
		case <-tp.stacker.asked:
		case <-tp.damaged:
			tp.applied.compared, tp.applied.stale = time.Time{}, true
		case <-ctx.Done():
			return nil
		}
		retry, recut = nil, nil
		if !known || local == nil {
			continue
		}
		doubt := checkName(state, tp.membership.nameLease)
		if doubt != nil && time.Since(replaced) > nameDoubt {
			return doubt
		}
		err := tp.follow(ctx, state, local, &history)
		tp.view.publish(state, err)
		if err == nil {
			if err = tp.compareOverlay(); err != nil {
				tp.view.publish(state, err)
			}
		}
		if pause := fails.after(err, state.Revision, tp.log); err != nil {
			retry = time.After(pause)
		}
		if doubt != nil {
			retry = time.After(retryTopology)
		}
		tp.endpoints.undoHalfDone() // whoever hears of the store may reach it again
	}
}

// fails is what is known of a state that cannot be applied.
type fails struct {
	pause time.Duration // before the last try
	said  string        // by the log
}

// after tells the log what has become of a try, if it is news, and gives the pause before the next.
func (f *fails) after(err error, revision int64, log *slog.Logger) time.Duration {
	if err == nil {
		if f.said != "" {
			log.Info("state of the network is applied", "revision", revision)
		}
		*f = fails{}
		return 0
	}
	if err.Error() != f.said {
		f.said = err.Error()
		log.Error("state of the network not applied; will try again", "revision", revision, "err", err)
	}
	f.pause = max(retryTopology, min(2*f.pause, lastRepair))
	return f.pause
}

// follow applies a state. If the store does not have what it must have of this node, it is told,
// and the next state has that; what was applied last stays in force until then. history is that of
// the store that was told last.
func (tp *topology) follow(ctx context.Context, state store.State, local []netip.Prefix, history *int) error {
	if !knowsNode(state, tp.self.Name) {
		*history = -1 // what rejoin cannot tell now is compared with the next state
		return tp.recovery.rejoin(ctx, state)
	}
	state, admitted := tp.admit(state)
	if state.History != *history {
		told, err := tp.recovery.reconcileReplaced(ctx, state)
		if err != nil {
			return err
		}
		*history = state.History
		if told {
			return nil
		}
	}
	// Policy first: as a rule it is known what may reach what is new before it can be reached.
	// Where policy cannot be applied, routes follow the network all the same: what has moved must
	// be found, and who is gone must not be. Then a new endpoint of another node counts, here, as
	// its prefix does; its own node judges it by its class. An endpoint of this node does not
	// start.
	return errors.Join(admitted, wrap("apply policy", tp.enforcer.follow(state, local)), wrap("apply stack profiles", tp.stacker.follow(state)), wrap("apply topology", tp.applyTopology(state, local)), tp.migration.letGo(ctx, state))
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// appliedTopology is what routes and programs were brought to last, without an error.
type appliedTopology struct {
	state store.State
	local []netip.Prefix
	known bool
	// compared is when the overlay was last compared with what the kernel has, stale whether
	// anything has changed since.
	compared time.Time
	stale    bool
}

// applyTopology brings routes and planes to state. Routes first: a connection that a plane sends
// over the overlay needs them. What has not changed since the last time is left alone, unless that
// went wrong.
func (tp *topology) applyTopology(state store.State, local []netip.Prefix) error {
	last := tp.applied
	nodes := model.ChangedNodes(last.state.Nodes, state.Nodes)
	unchanged := len(nodes) == 0 && slices.Equal(last.local, local)
	if last.known && unchanged && state.Endpoints.Same(last.state.Endpoints) {
		return nil
	}
	tp.applied.known = false
	var err error
	switch {
	case !last.known:
		err = tp.overlay.Set(withOverlay6(tp.prefix6, state.Nodes))
		tp.applied.compared, tp.applied.stale = time.Now(), false
	case !unchanged:
		before, now := model.Sides(nodes)
		err = tp.overlay.Change(withOverlay6(tp.prefix6, before), withOverlay6(tp.prefix6, now))
		tp.applied.stale = true
	}
	err = errors.Join(err, tp.planes.SetTopology(local, state.Nodes, state.Endpoints))
	tp.applied.state, tp.applied.local, tp.applied.known = state, local, err == nil
	return err
}

// compareEvery is how often a change of nodes is followed by a look at all of the kernel's routes
// and neighbours, in case somebody else has changed them. Between them, what changes costs what it
// is.
const compareEvery = time.Minute

// compareOverlay has that look, if it is due. The change itself is in force by then.
func (tp *topology) compareOverlay() error {
	if !tp.applied.known || !tp.applied.stale || time.Since(tp.applied.compared) < compareEvery {
		return nil
	}
	tp.applied.compared, tp.applied.stale = time.Now(), false
	err := tp.overlay.Set(withOverlay6(tp.prefix6, tp.applied.state.Nodes))
	tp.applied.known = err == nil
	return wrap("compare the overlay with the kernel's", err)
}

// followLocal sends what is local to the node, at once and after every change.
func (tp *topology) followLocal(ctx context.Context, locals chan<- []netip.Prefix) {
	for ctx.Err() == nil {
		err := netcfg.FollowLocal(ctx, func(local []netip.Prefix) {
			select {
			case locals <- local:
			case <-ctx.Done():
			}
		})
		if err != nil {
			tp.log.Error("the node's own addresses not followed; will try again", "err", err)
		}
		select {
		case <-time.After(retryTopology):
		case <-ctx.Done():
		}
	}
}

// withOverlay6 gives nodes with the IPv6 forms of their prefixes and addresses beside these.
func withOverlay6(prefix6 netip.Prefix, nodes []model.Node) []model.Node {
	out := make([]model.Node, len(nodes))
	for i, n := range nodes {
		n.Prefixes = model.WithOverlay6(prefix6, n.Prefixes)
		for _, a := range n.Moved {
			n.Moved = append(slices.Clip(n.Moved), model.OverlayAddrs(prefix6, a)[1:]...)
		}
		out[i] = n
	}
	return out
}
