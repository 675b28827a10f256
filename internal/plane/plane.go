// Package plane says what a plane is: one way in which the endpoints of a node communicate, with state of its own in the kernel or in
// other processes. The agent (internal/node) composes planes: it makes endpoints and tells each plane of them, and asks each for what
// it reports.
package plane

import (
	"context"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// Plane is one plane of a node. What alters endpoints is called by one goroutine at a time; Forget, Run and Close by any.
type Plane interface {
	// Name is the plane's, for logs and faults.
	Name() string
	// Guard prepares the node's side of an endpoint's device before anything can pass by it. It may be repeated.
	Guard(ifindex int) error
	// Await makes an endpoint known whose device, with that index, waits on the node for its container.
	Await(e model.Endpoint, ifindex int) error
	// Attach makes an endpoint known that has its device. It may be repeated, also for the endpoint of an earlier agent: what
	// goes on there then goes on.
	Attach(e model.Endpoint, dev netcfg.EndpointDevice) error
	// LeaveNetns says that endpoint id is in no network namespace any more: another one has the number of its.
	LeaveNetns(id model.EndpointID) error
	// Forget begins no more for an endpoint that is about to be detached.
	Forget(id model.EndpointID)
	// Detach undoes Await and Attach; what was not done is no error.
	Detach(e model.Endpoint) error
	// Keep removes what there is of endpoints that are not in keep, and says where how much that was.
	Keep(keep map[model.EndpointID]bool) (removed map[string]int, err error)
	// CutLeaving ends the connections of an endpoint that leaves the node, and says how many there were.
	CutLeaving(e model.Endpoint) (cut int, err error)
	// Run does what the plane does by itself until ctx ends.
	Run(ctx context.Context) error
	// Close gives up what the plane has open. What endpoints have under way goes on.
	Close() error
}
