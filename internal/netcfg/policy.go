package netcfg

import (
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// policyPriority places what policy stops before all else that looks at packets, connection tracking included: what
// is refused leaves no entry.
const policyPriority = -310

// addPolicy adds what the programs leave to nftables: answering what policy rejects, and keeping in what policy
// drops. Both are known by their marks.
func addPolicy(c *nftables.Conn, table *nftables.Table, cfg NodeConfig) {
	rejected := c.AddChain(&nftables.Chain{
		Name: "rejected", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(policyPriority),
	})
	dropped := c.AddChain(&nftables.Chain{
		Name: "dropped", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(policyPriority),
	})
	c.AddRule(&nftables.Rule{
		Table: table, Chain: rejected,
		Exprs: append(markMatch(cfg.RejectMark),
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}),
		UserData: comment("TCP that policy rejects"),
	})
	c.AddRule(&nftables.Rule{
		Table: table, Chain: rejected,
		Exprs: append(markMatch(cfg.RejectMark),
			&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}),
		UserData: comment("everything else that policy rejects"),
	})
	// An ICMP error or a RST cannot be made of every packet.
	c.AddRule(&nftables.Rule{
		Table: table, Chain: rejected, Exprs: append(markMatch(cfg.RejectMark), &expr.Verdict{Kind: expr.VerdictDrop}),
		UserData: comment("what cannot be answered"),
	})
	c.AddRule(&nftables.Rule{
		Table: table, Chain: dropped, Exprs: append(markMatch(cfg.DropMark), &expr.Verdict{Kind: expr.VerdictDrop}),
		UserData: comment("connects that policy drops"),
	})
}

// translatedPriority comes after every translation of destinations (-100) of what the node sends.
const translatedPriority = -50

// addTranslated adds the chain that leads what a node socket sends, and the node's own rules have given another destination,
// to the endpoint's device, where policy is asked about that: not by lo, where it would not be asked.
func addTranslated(c *nftables.Conn, table *nftables.Table, cfg NodeConfig) {
	chain := c.AddChain(&nftables.Chain{
		Name: "translated", Table: table, Type: nftables.ChainTypeRoute,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(translatedPriority),
	})
	c.AddRule(&nftables.Rule{
		Table: table, Chain: chain,
		Exprs: append(markMatch(cfg.Mark),
			slices.Concat(translatedMatch(), []expr.Any{
				&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(cfg.OverlayMark)},
				&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true}})...),
		UserData: comment("what is translated to an endpoint goes by its device"),
	})
}

// translatedMatch is "ct status dnat": the connection has got another destination than it was made for.
func translatedMatch() []expr.Any {
	const dnat = 1 << 5 // IPS_DST_NAT
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(dnat), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// openingExprs is "tcp flags & (syn|ack) == syn ... return".
func openingExprs(match ...expr.Any) []expr.Any {
	const syn, ack = 0x02, 0x10
	return append([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1, DestRegister: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{syn}},
	}, append(match, &expr.Verdict{Kind: expr.VerdictReturn})...)
}

// strangeMatch is "iifname != lo ... iifname != hd*": devices that no tc program of Heddle's looks at, or, the underlay
// device, lets by.
func strangeMatch() (out []expr.Any) {
	for _, name := range [][]byte{deviceNameData("lo"), deviceNameData(OverlayDevice), deviceNameData(DeliverDevice), []byte("hd")} {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: name})
	}
	return out
}
