package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Packets says how packets between containers go that node sockets do not carry. The zero value is
// what holds until SetPackets is called: through the node's stack.
type Packets struct {
	// Redirected: past the node's stack, where they need nothing of it.
	Redirected bool
	// Tunnelled: the programs put on and take off the headers of the overlay's device.
	Tunnelled bool
	// Native: without a tunnel to nodes that answer probes for it, and answering theirs.
	Native bool
	// NativeStill: taking for some seconds what others go on sending so.
	NativeStill bool
}

// nativeStill is how long that is: longer than an answer of this node counts.
const nativeStill = time.Duration(heddleNeighbourTimesNEIGHBOUR_ANSWER_MS)*time.Millisecond + 2*time.Second

// SetPackets tells the programs.
func (d *Datapath) SetPackets(p Packets) error {
	until := uint64(0)
	switch {
	case p.Native:
		until = math.MaxUint64
	case p.NativeStill:
		now, err := sinceBoot()
		if err != nil {
			return err
		}
		until = uint64(now + nativeStill)
	}
	if err := d.objs.NativeUntil.Set(until); err != nil {
		return fmt.Errorf("set native_until: %w", err)
	}
	if err := d.objs.NativeRouting.Set(word(p.Native)); err != nil {
		return fmt.Errorf("set native_routing: %w", err)
	}
	if err := d.objs.TunnelByProgram.Set(word(p.Tunnelled)); err != nil {
		return fmt.Errorf("set tunnel_by_program: %w", err)
	}
	if err := d.objs.PacketsRedirected.Set(word(p.Redirected)); err != nil {
		return fmt.Errorf("set packets_redirected: %w", err)
	}
	return nil
}

// mirrorSlots is how many mirror addresses an endpoint has, of which some are crossing addresses
// (include/mirror.h).
const mirrorSlots = 1024

// TakeOver has the programs know what was done on this node before there were maps that say so, so
// that they look for it only where it was (include/once.h). All programs have to be in place.
func (d *Datapath) TakeOver() error {
	for what, noted := range map[heddleOnce]*ebpf.Map{
		heddleOnceONCE_TRANSLATED: d.objs.TranslatedPairs,
		heddleOnceONCE_RELAYED:    d.objs.WireByRelay,
	} {
		switch err := noted.NextKey(nil, make([]byte, noted.KeySize())); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
		case err != nil:
			return fmt.Errorf("read %s: %w", noted, err)
		default:
			if err := d.objs.HappenedOnce.Put(uint32(what), uint32(1)); err != nil {
				return fmt.Errorf("write happened_once: %w", err)
			}
		}
	}
	var (
		at     heddleFlowKey
		behind heddleAddress
	)
	crossed := d.objs.CrossedByWire.Iterate()
	for crossed.Next(&at, &behind) {
		var crossing [4]byte
		binary.NativeEndian.PutUint32(crossing[:], at.Daddr)
		id := binary.BigEndian.Uint32(crossing[:]) & 0xffffff / mirrorSlots
		if err := d.objs.CrossedById.Put(id, uint32(1)); err != nil {
			return fmt.Errorf("write crossed_by_id: %w", err)
		}
	}
	if err := crossed.Err(); err != nil {
		return fmt.Errorf("read crossed_by_wire: %w", err)
	}
	if err := d.objs.HappenedOnce.Put(uint32(heddleOnceONCE_KNOWN), uint32(1)); err != nil {
		return fmt.Errorf("write happened_once: %w", err)
	}
	return nil
}

// sinceBoot is the programs' clock.
func sinceBoot() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}

// A Neighbour is another node on this one's network, as the programs know it.
type Neighbour struct {
	Underlay netip.Addr
	// Peer and Self are hardware addresses: of that node, and of the device that leads there.
	Peer, Self net.HardwareAddr
	// Near: packets could go to it as they are now, as far as this node's routes and neighbours
	// know.
	Near bool
	// Answered is how long ago it last answered a probe, Sent how long ago a container sent
	// something to it, about. Negative: never.
	Answered, Sent time.Duration
}

// Native reports whether packets go to n without a tunnel.
func (n Neighbour) Native() bool {
	return n.Near && n.Answered >= 0 && n.Answered < time.Duration(heddleNeighbourTimesNEIGHBOUR_ANSWER_MS)*time.Millisecond
}

// Neighbours gives those to or from which packets went.
func (d *Datapath) Neighbours() ([]Neighbour, error) {
	var (
		key [4]byte
		n   heddleNeighbour
		out []Neighbour
	)
	now, err := sinceBoot()
	if err != nil {
		return nil, err
	}
	ago := func(at uint64) time.Duration {
		if at == 0 {
			return -1
		}
		return max(0, now-time.Duration(at))
	}
	it := d.objs.NeighbourByUnderlay.Iterate()
	for it.Next(&key, &n) {
		out = append(out, Neighbour{
			Underlay: netip.AddrFrom4(key), Near: n.Near != 0,
			Peer: slices.Clone(net.HardwareAddr(n.Macs[:6])), Self: slices.Clone(net.HardwareAddr(n.Macs[6:])),
			Answered: ago(n.Answered), Sent: ago(n.Sent),
		})
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("read neighbours: %w", err)
	}
	return out, nil
}
