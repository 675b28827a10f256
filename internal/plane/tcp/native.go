package tcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

const (
	// probeNeighbours is how often a node to which containers send is asked whether it takes what
	// they send without a tunnel. The programs count on it (bpf/include/abi/packets.h).
	probeNeighbours = time.Second
	// neighbourIdle is how long after the last packet of a container for it that goes on.
	neighbourIdle = time.Minute
	// neighbourHops tells probes from what has been routed (RFC 5082).
	neighbourHops = 255
)

// nativeProbes asks other nodes whether they take packets without a tunnel (bpf/tc/native.h, which
// answers and notes answers; decision 0118). The goroutine of run owns it.
type nativeProbes struct {
	cfg      *Config
	packets  *packets
	datapath *datapath.Datapath
	log      *slog.Logger
	native   map[netip.Addr]bool // that did, at the last look
	failed   bool                // the last look failed
}

// tunnelOf gives the mode of tunnels that this node's device lets it have.
func tunnelOf(cfg Config) (model.TunnelMode, error) {
	if cfg.Tunnel != model.TunnelAuto {
		return cfg.Tunnel, nil
	}
	many, err := netcfg.SendsWithManyAddresses(cfg.Devices.UnderlayIfindex)
	if many {
		cfg.Log.Warn("packets to other nodes stay in a tunnel: the bond sends with several hardware addresses (balance-alb, balance-tlb)")
		return model.TunnelAlways, err
	}
	return cfg.Tunnel, err
}

// run probes until ctx ends. What fails costs speed only: packets travel in the tunnel.
func (n *nativeProbes) run(ctx context.Context) {
	if n.packets.tunnel != model.TunnelAuto {
		return
	}
	ticks := time.NewTicker(probeNeighbours)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		err := n.look()
		if err != nil && !n.failed {
			n.log.Error("packets travel in a tunnel: other nodes are not asked whether they take them without", "err", err)
		}
		n.failed = err != nil
	}
}

// look probes whom containers send to, and says whose answer is new.
func (n *nativeProbes) look() error {
	gateways := n.packets.nativeGateways()
	known, err := n.datapath.Neighbours()
	if err != nil {
		return err
	}
	now := map[netip.Addr]bool{}
	var errs []error
	for _, to := range known {
		now[to.Underlay] = gateways != nil && to.Native()
		gateway, member := gateways[to.Underlay]
		if !member || to.Sent < 0 || to.Sent > neighbourIdle {
			continue
		}
		// The kernel forgets whom only the programs send to.
		errs = append(errs, netcfg.UseNeighbour(n.cfg.Devices.UnderlayIfindex, to.Underlay))
		if to.Near {
			errs = append(errs, n.probe(to, gateway))
		}
	}
	for _, at := range slices.SortedFunc(maps.Keys(now), netip.Addr.Compare) {
		if now[at] != n.native[at] {
			n.log.Info("packets to a node", "underlay", at, "tunnel", !now[at])
		}
	}
	n.native = now
	return errors.Join(errs...)
}

// probe sends one of each family to the gateway address of neighbour to, as containers' packets
// would travel: what is between the nodes may know one and not the other.
func (n *nativeProbes) probe(to datapath.Neighbour, gateway netip.Addr) error {
	from := model.Gateway(n.cfg.Self.Prefixes[0])
	frames := [][]byte{neighbourProbe(to, from, gateway, n.cfg.VNI)}
	if n.cfg.Prefix6.IsValid() {
		from, gateway = model.Overlay6(n.cfg.Prefix6, from), model.Overlay6(n.cfg.Prefix6, gateway)
		frames = append(frames, neighbourProbe(to, from, gateway, n.cfg.VNI))
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("packet socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	for _, frame := range frames {
		if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: n.cfg.Devices.UnderlayIfindex}); err != nil {
			return fmt.Errorf("probe %v: %w", to.Underlay, err)
		}
	}
	return nil
}

// neighbourProbe is the frame of a probe: an echo request of ICMP between two gateways, with the
// network's VNI as identifier and sequence number.
func neighbourProbe(to datapath.Neighbour, from, gateway netip.Addr, vni uint32) []byte {
	ends := slices.Concat(from.AsSlice(), gateway.AsSlice())
	if from.Is6() {
		const icmp, echo = 58, 128
		message := binary.BigEndian.AppendUint32([]byte{echo, 0, 0, 0}, vni)
		summed := slices.Concat(ends, []byte{0, 0, 0, byte(len(message)), 0, 0, 0, icmp}, message)
		message = summed[len(summed)-len(message):]
		setSum(summed, len(summed)-len(message)+2)
		header := []byte{0x60, 0, 0, 0, 0, byte(len(message)), icmp, neighbourHops}
		return slices.Concat(to.Peer, to.Self, []byte{0x86, 0xdd}, header, ends, message)
	}
	const icmp, echo = 1, 8
	message := binary.BigEndian.AppendUint32([]byte{echo, 0, 0, 0}, vni)
	setSum(message, 2)
	header := append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, neighbourHops, icmp, 0, 0}, ends...)
	binary.BigEndian.PutUint16(header[2:], uint16(len(header)+len(message)))
	setSum(header, 10)
	return slices.Concat(to.Peer, to.Self, []byte{0x08, 0x00}, header, message)
}

// setSum writes the Internet checksum of b, of an even number of bytes, where it has zeros for it.
func setSum(b []byte, at int) {
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[at:], ^uint16(sum))
}

// nativeGateways gives the gateways of other nodes by underlay address, nil while packets go to
// none of them without a tunnel.
func (p *packets) nativeGateways() map[netip.Addr]netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.native {
		return nil
	}
	out := make(map[netip.Addr]netip.Addr, len(p.nodes))
	for _, n := range p.nodes {
		if len(n.Prefixes) > 0 {
			out[n.Underlay] = model.Gateway(n.Prefixes[0])
		}
	}
	return out
}

// natives counts the nodes to which packets go without a tunnel now.
func (p *packets) natives() (count int, err error) {
	if p.nativeGateways() == nil {
		return 0, nil
	}
	known, err := p.datapath.Neighbours()
	for _, n := range known {
		if n.Native() {
			count++
		}
	}
	return count, err
}
