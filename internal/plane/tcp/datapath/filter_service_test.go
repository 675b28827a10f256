package datapath

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// Marks of packets to services: policy is asked about the backend later, or has been about all.
const laterMark, backendsMark = 6, 7

// serviceScene is a node of which own may send to one backend only, by UDP to port 53 and by TCP to
// port 8080, and is sent nothing.
type serviceScene struct {
	*testing.T
	d                  *Datapath
	own, backend, vip  netip.Addr
	own4, beyond, node netip.Addr
}

func newServiceScene(t *testing.T, v6 bool, without uint64) *serviceScene {
	s := &serviceScene{T: t, d: loadForTestWithout(t, without), own: policyPlace(2, 2, v6), backend: policyPlace(1, 2, v6), own4: policyPlace(2, 2, false),
		vip: netip.MustParseAddr("10.96.0.10"), beyond: netip.MustParseAddr("192.0.2.10"), node: policyPlace(2, 1, v6)}
	if v6 {
		s.vip, s.beyond = netip.MustParseAddr("fd00:96::10"), netip.MustParseAddr("2001:db8::10")
	}
	for _, device := range []uint32{0, 7} {
		if err := s.d.objs.EndpointByIfindex.Put(device, heddleEndpoint{Addr4: fromAddr(s.own4), Id: 5}); err != nil {
			t.Fatal(err)
		}
	}
	may := only(model.VerdictReject, model.ProtocolUDP, 53)
	may.Ports = append([]model.PortVerdict{{Protocol: model.ProtocolTCP, First: 8080, Last: 8080, Verdict: model.VerdictAllow}}, may.Ports...)
	tables := twoWays(s.own4, policyPlace(1, 2, false), may, model.PairVerdict{Default: model.VerdictDrop})
	for _, six := range []bool{false, true} {
		tables.ByAddr[policyPlace(2, 2, six)] = model.ClassInfo{Class: 1, Egress: model.VerdictReject, Ingress: model.VerdictDrop}
	}
	tables.ByAddr[s.beyond] = model.ClassInfo{Class: 3}
	tables.Pairs[model.ClassPair{From: 1, To: 3}] = only(model.VerdictReject, model.ProtocolTCP, 6443)
	apply(t, s.d, tables)
	s.serve(53, true, netip.AddrPortFrom(s.backend, 53))
	s.serve(80, false, netip.AddrPortFrom(s.backend, 8080))
	return s
}

// serve makes a service at a port of vip.
func (s *serviceScene) serve(port uint16, udp bool, backends ...netip.AddrPort) {
	s.Helper()
	if err := s.d.SetService(model.Service{Addr: model.ServiceAddr{AddrPort: netip.AddrPortFrom(s.vip, port), UDP: udp}, Backends: backends}); err != nil {
		s.Fatal(err)
	}
}

// expect runs a packet that came in by a device through a program.
func (s *serviceScene) expect(what string, prog *ebpf.Program, frame []byte, by uint32, want string, wantMark uint32) {
	s.Helper()
	got, mark := filteredBy(s, s.d, prog, frame, by)
	if got != want || got == allowed && mark != wantMark {
		s.Errorf("%s: %s, mark %d; want %s, mark %d", what, got, mark, want, wantMark)
	}
}

// TestFilterServices: of what a container's own stack sends to a service, the backend is asked
// about, where the node's rules have put it in the service's place; its answers pass although they
// come in the service's name. What is no service's is judged by its address.
func TestFilterServices(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprint(v6), func(t *testing.T) {
			s := newServiceScene(t, v6, 0)
			out, in, over := s.d.objs.FromEndpoint, s.d.objs.ToEndpoint, s.d.objs.ToOverlay
			asks, syn := ip(s.own, s.vip, 17, datagram(4000, 53)), ip(s.own, s.vip, 6, segment(4000, 80, tcpSYN))
			s.expect("an answer before the question", in, ip(s.vip, s.own, 17, datagram(53, 4000)), 0, "drop", 0)
			s.expect("a question", out, asks, 0, allowed, laterMark)
			s.expect("its backend", over, ip(s.own, s.backend, 17, datagram(4000, 53)), 0, allowed, 0)
			s.expect("another port of the backend", over, ip(s.own, s.backend, 17, datagram(4000, 54)), 0, "reject", 0)
			s.expect("an answer", in, ip(s.vip, s.own, 17, datagram(53, 4000)), 0, allowed, 0)
			s.expect("an answer to another port", in, ip(s.vip, s.own, 17, datagram(53, 4001)), 0, "drop", 0)
			unreachable := byte(3)
			if v6 {
				unreachable = 1
			}
			s.expect("an error about the question", in, ip(s.vip, s.own, 1, icmp(unreachable, 0, asks[14:])), 5, allowed, 0)
			s.expect("SYN", out, syn, 0, allowed, laterMark)
			s.expect("SYN to its backend", over, ip(s.own, s.backend, 6, segment(4000, 8080, tcpSYN)), 0, allowed, 0)
			s.expect("SYN-ACK", in, ip(s.vip, s.own, 6, segment(80, 4000, tcpSYN|tcpACK)), 5, allowed, 0)
			s.expect("what a forgotten connection's server says", in, ip(s.vip, s.own, 6, segment(80, 4001, tcpACK)), 5, allowed, 0)
			s.expect("the same of no service's port", in, ip(s.vip, s.own, 6, segment(81, 4001, tcpACK)), 5, "reject", 0)
			s.expect("data", out, ip(s.own, s.vip, 6, segment(4000, 80, tcpACK)), 0, allowed, laterMark)
			s.expect("a SYN in the service's name", in, ip(s.vip, s.own, 6, segment(80, 4000, tcpSYN)), 5, "drop", 0)
			s.expect("a port that is no service's", out, ip(s.own, s.vip, 6, segment(4000, 81, tcpSYN)), 0, "reject", 0)
			s.expect("another protocol's", out, ip(s.own, s.vip, 17, datagram(4000, 80)), 0, "reject", 0)
			s.expect("no protocol's", out, ip(s.own, s.vip, 47, make([]byte, 20)), 0, "reject", 0)
			// Nobody else may be told by this to go where he may not.
			apply(t, s.d, twoWays(s.own4, policyPlace(1, 2, false), model.PairVerdict{Default: model.VerdictReject}, model.PairVerdict{Default: model.VerdictDrop}))
			s.expect("the backend after a change", over, ip(s.own, s.backend, 17, datagram(4000, 53)), 0, "reject", 0)
			s.expect("its SYN after a change", over, ip(s.own, s.backend, 6, segment(4000, 8080, tcpSYN)), 0, "reject", 0)
		})
	}
}

