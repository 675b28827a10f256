package plane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/stack"
)

// Set is the planes of a node. What makes an endpoint known goes through them in order and stops at
// the first that fails, whose caller then detaches it from all; what undoes goes through all of
// them backwards, for a plane may stand on those before it.
type Set []Plane

var _ interface {
	Endpoints
	Network
	Policy
	Limits
	Reports
	Services
	Stacks
	IDs
	Status
} = Set{}

// of says of which plane an error is.
func of(p Plane, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s plane: %w", p.Name(), err)
}

// forward has planes do something, in order, until one fails.
func (s Set) forward(do func(Plane) error) error {
	for _, p := range s {
		if err := do(p); err != nil {
			return of(p, err)
		}
	}
	return nil
}

// each has all planes do something, in order.
func (s Set) each(do func(Plane) error) error {
	var errs []error
	for _, p := range s {
		errs = append(errs, of(p, do(p)))
	}
	return errors.Join(errs...)
}

// backward has all planes do something, the last first.
func (s Set) backward(do func(Plane) error) error {
	var errs []error
	for _, p := range slices.Backward(s) {
		errs = append(errs, of(p, do(p)))
	}
	return errors.Join(errs...)
}

// sum adds what planes counted.
func (s Set) sum(count func(Plane) (int, error)) (sum int, err error) {
	err = s.backward(func(p Plane) error {
		n, err := count(p)
		sum += n
		return err
	})
	return sum, err
}

// Accepts implements Endpoints.
func (s Set) Accepts(wanted model.EndpointPlanes) error {
	for _, p := range s {
		if err := p.Accepts(wanted); err != nil {
			return err // what it says is for who asked, and not about the plane
		}
	}
	return nil
}

// Guard implements Endpoints.
func (s Set) Guard(ifindex int) error {
	return s.forward(func(p Plane) error { return p.Guard(ifindex) })
}

// Await implements Endpoints.
func (s Set) Await(e model.Endpoint, ifindex int) error {
	return s.forward(func(p Plane) error { return p.Await(e, ifindex) })
}

// Attach implements Endpoints.
func (s Set) Attach(e model.Endpoint, dev netcfg.EndpointDevice) error {
	return s.forward(func(p Plane) error { return p.Attach(e, dev) })
}

// Recall implements Endpoints.
func (s Set) Recall(e model.Endpoint, netns uint64) bool {
	return !slices.ContainsFunc(s, func(p Plane) bool { return !p.Recall(e, netns) })
}

// LeaveNetns implements Endpoints.
func (s Set) LeaveNetns(id model.EndpointID) error {
	return s.backward(func(p Plane) error { return p.LeaveNetns(id) })
}

// Detach implements Endpoints.
func (s Set) Detach(e model.Endpoint) error {
	return s.backward(func(p Plane) error { return p.Detach(e) })
}

// Keep implements Endpoints. What was removed has the plane's name before it.
func (s Set) Keep(keep map[model.EndpointID]bool) (removed map[string]int, err error) {
	removed = make(map[string]int)
	err = s.each(func(p Plane) error {
		own, err := p.Keep(keep)
		for what, n := range own {
			removed[p.Name()+" "+what] = n
		}
		return err
	})
	return removed, err
}

// InUse implements Endpoints.
func (s Set) InUse() (ids map[model.EndpointID]bool, err error) {
	ids = make(map[model.EndpointID]bool)
	err = s.forward(func(p Plane) error {
		own, err := p.InUse()
		for id, used := range own {
			ids[id] = ids[id] || used
		}
		return err
	})
	return ids, err
}

// CutLeaving implements Endpoints.
func (s Set) CutLeaving(e model.Endpoint) (cut int, err error) {
	return s.sum(func(p Plane) (int, error) { return p.CutLeaving(e) })
}

// SetTopology implements Network.
func (s Set) SetTopology(local []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) error {
	return s.each(func(p Plane) error { return p.SetTopology(local, nodes, endpoints) })
}

// Heard implements Network.
func (s Set) Heard(n model.Node) (last time.Time) {
	for _, p := range s {
		if at := p.Heard(n); at.After(last) {
			last = at
		}
	}
	return last
}

// ApplyPolicy implements Policy: whole or not at all for each plane. Whoever has an error applies
// all of it anew.
func (s Set) ApplyPolicy(change model.PolicyChange) error {
	return s.each(func(p Plane) error { return p.ApplyPolicy(change) })
}

// CutForbidden implements Policy.
func (s Set) CutForbidden() (cut int, err error) { return s.sum(Plane.CutForbidden) }

// CutForbiddenIn implements Policy.
func (s Set) CutForbiddenIn(netnsPath string) (cut int, err error) {
	return s.sum(func(p Plane) (int, error) { return p.CutForbiddenIn(netnsPath) })
}

// SetLimits implements Limits.
func (s Set) SetLimits(e model.Endpoint, all []model.Endpoint) error {
	return s.forward(func(p Plane) error { return p.SetLimits(e, all) })
}

// RestoreLimits implements Limits.
func (s Set) RestoreLimits(all []model.Endpoint) error {
	return s.each(func(p Plane) error { return p.RestoreLimits(all) })
}

// SpreadLimits implements Limits.
func (s Set) SpreadLimits() {
	for _, p := range s {
		p.SpreadLimits()
	}
}

