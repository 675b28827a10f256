package node

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// What an endpoint is made of that has moved to this node: decision 0030.

// tellNew tells the store of an endpoint whose lease was chosen by its state of revision since.
// told is false if the store knows of moves that have not come here yet. ahead is that of joining.
func (es *endpoints) tellNew(ctx context.Context, e model.Endpoint, since int64, ahead func(model.Endpoint) (wait func())) (told bool, err error) {
	if err := es.planes.SetLastID(e.ID); err != nil {
		return false, err
	}
	if ahead != nil {
		defer ahead(e)()
	}
	told, err = es.store.PutNewEndpoint(ctx, e, since)
	return told, storeError(err)
}

// moveFor finds the move among moves to this node that a request for an endpoint takes up: that of
// its address or, if it names none, of its name. It keeps what has moved away from being given out.
// The caller holds change.
func (es *endpoints) moveFor(req api.EndpointRequest, moves []model.Move) *model.Move {
	var away []netip.Addr
	var found *model.Move
	for _, m := range moves {
		switch {
		case m.Node != es.self.Name:
			away = append(away, m.Addr)
		case es.known.holds(m.Addr):
		case req.Addr.IsValid() && slices.Contains(model.OverlayAddrs(es.prefix6, m.Addr), req.Addr), !req.Addr.IsValid() && m.Name == req.Name:
			found = &m
		default:
			away = append(away, m.Addr) // it waits for another
		}
	}
	es.leases.SetMovedAway(away)
	return found
}

// takeUp leases the address of a move, and gives e what comes with it: labels and limits, unless e
// has some of its own.
func (es *endpoints) takeUp(e *model.Endpoint, m model.Move) (endpoint.Lease, error) {
	lease, err := es.leases.Adopt(e.Name, m.Addr)
	if err != nil {
		return lease, err
	}
	if len(e.Labels) == 0 {
		e.Labels = m.Labels
	}
	if e.Limits == nil {
		e.Limits = m.Limits
	}
	es.known.setMoved(m)
	return lease, nil
}

// takeBack undoes what create has done for e. What had migrated here goes on waiting. answers
// bounds what the store is asked.
func (es *endpoints) takeBack(e model.Endpoint, answers time.Duration) error {
	if _, migrated := es.known.moveOf(e.Addr4()); !migrated {
		return es.detach(e, answers)
	}
	return es.takeAway(e, answers, func(ctx context.Context) error {
		_, err := es.store.GiveUpEndpoint(ctx, e, es.self.Name)
		var never *store.UnknownMoveError
		if errors.As(err, &never) {
			return nil // it had not come so far
		}
		return err
	})
}

// dropWaiting ends a move to this node of an endpoint called name that nobody has taken up: its
// address goes home. ErrNotFound if there is none.
func (es *endpoints) dropWaiting(ctx context.Context, name string) error {
	state, _ := es.view.last()
	for _, m := range state.Moves {
		if m.Node != es.self.Name || m.Name != name || es.known.holds(m.Addr) {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, storeAnswers)
		defer cancel()
		if err := es.store.DropMove(ctx, m.Addr, es.self.Name); err != nil {
			return moveError(err)
		}
		es.log.Info("migrated endpoint that nobody has taken up is deleted", "endpoint", name, "addr", m.Addr)
		return nil
	}
	return api.ErrNotFound
}
