package policy

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// Ports of the services of a proxiedBackend: those whose backend's port clients are allowed, and
// others.
const serviceTCP, serviceTCPClosed, serviceUDP, serviceUDPClosed = 80, 81, 53, 54

// proxiedBackend is a container behind services of its own, of either family, which n1 translates
// as kube-proxy has it: in prerouting, and for the node ports masqueraded.
type proxiedBackend struct {
	at, mode           string
	vip                map[int]netip.Addr
	nodePort, nodeShut int
}

// proxied are the backends, and the ports at which they listen.
type proxied struct {
	backends             []proxiedBackend
	open, closed         map[string]int // TCP, by the server's mode
	udpOpen, udpClosed   int
	beyond               map[netip.AddrPort]string // services of others than containers, and what connects to them meet
	beyondOpen           int
	services             []model.Service
	prerouting, nodeport strings.Builder
}

func newProxied(t *testing.T) *proxied {
	p := &proxied{open: map[string]int{}, closed: map[string]int{}, beyond: map[netip.AddrPort]string{}, udpOpen: lab.FreePort(), udpClosed: lab.FreePort()}
	for _, mode := range lab.Modes {
		p.open[mode], p.closed[mode] = lab.FreePort(), lab.FreePort()
	}
	for _, at := range []string{"n1/c1", "n2/c1"} {
		for _, mode := range lab.Modes {
			server := startPolicyPeer(t, mode, at)
			server.Must("serve([%d, %d])", p.open[mode], p.closed[mode])
			if mode == "overlay" {
				server.Must("answer_datagrams(%d)", p.udpOpen)
				server.Must("answer_datagrams(%d)", p.udpClosed)
			}
			p.add(t, at, mode)
		}
	}
	p.addBeyond(t)
	lab.Spoil(t, "n1", "inet", fmt.Sprintf(`chain pre { type nat hook prerouting priority dstnat;
%s}
chain post { type nat hook postrouting priority srcnat;
meta l4proto tcp ct status dnat ct original proto-dst { %s } masquerade
}`, p.prerouting.String(), strings.TrimSuffix(p.nodeport.String(), ",")))
	return p
}

// addBeyond adds services of the host outside, of which a port is allowed, and of the client's node,
// as the API server's may be, of which every port is.
func (p *proxied) addBeyond(t *testing.T) {
	p.beyondOpen = lab.FreePort()
	shut, own := lab.FreePort(), lab.FreePort()
	startPolicyPeer(t, "host", "outside").Must("serve([%d, %d])", p.beyondOpen, shut)
	startPolicyPeer(t, "host", "n1/c1").Must("serve([%d])", own)
	outside, node := netip.MustParseAddr(lab.OutsideTarget(t)), netip.MustParseAddr(lab.Address(t, "host", "n1/c1"))
	at := func(a netip.Addr, port int) netip.AddrPort { return netip.AddrPortFrom(a, uint16(port)) }
	vip := netip.MustParseAddr("10.96.1.100")
	for i, c := range []struct {
		backends []netip.AddrPort // the first is the one that it is translated to
		want     string
	}{
		{[]netip.AddrPort{at(outside, p.beyondOpen)}, "hi"},
		{[]netip.AddrPort{at(node, own)}, "hi"},
		{[]netip.AddrPort{at(outside, p.beyondOpen), at(node, own)}, "hi"},
		{[]netip.AddrPort{at(outside, shut)}, "ECONNREFUSED"},
	} {
		service := at(vip, serviceTCP+i)
		p.beyond[service] = c.want
		p.services = append(p.services, model.Service{Addr: model.ServiceAddr{AddrPort: service}, Backends: c.backends})
		fmt.Fprintf(&p.prerouting, "ip daddr %s tcp dport %d dnat ip to %s\n", vip, service.Port(), c.backends[0])
	}
}

