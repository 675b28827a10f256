package tcp

import (
	"fmt"

	"heddle.dev/heddle/internal/dockernet"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// joinOwnStack makes the endpoint known to the programs, and then, if it is intercepted, lets its
// node sockets and the processes in its namespace that are not intercepted reach each other. A
// container's root can make that second part fail (its lo and eth0 are its own to change), so it is
// no reason to be without the endpoint.
func (p *Plane) joinOwnStack(e model.Endpoint, dev netcfg.EndpointDevice) error {
	inside := datapath.ContainerSide{Netns: dev.Netns, Ifindex: dev.ContainerIfindex, Device: e.ContainerDevice()}
	if !e.Planes.TCP.Intercepted || e.Adopted != nil { // what is between the two stacks then is another network's
		return p.datapath.SetEndpoint(e, dev.Ifindex, inside)
	}
	var err error
	if dockernet.Owns(e.Name) {
		if inside.ResolverPort, err = netcfg.ResolverPort(e.NetnsPath); err != nil {
			return fmt.Errorf("endpoint %s: %w", e.Name, err)
		}
	}
	inside.IDs = &datapath.NetnsIDs{Container: dev.IDs.Container, Node: dev.IDs.Node}
	if err := p.datapath.SetEndpoint(e, dev.Ifindex, inside); err != nil {
		return err
	}
	progs := p.datapath.TCPrograms()
	err = netcfg.JoinOwnStack(netcfg.OwnStackConfig{
		ID: e.ID, NetnsPath: e.NetnsPath, Device: dev, Addr: e.Addr4(), Table: model.Table, Ports: p.ownStackPorts(), OnLoopback: progs.OnLoopback, IntoLoopback: progs.IntoLoopback,
	})
	if err != nil {
		p.log.Warn("processes of the container that are not intercepted do not reach those that are", "endpoint", e.Name, "err", err)
	}
	return nil
}

// ownStackPorts are those that the own stack of an intercepted container chooses from: neither the
// kernel chooses them for its node sockets nor a stack module for its connections, which have the
// same address. A connection from a port that one of the other stack's has, to the same
// destination, would have no answer. The zero range: what the kernel chooses for node sockets
// cannot be limited.
func (p *Plane) ownStackPorts() model.PortRange {
	if p.nodePorts.First == 0 {
		return model.PortRange{}
	}
	return model.PortRange{First: max(p.nodePorts.First, protocol.FirstOwnPort), Last: 65535}
}

// PlainSockets reports whether plain sockets of an endpoint's container reach what its node sockets
// reach, by the overlay.
func (p *Plane) PlainSockets(e model.Endpoint) bool {
	return e.Adopted == nil && p.nodePorts.First != 0
}

// leaveOwnStack takes away what joinOwnStack left in the container's namespace.
func (p *Plane) leaveOwnStack(e model.Endpoint) error {
	if !e.Planes.TCP.Intercepted || e.Adopted != nil {
		return nil
	}
	return netcfg.LeaveOwnStack(e.NetnsPath, e.ID, p.ownStackPorts())
}
