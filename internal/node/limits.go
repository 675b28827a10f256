package node

import (
	"context"
	"errors"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// limiter changes the limits of endpoints. It has no state of its own; it holds endpoints.change.
type limiter struct {
	*host
	endpoints *endpoints
}

// SetLimits holds an endpoint to limits, in place of those it had: the zero Limits lift them all.
func (li *limiter) SetLimits(ctx context.Context, name string, change api.LimitsChange) (model.Endpoint, error) {
	limits := change.Limits
	li.endpoints.change.Lock()
	defer li.endpoints.change.Unlock()
	old, ok := li.known.named(name)
	if !ok {
		return model.Endpoint{}, api.ErrNotFound
	}
	if err := api.ValidateLimits(limits); err != nil {
		return model.Endpoint{}, err
	}
	var was model.Limits
	if old.Limits != nil {
		was = *old.Limits
	}
	if change.Was != nil && !change.Was.Equal(was) {
		return model.Endpoint{}, api.HasChanged("limits of " + name)
	}
	if err := li.endpoints.restoreLimits(); err != nil {
		return model.Endpoint{}, err
	}
	e := old
	e.Limits = nil
	if !limits.IsZero() {
		e.Limits = &limits
	}
	// The kernel first: what it refuses must not come back with the next agent.
	if err := li.endpoints.applyLimits(e); err != nil {
		return model.Endpoint{}, errors.Join(err, li.endpoints.applyLimits(old))
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := li.store.PutEndpoint(ctx, e); err != nil {
		return model.Endpoint{}, errors.Join(storeError(err), li.endpoints.applyLimits(old))
	}
	li.known.add(e)
	li.saveEndpoint(e.ID)
	li.log.Info("limits set", "endpoint", e.Name, "limits", limits)
	return e, nil
}

// LimitUse reports the limits in force on this node's endpoints and what waited for them.
func (li *limiter) LimitUse(context.Context) ([]model.LimitUse, error) {
	li.endpoints.change.Lock()
	defer li.endpoints.change.Unlock()
	return li.planes.LimitUse(li.endpoints.limited(model.Endpoint{}))
}

// spreadLimits tells the shaper of devices that the node got.
func (li *limiter) spreadLimits() {
	li.endpoints.change.Lock()
	defer li.endpoints.change.Unlock()
	li.planes.SpreadLimits()
}
