package stacks

import (
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// What the plane has no part in: packets of a module pass the TCP plane's programs at the
// endpoint's veth, as the container's own do. docs/architecture/stacks.md.

// Accepts implements plane.Endpoints: endpoints ask for nothing of this plane; profiles choose it.
func (p *Plane) Accepts(model.EndpointPlanes) error { return nil }

// Guard implements plane.Endpoints: nothing of this plane passes by devices.
func (p *Plane) Guard(int) error { return nil }

// Await implements plane.Endpoints: a container that its engine has yet to make is attached then.
func (p *Plane) Await(model.Endpoint, int) error { return nil }

// LeaveNetns implements plane.Endpoints: endpoints are told apart by their sockets.
func (p *Plane) LeaveNetns(model.EndpointID) error { return nil }

// Keep implements plane.Endpoints: the module hears of what there is when it is told of all.
func (p *Plane) Keep(map[model.EndpointID]bool) (map[string]int, error) { return nil, nil }

// InUse implements plane.Endpoints: a note has the endpoint's generation, too.
func (p *Plane) InUse() (map[model.EndpointID]bool, error) { return nil, nil }

// CutLeaving implements plane.Endpoints: Detach ends what there is.
func (p *Plane) CutLeaving(model.Endpoint) (int, error) { return 0, nil }

// SetTopology implements plane.Network.
func (p *Plane) SetTopology([]netip.Prefix, []model.Node, model.Endpoints) error { return nil }

// Heard implements plane.Network.
func (p *Plane) Heard(model.Node) time.Time { return time.Time{} }

// SetLimits implements plane.Limits.
func (p *Plane) SetLimits(model.Endpoint, []model.Endpoint) error { return nil }

// RestoreLimits implements plane.Limits.
func (p *Plane) RestoreLimits([]model.Endpoint) error { return nil }

// SpreadLimits implements plane.Limits.
func (p *Plane) SpreadLimits() {}

// LimitUse implements plane.Limits.
func (p *Plane) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) {
	return make([]model.LimitUse, len(all)), nil
}