func (p *proxied) add(t *testing.T, at, mode string) {
	n := len(p.backends) + 1
	b := proxiedBackend{at: at, mode: mode, nodePort: lab.FreePort(), nodeShut: lab.FreePort(),
		vip: map[int]netip.Addr{4: netip.AddrFrom4([4]byte{10, 96, 1, byte(n)}), 6: netip.MustParseAddr(fmt.Sprintf("fd00:96::1:%d", n))}}
	p.backends = append(p.backends, b)
	for family, addr := range map[int]string{4: lab.Address(t, "overlay", at), 6: lab.Overlay6(t, at)} {
		to, ip := netip.MustParseAddr(addr), map[int]string{4: "ip", 6: "ip6"}[family]
		lead := func(port uint16, udp bool, target int) {
			backend := netip.AddrPortFrom(to, uint16(target))
			p.services = append(p.services, model.Service{Addr: model.ServiceAddr{AddrPort: netip.AddrPortFrom(b.vip[family], port), UDP: udp}, Backends: []netip.AddrPort{backend}})
			fmt.Fprintf(&p.prerouting, "%s daddr %s %s dport %d dnat %s to %s\n", ip, b.vip[family], map[bool]string{true: "udp", false: "tcp"}[udp], port, ip, backend)
		}
		lead(serviceTCP, false, p.open[mode])
		lead(serviceTCPClosed, false, p.closed[mode])
		lead(serviceUDP, true, p.udpOpen)
		lead(serviceUDPClosed, true, p.udpClosed)
		if family == 4 {
			fmt.Fprintf(&p.prerouting, "ip daddr %s tcp dport %d dnat ip to %s:%d\n", lab.Address(t, "host", "n1/c1"), b.nodePort, to, p.open[mode])
			fmt.Fprintf(&p.prerouting, "ip daddr %s tcp dport %d dnat ip to %s:%d\n", lab.Address(t, "host", "n1/c1"), b.nodeShut, to, p.closed[mode])
			fmt.Fprintf(&p.nodeport, "%d,%d,", b.nodePort, b.nodeShut)
		}
	}
}

// policy is what a NetworkPolicy becomes that allows pods of some ports and their DNS, and nothing
// else, in either direction.
func (p *proxied) policy(t *testing.T, client string, ports map[string]int) map[string]any {
	allowed := []string{fmt.Sprintf("udp/%d", p.udpOpen)}
	for _, port := range ports {
		allowed = append(allowed, fmt.Sprintf("tcp/%d", port))
	}
	slices.Sort(allowed)
	host := map[string]any{"action": "allow", "peers": []any{map[string]any{"entity": "host"}}}
	outside := map[string]any{"action": "allow", "peers": []any{map[string]any{"prefix": lab.OutsideTarget(t) + "/32"}}, "ports": []string{fmt.Sprintf("tcp/%d", p.beyondOpen)}}
	return map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "proxied",
		"subject": map[string]any{"prefixes": []string{lab.Address(t, "overlay", client) + "/32"}},
		"ingress": map[string]any{"default": "deny", "rules": []any{host}},
		"egress": map[string]any{"default": "deny", "rules": []any{host, outside,
			map[string]any{"action": "allow", "peers": []any{map[string]any{"endpoints": map[string]any{}}}, "ports": allowed}}}}
}

// TestPolicyProxied: of what a container sends to a Service that the node translates, policy is
// decided for the backend, not for the Service's address, which no rule of a NetworkPolicy names;
// answers come back although nothing else may; what is forbidden later ends. At node ports, where
// the node's address takes the place of its own, a container is still itself.
func TestPolicyProxied(t *testing.T) {
	p := newProxied(t)
	node := api.Dial(lab.APISocket("n1"))
	t.Cleanup(node.Close)
	for _, mode := range lab.Modes {
		t.Run(mode, func(t *testing.T) {
			client := startPolicyPeer(t, mode, "n1/c2")
			lab.ApplyDocument(t, p.policy(t, "n1/c2", p.open))
			unknown := p.backends[0].vip[4]
			client.Expect(`"ECONNREFUSED"`, "datagram(4, %q, %d, 10, False)", unknown, serviceUDP)
			client.Expect(`["ECONNREFUSED"]`, "attempts([[4, %q, %d, False, '']], 0)", unknown, serviceTCP)

			testutil.NoError(t, node.EditServices(t.Context(), api.ServiceEdit{Put: p.services}))
			t.Cleanup(func() {
				var edit api.ServiceEdit
				for _, s := range p.services {
					edit.Delete = append(edit.Delete, s.Addr)
				}
				if err := node.EditServices(context.Background(), edit); err != nil {
					t.Error(err)
				}
			})
			live := p.reach(t, client, mode)
			client.Must("live = [%s]", strings.Join(live, ", "))
			lab.ChangePolicy(t, p.policy(t, "n1/c2", p.closed))
			for i, l := range live {
				if how := client.Must("outcome(live[%d], True)", i); how != `"ECONNRESET"` && how != `"ECONNABORTED"` {
					t.Errorf("%s, forbidden afterwards: %s", l, how)
				}
			}
		})
	}
}

