package firewall

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// The chains, and the set of addresses, that SetAdopted makes.
const (
	adoptedChain = "carried"
	adoptedGuard = "carried-guard"
	adoptedSet   = "carried"
)

// SetAdopted has packets for a node socket that holds one of addrs, addresses of another network,
// delivered locally by whatever device they come: such sockets' connections that are not direct. It
// keeps whoever sends from them from stores. No addrs take chains and set away, so that they cost
// nothing where there is none.
func SetAdopted(addrs []netip.Addr, mark uint32, stores []netip.AddrPort) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}
	have, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return fmt.Errorf("list nftables chains: %w", err)
	}
	set := &nftables.Set{Table: table, Name: adoptedSet, KeyType: nftables.TypeIPAddr}
	there := false
	for _, x := range have {
		if x.Table.Name == Table && (x.Name == adoptedChain || x.Name == adoptedGuard) {
			there = true
			c.FlushChain(x)
			c.DelChain(x)
		}
	}
	if there {
		c.DelSet(set)
	}
	var elements []nftables.SetElement
	for _, a := range addrs {
		if a.Is4() {
			elements = append(elements, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	if len(elements) > 0 {
		if err := c.AddSet(set, elements); err != nil {
			return fmt.Errorf("nftables set %s: %w", adoptedSet, err)
		}
		addAdopted(c, table, set, mark, stores)
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("set nftables chain %s: %w", adoptedChain, err)
	}
	return nil
}

func addAdopted(c *nftables.Conn, table *nftables.Table, set *nftables.Set, mark uint32, stores []netip.AddrPort) {
	chain := c.AddChain(&nftables.Chain{Name: adoptedChain, Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(deliverPriority)})
	c.AddRule(&nftables.Rule{
		Table: table, Chain: chain, Exprs: maybeDivertExprs(set, mark),
		UserData: comment("maybe for a node socket that holds an address of another network"),
	})
	if !model.ProtectStore.On() {
		return
	}
	guard := c.AddChain(&nftables.Chain{Name: adoptedGuard, Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	for _, at := range stores {
		c.AddRule(&nftables.Rule{
			Table: table, Chain: guard, Exprs: append(inSet(set, source), refuseStoreExprs(at)...),
			UserData: comment("the store is not for containers"),
		})
	}
}

// inSet is "ip saddr @set" or "ip daddr @set", or the same of ip6.
func inSet(set *nftables.Set, which side) []expr.Any {
	family, offset, length := byte(unix.NFPROTO_IPV4), uint32(12), uint32(net.IPv4len)
	if set.KeyType.Name == nftables.TypeIP6Addr.Name {
		family, offset, length = unix.NFPROTO_IPV6, 8, net.IPv6len
	}
	if which == destination {
		offset += length
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length, DestRegister: 1},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
	}
}

// maybeDivertExprs is "meta mark != mark ip daddr @set goto claimed": as for Heddle's own
// addresses.
func maybeDivertExprs(set *nftables.Set, mark uint32) []expr.Any {
	return slices.Concat([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
	}, inSet(set, destination), lead(expr.VerdictGoto, divertChain))
}
