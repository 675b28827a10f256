package firewall

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"heddle.dev/heddle/internal/netcfg/netdev"
)

// dropPlain counts what the rules of this file drop, named for the reason.
const dropPlain = "drop_plain"

// addPlainIn adds to chain, which all packets pass on their way in, what keeps others than the
// device of inner addresses from bringing packets for the node's: the kernel would take them for
// what the nodes that have the source's address sent. A node without an inner address needs none of
// it.
func (r ruleset) addPlainIn(chain *nftables.Chain, underlay int) {
	if !r.cfg.HasInner {
		return
	}
	own := netip.PrefixFrom(r.cfg.Underlay, r.cfg.Underlay.BitLen())
	r.rule(chain, "what is for the inner address comes encrypted, or from a container of this node", deviceIs(expr.MetaKeyIIF, underlay, expr.CmpOpNeq),
		nameIs(expr.MetaKeyIIFNAME, []byte(netdev.EndpointPrefix), expr.CmpOpNeq), addrMatch(own, destination, expr.CmpOpEq), dropAs(dropPlain))
}

// addPlainOut adds the chain that keeps what has an inner address from leaving by another device
// than theirs, whatever routes say: without that device, it would follow the default route.
func (r ruleset) addPlainOut(underlay int) {
	if !r.cfg.HasInner {
		return
	}
	chain := r.base("plain-out", nftables.ChainTypeFilter, nftables.ChainHookPostrouting, *nftables.ChainPriorityRaw)
	r.rule(chain, "encrypted", deviceIs(expr.MetaKeyOIF, underlay, expr.CmpOpEq), decided(expr.VerdictAccept))
	r.rule(chain, "within the node", deviceIs(expr.MetaKeyOIF, netdev.LoopbackIfindex, expr.CmpOpEq), decided(expr.VerdictAccept))
	r.rule(chain, "to a container of this node", nameIs(expr.MetaKeyOIFNAME, []byte(netdev.EndpointPrefix), expr.CmpOpEq), decided(expr.VerdictAccept))
	own := netip.PrefixFrom(r.cfg.Underlay, r.cfg.Underlay.BitLen())
	r.rule(chain, "inner addresses are reached encrypted", addrMatch(r.cfg.Inner, destination, expr.CmpOpEq), dropAs(dropPlain))
	r.rule(chain, "the inner address sends encrypted", addrMatch(own, source, expr.CmpOpEq), dropAs(dropPlain))
}

func dropAs(reason string) []expr.Any {
	return []expr.Any{countAs(reason), &expr.Verdict{Kind: expr.VerdictDrop}}
}

// deviceIs compares the index of a packet's device.
func deviceIs(key expr.MetaKey, device int, op expr.CmpOp) []expr.Any {
	out := indexMatch(key, device)
	out[1].(*expr.Cmp).Op = op
	return out
}

// nameIs compares the name of a packet's device with name, which is a prefix unless it is padded.
func nameIs(key expr.MetaKey, name []byte, op expr.CmpOp) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: name}}
}
