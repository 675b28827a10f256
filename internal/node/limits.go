package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/datapath"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// blocks says which blocks of classes the directions of endpoints have.
type blocks map[blockKey]int

type blockKey struct {
	id     model.EndpointID
	egress bool
}

// take gives a direction its block, or a free one.
func (b blocks) take(id model.EndpointID, egress bool) (int, error) {
	key := blockKey{id, egress}
	if n, ok := b[key]; ok {
		return n, nil
	}
	used := make(map[int]bool, len(b))
	for _, n := range b {
		used[n] = true
	}
	for n := range netcfg.ShapeBlocks {
		if !used[n] {
			b[key] = n
			return n, nil
		}
	}
	return 0, &api.Error{Code: api.CodeExhausted, Field: "connection_egress_bps",
		Message: fmt.Sprintf("all %d places for caps a connection are taken on this node", netcfg.ShapeBlocks),
		Remedy:  "lift the caps a connection of other endpoints; one direction of an endpoint takes one place"}
}

// shape makes of an endpoint's limits what netcfg sets up, and takes the blocks it needs.
func (b blocks) shape(e model.Endpoint) (netcfg.Shape, error) {
	return b.shapeOf(e.ID, limitsOf(e))
}

// shapeAnyhow is shape for limits that are to be in force whatever happens: a direction for which there is no block
// has its cap a connection for all connections together.
func (b blocks) shapeAnyhow(e model.Endpoint) (s netcfg.Shape, tighter error) {
	l := limitsOf(e)
	if s, tighter = b.shapeOf(e.ID, l); tighter == nil {
		return s, nil
	}
	have := func(egress bool) bool { _, ok := b[blockKey{e.ID, egress}]; return ok }
	if !have(true) {
		l.Egress, l.ConnectionEgress = tightest(l.Egress, l.ConnectionEgress), 0
	}
	if !have(false) {
		l.Ingress, l.ConnectionIngress = tightest(l.Ingress, l.ConnectionIngress), 0
	}
	s, _ = b.shapeOf(e.ID, l) // it takes no further block
	return s, tighter
}

func (b blocks) shapeOf(id model.EndpointID, l model.Limits) (netcfg.Shape, error) {
	s := netcfg.Shape{ID: id,
		Egress:  netcfg.ShapedDirection{Rate: l.Egress, ConnectionRate: l.ConnectionEgress},
		Ingress: netcfg.ShapedDirection{Rate: l.Ingress, ConnectionRate: l.ConnectionIngress},
	}
	var err error
	if l.ConnectionEgress != 0 {
		if s.Egress.Block, err = b.take(id, true); err != nil {
			return s, err
		}
	}
	if l.ConnectionIngress != 0 {
		if s.Ingress.Block, err = b.take(id, false); err != nil {
			return s, err
		}
	}
	return s, nil
}

// trim gives back the blocks that no endpoint of es needs.
func (b blocks) trim(es []model.Endpoint) {
	needed := make(blocks)
	for _, e := range es {
		l := limitsOf(e)
		if n, ok := b[blockKey{e.ID, true}]; ok && l.ConnectionEgress != 0 {
			needed[blockKey{e.ID, true}] = n
		}
		if n, ok := b[blockKey{e.ID, false}]; ok && l.ConnectionIngress != 0 {
			needed[blockKey{e.ID, false}] = n
		}
	}
	clear(b)
	maps.Copy(b, needed)
}

func limitsOf(e model.Endpoint) model.Limits {
	if e.Limits == nil {
		return model.Limits{}
	}
	return *e.Limits
}

// limitFor is what the programs are told of a shape.
func limitFor(s netcfg.Shape, l model.Limits) datapath.Limit {
	out := datapath.Limit{Priority: l.Priority, DSCP: l.DSCP}
	out.Egress.Rate = tightest(l.Egress, l.ConnectionEgress)
	out.Egress.Class, out.Egress.Connections = s.EgressClasses()
	out.Ingress.Rate = tightest(l.Ingress, l.ConnectionIngress)
	out.Ingress.Class, out.Ingress.Connections = s.IngressClasses()
	return out
}

