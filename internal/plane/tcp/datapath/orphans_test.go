package datapath

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// unowned are the hash maps whose entries belong to no endpoint of this node, and whose they are.
var unowned = map[string]string{
	"route_by_prefix": "nodes and their endpoints", "node_by_underlay": "nodes", "vtep_by_underlay": "nodes", "suspected_by_node": "nodes", "mapped_by_inner": "nodes", "mapped_by_outer": "nodes",
	"class_by_addr": "policy", "class_by_prefix": "policy", "verdict_by_pair": "policy", "verdict_by_port": "policy",
	"service_by_addr": "services", "backend_by_slot": "services", "member_by_backend": "services",
	"firewall_probes": "the firewall's watch: for as long as it asks", "forbidden_by_firewall": "the firewall's watch: for as long as it ends them",
	"group_by_listener": "sockets: the programs remove it with the last of them",
}

// TestEveryMapHasItsOwner: whoever adds a map says who its entries belong to.
func TestEveryMapHasItsOwner(t *testing.T) {
	spec, err := loadHeddle()
	if err != nil {
		t.Fatal(err)
	}
	var owned []string
	for _, m := range (&Datapath{}).ownedMaps() {
		owned = append(owned, m.name)
	}
	for name, m := range spec.Maps {
		if m.Type == ebpf.Hash || m.Type == ebpf.LPMTrie {
			if isOwned := slices.Contains(owned, name); isOwned == (unowned[name] != "") {
				t.Errorf("%s: compared with the endpoints: %v; otherwise owned by: %q", name, isOwned, unowned[name])
			}
		}
	}
}

// fillOwned gives every owned map an entry: of endpoint id with this address and device.
func fillOwned(t *testing.T, d *Datapath, id uint32, addr netip.Addr, ifindex uint32) {
	t.Helper()
	e := heddleEndpoint{Id: id, Addr4: fromAddr(addr), Ifindex: ifindex}
	put := func(m *ebpf.Map, key, value any) {
		t.Helper()
		if err := m.Put(key, value); err != nil {
			t.Fatal(err)
		}
	}
	first := id << 8
	put(d.objs.EndpointById, id, &e)
	put(d.objs.EndpointByAddr, e.Addr4, &e)
	put(d.objs.EndpointByIfindex, ifindex, &e)
	put(d.objs.AccountByEndpoint, id, &heddleAccount{})
	put(d.objs.SocketsByEndpoint, id, uint64(1))
	put(d.objs.PortsByEndpoint, id, &heddlePortAccount{})
	put(d.objs.NodePortsByEndpoint, id, &heddlePortAccount{})
	put(d.objs.LimitByEndpoint, id, &heddleLimit{Egress: heddleLimitSide{Rate: 1, Connections: first}})
	put(d.objs.SlotsByClass, first, &heddleLimitSlots{})
	put(d.objs.ClaimsByPort, &heddlePortKey{EndpointId: id, Port: 80}, &heddlePortbinds{})
}

