package datapath

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// Ports gives how many of the node's ephemeral ports endpoint id holds, so that nobody can connect
// from them: those of its sockets that were bound or listen, and of what these accepted. Ports that
// only TIME_WAIT holds are not among them, although they count towards Config.EndpointPorts. 0 if
// there is no such endpoint.
func (d *Datapath) Ports(id model.EndpointID) (n uint64, err error) {
	var a heddlePortAccount
	if err := d.objs.PortsByEndpoint.Lookup(uint32(id), &a); ignoreAbsent(err) != nil {
		return 0, fmt.Errorf("read ports of endpoint %d: %w", id, err)
	}
	return uint64(a.Held), nil
}

// openPorts begins to count the endpoint's ports, unless an earlier agent has.
func (d *Datapath) openPorts(id model.EndpointID) error {
	for _, accounts := range []*ebpf.Map{d.objs.PortsByEndpoint, d.objs.NodePortsByEndpoint} {
		err := accounts.Update(uint32(id), &heddlePortAccount{}, ebpf.UpdateNoExist)
		if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
	}
	return nil
}

func (d *Datapath) closePorts(id model.EndpointID) error {
	return errors.Join(ignoreAbsent(d.objs.PortsByEndpoint.Delete(uint32(id))),
		ignoreAbsent(d.objs.NodePortsByEndpoint.Delete(uint32(id))))
}

// EndOverQuota ends listeners that took a port without bind() above their endpoint's limit, and
// says how many. It must run in the node's network namespace.
func (d *Datapath) EndOverQuota() (n int, err error) {
	n, err = d.endPass("end_over_quota", d.objs.EndOverQuota, d.objs.OverQuotaUnlocked)
	if err != nil {
		return n, fmt.Errorf("end listeners above the limit of ports: %w", err)
	}
	return n, nil
}

// FollowOverQuota calls end when there may be something for EndOverQuota, until ctx ends; first for
// what came while no agent ran.
func (d *Datapath) FollowOverQuota(ctx context.Context, end func()) error {
	return followRing(ctx, d.objs.Surplus, func([]byte) { end() })
}
