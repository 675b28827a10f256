package node

import (
	"fmt"

	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp"
	"heddle.dev/heddle/internal/trap"
)

// This file composes the planes. No other of the package knows one by name, which a rule holds.

// checkPlanes finds what would make openPlanes fail, before anything is changed.
func (h *host) checkPlanes() error { return tcp.CheckPins(h.cfg.PinDir) }

// openPlanes opens the planes of the node, which has its devices: TCP's first, on which the others
// may stand.
func (h *host) openPlanes() error {
	sockets, err := tcp.Open(tcp.Config{
		Self: h.self, Network: h.network.ID, Pool: h.network.Pool, Prefix6: h.prefix6, VNI: h.network.VNI, VXLANPort: h.network.VXLANPort,
		Devices: h.devices, PinDir: h.cfg.PinDir, Cgroup: h.cfg.Cgroup, ProcDir: tcp.ProcDir(h.cfg.SeccompSocket),
		EndpointSockets: h.cfg.EndpointSockets, EndpointPorts: h.cfg.EndpointPorts, Firewall: h.cfg.Firewall, FirewallLive: h.cfg.FirewallLive, Clear: h.cfg.EncryptOpen, KeeperExe: h.cfg.KeeperExe,
		Packets: h.cfg.Packets, Tunnel: h.cfg.Tunnel, Stores: h.stores,
		Traps: h.traps, Faults: &h.faults, Log: h.log, StacksChanged: h.stacker.ask, Observe: h.observe,
	})
	if err != nil {
		return err
	}
	h.planes = plane.Set{sockets}
	if h.cfg.Planes != nil {
		further, err := h.cfg.Planes(plane.Host{
			Node: h.self, Network: h.network.ID, Prefix6: h.prefix6, Faults: &h.faults, Log: h.log, Traps: h.traps, Sockets: sockets,
			SetGroups: h.setGroups, StacksChanged: h.stacker.ask, StackModules: sockets, Keeper: func() trap.Keeper { return h.keeper }, Observe: h.observe,
		})
		h.planes = append(h.planes, further...)
		if err != nil {
			return fmt.Errorf("open planes: %w", err)
		}
	}
	h.stacker.planes, h.stacker.kernel = h.planes, sockets
	return h.planes.CheckNames()
}
