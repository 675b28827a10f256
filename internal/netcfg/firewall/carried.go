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
func (t *Rules) SetAdopted(addrs []netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	addrs = slices.DeleteFunc(slices.Clone(addrs), netip.Addr.Is6)
	slices.SortFunc(addrs, netip.Addr.Compare)
	if slices.Equal(t.adopted, addrs) && t.written.table != 0 {
		return nil
	}
	had := len(t.adopted) > 0
	t.adopted = addrs
	return t.write(func(r ruleset) error {
		if had {
			r.remove(adoptedChain)
			if model.ProtectStore.On() {
				r.remove(adoptedGuard)
			}
			r.c.DelSet(&nftables.Set{Table: r.table, Name: adoptedSet})
		}
		return r.addAdopted(addrs)
	})
}

// addAdopted adds chains and set, unless there are no addresses.
func (r ruleset) addAdopted(addrs []netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	set := &nftables.Set{Table: r.table, Name: adoptedSet, KeyType: nftables.TypeIPAddr}
	var elements []nftables.SetElement
	for _, a := range addrs {
		elements = append(elements, nftables.SetElement{Key: a.AsSlice()})
	}
	if err := r.c.AddSet(set, elements); err != nil {
		return fmt.Errorf("nftables set %s: %w", adoptedSet, err)
	}
	chain := r.base(adoptedChain, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, deliverPriority)
	r.rule(chain, "maybe for a node socket that holds an address of another network", maybeDivertExprs(set, r.cfg.Mark))
	if !model.ProtectStore.On() {
		return nil
	}
	guard := r.base(adoptedGuard, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw)
	for _, at := range r.cfg.Stores {
		r.rule(guard, "the store is not for containers", inSet(set, source), refuseStoreExprs(at))
	}
	return nil
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
