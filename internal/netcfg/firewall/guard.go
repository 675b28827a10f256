package firewall

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
)

// knownNodes is the nftables set of the underlay addresses from which the overlay is accepted.
const knownNodes = "nodes"

// Counters of what the guards drop, named for the reasons of internal/model.
const (
	dropOverlayStranger = "drop_overlay_stranger"
	dropService         = "drop_service"
	refuseStore         = "refuse_store"
)

// Chains of the store's guards, which early-in and early-out lead to.
const (
	guardIn  = "guard-in"
	guardOut = "guard-out"
)

// addGuards adds what keeps containers from the store and strangers from the overlay. nodes are the
// known ones; counts is what the guards of an earlier table had counted. The guards come after
// fragments were put together, which connection tracking does.
func (r ruleset) addGuards(nodes []netip.Addr, counts map[string]uint64) error {
	set := r.cfg.nodeSet()
	set.Table = r.table
	if err := r.c.AddSet(set, nodeElements(r.cfg.VTEP, nodes)); err != nil {
		return fmt.Errorf("nftables set %s: %w", knownNodes, err)
	}
	for _, name := range []string{dropOverlayStranger, refuseStore, dropPlain, dropService} {
		r.c.AddObj(&nftables.CounterObj{Table: r.table, Name: name, Packets: counts[name]})
	}
	overlay := r.base("guard-overlay", nftables.ChainTypeFilter, nftables.ChainHookInput, *nftables.ChainPriorityRaw)
	if model.ProtectOverlay.On() {
		known := r.chain(knownSendersChain)
		r.rule(known, "the overlay is for nodes", overlayStrangerExprs(r.cfg, set))
		r.rule(known, "nodes send to the underlay address", overlayElsewhereExprs(r.cfg))
		r.rule(overlay, "the overlay's", overlayMatch(r.cfg), lead(expr.VerdictGoto, knownSendersChain))
	}
	in, out := r.chain(guardIn), r.chain(guardOut)
	for _, at := range r.cfg.Stores {
		for _, device := range [][]byte{[]byte(netdev.EndpointPrefix), deviceNameData(netdev.Overlay)} {
			r.rule(in, "the store is not for containers", deviceMatch(device), refuseStoreExprs(at))
		}
		r.rule(out, "the store is not for sockets of containers", refuseStoreExprs(at))
	}
	return nil
}

// guarded adds to chain what leads packets for a port of the stores to guard: of all packets only
// the port is compared.
func (r ruleset) guarded(chain *nftables.Chain, guard string) {
	if !model.ProtectStore.On() {
		return
	}
	var ports []uint16
	for _, at := range r.cfg.Stores {
		ports = append(ports, at.Port())
	}
	slices.Sort(ports)
	for _, port := range slices.Compact(ports) {
		r.rule(chain, "maybe the store", portMatch(model.PortRange{First: port, Last: port}, destination), lead(expr.VerdictJump, guard))
	}
}

// overlayStrangerExprs is "saddr != @nodes counter drop", for what overlayMatch has matched: by
// whatever device it comes.
func overlayStrangerExprs(cfg Config, set *nftables.Set) []expr.Any {
	offset, length := uint32(12), uint32(4)
	if cfg.VTEP.Is6() {
		offset, length = 8, 16
	}
	return []expr.Any{
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length, DestRegister: 1},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID, Invert: true},
		countAs(dropOverlayStranger),
		&expr.Verdict{Kind: expr.VerdictDrop},
	}
}

// overlayElsewhereExprs is "daddr != underlay counter drop", for the same. The program of the
// underlay device looks inside what is for the underlay address only. To others of the node's, if
// it has any, containers of other nodes could send: masqueraded, with their node's address.
func overlayElsewhereExprs(cfg Config) []expr.Any {
	elsewhere := addrMatch(netip.PrefixFrom(cfg.VTEP, cfg.VTEP.BitLen()), destination, expr.CmpOpNeq)[familyMatched:]
	return append(elsewhere, countAs(dropOverlayStranger), &expr.Verdict{Kind: expr.VerdictDrop})
}

