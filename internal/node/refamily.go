package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store/etcd"
)

// refamily gives an endpoint of an earlier agent the addresses of the families that the node has
// now. The store is to be told if they are others.
func (rs *restorer) refamily(e model.Endpoint) model.Endpoint {
	addrs := model.OverlayAddrs(rs.prefix6, e.Addr4())
	if slices.Equal(addrs, e.Addrs) {
		return e
	}
	e.Addrs = addrs
	rs.untold = append(rs.untold, e)
	return e
}

// tellAddrs tells the store of the addresses that refamily has changed. What it does not take is a
// fault, which repair tries again. The caller holds change.
func (rs *restorer) tellAddrs(ctx context.Context) {
	var left []model.Endpoint
	var silent error // the store does not answer: one wait is enough
	for _, e := range rs.untold {
		rs.progress()
		err := silent
		if err == nil {
			err = rs.tell(ctx, e)
		}
		if err == nil {
			rs.faults.Clear(api.FaultAddrs, e.Name)
			rs.log.Info("endpoint has other addresses", "endpoint", e.Name, "addrs", e.Addrs)
			continue
		}
		if unreachable := (*etcd.UnreachableError)(nil); errors.As(err, &unreachable) || errors.Is(err, context.DeadlineExceeded) {
			silent = err
		}
		if rs.faults.Set(api.FaultAddrs, e.Name, err) {
			rs.log.Error("the store has other addresses for an endpoint than it has; will try again", "reason", api.FaultAddrs, "endpoint", e.Name, "err", err)
		}
		left = append(left, e)
	}
	rs.untold = left
}

// retell is tellAddrs for the endpoints that are there still, as they are now.
func (rs *restorer) retell(ctx context.Context) {
	var there []model.Endpoint
	for _, e := range rs.untold {
		if now, ok := rs.known.withID(e.ID); ok && now.Name == e.Name {
			there = append(there, now)
		} else {
			rs.faults.Clear(api.FaultAddrs, e.Name)
		}
	}
	rs.untold = there
	rs.tellAddrs(ctx)
}

func (rs *restorer) tell(ctx context.Context, e model.Endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := rs.store.PutEndpoint(ctx, e); err != nil {
		return fmt.Errorf("endpoint %s: change addresses to %s: %w", e.Name, e.Addrs, err)
	}
	return nil
}
