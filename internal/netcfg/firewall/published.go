package firewall

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// Ports of the node that lead to containers are elements of two maps, which the first packet of a
// connection is looked up in: a port more costs an element, and none of it is there while no port
// is published.

// Published is a port of the node and where it leads: overlay addresses of an endpoint.
type Published struct {
	model.PublishedPort
	To []netip.Addr
}

// source gives the address that stands for clients whose own would lead nowhere: none of the
// overlay if there is another, since node sockets' packets between such are not tracked.
func (c Config) source(family netip.Addr) netip.Addr {
	return rtnl.SameFamily(family, append([]netip.Addr{c.Underlay}, c.Gateways...))
}

// The chains, and for each family the map of ports and the set of pairs of an endpoint's address
// with itself.
const (
	publishedIn   = "published-in"
	publishedOut  = "published-out"
	publishedBack = "published-back"
)

// publishedFamily is what differs between the families.
type publishedFamily struct {
	ports, self string // names
	any         netip.Addr
	nfproto     byte
	addrType    nftables.SetDatatype
	source      uint32 // offset of the addresses in the header
	// Registers behind an address in register 1: for the protocol, the port, and a port behind an
	// address that was looked up.
	regProtocol, regPort, regTo uint32
}

// NFT_REG_1 is 16 bytes; those of 4 bytes that overlap with it and what follows it begin at 8.
const (
	reg32Second, reg32Third, reg32Fifth, reg32Sixth = 9, 10, 12, 13
	regFib                                          = 4 // NFT_REG_4, behind all of these
)

var publishedFamilies = []publishedFamily{
	{"published4", "published-self4", netip.IPv4Unspecified(), unix.NFPROTO_IPV4, nftables.TypeIPAddr, 12, reg32Second, reg32Third, reg32Second},
	{"published6", "published-self6", netip.IPv6Unspecified(), unix.NFPROTO_IPV6, nftables.TypeIP6Addr, 8, reg32Fifth, reg32Sixth, reg32Fifth},
}

func (f publishedFamily) size() uint32 { return uint32(f.any.BitLen() / 8) }

func (f publishedFamily) portMap(table *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: table, Name: f.ports, IsMap: true, Concatenation: true,
		KeyType:  nftables.MustConcatSetType(f.addrType, nftables.TypeInetProto, nftables.TypeInetService),
		DataType: nftables.MustConcatSetType(f.addrType, nftables.TypeInetService)}
}

func (f publishedFamily) selfSet(table *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: table, Name: f.self, Concatenation: true, KeyType: nftables.MustConcatSetType(f.addrType, f.addrType)}
}

// elements gives the map's and the set's for ports.
func (f publishedFamily) elements(ports []Published) (leads, self []nftables.SetElement) {
	for _, p := range ports {
		to := rtnl.SameFamily(f.any, p.To)
		if !to.IsValid() || !p.ReachedBy(f.any) {
			continue
		}
		at := p.HostAddr
		if !at.IsValid() {
			at = f.any
		}
		protocol := byte(unix.IPPROTO_TCP)
		if p.Protocol == model.PortUDP {
			protocol = unix.IPPROTO_UDP
		}
		port := func(n uint16) []byte { return append(binaryutil.BigEndian.PutUint16(n), 0, 0) }
		leads = append(leads, nftables.SetElement{
			Key: slices.Concat(at.AsSlice(), []byte{protocol, 0, 0, 0}, port(p.HostPort)), Val: slices.Concat(to.AsSlice(), port(p.Port)),
		})
		self = append(self, nftables.SetElement{Key: slices.Concat(to.AsSlice(), to.AsSlice())}) // once or more: it is a set
	}
	return leads, self
}

