package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// firewallTable is the nftables table that holds everything of Heddle's.
const firewallTable = "heddle"

// deliverPriority places the marking of packets for node sockets after destination translation (-100),
// which gives replies to translated connections their overlay address back.
const deliverPriority = -50

// setFirewall replaces Heddle's nftables table by what cfg needs, in one transaction: there is no moment
// without it, and connections under translation keep theirs. nodes are those from which the overlay is accepted, and
// moved the addresses that have moved to this node, until Overlay.Set says otherwise.
func setFirewall(cfg NodeConfig, nodes, moved []netip.Addr) error {
	counts, err := GuardCounts()
	if err != nil {
		return err
	}
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: firewallTable}
	c.AddTable(table) // so that there is one to delete
	c.DelTable(table)
	c.AddTable(table)
	outside := c.AddChain(&nftables.Chain{
		Name: "outside", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	deliver := c.AddChain(&nftables.Chain{
		Name: "deliver", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(deliverPriority),
	})
	addPolicy(c, table, cfg)
	addTranslated(c, table, cfg)
	if err := addGuards(c, table, cfg, nodes, counts); err != nil {
		return err
	}
	addUntracked(c, table, cfg)
	c.AddRule(&nftables.Rule{
		Table: table, Chain: deliver, Exprs: forgedMirrorExprs(cfg.Mark),
		UserData: comment("only the endpoint's own device brings packets of a container's own stack"),
	})
	for _, match := range [][]expr.Any{strangeMatch(), translatedMatch()} {
		c.AddRule(&nftables.Rule{
			Table: table, Chain: deliver, Exprs: openingExprs(match...),
			UserData: comment("what opens a connection from elsewhere, or is translated, is routed to the endpoint's device, where policy is asked"),
		})
	}
	// The whole pool, not the node's prefixes: an endpoint that came from another node has its address of there.
	for _, p := range cfg.Pool {
		c.AddRule(&nftables.Rule{
			Table: table, Chain: outside, Exprs: masqueradeExprs(p, cfg.Pool),
			UserData: comment("containers reach the outside with the node's address"),
		})
	}
	for _, p := range cfg.Prefixes {
		c.AddRule(&nftables.Rule{
			Table: table, Chain: deliver, Exprs: deliverExprs(p, cfg.Mark),
			UserData: comment("packets for a node socket that holds an overlay address are local"),
		})
	}
	if err := addMoved(c, table, moved, cfg.Mark); err != nil {
		return err
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("set nftables table %s: %w", firewallTable, err)
	}
	return nil
}

// deleteFirewall deletes Heddle's nftables table, and reports whether there was one.
func deleteFirewall() (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("open nftables: %w", err)
	}
	c.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: firewallTable})
	err = c.Flush()
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("delete nftables table %s: %w", firewallTable, err)
	}
	return true, nil
}

// masqueradeExprs is "ip saddr own ip daddr != pool... oifname != overlay oifname != lo masquerade". What
// leaves by lo stays on the node, and there the container's own address is wanted.
func masqueradeExprs(own netip.Prefix, pool []netip.Prefix) []expr.Any {
	out := addrMatch(own, source, expr.CmpOpEq)
	for _, p := range pool {
		if p.Addr().Is4() == own.Addr().Is4() {
			out = append(out, addrMatch(p, destination, expr.CmpOpNeq)...)
		}
	}
	for _, name := range []string{OverlayDevice, "lo"} {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: deviceNameData(name)})
	}
	return append(out, &expr.Masq{})
}

// deliverExprs is "meta mark != mark meta l4proto tcp ip daddr own socket transparent 1 meta mark set mark".
// The mark is looked at first: packets that a tc program marked, and those of sockets that send with the
// mark, need no socket lookup.
func deliverExprs(own netip.Prefix, mark uint32) []expr.Any {
	markData := binaryutil.NativeEndian.PutUint32(mark)
	out := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: markData},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
	}
	out = append(out, addrMatch(own, destination, expr.CmpOpEq)...)
	return append(out,
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1}},
		&expr.Immediate{Register: 1, Data: markData},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	)
}

// forgedMirrorExprs is "ip saddr mirrors meta mark != mark drop": the tc program of an endpoint's device marks
// what may pass.
func forgedMirrorExprs(mark uint32) []expr.Any {
	return append(addrMatch(model.MirrorRange, source, expr.CmpOpEq),
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Verdict{Kind: expr.VerdictDrop})
}

// side says which address of a packet addrMatch looks at.
type side int

const (
	source side = iota
	destination
)

// addrMatch compares one address of packets of p's family with p.
func addrMatch(p netip.Prefix, which side, op expr.CmpOp) []expr.Any {
	family, offset, length := byte(unix.NFPROTO_IPV4), uint32(12), uint32(net.IPv4len)
	if p.Addr().Is6() {
		family, offset, length = unix.NFPROTO_IPV6, 8, net.IPv6len
	}
	if which == destination {
		offset += length
	}
	network := toIPNet(p.Masked())
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length, DestRegister: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: length, Mask: network.Mask, Xor: make([]byte, length)},
		&expr.Cmp{Op: op, Register: 1, Data: network.IP},
	}
}

// deviceNameData is a device name as nftables compares it: 16 bytes, zero padded.
func deviceNameData(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func comment(text string) []byte { return userdata.AppendString(nil, userdata.TypeComment, text) }