// entries counts those of every owned map.
func entries(t *testing.T, d *Datapath) map[string]int {
	t.Helper()
	out := make(map[string]int)
	for _, m := range d.ownedMaps() {
		var key, value []byte
		it := m.entries.Iterate()
		for it.Next(&key, &value) {
			out[m.name]++
		}
		if err := it.Err(); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestOrphanEntriesGo: whatever an agent left of an endpoint that is not there goes, out of each
// map by itself, and is counted; what is there stays.
func TestOrphanEntriesGo(t *testing.T) {
	d := loadForTest(t)
	fillOwned(t, d, 5, overlayB, 505)
	if _, err := d.KeepEndpoints(map[model.EndpointID]bool{5: true}); err != nil { // what loadForTest gave it
		t.Fatal(err)
	}
	own := entries(t, d)
	if err := d.limitsInForce(true); err != nil {
		t.Fatal(err)
	}
	before := counters(t, d)[heddleHeddleReasonREASON_MEND_STRAY_ENTRY]
	total := uint64(0)
	for name := range own {
		fillOwned(t, d, 9, netip.MustParseAddr("10.244.2.9"), 909)
		// All but this map's entry have been removed, or were never written.
		keepOnly(t, d, name)
		removed, err := d.KeepEndpoints(map[model.EndpointID]bool{5: true})
		if err != nil || len(removed) != 1 || removed[name] != 1 {
			t.Errorf("%s: removed %v, %v", name, removed, err)
		}
		total++
	}
	fillOwned(t, d, 9, netip.MustParseAddr("10.244.2.9"), 909)
	moved := heddleEndpoint{Id: 5, Addr4: fromAddr(netip.MustParseAddr("10.244.2.8")), Ifindex: 808} // where it was before
	if err := d.objs.EndpointByAddr.Put(moved.Addr4, &moved); err != nil {
		t.Fatal(err)
	}
	if err := d.objs.EndpointByIfindex.Put(moved.Ifindex, &moved); err != nil {
		t.Fatal(err)
	}
	removed, err := d.KeepEndpoints(map[model.EndpointID]bool{5: true})
	if err != nil || len(removed) != len(own) || removed["endpoint_by_addr"] != 2 || removed["endpoint_by_ifindex"] != 2 {
		t.Errorf("removed %v, %v", removed, err)
	}
	for _, n := range removed {
		total += uint64(n)
	}
	if now := entries(t, d); !maps.Equal(now, own) {
		t.Errorf("left %v, want %v", now, own)
	}
	if n := counters(t, d)[heddleHeddleReasonREASON_MEND_STRAY_ENTRY] - before; n != total {
		t.Errorf("%d counted, want %d", n, total)
	}
	if removed, err := d.KeepEndpoints(nil); err != nil || len(removed) != len(own) || len(entries(t, d)) != 0 {
		t.Errorf("without endpoints: removed %v, left %v, %v", removed, entries(t, d), err)
	}
	var limits uint32
	if err := d.objs.LimitsInForce.Get(&limits); err != nil || limits != 0 {
		t.Errorf("limits in force: %d, %v", limits, err)
	}
}

// keepOnly removes the entries of endpoint 9 out of every map but the one called name.
func keepOnly(t *testing.T, d *Datapath, name string) {
	t.Helper()
	for _, m := range d.ownedMaps() {
		if m.name == name {
			continue
		}
		o := owners{ids: map[model.EndpointID]bool{5: true}, byID: map[uint32]heddleEndpoint{5: {Id: 5, Addr4: fromAddr(overlayB), Ifindex: 505}},
			classes: map[uint32]bool{5 << 8: true}, inUse: func() (map[model.EndpointID]bool, error) { return map[model.EndpointID]bool{}, nil }}
		if _, err := m.keep(o); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDeleteEndpointGoesOn: an endpoint that was forgotten in part is forgotten whole when that is
// tried again, and one whose device is another now is not known by the old one.
func TestDeleteEndpointGoesOn(t *testing.T) {
	d := loadForTest(t)
	e := model.Endpoint{ID: 9, Name: "z", Addrs: []netip.Addr{netip.MustParseAddr("10.244.2.9")}}
	own := entries(t, d)
	for _, ifindex := range []int{909, 910} {
		if err := d.SetEndpoint(e, ifindex, ContainerSide{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := entries(t, d)["endpoint_by_ifindex"]; n != own["endpoint_by_ifindex"]+1 {
		t.Errorf("%d devices", n)
	}
	if err := d.objs.EndpointById.Delete(uint32(e.ID)); err != nil {
		t.Fatal(err)
	}
	if err := d.DeleteEndpoint(e.ID); err != nil {
		t.Fatal(err)
	}
	if now := entries(t, d); !maps.Equal(now, own) {
		t.Errorf("left %v, want %v", now, own)
	}
}
