package stacks

import (
	"heddle.dev/heddle/internal/model"
)

// The kernel holds the packets of a module to the caps of its endpoint, as those of any container,
// and drops what its queues have no room for. Modules are told of the caps, too, so that they offer
// no more than passes: smoltcp has no SACK, and gets a fraction of a cap whose queue drops.

// paceShare is how much of a cap a module may move in bytes of data, in percent: headers and
// acknowledgements count against the cap as well.
const paceShare = 98

// pace gives a cap as a module is told it, in bytes of data a second; 0 is none.
func pace(r model.Rate) uint64 { return uint64(r) / 8 * paceShare / 100 }

// SetLimits implements plane.Limits. What it does is no protection, so that a module which cannot
// be told fails nothing.
func (p *Plane) SetLimits(e model.Endpoint, _ []model.Endpoint) error {
	p.announce.Lock()
	defer p.announce.Unlock()
	p.limit(e.ID, e.Limits)
	return nil
}

// RestoreLimits implements plane.Limits.
func (p *Plane) RestoreLimits(all []model.Endpoint) error {
	p.announce.Lock()
	defer p.announce.Unlock()
	for _, e := range all {
		p.limit(e.ID, e.Limits)
	}
	return nil
}

// limit notes the limits of an endpoint, nil for none, and tells its module of news. The caller
// holds announce.
func (p *Plane) limit(id model.EndpointID, l *model.Limits) {
	var caps model.Limits
	if l != nil {
		caps = model.Limits{Egress: l.Egress, Ingress: l.Ingress}
	}
	p.mu.Lock()
	before, t := p.limits[id], p.tenants[id]
	if caps.IsZero() {
		delete(p.limits, id)
	} else {
		p.limits[id] = caps
	}
	p.mu.Unlock()
	if t == nil || caps == before {
		return
	}
	if l := t.module.Current(); l != nil {
		p.tell(l, t)
	}
}

// capsOf gives the caps of an endpoint.
func (p *Plane) capsOf(id model.EndpointID) model.Limits {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.limits[id]
}
