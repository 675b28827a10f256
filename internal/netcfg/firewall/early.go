package firewall

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
)

// earlyPriority places the first chains before all else that looks at packets, connection tracking
// included: what policy refuses leaves no entry. Fragments have been put together.
const earlyPriority = -310

// The chains that early-in and early-out lead to, beside the guards.
const (
	loopbackChain   = "loopback"
	rejectedChain   = "rejected"
	nodeSocketChain = "node-socket"
	// knownSendersChain is guard-overlay's.
	knownSendersChain = "known-senders"
)

// addEarly adds what comes before connection tracking: answers to what policy rejects, the guards
// of the store, and rules that keep tracking, which the masquerading of other traffic switches on
// for the whole namespace, off the paths that need none: direct connections, and those between node
// sockets over lo. Both would otherwise pay for a table entry a connection and a lookup a packet.
//
// It is one chain a hook, and what is commonest leaves it first: of the overlay, every packet of a
// plain container passes both. divert is the index of
// netdev.Divert, underlay that of the underlay's device.
func (r ruleset) addEarly(divert, underlay int) {
	r.addRejected()
	r.addLoopback()
	in := r.base("early-in", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, earlyPriority)
	r.rule(in, "early-out saw it; no program rejects what is on lo", indexMatch(expr.MetaKeyIIF, netdev.LoopbackIfindex),
		lead(expr.VerdictGoto, loopbackChain))
	r.addPlainIn(in, underlay)
	r.rule(in, "policy rejects it", markMatch(r.cfg.RejectMark), lead(expr.VerdictGoto, rejectedChain))
	r.untrackOverlay(in)
	r.rule(in, "tracked before, and maybe translated: not to be taken for another connection",
		indexMatch(expr.MetaKeyIIF, divert), untracked())
	r.addDirect(in, guardIn)
	// From elsewhere it goes no further than the chain deliver.
	r.rule(in, "connections of a container with itself are not translated",
		markMatch(r.cfg.Mark), addrMatch(model.MirrorRange, source, expr.CmpOpEq), untracked())

	out := r.base("early-out", nftables.ChainTypeFilter, nftables.ChainHookOutput, earlyPriority)
	r.addNodeSocket()
	for _, mark := range []uint32{r.cfg.Mark, r.cfg.OverlayMark} {
		r.rule(out, "of a container's socket", markMatch(mark), lead(expr.VerdictGoto, nodeSocketChain))
	}
	r.untrackOverlay(out)
	r.rule(out, "connects that policy drops", markMatch(r.cfg.DropMark), decided(expr.VerdictDrop))
	for _, which := range []side{destination, source} { // RSTs of the kernel have no mark
		r.untrackDirect(out, which)
	}
}

// untrackOverlay adds to chain that the overlay's own packets are not tracked: masqueraded, a
// datagram that a container sends from the overlay's port has the node's address and that port, and
// what another node's overlay sends there would be taken for its answer.
func (r ruleset) untrackOverlay(chain *nftables.Chain) {
	if model.ProtectOverlayPort.On() {
		r.rule(chain, "the overlay is not translated", overlayMatch(r.cfg), untracked())
	}
}

// addLoopback adds the chain for what comes by lo. A packet has what early-out and connection
// tracking made of it, unless it passed the shaping device: the redirect there takes it away, so
// that an untracked packet would be tracked after all, and its connection from one side only. It is
// given back by addresses and ports, since RSTs of the kernel have no mark. What was tracked finds
// its entry again, unless it has been translated since: an answer by a published port, between
// addresses of the node. Tracked anew, with its entry's own addresses, it would get another port.
func (r ruleset) addLoopback() {
	chain := r.chain(loopbackChain)
	r.rule(chain, "tracked, or not to be", hasState(), decided(expr.VerdictAccept))
	for _, p := range r.cfg.Pool {
		r.rule(chain, "connections between node sockets are not translated", withinMatch(p), untracked())
	}
	for _, which := range []side{destination, source} {
		r.untrackDirect(chain, which)
	}
	r.rule(chain, "translated already", localMatch(source), localMatch(destination), untracked())
}

