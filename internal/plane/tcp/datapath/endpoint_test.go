package datapath

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// TestTopology checks what the programs are told about a network of three nodes, seen from b.
func TestTopology(t *testing.T) {
	ports := model.PortRange{First: 17440, Last: 17455}
	nodes := []model.Node{
		{Name: "a", Underlay: underlayA, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Planes: takesDirect(ports)},
		{Name: "b", Underlay: underlayB, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}, Planes: takesDirect(ports)},
		{Name: "plain", Underlay: netip.MustParseAddr("192.0.2.3"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}},
	}
	// An address of b's lives on a, one of a's on b, and a plain endpoint has brought its own from
	// a third.
	nodes[0].Moved = []netip.Addr{netip.MustParseAddr("10.244.2.5"), netip.MustParseAddr("10.244.3.5")}
	nodes[1].Moved = []netip.Addr{netip.MustParseAddr("10.244.1.5")}
	endpoints := []model.Endpoint{
		{Name: "a/plain", Node: "a", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.9")}},
		{Name: "a/heddle", Node: "a", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.8")}, Planes: intercepted(true)},
		{Name: "b/plain", Node: "b", Addrs: []netip.Addr{netip.MustParseAddr("10.244.2.9")}},
		{Name: "a/moved", Node: "a", Addrs: []netip.Addr{netip.MustParseAddr("10.244.3.5")}},
		{Name: "lost/plain", Node: "gone", Addrs: []netip.Addr{netip.MustParseAddr("10.244.4.9")}},
	}
	// Of another network: one here, one there, a plain one there, and one that two nodes claim.
	other := &model.Adopted{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16")}}
	for i, e := range []model.Endpoint{{Node: "b", Planes: intercepted(true)}, {Node: "a", Planes: intercepted(true)}, {Node: "a"}, {Node: "a", Planes: intercepted(true)}} {
		e.Adopted, e.Addrs = other, []netip.Addr{netip.AddrFrom4([4]byte{10, 88, 1, byte(i)})}
		endpoints = append(endpoints, e)
	}
	endpoints = append(endpoints, model.Endpoint{Node: "plain", Planes: intercepted(true), Adopted: other, Addrs: []netip.Addr{netip.MustParseAddr("10.88.1.3")}})
	top := newTopology("b")
	top.change([]netip.Prefix{netip.MustParsePrefix("198.51.100.7/32"), netip.MustParsePrefix("2001:db8::7/128")}, nodes, model.EndpointsOf(endpoints...))
	routes, byUnderlay := top.contents(), top.byUnderlay
	const self, addr, direct, plain = heddleRouteFlagsROUTE_SELF, heddleRouteFlagsROUTE_NODE_ADDR, heddleRouteFlagsROUTE_DIRECT, heddleRouteFlagsROUTE_PLAIN
	const adopted = heddleRouteFlagsROUTE_ADOPTED
	want := map[string]heddleRouteFlags{
		"10.244.1.0/24":   direct,
		"10.244.1.1/32":   direct | plain, // a's gateway: a's own processes
		"10.244.1.9/32":   direct | plain,
		"10.244.2.0/24":   direct | self,
		"10.244.2.1/32":   addr,
		"192.0.2.2/32":    addr,
		"198.51.100.7/32": addr,
		"2001:db8::7/128": addr,
		"10.244.1.5/32":   direct | self,
		"10.244.2.5/32":   direct,
		"10.244.3.5/32":   direct | plain,
		"10.244.3.0/24":   0,
		"10.244.3.1/32":   plain,
		"10.88.0.0/16":    plain | adopted,
		"10.88.1.0/32":    direct | self | adopted,
		"10.88.1.1/32":    direct | adopted,
		"10.88.1.2/32":    direct | plain | adopted,
		"10.88.1.3/32":    plain | adopted,
	}
	if len(routes) != len(want) {
		t.Errorf("%d routes, want %d", len(routes), len(want))
	}
	for p, flags := range want {
		r, ok := routes[routeKey(netip.MustParsePrefix(p))]
		if !ok || heddleRouteFlags(r.Flags) != flags {
			t.Errorf("%s: flags %04b (found %v), want %04b", p, r.Flags, ok, flags)
		}
	}
	if r := routes[routeKey(netip.MustParsePrefix("10.244.1.0/24"))]; toAddr(r.Underlay) != underlayA || r.PortFirst != 17440 || r.PortLast != 17455 {
		t.Errorf("route to a: %+v", r)
	}
	if len(byUnderlay) != 3 {
		t.Errorf("%d nodes by underlay address, want 3", len(byUnderlay))
	}
}

// record gives one entry of the connection listing: direct, from 10.244.1.2:40000 to 10.244.2.2:80.
func record() heddleConnectionRecord {
	be := func(p uint16) uint16 { return p>>8 | p<<8 }
	return heddleConnectionRecord{
		Tag: heddleSockTag{
			EndpointId: 7, Path: uint8(heddleHeddlePathPATH_DIRECT),
			Flags: uint32(heddleSockTagFlagsTAG_LOCAL | heddleSockTagFlagsTAG_REMOTE),
			Local: fromAddr(overlayA), Remote: fromAddr(overlayB), RemotePort: be(80),
		},
		NodeLocal: fromAddr(underlayA), NodeRemote: fromAddr(underlayB),
		NodeLocalPort: be(40000), NodeRemotePort: be(17441), State: 1, Family: 2, BytesSent: 5, BytesReceived: 6,
	}
}

func TestParseConnections(t *testing.T) {
	direct := record()
	listener := record()
	listener.NodeRemotePort = 0
	listener.State, listener.Tag.Flags = tcpListen, uint32(heddleSockTagFlagsTAG_WILD)
	unused := record()
	unused.Tag.Path, unused.State = 0, 7
	var raw bytes.Buffer
	for _, r := range []heddleConnectionRecord{direct, listener, unused} {
		if err := binary.Write(&raw, binary.NativeEndian, &r); err != nil {
			t.Fatal(err)
		}
	}
	got, err := parseConnections(raw.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 {
		t.Fatalf("%d connections, want the direct one and the listener", len(got))
	}
	want := model.Connection{
		Endpoint: 7, State: "ESTABLISHED", Path: names.PathDirect,
		Local: netip.MustParseAddrPort("10.244.1.2:40000"), Remote: netip.MustParseAddrPort("10.244.2.2:80"),
		NodeLocal: netip.MustParseAddrPort("192.0.2.1:40000"), NodeRemote: netip.MustParseAddrPort("192.0.2.2:17441"),
		BytesSent: 5, BytesReceived: 6,
	}
	if got[0] != want {
		t.Errorf("got %+v\nwant %+v", got[0], want)
	}
	if l := got[1]; l.Path != model.PathListen || l.Local != netip.MustParseAddrPort("0.0.0.0:40000") || l.Remote.IsValid() {
		t.Errorf("listener: %+v", l)
	}
	if _, err := parseConnections(raw.Bytes()[:raw.Len()-1]); err == nil {
		t.Error("a cut record was accepted")
	}
}