// reach tries every service from a client of a mode, and gives connections to keep.
func (p *proxied) reach(t *testing.T, client *lab.Peer, mode string) (live []string) {
	var targets []policyTarget
	var want, got []string
	add := func(family int, addr any, port int, wanted string) {
		targets, want = append(targets, policyTarget{family, fmt.Sprint(addr), port, false, ""}), append(want, wanted)
	}
	for _, b := range p.backends {
		for family, vip := range b.vip {
			add(family, vip, serviceTCP, "hi")
			add(family, vip, serviceTCPClosed, "ECONNREFUSED")
			live = append(live, fmt.Sprintf("opened(%d, %q, %d)", family, vip, serviceTCP))
			if b.mode != "overlay" { // UDP is no other way to these
				continue
			}
			for _, size := range []int{10, 4000} {
				client.Expect(fmt.Sprint(size), "datagram(%d, %q, %d, %d, False)", family, vip, serviceUDP, size)
			}
			client.Expect(`"ECONNREFUSED"`, "datagram(%d, %q, %d, 10, False)", family, vip, serviceUDPClosed)
		}
		if mode == "overlay" {
			add(4, lab.Address(t, "host", "n1/c1"), b.nodePort, "hi")
			live = append(live, fmt.Sprintf("opened(4, %q, %d)", lab.Address(t, "host", "n1/c1"), b.nodePort))
			add(4, lab.Address(t, "host", "n1/c1"), b.nodeShut, "ECONNREFUSED")
		}
	}
	for service, wanted := range p.beyond {
		add(4, service.Addr(), int(service.Port()), wanted)
	}
	answer(t, client, &got, "attempts(json.loads(%s), 0)", lab.JSON(t, lab.JSON(t, targets)))
	if !slices.Equal(got, want) {
		t.Errorf("connects to %v:\n%v, want\n%v", targets, got, want)
	}
	if mode == "overlay" {
		p.reachNobody(t, client)
	}
	return live
}

// reachNobody tries a service without backends: kube-proxy rejects that when it is forwarded.
func (p *proxied) reachNobody(t *testing.T, client *lab.Peer) {
	at, port := lab.OutsideTarget(t), lab.FreePort()
	service := model.ServiceAddr{AddrPort: netip.AddrPortFrom(netip.MustParseAddr(at), uint16(port))}
	node := api.Dial(lab.APISocket("n1"))
	defer node.Close()
	testutil.NoError(t, node.EditServices(t.Context(), api.ServiceEdit{Put: []model.Service{{Addr: service}}}))
	reject := lab.Spoil(t, "n1", "ip", fmt.Sprintf("chain forwarded { type filter hook forward priority filter; ip daddr %s tcp dport %d reject with tcp reset; }", at, port))
	before := lab.Counters(t, "n1")["drop_service"]
	client.Expect(`["ECONNREFUSED"]`, "attempts([[4, %q, %d, False, '']], 0)", at, port)
	reject()
	if now := lab.Counters(t, "n1")["drop_service"]; now != before {
		t.Errorf("%d packets are dropped that others reject", now-before)
	}
	client.Expect(`["hangs"]`, "attempts([[4, %q, %d, True, '']], 0.5)", at, port)
	if now := lab.Counters(t, "n1")["drop_service"]; now == before {
		t.Error("what nobody rejects is not dropped")
	}
	testutil.NoError(t, node.EditServices(t.Context(), api.ServiceEdit{Delete: []model.ServiceAddr{service}}))
}
