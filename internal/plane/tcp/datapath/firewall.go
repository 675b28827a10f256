package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/model"
)

// FirewallKey is what the nodes' firewalls are asked about: connections of a container to an
// address and port.
type FirewallKey struct {
	Src netip.Addr     // the container's IPv4 overlay address
	Dst netip.AddrPort // of either family
}

func (k FirewallKey) abi() heddleFirewallKey {
	return heddleFirewallKey{Dst: fromAddr(k.Dst.Addr()), Src: fromAddr(k.Src).Word[3], Port: toPort(k.Dst.Port())}
}

// FirewallProbe is one probe of them that is under way, from a port of the container's own stack.
type FirewallProbe struct {
	FirewallKey
	Port uint16
}

// abi gives the key by which packets are found: of IPv6 ones what the overlay addresses embed.
func (d *Datapath) abi(p FirewallProbe) heddleFlowKey {
	k := heddleFlowKey{Saddr: fromAddr(p.Src).Word[3], Sport: toPort(p.Port), Dport: toPort(p.Dst.Port())}
	dst := p.Dst.Addr()
	if dst.Is6() {
		k.Ipv6, dst = 1, model.Overlay4(d.cfg.Prefix6, dst)
	}
	k.Daddr = fromAddr(dst).Word[3]
	return k
}

// TagFirewallProbe makes the new TCP socket fd, which may be of any network namespace, one of the
// agent's whose SYN asks the nodes' firewalls and is for no program. No other hook touches it.
func (d *Datapath) TagFirewallProbe(fd int, key FirewallKey) error {
	tag := heddleSockTag{
		Flags: uint32(heddleSockTagFlagsTAG_PROBE), Path: uint8(heddleHeddlePathPATH_DIRECT), Reason: uint8(heddleHeddleReasonREASON_FALLBACK_FIREWALL),
		Local: fromAddr(key.Src), Remote: fromAddr(key.Dst.Addr()), RemotePort: toPort(key.Dst.Port()),
	}
	if err := d.objs.TagBySock.Put(uint32(fd), &tag); err != nil {
		return fmt.Errorf("tag probe of the firewalls: %w", err)
	}
	return nil
}

// ForgetFirewalls removes what an earlier agent left that ended in the midst of probes of the
// firewalls, or of ending what they forbid.
func (d *Datapath) ForgetFirewalls() error {
	return errors.Join(
		deleteWhere(d.objs.FirewallProbes, func(*heddleFlowKey, *heddleFirewallProbe) bool { return true }),
		deleteWhere(d.objs.ForbiddenByFirewall, func(*heddleFirewallKey, *uint32) bool { return true }),
	)
}

// ExpectFirewallProbe lets a probe out of its container: before its SYN is sent.
func (d *Datapath) ExpectFirewallProbe(p FirewallProbe) error {
	key := d.abi(p)
	if err := d.objs.FirewallProbes.Put(&key, &heddleFirewallProbe{}); err != nil {
		return fmt.Errorf("note probe of the firewalls: %w", err)
	}
	return nil
}

// EndFirewallProbe forgets a probe, and says whether it left its container and whether it was
// answered: then the firewalls let such connections pass.
func (d *Datapath) EndFirewallProbe(p FirewallProbe) (left, passed bool, err error) {
	var noted heddleFirewallProbe
	key := d.abi(p)
	err = errors.Join(d.objs.FirewallProbes.Lookup(&key, &noted), d.objs.FirewallProbes.Delete(&key))
	if err != nil {
		return false, false, fmt.Errorf("read probe of the firewalls: %w", err)
	}
	return noted.Expected != 0, noted.Passed != 0, nil
}

// PastFirewalls gives the live connections that containers of this node have opened past the
// firewalls, and how many of each there are. It must run in the node's network namespace.
func (d *Datapath) PastFirewalls() (map[FirewallKey]int, error) {
	raw, err := d.listRecords()
	if err != nil {
		return nil, err
	}
	out := make(map[FirewallKey]int)
	err = eachRecord(raw, func(r *heddleConnectionRecord) {
		tag := &r.Tag
		direct := tag.Path == uint8(heddleHeddlePathPATH_DIRECT)
		if !direct && tag.Path != uint8(heddleHeddlePathPATH_LOCAL) || r.State == tcpListen || r.State == tcpClosed ||
			heddleSockTagFlags(tag.Flags)&heddleSockTagFlagsTAG_ACCEPTED != 0 {
			return
		}
		src, known := d.AddressOf(model.EndpointID(tag.EndpointId))
		if !known {
			return
		}
		dst := netip.AddrPortFrom(toAddr(r.NodeRemote), toPort(r.NodeRemotePort))
		if direct {
			dst = netip.AddrPortFrom(toAddr(tag.Remote), toPort(tag.RemotePort))
		}
		out[FirewallKey{src, dst}]++
	})
	return out, err
}

// EndForbidden ends those of them that the firewalls forbid, and says how many: programs see
// ECONNABORTED, their peers a reset. The next such connection is judged by the firewalls, whenever
// it comes. Errors are CutForbidden's.
func (d *Datapath) EndForbidden(keys []FirewallKey) (ended int, err error) {
	for _, k := range keys {
		key := k.abi()
		if err := ignoreAbsent(d.objs.PassedFirewallAt.Delete(&key)); err != nil {
			return 0, fmt.Errorf("forget what passed the firewalls: %w", err)
		}
		if err := d.objs.ForbiddenByFirewall.Put(&key, uint32(1)); err != nil {
			return 0, fmt.Errorf("note what the firewalls forbid: %w", err)
		}
	}
	defer func() {
		err = errors.Join(err, deleteWhere(d.objs.ForbiddenByFirewall, func(*heddleFirewallKey, *uint32) bool { return true }))
	}()
	ended, err = d.endPass("cut_firewall", d.objs.CutFirewall, d.objs.FirewallUnlocked)
	return ended, wrapCut(err)
}
