package firewall

import (
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/netdev"
)

// translatedPriority comes after every translation of destinations (-100) of what the node sends.
const translatedPriority = -50

// addTranslated adds the chain that leads what a node socket sends, and the node's own rules have
// given another destination, to the endpoint's device, where policy is asked about that: not by lo,
// where it would not be asked.
func (r ruleset) addTranslated() {
	chain := r.base("translated", nftables.ChainTypeRoute, nftables.ChainHookOutput, translatedPriority)
	r.rule(chain, "what is translated to an endpoint goes by its device", markMatch(r.cfg.Mark), translatedMatch(), []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(r.cfg.OverlayMark)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true}})
}

// translatedMatch is "ct status dnat": the connection has got another destination than it was made
// for.
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

// arrivedMatch is "iifname != lo iifname != heddle-hd0": by a device from beyond the node's own
// stack. A tc program marks there what is for a listener that takes it; devices of others have
// none.
func arrivedMatch() (out []expr.Any) {
	for _, name := range [][]byte{deviceNameData("lo"), deviceNameData(netdev.Divert)} {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: name})
	}
	return out
}
