package netcfg

import (
	"github.com/google/nftables"
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

// strangeSYNExprs is "iifname != lo ... iifname != hd* tcp flags & (syn|ack) == syn return": SYNs from devices that no
// tc program of Heddle's looks at, or, on the underlay device, let by.
func strangeSYNExprs() []expr.Any {
	const syn, ack = 0x02, 0x10
	var out []expr.Any
	for _, name := range [][]byte{deviceNameData("lo"), deviceNameData(OverlayDevice), deviceNameData(DeliverDevice), []byte("hd")} {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: name})
	}
	return append(out,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1, DestRegister: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{syn}},
		&expr.Verdict{Kind: expr.VerdictReturn},
	)
}