// SetPublished brings the ports of this node that lead to containers to ports. What a port that
// leads nowhere any more, or elsewhere, had opened ends.
func (t *Rules) SetPublished(ports []Published) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.published
	if len(before)+len(ports) == 0 {
		return nil
	}
	t.published = slices.Clone(ports)
	var changes []setChange
	var stale []flowOfPort
	for _, f := range publishedFamilies {
		had, hadSelf := f.elements(before)
		leads, self := f.elements(ports)
		changed := setChange{f.portMap(heddleTable()), missing(leads, had), missing(had, leads)}
		changes = append(changes, changed, setChange{f.selfSet(heddleTable()), missing(self, hadSelf), missing(hadSelf, self)})
		stale = append(stale, f.flows(changed.added, changed.removed)...)
	}
	err := t.write(func(r ruleset) (err error) {
		if len(before) == 0 {
			err = r.addPublishedChains()
		}
		for _, change := range changes {
			err = errors.Join(err, change.add(r.c))
		}
		if len(ports) == 0 {
			r.removePublished()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("set published ports: %w", err)
	}
	return forgetFlows(stale)
}

// setChange is what changes of a set or map.
type setChange struct {
	set            *nftables.Set
	added, removed []nftables.SetElement
}

// add adds the change to c. What leads elsewhere now goes first.
func (x setChange) add(c *nftables.Conn) (err error) {
	for some := range slices.Chunk(x.removed, knownNodesAtOnce) {
		err = errors.Join(err, c.SetDeleteElements(x.set, some))
	}
	for some := range slices.Chunk(x.added, knownNodesAtOnce) {
		err = errors.Join(err, c.SetAddElements(x.set, some))
	}
	if err != nil {
		return fmt.Errorf("nftables set %s: %w", x.set.Name, err)
	}
	return nil
}

// missing gives the elements of from that are not in in.
func missing(from, in []nftables.SetElement) (out []nftables.SetElement) {
	text := func(e nftables.SetElement) string { return string(e.Key) + string(e.Val) }
	known := make(map[string]bool, len(in))
	for _, e := range in {
		known[text(e)] = true
	}
	for _, e := range from {
		if !known[text(e)] {
			out = append(out, e)
		}
	}
	return out
}

// removePublished takes chains and sets away.
func (r ruleset) removePublished() {
	for _, name := range []string{publishedIn, publishedOut, publishedBack} {
		r.remove(name)
	}
	for _, f := range publishedFamilies {
		r.c.DelSet(f.portMap(r.table))
		r.c.DelSet(f.selfSet(r.table))
	}
}

// addPublished adds chains and maps with ports, unless there are none.
func (r ruleset) addPublished(ports []Published) error {
	if len(ports) == 0 {
		return nil
	}
	err := r.addPublishedChains()
	for _, f := range publishedFamilies {
		leads, self := f.elements(ports)
		err = errors.Join(err, setChange{set: f.portMap(r.table), added: leads}.add(r.c), setChange{set: f.selfSet(r.table), added: self}.add(r.c))
	}
	return err
}

// addPublishedChains adds the chains, with empty maps and sets.
func (r ruleset) addPublishedChains() error {
	in := r.base(publishedIn, nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest)
	out := r.base(publishedOut, nftables.ChainTypeNAT, nftables.ChainHookOutput, *nftables.ChainPriorityNATDest)
	back := r.base(publishedBack, nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource)
	loopback := netip.PrefixFrom(model.Loopback4, 8)
	own := addrMatch(netip.PrefixFrom(model.Loopback4, 32), destination, expr.CmpOpNeq)
	if model.ProtectPublished.On() {
		r.rule(in, "nobody beyond the node reaches its loopback addresses", addrMatch(loopback, destination, expr.CmpOpEq), decided(expr.VerdictReturn))
	}
	r.rule(out, "others are of containers", addrMatch(loopback, destination, expr.CmpOpEq), own[familyMatched:], decided(expr.VerdictReturn))
	elsewhere := []netip.Prefix{netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("fe80::/10")}
	for _, a := range r.cfg.Gateways {
		elsewhere = append(elsewhere, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, p := range elsewhere {
		for _, chain := range []*nftables.Chain{in, out} {
			r.rule(chain, "not an address that ports are published at", addrMatch(p, destination, expr.CmpOpEq), decided(expr.VerdictReturn))
		}
	}
	for _, f := range publishedFamilies {
		ports, self := f.portMap(r.table), f.selfSet(r.table)
		for _, s := range []*nftables.Set{ports, self} {
			if err := r.c.AddSet(s, nil); err != nil {
				return fmt.Errorf("nftables set %s: %w", s.Name, err)
			}
		}
		for _, chain := range []*nftables.Chain{in, out} {
			r.rule(chain, "a published port of this address", f.leadExprs(ports, true))
			r.rule(chain, "a published port of the node", f.leadExprs(ports, false))
		}
		from := r.cfg.source(f.any)
		if !from.IsValid() {
			continue
		}
		r.rule(back, "a container that reaches itself must not see its own address", f.isFamily(), []expr.Any{
			&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: 2 * f.size(), DestRegister: 1},
			&expr.Lookup{SourceRegister: 1, SetName: self.Name, SetID: self.ID},
		}, nameIs(expr.MetaKeyIIFNAME, []byte(netdev.EndpointPrefix), expr.CmpOpEq), translatedMatch(), f.sourceExprs(from))
		if f.any.Is4() {
			r.rule(back, "answers to a loopback address would not come back", addrMatch(loopback, source, expr.CmpOpEq), translatedMatch(), f.sourceExprs(from))
		}
	}
	return nil
}

func (f publishedFamily) isFamily() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.nfproto}}}
}

