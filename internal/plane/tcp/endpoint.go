package tcp

import (
	"errors"
	"net/netip"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// Accepts implements plane.Endpoints: every endpoint is taken.
func (p *Plane) Accepts(model.EndpointPlanes) error { return nil }

// Guard attaches the programs of the node's side of an endpoint's device. Before the container's
// side is up, nothing passes without them.
func (p *Plane) Guard(ifindex int) error {
	progs := p.datapath.TCPrograms()
	err := netcfg.AttachTC(ifindex,
		netcfg.Filter{Direction: netcfg.Ingress, Program: progs.FromEndpoint, Name: "from_endpoint"},
		netcfg.Filter{Direction: netcfg.Egress, Program: progs.ToEndpoint, Name: "to_endpoint"})
	if err != nil {
		return err
	}
	return p.shaper.attach(ifindex)
}

// Await makes an endpoint known whose device waits on the node for its container.
func (p *Plane) Await(e model.Endpoint, ifindex int) error {
	return p.datapath.SetEndpoint(e, ifindex, datapath.ContainerSide{Device: e.ContainerDevice()})
}

// Attach makes an endpoint known that has its device. It may be repeated.
func (p *Plane) Attach(e model.Endpoint, dev netcfg.EndpointDevice) error {
	p.firewall.attach(e)
	s, err := p.datapath.Stack(e.ID)
	if err != nil {
		return err
	}
	p.own.again(e, s)
	return p.joinOwnStack(e, dev)
}

// Recall implements plane.Endpoints.
func (p *Plane) Recall(e model.Endpoint, netns uint64) bool {
	return e.Adopted == nil && p.datapath.Recall(e, netns)
}

// LeaveNetns says that endpoint id is in no network namespace any more: another has the number of
// its.
func (p *Plane) LeaveNetns(id model.EndpointID) error { return p.datapath.LeaveNetns(id) }

// Detach undoes Attach; what was not done is no error.
func (p *Plane) Detach(e model.Endpoint) error {
	p.firewall.detach(e)
	return errors.Join(p.leaveOwnStack(e), p.datapath.DeleteEndpoint(e.ID))
}

// Keep removes what the programs' maps have of endpoints that are not in keep, and says in which
// maps how much that was.
func (p *Plane) Keep(keep map[model.EndpointID]bool) (removed map[string]int, err error) {
	return p.datapath.KeepEndpoints(keep)
}

// LastID gives the id that was given out last, also by earlier agents; SetLastID notes it.
func (p *Plane) LastID() (model.EndpointID, error) { return p.datapath.LastID() }

// SetLastID is LastID's other half.
func (p *Plane) SetLastID(id model.EndpointID) error { return p.datapath.SetLastID(id) }

// InUse gives the ids of endpoints that sockets carry, also of endpoints that are gone.
func (p *Plane) InUse() (map[model.EndpointID]bool, error) { return p.datapath.IDsInUse() }

// CutLeaving ends what sockets of e there still are, on the node and in its container's own stack,
// and says how many.
func (p *Plane) CutLeaving(e model.Endpoint) (cut int, err error) {
	cut, err = p.datapath.CutLeaving(e.ID)
	plain := 0
	if in := netcfg.InContainer(e.NetnsPath, func() (err error) {
		plain, err = p.datapath.CutLeavingPlain()
		return err
	}); in != nil && !errors.Is(in, netcfg.ErrNoContainer) {
		err = errors.Join(err, in)
	}
	return cut + plain, err
}

// SetTopology has the direct paths to nodes probed, and tells the programs who is where: in this
// order, so that routes to new nodes are unproven from the start.
func (p *Plane) SetTopology(local []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) error {
	p.firewall.setNodes(nodes)
	p.packets.setNodes(nodes)
	return errors.Join(p.probed.follow(nodes), p.datapath.SetTopology(p.cfg.Self.Name, local, nodes, endpoints))
}

// ApplyPolicy brings the programs' tables to a change, whole or not at all.
func (p *Plane) ApplyPolicy(change model.PolicyChange) error { return p.datapath.ApplyPolicy(change) }

// CutForbidden ends connections of node sockets that the tables forbid, and says how many.
func (p *Plane) CutForbidden() (int, error) { return p.datapath.CutForbidden() }

// CutForbiddenIn ends those of a container's own stack.
func (p *Plane) CutForbiddenIn(netnsPath string) (cut int, err error) {
	err = netcfg.InContainer(netnsPath, func() (err error) {
		cut, err = p.datapath.CutForbiddenPlain()
		return unlessStuck(err)
	})
	return cut, err
}

// SetLimits holds an endpoint to its limits.
func (p *Plane) SetLimits(e model.Endpoint, all []model.Endpoint) error { return p.shaper.set(e, all) }

// RestoreLimits takes over the limits of an earlier agent.
func (p *Plane) RestoreLimits(all []model.Endpoint) error { return p.shaper.restore(all) }

// SpreadLimits puts limits in force on devices that the node got since.
func (p *Plane) SpreadLimits() { p.shaper.spread() }

// LimitUse gives what of the limits of all is in force, and what waited for them.
func (p *Plane) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) { return p.shaper.use(all) }
