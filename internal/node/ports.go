package node

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// ipLocalPortRange is the option IP_LOCAL_PORT_RANGE (Linux 6.3), of level SOL_IP: the lowest port of the kernel's choice
// for a socket, and the highest in the upper 16 bits; 0 is the namespace's own limit.
const ipLocalPortRange = 51

// nodePorts gives the ports that the node keeps for its own connects: the last eighth of its ephemeral ports. A container
// that took every port of the others would leave nobody one (bpf/ports.bpf.c). The zero range: there are too few, or the
// kernel cannot keep sockets from them.
func nodePorts() (model.PortRange, error) {
	all, err := netcfg.EphemeralPorts()
	if err != nil {
		return model.PortRange{}, err
	}
	kept := (int(all.Last) - int(all.First) + 1) / 8
	if kept < 16 {
		return model.PortRange{}, nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return model.PortRange{}, fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	err = unix.SetsockoptInt(fd, unix.SOL_IP, ipLocalPortRange, 0)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return model.PortRange{}, nil
	}
	if err != nil {
		return model.PortRange{}, fmt.Errorf("set IP_LOCAL_PORT_RANGE: %w", err)
	}
	return model.PortRange{First: all.Last - uint16(kept) + 1, Last: all.Last}, nil
}
