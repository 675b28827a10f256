package verbs

import (
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// What the plane has no part in: connections of queue pairs are TCP connections of their endpoints,
// so that policy, paths and what is listed of them are the TCP plane's. docs/architecture/verbs.md.

// Guard implements plane.Endpoints: nothing of this plane passes by devices.
func (p *Plane) Guard(int) error { return nil }

// Await implements plane.Endpoints: a container that its engine has yet to make is attached then.
func (p *Plane) Await(model.Endpoint, int) error { return nil }

// LeaveNetns implements plane.Endpoints: endpoints are told apart by their sockets.
func (p *Plane) LeaveNetns(model.EndpointID) error { return nil }

// InUse implements plane.Endpoints: the router's numbers are not ids.
func (p *Plane) InUse() (map[model.EndpointID]bool, error) { return nil, nil }

// CutLeaving implements plane.Endpoints: Detach ends what there is.
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

// SpreadLimits implements plane.Limits: the router has no devices.
func (p *Plane) SpreadLimits() {}

// Connections implements plane.Reports.
func (p *Plane) Connections() ([]model.Connection, error) { return nil, nil }
