package queues

import (
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// What the plane has no part in: connections are the TCP plane's, with its policy and its end.

// Accepts implements plane.Endpoints: profiles choose it.
func (p *Plane) Accepts(model.EndpointPlanes) error { return nil }

// Guard implements plane.Endpoints: nothing of this plane passes by devices.
func (p *Plane) Guard(int) error { return nil }

// Await implements plane.Endpoints: a container that its engine has yet to make is attached then.
func (p *Plane) Await(model.Endpoint, int) error { return nil }

// LeaveNetns implements plane.Endpoints: endpoints are told apart by their sockets.
func (p *Plane) LeaveNetns(model.EndpointID) error { return nil }

// Keep implements plane.Endpoints: memory goes with the processes that have it.
func (p *Plane) Keep(map[model.EndpointID]bool) (map[string]int, error) { return nil, nil }

// InUse implements plane.Endpoints: nothing here outlives the agent.
func (p *Plane) InUse() (map[model.EndpointID]bool, error) { return nil, nil }

// CutLeaving implements plane.Endpoints: the TCP plane does.
func (p *Plane) CutLeaving(model.Endpoint) (int, error) { return 0, nil }

// SetTopology implements plane.Network.
func (p *Plane) SetTopology([]netip.Prefix, []model.Node, model.Endpoints) error { return nil }

// Heard implements plane.Network.
func (p *Plane) Heard(model.Node) time.Time { return time.Time{} }

// ApplyPolicy implements plane.Policy.
func (p *Plane) ApplyPolicy(model.PolicyChange) error { return nil }

// CutForbidden implements plane.Policy.
func (p *Plane) CutForbidden() (int, error) { return 0, nil }

// CutForbiddenIn implements plane.Policy.
func (p *Plane) CutForbiddenIn(string) (int, error) { return 0, nil }

// SpreadLimits implements plane.Limits.
func (p *Plane) SpreadLimits() {}

// LimitUse implements plane.Limits.
func (p *Plane) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) {
	return make([]model.LimitUse, len(all)), nil
}

// SetLimits implements plane.Limits: what the service sends is the endpoint's own sockets'.
func (p *Plane) SetLimits(model.Endpoint, []model.Endpoint) error { return nil }

// RestoreLimits implements plane.Limits.
func (p *Plane) RestoreLimits([]model.Endpoint) error { return nil }

// Counters implements plane.Reports.
func (p *Plane) Counters() ([]api.Counter, error) { return nil, nil }

// Connections implements plane.Reports: they are the TCP plane's.
func (p *Plane) Connections() ([]model.Connection, error) { return nil, nil }

// Traffic implements plane.Reports: the TCP plane counts it.
func (p *Plane) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	return make([]model.Traffic, len(endpoints)), nil
}
