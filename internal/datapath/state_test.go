package datapath

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestTopology checks what the programs are told about a network of three nodes, seen from b.
func TestTopology(t *testing.T) {
	ports := model.PortRange{First: 17440, Last: 17455}
	nodes := []model.Node{
		{Name: "a", Underlay: underlayA, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, DirectPorts: ports},
		{Name: "b", Underlay: underlayB, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}, DirectPorts: ports},
		{Name: "plain", Underlay: netip.MustParseAddr("192.0.2.3"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}},
	}
	// An address of b's lives on a, one of a's on b, and a plain endpoint has brought its own from a third.
	nodes[0].Moved = []netip.Addr{netip.MustParseAddr("10.244.2.5"), netip.MustParseAddr("10.244.3.5")}
	nodes[1].Moved = []netip.Addr{netip.MustParseAddr("10.244.1.5")}
	endpoints := []model.Endpoint{
		{Name: "a/plain", Node: "a", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.9")}},
		{Name: "a/heddle", Node: "a", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.8")}, Intercepted: true},
		{Name: "b/plain", Node: "b", Addrs: []netip.Addr{netip.MustParseAddr("10.244.2.9")}},
		{Name: "a/moved", Node: "a", Addrs: []netip.Addr{netip.MustParseAddr("10.244.3.5")}},
		{Name: "lost/plain", Node: "gone", Addrs: []netip.Addr{netip.MustParseAddr("10.244.4.9")}},
	}
	// Of another network: one here, one there, a plain one there, and one that two nodes claim.
	other := &model.Carried{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16")}}
	for i, e := range []model.Endpoint{{Node: "b", Intercepted: true}, {Node: "a", Intercepted: true}, {Node: "a"}, {Node: "a", Intercepted: true}} {
		e.Carried, e.Addrs = other, []netip.Addr{netip.AddrFrom4([4]byte{10, 88, 1, byte(i)})}
		endpoints = append(endpoints, e)
	}
	endpoints = append(endpoints, model.Endpoint{Node: "plain", Intercepted: true, Carried: other, Addrs: []netip.Addr{netip.MustParseAddr("10.88.1.3")}})
	routes, byUnderlay := topology("b", []netip.Prefix{netip.MustParsePrefix("198.51.100.7/32"), netip.MustParsePrefix("2001:db8::7/128")}, nodes, endpoints)
	const self, addr, direct, plain = heddleRouteFlagsROUTE_SELF, heddleRouteFlagsROUTE_NODE_ADDR, heddleRouteFlagsROUTE_DIRECT, heddleRouteFlagsROUTE_PLAIN
	const carried = heddleRouteFlagsROUTE_CARRIED
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
		"10.88.0.0/16":    plain | carried,
		"10.88.1.0/32":    direct | self | carried,
		"10.88.1.1/32":    direct | carried,
		"10.88.1.2/32":    direct | plain | carried,
		"10.88.1.3/32":    plain | carried,
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
			EndpointId: 7, Path: uint8(model.PathDirect),
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
		Endpoint: 7, State: "ESTABLISHED", Path: model.PathDirect,
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

// withMove now and then moves an address of n1 to another node or home, and has an endpoint take it up, or go.
func withMove(r *rand.Rand, nodes []model.Node, endpoints []model.Endpoint) ([]model.Node, []model.Endpoint) {
	addr := netip.MustParseAddr("10.244.1.99")
	if r.IntN(4) == 0 {
		nodes = slices.Clone(nodes)
		for i := range nodes {
			nodes[i].Moved = nil
		}
		if to := r.IntN(4); to != 1 {
			nodes[to].Moved = []netip.Addr{addr}
		}
	}
	endpoints = slices.DeleteFunc(endpoints, func(e model.Endpoint) bool { return e.Addr4() == addr })
	for _, n := range nodes {
		if slices.Contains(n.Moved, addr) && r.IntN(2) == 0 {
			endpoints = append(endpoints, model.Endpoint{ID: 9, Node: n.Name, Addrs: []netip.Addr{addr}, Intercepted: r.IntN(2) == 0})
		}
	}
	return nodes, endpoints
}

// TestTopologyFollowsChanges: whatever endpoints come, go and change, the map has what SetTopology would write anew.
func TestTopologyFollowsChanges(t *testing.T) {
	d := loadForTest(t)
	r := rand.New(rand.NewPCG(1, 1))
	var nodes []model.Node
	node := func(i int) model.Node {
		return model.Node{Name: fmt.Sprint("n", i), Underlay: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}),
			Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24)}}
	}
	for i := range 4 {
		nodes = append(nodes, node(i))
	}
	var endpoints []model.Endpoint
	for step := range 200 {
		endpoints = slices.Clone(endpoints)
		for range 1 + r.IntN(3) {
			on, id := r.IntN(5), model.EndpointID(1+r.IntN(5)) // n4 is not there, or not always
			e := model.Endpoint{ID: id, Node: fmt.Sprint("n", on), Intercepted: r.IntN(2) == 0,
				Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, byte(on), byte(20 + 10*r.IntN(2) + int(id))})}}
			same := func(o model.Endpoint) bool { return o.Node == e.Node && o.ID == e.ID }
			endpoints = slices.DeleteFunc(endpoints, same)
			if r.IntN(3) > 0 {
				endpoints = append(endpoints, e)
			}
		}
		slices.SortFunc(endpoints, func(a, b model.Endpoint) int {
			return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.ID, b.ID))
		})
		if step%20 == 10 {
			nodes = slices.Clone(nodes[:4])
			if r.IntN(2) == 0 {
				nodes = append(nodes, node(4))
			}
		}
		nodes, endpoints = withMove(r, nodes, endpoints)
		if err := d.SetTopology("n0", nil, nodes, endpoints); err != nil {
			t.Fatal(err)
		}
		want, _ := topology("n0", nil, nodes, endpoints)
		have := make(map[heddleRouteKey]heddleRoute)
		var k heddleRouteKey
		var v heddleRoute
		it := d.objs.RouteByPrefix.Iterate()
		for it.Next(&k, &v) {
			have[k] = v
		}
		if err := it.Err(); err != nil || !maps.Equal(have, want) {
			t.Fatalf("step %d: %d routes, want %d (%v)", step, len(have), len(want), err)
		}
	}
}