// leadExprs is "dnat to daddr . l4proto . dport map ports", for an address of this node; without
// exact, the unspecified address stands for daddr.
func (f publishedFamily) leadExprs(ports *nftables.Set, exact bool) []expr.Any {
	at := []expr.Any{&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: f.source + f.size(), Len: f.size(), DestRegister: 1}}
	if !exact { // so that nft can print it
		at = append(at, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.size(), Mask: f.any.AsSlice(), Xor: f.any.AsSlice()})
	}
	return slices.Concat(f.isFamily(), at, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.regProtocol},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: f.regPort},
		&expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: ports.Name, SetID: ports.ID},
		&expr.Fib{Register: regFib, ResultADDRTYPE: true, FlagDADDR: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regFib, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.nfproto), RegAddrMin: 1, RegProtoMin: f.regTo, Specified: true},
	})
}

func (f publishedFamily) sourceExprs(a netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: a.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.nfproto), RegAddrMin: 1},
	}
}

// flowOfPort describes what connection tracking knows of a port.
type flowOfPort struct {
	at, to         netip.Addr // to: the zero Addr, if it led nowhere
	protocol       uint8
	hostPort, port uint16
}

// flows gives what has to be forgotten of ports that were added or removed. Of those that were
// added, only datagrams' senders go on as before.
func (f publishedFamily) flows(added, removed []nftables.SetElement) (out []flowOfPort) {
	for i, e := range append(slices.Clip(removed), added...) {
		at, _ := netip.AddrFromSlice(e.Key[:f.size()])
		flow := flowOfPort{at: at, protocol: e.Key[f.size()], hostPort: binaryutil.BigEndian.Uint16(e.Key[f.size()+4:])}
		if i < len(removed) {
			flow.to, _ = netip.AddrFromSlice(e.Val[:f.size()])
			flow.port = binaryutil.BigEndian.Uint16(e.Val[f.size():])
		} else if flow.protocol != unix.IPPROTO_UDP {
			continue
		}
		out = append(out, flow)
	}
	return out
}

// MatchConntrackFlow reports whether flow is what f describes.
func (f flowOfPort) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	asked, answers := flow.Forward, flow.Reverse
	at, from := rtnl.FromIP(asked.DstIP), rtnl.FromIP(answers.SrcIP)
	if asked.Protocol != f.protocol || asked.DstPort != f.hostPort || at.Is4() != f.at.Is4() || !f.at.IsUnspecified() && at != f.at {
		return false
	}
	if f.to.IsValid() {
		return from == f.to && answers.SrcPort == f.port
	}
	// Nothing has been translated: the node itself was asked.
	return from == at && answers.SrcPort == asked.DstPort && rtnl.FromIP(answers.DstIP) == rtnl.FromIP(asked.SrcIP)
}

// forgetFlows has connection tracking forget.
func forgetFlows(flows []flowOfPort) error {
	if !model.ProtectPublished.On() {
		return nil
	}
	for _, f := range flows {
		family := netlink.InetFamily(unix.AF_INET)
		if f.at.Is6() {
			family = unix.AF_INET6
		}
		if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("end what port %d had opened: %w", f.hostPort, err)
		}
	}
	return nil
}