// TestFilterServicesBeyond: where backends are beyond the overlay, all of them have to be allowed,
// and there must not be too many to ask about.
func TestFilterServicesBeyond(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		s := newServiceScene(t, v6, 0)
		out, allowedOne := s.d.objs.FromEndpoint, netip.AddrPortFrom(s.beyond, 6443)
		syn, data := ip(s.own, s.vip, 6, segment(4000, 443, tcpSYN)), ip(s.own, s.vip, 6, segment(4000, 443, tcpACK))
		s.serve(443, false, allowedOne)
		s.expect("a backend that is allowed", out, syn, 0, allowed, backendsMark)
		s.expect("its SYN-ACK", s.d.objs.ToEndpoint, ip(s.vip, s.own, 6, segment(443, 4000, tcpSYN|tcpACK)), 5, allowed, 0)
		s.serve(443, false, allowedOne, netip.AddrPortFrom(s.backend, 8080))
		s.expect("and one in the overlay", out, syn, 0, allowed, backendsMark)
		s.serve(443, false, allowedOne, netip.AddrPortFrom(s.beyond, 6444))
		s.expect("one that is not", out, syn, 0, "reject", 0)
		s.expect("data to it", out, data, 0, "reject", 0)
		s.expect("a RST to it", out, ip(s.own, s.vip, 6, segment(4000, 443, tcpRST)), 0, allowed, backendsMark)
		var many []netip.AddrPort
		for i := range uint16(17) {
			many = append(many, netip.AddrPortFrom(s.backend, 8080+i))
		}
		s.serve(443, false, many[0], allowedOne)
		s.expect("few", out, syn, 0, allowed, backendsMark)
		s.serve(443, false, append(many, allowedOne)...)
		s.expect("more than are asked about", out, syn, 0, "reject", 0)
		s.serve(443, false, many...)
		s.expect("many, in the overlay", out, syn, 0, allowed, laterMark)
		s.serve(443, false)
		s.expect("none", out, syn, 0, allowed, laterMark)
	}
}

// TestFilterServicesMark: without the protection, the packet has no mark by which it could be held
// back; and none where there is no policy.
func TestFilterServicesMark(t *testing.T) {
	s := newServiceScene(t, false, 1<<model.ProtectServices)
	asks := ip(s.own, s.vip, 17, datagram(4000, 53))
	s.expect("without the protection", s.d.objs.FromEndpoint, asks, 0, allowed, 0)
	s = newServiceScene(t, false, 0)
	if err := s.d.ApplyPolicy(model.PolicyChange{Reset: true}); err != nil {
		t.Fatal(err)
	}
	s.expect("without policy", s.d.objs.FromEndpoint, asks, 0, allowed, 0)
	s.expect("SYN", s.d.objs.FromEndpoint, ip(s.own, s.vip, 6, segment(4000, 80, tcpSYN)), 0, allowed, 0)
}

// TestFilterMasqueraded: a container whose packets the node's rules give another source, as
// kube-proxy does at node ports, is judged as what it is.
func TestFilterMasqueraded(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		s := newServiceScene(t, v6, 0)
		near := policyPlace(2, 9, v6)
		for name, prog := range map[string]*ebpf.Program{"to_endpoint": s.d.objs.ToEndpoint, "to_overlay": s.d.objs.ToOverlay} {
			s.expect(name+": the node's own", prog, ip(s.node, near, 6, segment(4000, 80, tcpSYN)), 0, allowed, 0)
			s.expect(name+": by the container's device", prog, ip(s.node, near, 6, segment(4001, 80, tcpSYN)), 7, "reject", 0)
			s.expect(name+": a datagram", prog, ip(s.node, near, 17, datagram(4001, 80)), 7, "reject", 0)
			s.expect(name+": to the backend", prog, ip(s.node, s.backend, 6, segment(4001, 8080, tcpSYN)), 7, allowed, 0)
			s.expect(name+": a datagram to it", prog, ip(s.node, s.backend, 17, datagram(4001, 53)), 7, allowed, 0)
		}
		// Itself, by a service of its own.
		s.expect("to itself", s.d.objs.ToEndpoint, ip(s.node, s.own, 6, segment(4001, 8080, tcpSYN)), 7, allowed, 0)
		s.expect("its answer", s.d.objs.FromEndpoint, ip(s.own, s.node, 6, segment(8080, 4001, tcpSYN|tcpACK)), 0, allowed, 0)
		s.expect("a datagram to itself", s.d.objs.ToEndpoint, ip(s.node, s.own, 17, datagram(4001, 53)), 7, allowed, 0)
		s.expect("its answer", s.d.objs.FromEndpoint, ip(s.own, s.node, 17, datagram(53, 4001)), 0, allowed, 0)
	}
}
