// Package firewall is Heddle's nftables table on a node: what of a node's packets is masqueraded,
// not tracked, delivered locally, rejected or refused, which nodes the overlay is accepted from,
// and which ports lead to containers. It owns everything in that table, and looks at the tables of
// others without changing them. Every function works on the network namespace of the calling
// thread. Rules have a lock; other calls their callers serialise.
package firewall

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// Table is the nftables table that holds everything of Heddle's.
const Table = "heddle"

// deliverPriority places the marking of packets for node sockets after destination translation
// (-100), which gives replies to translated connections their overlay address back.
const deliverPriority = -50

// Config is what of a node its table needs to know.
type Config struct {
	// Underlay is the node's address on the network that joins the nodes, or its inner address: if
	// HasInner, in the prefix Inner of all inner addresses.
	Underlay netip.Addr
	HasInner bool
	Inner    netip.Prefix
	// VTEP is the address that VXLAN is sent from, to VXLANPort, with VNI.
	VTEP      netip.Addr
	VXLANPort uint16
	VNI       uint32
	// Prefixes are the node's own overlay prefixes, Gateways its addresses in them, and Pool what
	// the prefixes of all nodes are taken from.
	Prefixes []netip.Prefix
	Gateways []netip.Addr
	Pool     []netip.Prefix
	// The marks are those of netcfg.NodeConfig.
	Mark, OverlayMark, DropMark, RejectMark, ServiceMark uint32
	// DirectPorts are the TCP ports that direct connections to any node use.
	DirectPorts model.PortRange
	// Stores are where the nodes' store answers: containers are refused there.
	Stores []netip.AddrPort
	// Published are the ports that led to containers before; SetPublished changes them.
	Published []Published
}

// ruleset is Heddle's table as it is being written: what is added takes effect when c is flushed.
type ruleset struct {
	c     *nftables.Conn
	table *nftables.Table
	cfg   Config
}

// base adds a chain that the kernel calls at hook, in the order of priorities.
func (r ruleset) base(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority nftables.ChainPriority) *nftables.Chain {
	return r.c.AddChain(&nftables.Chain{Name: name, Table: r.table, Type: kind, Hooknum: hook, Priority: &priority})
}

// chain adds a chain that rules lead to.
func (r ruleset) chain(name string) *nftables.Chain {
	return r.c.AddChain(&nftables.Chain{Name: name, Table: r.table})
}

// remove removes a chain with its rules.
func (r ruleset) remove(name string) {
	chain := &nftables.Chain{Name: name, Table: r.table}
	r.c.FlushChain(chain)
	r.c.DelChain(chain)
}

// rule adds a rule of the expressions of parts at the end of chain.
func (r ruleset) rule(chain *nftables.Chain, why string, parts ...[]expr.Any) {
	r.c.AddRule(&nftables.Rule{Table: r.table, Chain: chain, Exprs: slices.Concat(parts...), UserData: comment(why)})
}

// addOutside adds the chain that has containers reach the outside.
func (r ruleset) addOutside() {
	outside := r.base("outside", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource)
	// The whole pool, not the node's prefixes: an endpoint that came from another node has its
	// address of there.
	for _, p := range r.cfg.Pool {
		r.rule(outside, "containers reach the outside with the node's address", masqueradeExprs(p, r.cfg.Pool))
	}
}

// Delete deletes Heddle's nftables table, and reports whether there was one.
func Delete() (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("open nftables: %w", err)
	}
	c.DelTable(heddleTable())
	err = c.Flush()
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("delete nftables table %s: %w", Table, err)
	}
	return true, nil
}

// masqueradeExprs is "ip saddr own ip daddr != pool... oifname != overlay oifname != lo
// masquerade". What leaves by lo stays on the node, and there the container's own address is
// wanted.
func masqueradeExprs(own netip.Prefix, pool []netip.Prefix) []expr.Any {
	out := addrMatch(own, source, expr.CmpOpEq)
	for _, p := range pool {
		if p.Addr().Is4() == own.Addr().Is4() {
			out = append(out, addrMatch(p, destination, expr.CmpOpNeq)...)
		}
	}
	for _, name := range []string{netdev.Overlay, "lo"} {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: deviceNameData(name)})
	}
	return append(out, &expr.Masq{})
}

// divertChain is where packets for overlay addresses go that no program and no socket has marked:
// it marks those that a node socket claims.
const divertChain = "claimed" // a name in pins.md: it goes with the next table

// addDeliver adds what makes packets for node sockets local. The mark is looked at first: packets
// that a tc program marked, and those of sockets that send with the mark, need nothing of it.
func (r ruleset) addDeliver() {
	divert := r.chain(divertChain)
	for _, match := range [][]expr.Any{arrivedMatch(), translatedMatch()} {
		r.rule(divert, "what opens a connection and is not marked, or is translated, is routed to the endpoint's device, where policy is asked",
			openingExprs(match...))
	}
	r.rule(divert, "packets for a node socket that holds an overlay address are local", divertExprs(unix.IPPROTO_TCP, r.cfg.Mark))
	for _, proto := range []byte{unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6} {
		r.rule(divert, "and so is an error about what it sent, such as that it is too large for a hop", divertExprs(proto, r.cfg.Mark))
	}

	deliver := r.base("deliver", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, deliverPriority)
	r.rule(deliver, "it is local", markMatch(r.cfg.Mark), decided(expr.VerdictAccept))
	// The tc program of an endpoint's device marks what may pass.
	r.rule(deliver, "only the endpoint's own device brings packets of a container's own stack",
		addrMatch(model.MirrorRange, source, expr.CmpOpEq), decided(expr.VerdictDrop))
	for _, p := range r.cfg.Prefixes {
		r.rule(deliver, "maybe for a node socket", addrMatch(p, destination, expr.CmpOpEq), lead(expr.VerdictGoto, divertChain))
	}
}

// divertExprs is "meta l4proto proto socket transparent 1 meta mark set mark". The kernel finds the
// socket of an ICMP error by the packet that it quotes.
func divertExprs(proto byte, mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1}},
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	}
}

func decided(kind expr.VerdictKind) []expr.Any { return lead(kind, "") }

// lead is a verdict of kind goto or jump to chain.
func lead(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}

// side says which address of a packet addrMatch looks at.
type side int

const (
	source side = iota
	destination
)

// familyMatched is how many expressions of addrMatch compare the family: not needed again in the
// same rule.
const familyMatched = 2

// addrMatch compares one address of packets of p's family with p. What the kernel can do without a
// mask, or with payloads of 1, 2 or 4 bytes, is several times faster than the rest.
func addrMatch(p netip.Prefix, which side, op expr.CmpOp) []expr.Any {
	family, offset, length := byte(unix.NFPROTO_IPV4), uint32(12), uint32(net.IPv4len)
	if p.Addr().Is6() {
		family, offset, length = unix.NFPROTO_IPV6, 8, net.IPv6len
	}
	if which == destination {
		offset += length
	}
	network := rtnl.ToIPNet(p.Masked())
	whole := uint32(p.Bits() / 8)
	masked := p.Bits()%8 != 0 || whole == 0 || whole == 3
	if !masked {
		length = whole
	}
	out := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length, DestRegister: 1},
	}
	if masked {
		out = append(out, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: length, Mask: network.Mask, Xor: make([]byte, length)})
	}
	return append(out, &expr.Cmp{Op: op, Register: 1, Data: network.IP[:length]})
}

// deviceNameData is a device name as nftables compares it: 16 bytes, zero padded.
func deviceNameData(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func comment(text string) []byte { return userdata.AppendString(nil, userdata.TypeComment, text) }
