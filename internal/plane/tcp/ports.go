package tcp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// ipLocalPortRange is the option IP_LOCAL_PORT_RANGE (Linux 6.3), of level SOL_IP: the lowest port
// of the kernel's choice for a socket, and the highest in the upper 16 bits; 0 is the namespace's
// own limit.
const ipLocalPortRange = 51

// nodePorts gives the ports that the node keeps for its own connects: the last eighth of all, its
// ephemeral ports, and some more (seldomAlike). A container that took all of the others would leave
// nobody one (bpf/sock/node_ports.h); by name it gets a few of these
// (bpf/sock/reserved_ports.h). The zero range: there are too few, or the kernel cannot keep sockets
// from them.
func nodePorts(all model.PortRange) (model.PortRange, error) {
	n := int(all.Last) - int(all.First) + 1
	kept := seldomAlike(n, n/8)
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

// seldomAlike gives the next number of ports to keep, of n, with which what is left for containers'
// sockets has no divisor in common with what a container's own stack chooses from. For a connection
// to the same destination the kernel takes the same random number modulo either: with seven eighths
// of one another, the two stacks of a container, which have one address, chose the same source port
// every eighth time, but for some steps. Whose SYN comes second has no answer then.
func seldomAlike(n, kept int) int {
	for ; kept < n; kept++ {
		a, b := n&^1, n-kept // without IP_LOCAL_PORT_RANGE, the kernel chooses of an even number
		for b != 0 {
			a, b = b, a%b
		}
		if a == 1 {
			break
		}
	}
	return kept
}

// defaultEndpointPorts gives how many of the node's ephemeral ports an endpoint may hold, so that
// what one holds, and as many again that it has let go but in some state of the kernel's still has,
// leaves half of them to others.
func defaultEndpointPorts(ephemeral, kept model.PortRange) uint32 {
	n := uint32(ephemeral.Last) - uint32(ephemeral.First) + 1
	if kept.First != 0 {
		n -= uint32(kept.Last) - uint32(kept.First) + 1
	}
	return max(n/4, 1)
}

// surplusPause is between two looks for listeners to end, each of which reads all of the node's
// sockets.
const surplusPause = 20 * time.Millisecond

// endOverQuota ends listeners above the limit of ports, until ctx ends. They were never bound:
// bind() would have been refused.
func (p *Plane) endOverQuota(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	reported := make(chan struct{}, 1)
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-reported:
			}
			if _, err := p.datapath.EndOverQuota(); unlessStuck(err) != nil {
				p.log.Warn("listeners without bind hold more of the node's ports than their containers may", "err", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(surplusPause):
			}
		}
	})
	err := p.datapath.FollowOverQuota(ctx, func() {
		select {
		case reported <- struct{}{}:
		default: // what reported this one, the next look sees, too
		}
	})
	if err != nil {
		p.log.Error("listeners without bind are not ended, however many of the node's ports they hold", "err", err)
	}
}
