package netcfg

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// addUntracked adds chains that keep connection tracking, which the masquerading of other traffic switches
// on for the whole namespace, off the paths that need none: direct connections, and those between node
// sockets over lo. Both would otherwise pay for a table entry a connection and a lookup a packet.
func addUntracked(c *nftables.Conn, table *nftables.Table, cfg NodeConfig) {
	for _, hook := range []struct {
		name string
		num  *nftables.ChainHook
	}{{"untracked-in", nftables.ChainHookPrerouting}, {"untracked-out", nftables.ChainHookOutput}} {
		chain := c.AddChain(&nftables.Chain{
			Name: hook.name, Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: hook.num, Priority: nftables.ChainPriorityRaw,
		})
		if hook.num == nftables.ChainHookPrerouting {
			c.AddRule(&nftables.Rule{
				Table: table, Chain: chain, Exprs: append(deviceMatch(deviceNameData(DeliverDevice)), &expr.Notrack{}),
				UserData: comment("tracked before, and maybe translated: not to be taken for another connection"),
			})
		}
		if cfg.DirectPorts != (model.PortRange{}) {
			for _, which := range []side{source, destination} {
				c.AddRule(&nftables.Rule{
					Table: table, Chain: chain, Exprs: append(portMatch(cfg.DirectPorts, which), &expr.Notrack{}),
					UserData: comment("direct connections are not translated"),
				})
			}
		}
		for _, which := range []side{source, destination} {
			c.AddRule(&nftables.Rule{
				Table: table, Chain: chain, Exprs: append(addrMatch(model.MirrorRange, which, expr.CmpOpEq), &expr.Notrack{}),
				UserData: comment("connections of a container with itself are not translated"),
			})
		}
		for _, p := range cfg.Pool { // what has moved here is in another node's prefix
			c.AddRule(&nftables.Rule{
				Table: table, Chain: chain, Exprs: untrackedLocalExprs(p, hook.num == nftables.ChainHookOutput),
				UserData: comment("connections between node sockets are not translated"),
			})
		}
	}
}

// portMatch is "meta l4proto tcp tcp sport (or dport) first-last".
func portMatch(r model.PortRange, which side) []expr.Any {
	offset := uint32(0)
	if which == destination {
		offset = 2
	}
	first, last := make([]byte, 2), make([]byte, 2)
	binary.BigEndian.PutUint16(first, r.First)
	binary.BigEndian.PutUint16(last, r.Last)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2, DestRegister: 1},
		&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: first, ToData: last},
	}
}

// untrackedLocalExprs is "oifname (iifname) lo meta l4proto tcp ip daddr own ip saddr own notrack".
func untrackedLocalExprs(own netip.Prefix, out bool) []expr.Any {
	key := expr.MetaKeyIIFNAME
	if out {
		key = expr.MetaKeyOIFNAME
	}
	match := []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: deviceNameData("lo")},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
	}
	match = append(match, addrMatch(own, source, expr.CmpOpEq)...)
	match = append(match, addrMatch(own, destination, expr.CmpOpEq)...)
	return append(match, &expr.Notrack{})
}