// LimitUse implements Limits: for each endpoint the sum over the planes.
func (s Set) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) {
	out := make([]model.LimitUse, len(all))
	for i, e := range all {
		out[i] = model.LimitUse{Endpoint: e.Name, Limits: *e.Limits}
	}
	err := s.forward(func(p Plane) error {
		own, err := p.LimitUse(all)
		for i, u := range own {
			out[i].Egress.Add(u.Egress)
			out[i].Ingress.Add(u.Ingress)
		}
		return err
	})
	return out, err
}

// Declares implements Reports.
func (s Set) Declares() (all Declaration) {
	for _, p := range s {
		d := p.Declares()
		all.Paths = append(all.Paths, d.Paths...)
		all.Protocols = append(all.Protocols, d.Protocols...)
		all.Reasons = append(all.Reasons, d.Reasons...)
		all.Faults = append(all.Faults, d.Faults...)
	}
	return all
}

// CheckNames reports two planes of one name, or that declare the same.
func (s Set) CheckNames() error {
	owners := make(map[string]string)
	var errs []error
	own := func(p Plane, what, name string) {
		if owner, taken := owners[what+name]; taken {
			errs = append(errs, of(p, fmt.Errorf("%s %q is the %s plane's", what, name, owner)))
		}
		owners[what+name] = p.Name()
	}
	for _, p := range s {
		own(p, "plane", p.Name())
		d := p.Declares()
		for _, path := range d.Paths {
			if path != model.PathNone && path != model.PathListen {
				own(p, "path", string(path))
			}
		}
		for _, protocol := range d.Protocols {
			own(p, "protocol", protocol)
		}
		for _, r := range d.Reasons {
			own(p, "reason", r.Name)
		}
		for _, f := range d.Faults {
			own(p, "fault", string(f))
		}
	}
	return errors.Join(errs...)
}

// Counters implements Reports.
func (s Set) Counters() ([]api.Counter, error) { return concat(s, Plane.Counters) }

// Connections implements Reports.
func (s Set) Connections() ([]model.Connection, error) { return concat(s, Plane.Connections) }

func concat[T any](s Set, list func(Plane) ([]T, error)) (all []T, err error) {
	err = s.forward(func(p Plane) error {
		own, err := list(p)
		all = append(all, own...)
		return err
	})
	return all, err
}

// Traffic implements Reports: for each endpoint the sum over the planes.
func (s Set) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	out := make([]model.Traffic, len(endpoints))
	for i, e := range endpoints {
		out[i] = model.Traffic{Endpoint: e.ID, Name: e.Name, Live: make(map[model.Path]uint64)}
	}
	err := s.forward(func(p Plane) error {
		own, err := p.Traffic(endpoints)
		for i, t := range own {
			out[i].Add(t)
		}
		return err
	})
	return out, err
}

// LastID implements IDs.
func (s Set) LastID() (last model.EndpointID, err error) {
	err = s.forward(func(p Plane) error {
		if has, ok := p.(IDs); ok {
			id, err := has.LastID()
			last = max(last, id)
			return err
		}
		return nil
	})
	return last, err
}

// SetLastID implements IDs.
func (s Set) SetLastID(id model.EndpointID) error {
	return s.forward(func(p Plane) error {
		if has, ok := p.(IDs); ok {
			return has.SetLastID(id)
		}
		return nil
	})
}

// FillStatus implements Status.
func (s Set) FillStatus(ctx context.Context, st *api.Status) error {
	return s.forward(func(p Plane) error {
		if has, ok := p.(Status); ok {
			return has.FillStatus(ctx, st)
		}
		return nil
	})
}

// RDMA implements RDMA.
func (s Set) RDMA(ctx context.Context) (api.RDMA, error) {
	for _, p := range s {
		if has, ok := p.(RDMA); ok {
			state, err := has.RDMA(ctx)
			return state, of(p, err)
		}
	}
	return api.RDMA{}, nil
}

// StackModules implements StackReports.
func (s Set) StackModules(ctx context.Context) (all []api.StackModule, err error) {
	var errs []error
	for _, p := range s {
		if has, ok := p.(StackReports); ok {
			list, err := has.StackModules(ctx)
			all, errs = append(all, list...), append(errs, of(p, err))
		}
	}
	return all, errors.Join(errs...)
}

// Services implements Services: they are the same in each plane that has them.
func (s Set) Services() ([]model.Service, error) {
	for _, p := range s {
		if has, ok := p.(Services); ok {
			list, err := has.Services()
			return list, of(p, err)
		}
	}
	return nil, nil
}

// EditServices implements Services.
func (s Set) EditServices(ctx context.Context, edit api.ServiceEdit) error {
	return s.forward(func(p Plane) error {
		if has, ok := p.(Services); ok {
			return has.EditServices(ctx, edit)
		}
		return nil
	})
}

// ServeStack implements Stacks: what the planes say that have a part in the stack.
func (s Set) ServeStack(kind stack.Kind, settings stack.Settings) error {
	served := false
	for _, p := range s {
		has, ok := p.(Stacks)
		if !ok {
			continue
		}
		if err := has.ServeStack(kind, settings); err == nil {
			served = true
		} else if !errors.Is(err, ErrOtherStack) {
			return err
		}
	}
	if !served {
		return fmt.Errorf("%s: %w", kind, ErrOtherStack)
	}
	return nil
}

// SetStack implements Stacks: every plane hears of it, also after one has failed.
func (s Set) SetStack(e model.Endpoint, c stack.Choice) error {
	return s.each(func(p Plane) error {
		if has, ok := p.(Stacks); ok {
			return has.SetStack(e, c)
		}
		return nil
	})
}

// Close closes the planes, the last first.
func (s Set) Close() error { return s.backward(Plane.Close) }