// localMatch is "fib saddr (or daddr) type local": one of the node's own addresses.
func localMatch(which side) []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagSADDR: which == source, FlagDADDR: which == destination},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
	}
}

// hasState is "ct state != invalid". Before connection tracking, that is a packet which is marked
// as untracked, or passed connection tracking on its way to lo.
func hasState() []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(expr.CtStateBitINVALID)},
	}
}

// withinMatch compares both addresses of packets of p's family with p.
func withinMatch(p netip.Prefix) []expr.Any {
	return append(addrMatch(p, source, expr.CmpOpEq), addrMatch(p, destination, expr.CmpOpEq)[familyMatched:]...)
}

// addNodeSocket adds the chain for what sockets of containers send.
func (r ruleset) addNodeSocket() {
	chain := r.chain(nodeSocketChain)
	// A store in the pool could be one of those addresses.
	inside := slices.ContainsFunc(r.cfg.Stores, func(at netip.AddrPort) bool { return contains(r.cfg.Pool, at.Addr()) })
	if inside {
		r.guarded(chain, guardOut)
	}
	for _, p := range r.cfg.Pool { // what has moved here is in another node's prefix
		r.rule(chain, "connections between node sockets are not translated", indexMatch(expr.MetaKeyOIF, netdev.LoopbackIfindex),
			withinMatch(p), untracked())
	}
	r.addDirect(chain, guardOut)
	r.rule(chain, "connections of a container with itself are not translated",
		addrMatch(model.MirrorRange, destination, expr.CmpOpEq), untracked())
}

// addDirect adds to chain what leaves direct connections alone, and what leads to the store's
// guard. What is for a direct port is not for a store, unless one is at such a port; what comes
// from a direct port may well be.
func (r ruleset) addDirect(chain *nftables.Chain, guard string) {
	there := slices.ContainsFunc(r.cfg.Stores, func(at netip.AddrPort) bool { return r.cfg.DirectPorts.Contains(at.Port()) })
	if there {
		r.guarded(chain, guard)
	}
	r.untrackDirect(chain, destination)
	if !there {
		r.guarded(chain, guard)
	}
	r.untrackDirect(chain, source)
}

// untrackDirect adds to chain that packets to (or from) direct ports are not tracked.
func (r ruleset) untrackDirect(chain *nftables.Chain, which side) {
	if r.cfg.DirectPorts != (model.PortRange{}) {
		r.rule(chain, "direct connections are not translated", portMatch(r.cfg.DirectPorts, which), untracked())
	}
}

// addRejected adds the chain that answers what policy rejects.
func (r ruleset) addRejected() {
	chain := r.chain(rejectedChain)
	// The programs marked it as sent to many stations, which the kernel answers by nothing, so that
	// it gets nowhere without this chain.
	r.rule(chain, "it was sent to this node alone", []expr.Any{
		&expr.Immediate{Register: 1, Data: []byte{unix.PACKET_HOST}},
		&expr.Meta{Key: expr.MetaKeyPKTTYPE, Register: 1, SourceRegister: true}})
	r.rule(chain, "TCP that policy rejects", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
	r.rule(chain, "everything else that policy rejects",
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})
	// An ICMP error or a RST cannot be made of every packet.
	r.rule(chain, "what cannot be answered", decided(expr.VerdictDrop))
}

// untracked is "notrack accept": the connection is not tracked, and the chain has nothing more to
// do about it.
func untracked() []expr.Any {
	return []expr.Any{&expr.Notrack{}, &expr.Verdict{Kind: expr.VerdictAccept}}
}

// indexMatch is "iif device" or "oif device".
func indexMatch(key expr.MetaKey, device int) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(uint32(device))},
	}
}

// portMatch is "meta l4proto tcp tcp sport (or dport) first-last".
func portMatch(ports model.PortRange, which side) []expr.Any {
	offset := uint32(0)
	if which == destination {
		offset = 2
	}
	out := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2, DestRegister: 1},
	}
	first, last := binaryutil.BigEndian.PutUint16(ports.First), binaryutil.BigEndian.PutUint16(ports.Last)
	if ports.First == ports.Last {
		return append(out, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: first})
	}
	return append(out, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: first, ToData: last})
}

// contains reports whether a is in one of prefixes.
func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
