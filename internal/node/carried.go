package node

import (
	"errors"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp"
)

// Endpoints whose device and address another network has made (model.Carried): decision 0020.

// adopted is what the agent must know to leave such an endpoint's device again.
type adopted struct {
	ifindex int // node's side
	addr    netip.Addr
}

// lease gives an endpoint its id, and an address unless it has one.
func (a *Agent) lease(req api.EndpointRequest) (endpoint.Lease, error) {
	if req.Carried == nil {
		return a.leases.Lease(req.Name, req.Addr)
	}
	for _, p := range append(req.Carried.Prefixes, netip.PrefixFrom(req.Addr, req.Addr.BitLen())) {
		for _, own := range a.network.Pool {
			if own.Overlaps(p) {
				return endpoint.Lease{}, fmt.Errorf("%w: %s is another network's, but overlaps Heddle's pool %s: give one of them other addresses",
					endpoint.ErrAddr, p, own)
			}
		}
	}
	return a.leases.Adopt(req.Name, req.Addr)
}

// addDevice makes an endpoint's devices, or finds those that another network has made, and attaches the programs.
func (a *Agent) addDevice(e model.Endpoint) (netcfg.EndpointDevice, error) {
	if e.Carried == nil {
		cfg := a.deviceConfig(e)
		cfg.Guard = a.planes.Guard
		return netcfg.AddEndpoint(cfg)
	}
	dev, err := netcfg.AdoptEndpoint(a.deviceConfig(e))
	if err != nil {
		return dev, err
	}
	a.adopted[e.ID] = adopted{dev.Ifindex, e.Addr4()}
	return dev, errors.Join(a.planes.Guard(dev.Ifindex), a.setCarried())
}

// leaveDevice undoes what attach did to a device that another network has made; that network deletes it.
func (a *Agent) leaveDevice(e model.Endpoint) error {
	was, ok := a.adopted[e.ID]
	if !ok {
		return nil
	}
	delete(a.adopted, e.ID)
	return errors.Join(netcfg.DetachTC(was.ifindex, netcfg.Ingress), netcfg.DetachTC(was.ifindex, netcfg.Egress), a.setCarried())
}

// setCarried has packets for such endpoints' sockets delivered, whatever device they come by.
func (a *Agent) setCarried() error {
	var addrs []netip.Addr
	for _, x := range a.adopted {
		addrs = append(addrs, x.addr)
	}
	return netcfg.SetCarried(addrs, tcp.Mark, a.stores)
}

// leaveStaleDevices detaches the programs from devices of other networks whose endpoints an earlier agent had.
func (a *Agent) leaveStaleDevices() error {
	keep := make(map[int]bool)
	for _, x := range a.adopted {
		keep[x.ifindex] = true
	}
	return netcfg.LeaveAdopted(keep)
}