// overlayMatch is "udp dport vxlan @th,96,24 vni", in the underlay's family.
func overlayMatch(cfg Config) []expr.Any {
	family := byte(unix.NFPROTO_IPV4)
	if cfg.VTEP.Is6() {
		family = unix.NFPROTO_IPV6
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(cfg.VXLANPort)},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 12, Len: 3, DestRegister: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint32(cfg.VNI)[1:]},
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
	}
}

// refuseStoreExprs is "daddr at tcp dport at counter reject with tcp reset".
func refuseStoreExprs(at netip.AddrPort) []expr.Any {
	out := addrMatch(netip.PrefixFrom(at.Addr(), at.Addr().BitLen()), destination, expr.CmpOpEq)
	return append(out,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(at.Port())},
		countAs(refuseStore),
		&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
	)
}

// deviceMatch compares the device a packet came in by with name, which is a prefix unless it is
// padded.
func deviceMatch(name []byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
	}
}

func markMatch(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
	}
}

func countAs(reason string) expr.Any {
	return &expr.Objref{Type: int(nftables.ObjTypeCounter), Name: reason}
}

// nodeElements gives the set elements of the addresses in underlay's family.
func nodeElements(underlay netip.Addr, nodes []netip.Addr) []nftables.SetElement {
	var out []nftables.SetElement
	for _, a := range nodes {
		if a.Is4() == underlay.Is4() {
			out = append(out, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	return out
}

// SetKnownNodes makes nodes, and no others, those from which the overlay is accepted. It compares
// them with what the kernel has.
func (t *Rules) SetKnownNodes(nodes map[string]netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.nodes = addrSet(nodes)
	return t.write(func(r ruleset) error {
		elements, err := r.c.GetSetElements(t.cfg.nodeSet())
		if err != nil {
			return fmt.Errorf("nftables set %s: %w", knownNodes, err)
		}
		have := map[netip.Addr]bool{}
		for _, e := range elements {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				have[a] = true
			}
		}
		return t.changeNodes(r.c, have, t.nodes)
	})
}

// ChangeKnownNodes is SetKnownNodes for some nodes, which were have.
func (t *Rules) ChangeKnownNodes(have, want map[string]netip.Addr) error {
	before, now := addrSet(have), addrSet(want)
	if maps.Equal(before, now) {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for a := range before {
		delete(t.nodes, a)
	}
	maps.Copy(t.nodes, now)
	return t.write(func(r ruleset) error { return t.changeNodes(r.c, before, now) })
}

func addrSet(nodes map[string]netip.Addr) map[netip.Addr]bool {
	out := make(map[netip.Addr]bool, len(nodes))
	for _, a := range nodes {
		out[a] = true
	}
	return out
}

// knownNodesAtOnce is how many elements one netlink message takes.
const knownNodesAtOnce = 500

// nodeSet is the set of known nodes, in Heddle's table.
func (c Config) nodeSet() *nftables.Set {
	set := &nftables.Set{Table: heddleTable(), Name: knownNodes, KeyType: nftables.TypeIPAddr}
	if c.VTEP.Is6() {
		set.KeyType = nftables.TypeIP6Addr
	}
	return set
}

// changeNodes adds to c what brings the set from have to want.
func (t *Rules) changeNodes(c *nftables.Conn, have, want map[netip.Addr]bool) error {
	change := setChange{set: t.cfg.nodeSet()}
	for a := range want {
		if !have[a] && a.Is4() == t.cfg.VTEP.Is4() {
			change.added = append(change.added, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	for a := range have {
		if !want[a] {
			change.removed = append(change.removed, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	return change.add(c)
}

// GuardCounts gives how many packets the guards of this node have dropped or refused, by the name
// of the reason. Restarts of the agent carry the counts on; with a table that somebody takes away
// goes what was counted since they were asked for last.
func (t *Rules) GuardCounts() (map[string]uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.readCounts()
	return maps.Clone(t.counts), err
}

// readCounts brings counts to what the kernel has, if it has any. The caller holds mu.
func (t *Rules) readCounts() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	objects, err := c.GetNamedObjects(heddleTable())
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read nftables counters: %w", err)
	}
	for _, o := range objects {
		if named, ok := o.(*nftables.NamedObj); ok {
			if counter, ok := named.Obj.(*expr.Counter); ok {
				t.counts[named.Name] = max(t.counts[named.Name], counter.Packets)
			}
		}
	}
	return nil
}
