package plane

import (
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// A plane embeds the types of this file for what it has no part in, so that its declaration says
// which parts those are. Methods of its own take the place of those that it does have.

// WithoutDevices is a plane by whose endpoints' devices nothing of its passes, and that leaves
// nothing with the kernel that carries their ids: Detach ends all that there is.
type WithoutDevices struct{}

// Guard implements Endpoints.
func (WithoutDevices) Guard(int) error { return nil }

// Await implements Endpoints: a container that its engine has yet to make is attached then.
func (WithoutDevices) Await(model.Endpoint, int) error { return nil }

// LeaveNetns implements Endpoints: endpoints are told apart by their sockets.
func (WithoutDevices) LeaveNetns(model.EndpointID) error { return nil }

// InUse implements Endpoints.
func (WithoutDevices) InUse() (map[model.EndpointID]bool, error) { return nil, nil }

// CutLeaving implements Endpoints.
func (WithoutDevices) CutLeaving(model.Endpoint) (int, error) { return 0, nil }

// WithoutRequests is a plane of which endpoints do not ask anything: profiles choose it. What it
// keeps of them goes with their processes, or is found again when all are told.
type WithoutRequests struct{}

// Accepts implements Endpoints.
func (WithoutRequests) Accepts(model.EndpointPlanes) error { return nil }

// Recall implements Endpoints: none that has a profile is asked for.
func (WithoutRequests) Recall(model.Endpoint, uint64) bool { return true }

// Keep implements Endpoints.
func (WithoutRequests) Keep(map[model.EndpointID]bool) (map[string]int, error) { return nil, nil }

// WithoutNetwork is a plane that reaches other nodes by the TCP plane, or not at all.
type WithoutNetwork struct{}

// SetTopology implements Network.
func (WithoutNetwork) SetTopology([]netip.Prefix, []model.Node, model.Endpoints) error { return nil }

// Heard implements Network.
func (WithoutNetwork) Heard(model.Node) time.Time { return time.Time{} }

// WithoutPolicy is a plane whose connections are the TCP plane's too, which policy ends.
type WithoutPolicy struct{}

// ApplyPolicy implements Policy.
func (WithoutPolicy) ApplyPolicy(model.PolicyChange) error { return nil }

// CutForbidden implements Policy.
func (WithoutPolicy) CutForbidden() (int, error) { return 0, nil }

// CutForbiddenIn implements Policy.
func (WithoutPolicy) CutForbiddenIn(string) (int, error) { return 0, nil }

// WithoutLimits is a plane whose bytes others hold to their limits.
type WithoutLimits struct{}

// SetLimits implements Limits.
func (WithoutLimits) SetLimits(model.Endpoint, []model.Endpoint) error { return nil }

// RestoreLimits implements Limits.
func (WithoutLimits) RestoreLimits([]model.Endpoint) error { return nil }

// SpreadLimits implements Limits.
func (WithoutLimits) SpreadLimits() {}

// LimitUse implements Limits.
func (WithoutLimits) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) {
	return make([]model.LimitUse, len(all)), nil
}
