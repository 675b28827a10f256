package node

import (
	"context"
	"errors"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// SetVerbs says what an endpoint of this node has of the verbs plane.
func (es *endpoints) SetVerbs(ctx context.Context, name string, change api.VerbsChange) (model.Endpoint, error) {
	v := change.VerbsEndpoint
	es.change.Lock()
	defer es.change.Unlock()
	old, ok := es.known.named(name)
	if !ok {
		return old, api.ErrNotFound
	}
	if old.Planes.Verbs.VerbsEndpoint == v {
		return old, nil
	}
	if change.Was != nil && *change.Was != old.Planes.Verbs.VerbsEndpoint {
		return old, api.HasChanged("verbs of " + name)
	}
	e := old
	e.Planes.Verbs.VerbsEndpoint = v
	if !v.Wanted {
		e.Planes.Verbs.Groups = nil
	}
	if err := errors.Join(api.ValidateVerbs(v, e.Planes.TCP.Intercepted), es.planes.Accepts(e.Planes)); err != nil {
		return old, err
	}
	if err := es.attachments.attach(e); err != nil {
		return old, errors.Join(err, es.attachments.attach(old))
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := es.store.PutEndpoint(ctx, e); err != nil {
		return old, errors.Join(storeError(err), es.attachments.attach(old))
	}
	es.known.add(e)
	es.saveEndpoint(e.ID)
	es.log.Info("verbs set", "endpoint", e.Name, "wanted", v.Wanted, "spin_us", v.SpinMicros, "outside", v.Outside)
	return e, nil
}
