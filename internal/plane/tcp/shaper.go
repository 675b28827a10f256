package tcp

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// shaper holds endpoints to their limits: by classes of traffic on the node's devices (netcfg), and
// by what the programs are told of them. Its methods are called by one goroutine at a time.
type shaper struct {
	datapath *datapath.Datapath
	faults   plane.Faults
	log      *slog.Logger

	blocks blocks // nil before restore
	on     bool   // there are devices and filters for limits
}

// set brings the kernel to the limits of e, which is one of es if it has any: all endpoints with
// limits. Those of the others are in force.
func (s *shaper) set(e model.Endpoint, es []model.Endpoint) error {
	if len(es) == 0 && !s.on {
		return nil
	}
	if e.Limits == nil && (s.blocks == nil || s.faults.Has(api.FaultLimits)) {
		return s.datapath.ClearLimit(e.ID) // what the others need is not known: restore removes the rest, or repair
	}
	if e.Limits != nil {
		shape, err := s.blocks.shape(e)
		if err != nil {
			return err
		}
		s.on = true
		if err := s.setShapes([]netcfg.Shape{shape}); err != nil {
			return &api.Error{Code: api.CodeUnsupported, Message: err.Error(),
				Remedy: "run `heddle doctor`: it names what this kernel lacks for limits (net_shape, net_mirred)"}
		}
		if err := s.datapath.SetLimit(e.ID, limitFor(shape, *e.Limits)); err != nil {
			return err
		}
	} else if err := s.datapath.ClearLimit(e.ID); err != nil {
		return err
	}
	return s.prune(es)
}

// prune removes what the limits of es, all there are, do not need.
func (s *shaper) prune(es []model.Endpoint) error {
	s.blocks.trim(es)
	shapes := make([]netcfg.Shape, len(es))
	for i, e := range es {
		shapes[i], _ = s.blocks.shapeAnyhow(e)
	}
	if err := netcfg.PruneShapes(shapes); err != nil {
		return fmt.Errorf("remove limits: %w", err)
	}
	s.on = len(es) > 0
	return nil
}

// restore takes over the limits of an earlier agent, for those that are to have some. If that fails
// those in force stay as they are, and repair tries again: an agent that does not start would leave
// containers without sockets, one that lifts limits without them.
func (s *shaper) restore(es []model.Endpoint) error {
	err := s.try(es)
	switch {
	case err == nil:
		if s.faults.Clear(api.FaultLimits, "") {
			s.log.Info("limits restored")
		}
	case s.faults.Set(api.FaultLimits, "", err):
		s.log.Error("limits not restored: those of the earlier agent stay in force; will try again", "reason", api.FaultLimits, "err", err)
	}
	return err
}

// try brings the kernel to the limits of es, all that have some. It takes nothing away before all
// of them are in force.
func (s *shaper) try(es []model.Endpoint) error {
	s.on = true // until it is known that there are none: new devices must not be without
	s.blocks = make(blocks)
	have, err := s.datapath.Limits()
	if err != nil {
		return err
	}
	s.on = len(es)+len(have) > 0
	for id, l := range have {
		if n, ok := netcfg.ShapeBlockOf(l.Egress.Connections); ok {
			s.blocks[blockKey{id, true}] = n
		}
		if n, ok := netcfg.ShapeBlockOf(l.Ingress.Connections); ok {
			s.blocks[blockKey{id, false}] = n
		}
	}
	shapes := make([]netcfg.Shape, len(es))
	for i, e := range es {
		shapes[i], err = s.blocks.shapeAnyhow(e)
		if err == nil {
			s.faults.Clear(api.FaultLimitsTighter, e.Name)
		} else if s.faults.Set(api.FaultLimitsTighter, e.Name, err) {
			s.log.Error("limit tighter than asked for: all connections share the cap of one", "reason", api.FaultLimitsTighter, "endpoint", e.Name, "err", err)
		}
	}
	if len(shapes) > 0 {
		if err := s.setShapes(shapes); err != nil {
			return fmt.Errorf("restore limits: %w", err)
		}
	}
	kept := make(map[model.EndpointID]bool)
	for i, e := range es {
		kept[e.ID] = true
		if err := s.datapath.SetLimit(e.ID, limitFor(shapes[i], *e.Limits)); err != nil {
			return err
		}
	}
	for id := range have {
		if !kept[id] {
			if err := s.datapath.ClearLimit(id); err != nil {
				return err
			}
		}
	}
	return s.prune(es)
}

// use gives what of the limits of es is in force, and what waited for them.
func (s *shaper) use(es []model.Endpoint) ([]model.LimitUse, error) {
	shapes := make([]netcfg.Shape, len(es))
	for i, e := range es {
		shapes[i], _ = s.blocks.shapeAnyhow(e)
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

// spread puts limits in force on devices that the node got, or got routes for, since they were set.
func (s *shaper) spread() {
	if !s.on {
		return
	}
	if err := s.setShapes(nil); err != nil {
		s.log.Error("limits are not in force on all devices", "err", err)
	}
}

// attach has what limits need on a new device.
func (s *shaper) attach(ifindex int) error {
	if !s.on {
		return nil
	}
	return netcfg.AttachLimiter(ifindex, s.limiter())
}

// setShapes brings classes and devices to shapes, and tells the programs where the classes are.
func (s *shaper) setShapes(shapes []netcfg.Shape) error {
	ifindex, err := netcfg.SetShapes(shapes, s.limiter())
	if ifindex != 0 {
		err = errors.Join(err, s.datapath.UseShapeDevice(ifindex))
	}
	return err
}

func (s *shaper) limiter() netcfg.Limiter {
	progs := s.datapath.TCPrograms()
	return netcfg.Limiter{In: progs.LimitIn, Out: progs.LimitOut}
}

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

// shapeAnyhow is shape for limits that are to be in force whatever happens: a direction for which
// there is no block has its cap a connection for all connections together.
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
