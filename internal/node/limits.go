package node

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// SetLimits holds an endpoint to limits, in place of those it had: the zero Limits lift them all.
func (a *Agent) SetLimits(ctx context.Context, name string, limits model.Limits) (model.Endpoint, error) {
	a.change.Lock()
	defer a.change.Unlock()
	old, ok := a.known.named(name)
	if !ok {
		return model.Endpoint{}, api.ErrNotFound
	}
	if err := api.ValidateLimits(limits); err != nil {
		return model.Endpoint{}, err
	}
	if a.faults.Has(api.FaultLimits) {
		if err := a.planes.RestoreLimits(a.limited(model.Endpoint{})); err != nil {
			return model.Endpoint{}, &api.Error{Code: api.CodeUnavailable, Message: "limits of an earlier agent could not be taken over: " + err.Error(),
				Remedy: "mend that, or try again later"}
		}
	}
	e := old
	e.Limits = nil
	if !limits.IsZero() {
		e.Limits = &limits
	}
	// The kernel first: what it refuses must not come back with the next agent.
	if err := a.applyLimits(e); err != nil {
		return model.Endpoint{}, errors.Join(err, a.applyLimits(old))
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := a.store.PutEndpoint(ctx, e); err != nil {
		return model.Endpoint{}, errors.Join(storeError(err), a.applyLimits(old))
	}
	a.known.add(e)
	a.saveRecord(0)
	a.log.Info("limits set", "endpoint", e.Name, "limits", limits)
	return e, nil
}

// applyLimits brings the planes to the limits of e. The caller holds change.
func (a *Agent) applyLimits(e model.Endpoint) error { return a.planes.SetLimits(e, a.limited(e)) }

// liftLimits lifts those that e has, for an endpoint that goes. The caller holds change.
func (a *Agent) liftLimits(e model.Endpoint) error {
	if e.Limits == nil {
		return nil
	}
	e.Limits = nil
	return a.applyLimits(e)
}

// LimitUse reports the limits in force on this node's endpoints and what waited for them.
func (a *Agent) LimitUse(context.Context) ([]model.LimitUse, error) {
	a.change.Lock()
	defer a.change.Unlock()
	return a.planes.LimitUse(a.limited(model.Endpoint{}))
}

// spreadLimits tells the shaper of devices that the node got.
func (a *Agent) spreadLimits() {
	a.change.Lock()
	defer a.change.Unlock()
	a.planes.SpreadLimits()
}

// limited lists the endpoints with limits by id, changed in place of what is known of it.
func (a *Agent) limited(changed model.Endpoint) []model.Endpoint {
	var out []model.Endpoint
	for _, e := range a.known.all() {
		if e.Limits != nil && e.ID != changed.ID {
			out = append(out, e)
		}
	}
	if changed.Limits != nil {
		out = append(out, changed)
	}
	slices.SortFunc(out, func(x, y model.Endpoint) int { return cmp.Compare(x.ID, y.ID) })
	return out
}