func tightest(a, b model.Rate) model.Rate {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

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
	if a.faults.has(api.FaultLimits) {
		if err := a.tryLimits(); err != nil {
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

// applyLimits brings the kernel to the limits of e; those of the other endpoints are in force.
func (a *Agent) applyLimits(e model.Endpoint) error {
	es := a.limited(e)
	if len(es) == 0 && !a.limiting {
		return nil
	}
	if e.Limits == nil && a.faults.has(api.FaultLimits) {
		return a.datapath.ClearLimit(e.ID) // what the others need is not known: repair removes the rest
	}
	if e.Limits != nil {
		shape, err := a.blocks.shape(e)
		if err != nil {
			return err
		}
		a.limiting = true
		if err := a.setShapes([]netcfg.Shape{shape}); err != nil {
			return &api.Error{Code: api.CodeUnsupported, Message: err.Error(),
				Remedy: "run `heddle doctor`: it names what this kernel lacks for limits (net_shape, net_mirred)"}
		}
		if err := a.datapath.SetLimit(e.ID, limitFor(shape, *e.Limits)); err != nil {
			return err
		}
	} else if err := a.datapath.ClearLimit(e.ID); err != nil {
		return err
	}
	return a.pruneLimits(es)
}

// pruneLimits removes what the limits of es, all there are, do not need.
func (a *Agent) pruneLimits(es []model.Endpoint) error {
	a.blocks.trim(es)
	shapes := make([]netcfg.Shape, len(es))
	for i, e := range es {
		shapes[i], _ = a.blocks.shapeAnyhow(e)
	}
	if err := netcfg.PruneShapes(shapes); err != nil {
		return fmt.Errorf("remove limits: %w", err)
	}
	a.limiting = len(es) > 0
	return nil
}

// restoreLimits takes over the limits of an earlier agent. If that fails those in force stay as they are, and repair
// tries again: an agent that does not start would leave containers without sockets, one that lifts limits without them.
func (a *Agent) restoreLimits() {
	err := a.tryLimits()
	switch {
	case err == nil:
		if a.faults.clear(api.FaultLimits, "") {
			a.log.Info("limits restored")
		}
	case a.faults.set(api.FaultLimits, "", err):
		a.log.Error("limits not restored: those of the earlier agent stay in force; will try again", "reason", api.FaultLimits, "err", err)
	}
}

// tryLimits brings the kernel to the limits that the store has. It takes nothing away before all of them are in force.
func (a *Agent) tryLimits() error {
	es := a.limited(model.Endpoint{})
	a.limiting = true // until it is known that there are none: new devices must not be without
	a.blocks = make(blocks)
	have, err := a.datapath.Limits()
	if err != nil {
		return err
	}
	a.limiting = len(es)+len(have) > 0
	for id, l := range have {
		if n, ok := netcfg.ShapeBlockOf(l.Egress.Connections); ok {
			a.blocks[blockKey{id, true}] = n
		}
		if n, ok := netcfg.ShapeBlockOf(l.Ingress.Connections); ok {
			a.blocks[blockKey{id, false}] = n
		}
	}
	shapes := make([]netcfg.Shape, len(es))
	for i, e := range es {
		shapes[i], err = a.blocks.shapeAnyhow(e)
		if err == nil {
			a.faults.clear(api.FaultLimitsTighter, e.Name)
		} else if a.faults.set(api.FaultLimitsTighter, e.Name, err) {
			a.log.Error("limit tighter than asked for: all connections share the cap of one", "reason", api.FaultLimitsTighter, "endpoint", e.Name, "err", err)
		}
	}
	if len(shapes) > 0 {
		if err := a.setShapes(shapes); err != nil {
			return fmt.Errorf("restore limits: %w", err)
		}
	}
	kept := make(map[model.EndpointID]bool)
	for i, e := range es {
		kept[e.ID] = true
		if err := a.datapath.SetLimit(e.ID, limitFor(shapes[i], *e.Limits)); err != nil {
			return err
		}
	}
	for id := range have {
		if !kept[id] {
			if err := a.datapath.ClearLimit(id); err != nil {
				return err
			}
		}
	}
	return a.pruneLimits(es)
}

// LimitUse reports the limits in force on this node's endpoints and what waited for them.
func (a *Agent) LimitUse(context.Context) ([]model.LimitUse, error) {
	a.change.Lock()
	defer a.change.Unlock()
	es := a.limited(model.Endpoint{})
	shapes := make([]netcfg.Shape, len(es))
	for i, e := range es {
		shapes[i], _ = a.blocks.shapeAnyhow(e)
	}
	egress, ingress, err := netcfg.ShapeUse(shapes)
	if err != nil {
		return nil, err
	}
	out := make([]model.LimitUse, len(es))
	for i, e := range es {
		out[i] = model.LimitUse{Endpoint: e.Name, Limits: *e.Limits, Egress: egress[i], Ingress: ingress[i]}
	}
	return out, nil
}

// spreadLimits puts limits in force on devices that the node got, or got routes for, since they were set.
func (a *Agent) spreadLimits() {
	a.change.Lock()
	defer a.change.Unlock()
	if !a.limiting {
		return
	}
	if err := a.setShapes(nil); err != nil {
		a.log.Error("limits are not in force on all devices", "err", err)
	}
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

// setShapes brings classes and devices to shapes, and tells the programs where the classes are.
func (a *Agent) setShapes(shapes []netcfg.Shape) error {
	ifindex, err := netcfg.SetShapes(shapes, a.limiter())
	if ifindex != 0 {
		err = errors.Join(err, a.datapath.UseShapeDevice(ifindex))
	}
	return err
}

func (a *Agent) limiter() netcfg.Limiter {
	progs := a.datapath.TCPrograms()
	return netcfg.Limiter{In: progs.LimitIn, Out: progs.LimitOut}
}
