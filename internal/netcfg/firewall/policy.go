package firewall

import (
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
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

// forwardedPriority comes after others' filters (0): kube-proxy rejects there what is for a Service
// without backends, and its sender is to hear of it.
const forwardedPriority = 10

// servicesChain is where packets go that containers sent to services.
const servicesChain = "services"

// addServices adds what lets packets that containers sent to services leave the node only as policy
// has been asked about: by devices whose programs ask about the backend that the node's rules have
// put in the service's place, or, if policy allows all of its backends, as one of them. Policy has
// not been asked about the service's own address.
func (r ruleset) addServices() {
	chain := r.chain(servicesChain)
	plain := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(model.ForeignMarks), Xor: make([]byte, 4)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}
	r.rule(chain, "policy is asked there about the backend", nameIs(expr.MetaKeyOIFNAME, deviceNameData(netdev.Overlay), expr.CmpOpEq), plain)
	r.rule(chain, "and there", nameIs(expr.MetaKeyOIFNAME, []byte(netdev.EndpointPrefix), expr.CmpOpEq), plain)
	r.rule(chain, "policy allows all backends, and this is one", serviceMatch(r.cfg.ServiceMark|1, model.ForeignMarks), translatedMatch(), plain)
	r.rule(chain, "policy has not been asked about a service's address", dropAs(dropService))
	forward := r.base("forwarded", nftables.ChainTypeFilter, nftables.ChainHookForward, forwardedPriority)
	r.rule(forward, "to a service", serviceMatch(r.cfg.ServiceMark, model.ForeignMarks|1), lead(expr.VerdictGoto, servicesChain))
}

// serviceMatch is "meta mark & ~but == mark".
func serviceMatch(mark, but uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(^but), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
	}
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
