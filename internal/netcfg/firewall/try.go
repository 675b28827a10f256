package firewall

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// tryMark is of the network namespace of the calling thread, which goes soon.
const tryMark = 0x1

// TryMasquerade tries a chain that masquerades, in a network namespace that is for such tries.
func TryMasquerade() error {
	return nftRule("masquerade", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
		&expr.Masq{})
}

// TrySocketMatch tries a rule that marks packets of a transparent socket.
func TrySocketMatch() error {
	return nftRule("socket", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle,
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1}},
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(tryMark)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true})
}

// TryGuards sets up the guards of a node, as Set does.
func TryGuards() error {
	conn, err := nftables.New()
	if err != nil {
		return rtnl.Errno("open nftables", err)
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "probe-guards"})
	at := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	r := ruleset{conn, table, Config{Underlay: at, VTEP: at, VNI: 1, VXLANPort: 4789,
		Mark: tryMark, OverlayMark: tryMark + 1, DropMark: tryMark + 2, RejectMark: tryMark + 3,
		Stores: []netip.AddrPort{netip.AddrPortFrom(at, 2379)}}}
	if err := r.addGuards([]netip.Addr{at}, nil); err != nil {
		return err
	}
	r.addEarly(netdev.LoopbackIfindex, netdev.LoopbackIfindex)
	return rtnl.Errno("add guards", conn.Flush())
}

// nftRule makes a table for both families with one chain and one rule in it.
func nftRule(name string, t nftables.ChainType, hook *nftables.ChainHook, prio *nftables.ChainPriority, exprs ...expr.Any) error {
	conn, err := nftables.New()
	if err != nil {
		return rtnl.Errno("open nftables", err)
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "probe-" + name})
	chain := conn.AddChain(&nftables.Chain{Name: "probe", Table: table, Type: t, Hooknum: hook, Priority: prio})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs})
	return rtnl.Errno("add "+name+" rule", conn.Flush())
}
