package store

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func prefixes(texts ...string) (ps []netip.Prefix) {
	for _, s := range texts {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

func testNode(name, underlay string, ps ...string) model.Node {
	return model.Node{Name: name, Underlay: netip.MustParseAddr(underlay), Prefixes: prefixes(ps...)}
}

func TestNetworkDefaultsAreValid(t *testing.T) {
	n := Network{}.WithDefaults()
	if err := n.Validate(); err != nil {
		t.Error(err)
	}
	if n.Pool[0] != DefaultPool || n.NodePrefixLen != 24 || n.Prefix6.String() != "fd48:6464:1::/96" {
		t.Errorf("defaults %+v", n)
	}
	for want, wish := range map[string]Network{
		"fd48:6464:2a::/96": {ID: 42}, "fd01::/96": {Prefix6: netip.MustParsePrefix("fd01::/96")}, "none": {NoPrefix6: true},
	} {
		got := wish.WithDefaults()
		if err := got.Validate(); err != nil || prefix6Text(got.Prefix6) != want {
			t.Errorf("wish %+v: %s, %v, want %s", wish, prefix6Text(got.Prefix6), err, want)
		}
	}
}

func TestNetworkValidateNamesTheField(t *testing.T) {
	for field, change := range map[string]func(*Network){
		"network id":       func(n *Network) { n.ID = 4096 },
		"pool":             func(n *Network) { n.Pool = prefixes("10.0.0.0/8", "10.1.0.0/16") },
		"bits beyond":      func(n *Network) { n.Pool = prefixes("10.1.2.3/16") },
		"no room":          func(n *Network) { n.Pool = prefixes("10.0.0.0/25") },
		"unicast":          func(n *Network) { n.Pool = prefixes("127.0.0.0/16") },
		"a length of":      func(n *Network) { n.Pool = prefixes("0.0.0.0/0") },
		"node_prefix_len ": func(n *Network) { n.NodePrefixLen = 31 },
		"IPv4 prefix":      func(n *Network) { n.Pool = prefixes("fd00::/48") },
		"prefix6":          func(n *Network) { n.Prefix6 = netip.MustParsePrefix("fd00::/64") },
		"prefix6 fd":       func(n *Network) { n.NoPrefix6 = true },
		"vni":              func(n *Network) { n.VNI = 1 << 24 },
		"vxlan_port":       func(n *Network) { n.VXLANPort = 0 },
	} {
		n := Network{}.WithDefaults()
		change(&n)
		if err := n.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestCheckAgainstNamesTheField(t *testing.T) {
	inForce := Network{}.WithDefaults()
	if err := (Network{}).CheckAgainst(inForce); err != nil {
		t.Errorf("no wishes: %v", err)
	}
	for field, want := range map[string]Network{
		"id":              {ID: 2},
		"pool":            {Pool: prefixes("10.0.0.0/16")},
		"node_prefix_len": {NodePrefixLen: 25},
		"prefix6":         {Prefix6: netip.MustParsePrefix("fd01::/96")},
		"vni":             {VNI: 1},
		"vxlan_port":      {VXLANPort: 8472},
	} {
		var mismatch *MismatchError
		if err := want.CheckAgainst(inForce); !errors.As(err, &mismatch) || mismatch.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestKeysAreReadAsTheyAreWritten(t *testing.T) {
	k := KeysOf(7)
	a := netip.MustParseAddr("10.0.0.2")
	for key, want := range map[string]Key{
		k.Network():          {Kind: KeyNetwork},
		k.Node("n1"):         {Kind: KeyNode, Node: "n1"},
		k.Endpoint("n1", 12): {Kind: KeyEndpoint, Node: "n1", Endpoint: 12},
		k.Addr("n1", a):      {Kind: KeyAddr, Node: "n1", Addr: a},
		k.Policy("a"):        {Kind: KeyPolicy, Name: "a"},
		k.Policy("shop/a.b"): {Kind: KeyPolicy, Name: "shop/a.b"},
		k.Namespace("shop"):  {Kind: KeyNamespace, Name: "shop"},
		k.Root() + "new/x":   {Kind: KeyUnknown},
	} {
		if got, err := k.Parse(key); err != nil || got != want {
			t.Errorf("%s: %+v, %v", key, got, err)
		}
	}
	for _, bad := range []string{
		"", "/heddle/v1/8/network", k.Root() + "network/", k.Nodes(), k.Node("n1/x"), k.Node("N1"),
		k.Endpoints("n1"), k.Endpoints("n1") + "0", k.Endpoints("n1") + "07", k.Endpoints("n1") + "+7", k.Endpoints("n1") + "7/",
		k.Endpoints("n1") + "4194304", k.Endpoints("") + "7", k.Addrs("n1") + "10.0.0.1/", k.Addrs("n1") + "fd00::1", k.Addrs("n1") + "::ffff:10.0.0.1",
		k.Policies(), k.Policy("a/b/c"), k.Policy("A"), k.Policy("a/"), k.Namespaces(), k.Namespace("a.b"), k.Namespace("a/b"),
		k.Root() + "nodes", k.Root() + "endpoints", k.Root() + "new/" + strings.Repeat("x", 300),
	} {
		if got, err := k.Parse(bad); err == nil {
			t.Errorf("%s: %+v, want an error", bad, got)
		}
	}
}

func TestAllocatePrefixes(t *testing.T) {
	network := Network{Pool: prefixes("10.9.0.0/22", "10.8.0.0/24")}.WithDefaults()
	nodes := []model.Node{testNode("n1", "10.0.0.1", "10.9.0.0/24"), testNode("n2", "10.0.0.2", "10.9.1.128/25", "10.9.3.0/24")}
	allocate := func(n model.Node) string {
		got, err := AllocatePrefixes(network, nodes, n)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprint(got.Prefixes)
	}
	for _, c := range []struct{ what, want, got string }{
		{"free", "[10.9.2.0/24]", allocate(testNode("n3", "10.0.0.3"))},
		{"returning", "[10.9.0.0/24]", allocate(testNode("n1", "10.0.0.77"))},
		{"asks for a free one", "[10.9.1.0/25]", allocate(testNode("n3", "10.0.0.3", "10.9.1.0/25"))},
		{"asks for more", "[10.9.0.0/24 10.9.2.0/24]", allocate(testNode("n1", "10.0.0.1", "10.9.0.0/24", "10.9.2.0/24"))},
		{"overlap", "prefix 10.9.0.0/25 overlaps 10.9.0.0/24 of node n1", allocate(testNode("n3", "10.0.0.3", "10.9.0.0/25"))},
		{"outside", "prefix 10.7.0.0/24 overlaps addresses outside pool", allocate(testNode("n3", "10.0.0.3", "10.7.0.0/24"))},
		{"own overlap", "of the same node", allocate(testNode("n3", "10.0.0.3", "10.9.2.0/24", "10.9.2.0/25"))},
		{"underlay taken", "underlay address 10.0.0.2 belongs to node n2", allocate(testNode("n3", "10.0.0.2"))},
		{"underlay in pool", "overlaps underlay address 10.9.2.9", allocate(testNode("n3", "10.9.2.9"))},
		{"no underlay", "underlay: address invalid IP", allocate(model.Node{Name: "n3"})},
		{"no name", "node \"\"", allocate(testNode("", "10.0.0.3"))},
	} {
		if !strings.Contains(c.got, c.want) {
			t.Errorf("%s: %s, want %s", c.what, c.got, c.want)
		}
	}
	nodes = append(nodes, testNode("n3", "10.0.0.3", "10.9.2.0/24"))
	if got := allocate(testNode("n4", "10.0.0.4")); got != "[10.8.0.0/24]" {
		t.Errorf("first pool full: %s, want one of the second", got)
	}
	nodes = append(nodes, testNode("n4", "10.0.0.4", "10.8.0.0/24"))
	if _, err := AllocatePrefixes(network, nodes, testNode("n5", "10.0.0.5")); !errors.Is(err, ErrPoolExhausted) {
		t.Errorf("all full: %v", err)
	}
}

// TestNetworksOfBothKindsAreRead: a record without prefix6, such as one from before there was any,
// is an IPv4-only network.
func TestNetworksOfBothKindsAreRead(t *testing.T) {
	const common = `{"id":1,"pool":["10.1.0.0/16"],"node_prefix_len":24,"vni":1,"vxlan_port":4789`
	for value, want := range map[string]string{
		common + `}`:                              "none",
		common + `,"prefix6":""}`:                 "none",
		common + `,"node_prefix_len6":0}`:         "none",
		common + `,"prefix6":"fd48:6464:1::/96"}`: "fd48:6464:1::/96",
	} {
		n, err := ParseNetwork(1, []byte(value))
		if err != nil || prefix6Text(n.Prefix6) != want {
			t.Errorf("%s: %s, %v, want %s", value, prefix6Text(n.Prefix6), err, want)
		}
		if err := (Network{}).CheckAgainst(n); err != nil {
			t.Errorf("%s: no wish: %v", value, err)
		}
		if err := (Network{NoPrefix6: true}).CheckAgainst(n); (err == nil) != (want == "none") {
			t.Errorf("%s: wish for none: %v", value, err)
		}
		again, err := EncodeNetwork(n)
		if err != nil || strings.Contains(string(again), "prefix6") != (want != "none") {
			t.Errorf("%s: written as %s, %v", value, again, err)
		}
	}
	for _, bad := range []string{`"fd00::/64"`, `"10.0.0.0/8"`, `7`, `"fd00::1/96"`, `"::/96"`} {
		if n, err := ParseNetwork(1, []byte(common+`,"prefix6":`+bad+`}`)); err == nil {
			t.Errorf("prefix6 %s: %+v, want an error", bad, n)
		}
	}
}

func TestCheckEndpointTiesTheFamilies(t *testing.T) {
	network, n := Network{}.WithDefaults(), testNode("n1", "10.0.0.1", "10.244.1.0/24")
	check := func(network Network, addrs ...string) error {
		e := model.Endpoint{Node: "n1"}
		for _, a := range addrs {
			e.Addrs = append(e.Addrs, netip.MustParseAddr(a))
		}
		return CheckEndpoint(network, n, e, nil)
	}
	for _, good := range [][]string{{"10.244.1.2"}, {"10.244.1.2", "fd48:6464:1::af4:102"}} {
		if err := check(network, good...); err != nil {
			t.Errorf("%v: %v", good, err)
		}
	}
	for _, bad := range [][]string{{"10.244.2.2"}, {"10.244.2.2", "fd48:6464:1::af4:202"}, {"10.244.1.2", "fd48:6464:2::af4:102"}} {
		var outside *AddrOutsideError
		if err := check(network, bad...); !errors.As(err, &outside) {
			t.Errorf("%v: %v, want an AddrOutsideError", bad, err)
		}
	}
	if err := check(Network{}, "10.244.1.2", "fd48:6464:1::af4:102"); err == nil || !strings.Contains(err.Error(), "prefix6 none") {
		t.Errorf("IPv4-only network: %v", err)
	}
}

// TestFreePrefixAgainstExhaustiveSearch compares the jumping search with trying every prefix.
func TestFreePrefixAgainstExhaustiveSearch(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, pool := range prefixes("10.0.0.0/24", "255.255.255.0/24", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120") {
		width := pool.Addr().BitLen()
		for range 400 {
			var used []netip.Prefix
			for range rng.IntN(12) {
				offset := netip.PrefixFrom(addOffset(pool.Addr(), rng.IntN(256)), width-rng.IntN(8)).Masked()
				used = append(used, offset)
			}
			bits := width - rng.IntN(8)
			var want netip.Prefix
			for i := 0; i < 256 && !want.IsValid(); i += 1 << (width - bits) {
				if p := netip.PrefixFrom(addOffset(pool.Addr(), i), bits); !slices.ContainsFunc(used, p.Overlaps) {
					want = p
				}
			}
			if got, found := freePrefix(pool, bits, used); got != want || found != want.IsValid() {
				t.Fatalf("pool %s, /%d, used %v: %s, want %s", pool, bits, used, got, want)
			}
		}
	}
}

func addOffset(a netip.Addr, n int) netip.Addr {
	for range n {
		a = a.Next()
	}
	return a
}

func TestViewLeavesOutWhatContradictsOlderValues(t *testing.T) {
	k := KeysOf(1)
	invalid := 0
	v := NewView(k, slog.New(slog.NewTextHandler(io.Discard, nil)), func() { invalid++ })
	setNode := func(created int64, n model.Node) {
		value, err := EncodeNode(n)
		if err != nil {
			t.Fatal(err)
		}
		v.Set(k.Node(n.Name), value, created)
	}
	setEndpoint := func(node string, id model.EndpointID, addr string) {
		value, err := EncodeEndpoint(model.Endpoint{ID: id, Name: "c", Node: node, Addrs: []netip.Addr{netip.MustParseAddr(addr)}})
		if err != nil {
			t.Fatal(err)
		}
		v.Set(k.Endpoint(node, id), value, 9)
	}
	check := func(what, want string, wantInvalid int) {
		t.Helper()
		s := v.State(1)
		var names []string
		for _, n := range s.Nodes {
			names = append(names, n.Name)
		}
		for e := range s.Endpoints.All() {
			names = append(names, fmt.Sprintf("%s/%d", e.Node, e.ID))
		}
		if got := strings.Join(names, " "); got != want || invalid != wantInvalid {
			t.Errorf("%s: %s with %d invalid, want %s with %d", what, got, invalid, want, wantInvalid)
		}
	}
	setNode(5, testNode("b", "10.0.0.1", "10.1.0.0/24"))
	setNode(6, testNode("a", "10.0.0.2", "10.1.0.128/25"))
	setNode(7, testNode("c", "10.0.0.1", "10.1.1.0/24"))
	setEndpoint("b", 1, "10.1.0.2")
	setEndpoint("b", 2, "10.1.0.2")
	setEndpoint("b", 3, "10.1.9.2")
	setEndpoint("a", 4, "10.1.0.130")
	check("contradictions", "b b/1", 5)
	check("the same again", "b b/1", 5)
	v.Delete(k.Node("b"))
	check("the older node left", "a c a/4", 8) // its endpoints have lost their node: three for new reasons
	v.Set(k.Node("a"), []byte("{}"), 6)
	check("a valid value turned invalid", "c", 10)
	v.Set("/elsewhere", nil, 1)
	v.Delete("/elsewhere")
	check("foreign key", "c", 11)
	v.Reset()
	check("reset", "", 11)
}

func TestValuesThatReadersReject(t *testing.T) {
	const good = `{"name":"n1","underlay":"10.0.0.1","prefixes":["10.1.0.0/24"],"vtep_mac":"02:00:00:00:00:01","direct_ports":{"first":1,"last":2}}`
	if _, err := ParseNode("n1", []byte(good)); err != nil {
		t.Fatal(err)
	}
	if _, err := ParseNode("n1", []byte(strings.Replace(good, `{`, `{"from_the_future":{"x":[1,{"y":null}]},`, 1))); err != nil {
		t.Errorf("unknown member: %v", err)
	}
	card := func(gids string) string {
		return strings.Replace(good, `{`, `{"planes":{"tcp":{"direct_ports":{"first":1,"last":2}},"verbs":{"card":{"gids":[`+gids+`],"lid":3}}},`, 1)
	}
	n, err := ParseNode("n1", []byte(card(`"::ffff:10.1.0.1","fe80::1"`)))
	want := &model.VerbsCard{GIDs: []netip.Addr{netip.MustParseAddr("::ffff:10.1.0.1"), netip.MustParseAddr("fe80::1")}, LID: 3}
	if err != nil || !reflect.DeepEqual(n.Planes.Verbs.Card, want) {
		t.Errorf("card %+v, %v", n.Planes.Verbs.Card, err)
	}
	for what, value := range map[string]string{
		"card nowhere":       card(``),
		"card of IPv4":       card(`"10.1.0.1"`),
		"card of a zone":     card(`"fe80::1%eth0"`),
		"card at ::":         card(`"::"`),
		"card everywhere":    card(strings.Repeat(`"fe80::1",`, 8) + `"fe80::1"`),
		"empty":              ``,
		"null":               `null`,
		"array":              `[]`,
		"truncated":          good[:len(good)-1],
		"trailing data":      good + `{}`,
		"other name":         strings.Replace(good, `"n1"`, `"n2"`, 1),
		"member twice":       strings.Replace(good, `{`, `{"name":"n1",`, 1),
		"member twice below": strings.Replace(good, `"first":1`, `"first":1,"first":1`, 1),
		"other case":         strings.Replace(good, `"underlay"`, `"Underlay"`, 1),
		"folding letter":     strings.Replace(good, `"prefixes"`, `"prefixeſ"`, 1),
		"not UTF-8":          strings.Replace(good, `{`, "{\"x\":\"\xff\",", 1),
		"wrong type":         strings.Replace(good, `"10.0.0.1"`, `7`, 1),
		"zone":               strings.Replace(good, `"10.0.0.1"`, `"fe80::1%eth0"`, 1),
		"IPv4 in IPv6":       strings.Replace(good, `"10.0.0.1"`, `"::ffff:10.0.0.1"`, 1),
		"multicast underlay": strings.Replace(good, `"10.0.0.1"`, `"224.0.0.1"`, 1),
		"IPv6 prefix":        strings.Replace(good, `10.1.0.0/24`, `fd00::/120`, 1),
		"no prefix":          strings.Replace(good, `["10.1.0.0/24"]`, `[]`, 1),
		"host bits":          strings.Replace(good, `10.1.0.0/24`, `10.1.0.1/24`, 1),
		"overlapping":        strings.Replace(good, `["10.1.0.0/24"]`, `["10.1.0.0/24","10.1.0.0/25"]`, 1),
		"too many prefixes":  strings.Replace(good, `"10.1.0.0/24"`, strings.Repeat(`"10.1.0.0/24",`, 16)+`"10.1.0.0/24"`, 1),
		"multicast MAC":      strings.Replace(good, `"02:`, `"03:`, 1),
		"MAC spelling":       strings.Replace(good, `02:00:00:00:00:01`, `02-00-00-00-00-01`, 1),
		"ports":              strings.Replace(good, `"first":1`, `"first":3`, 1),
		"too long":           strings.Replace(good, `{`, `{"x":"`+strings.Repeat("x", maxValueBytes)+`",`, 1),
	} {
		if n, err := ParseNode("n1", []byte(value)); err == nil {
			t.Errorf("%s: %+v, want an error", what, n)
		}
	}
}

func TestEndpointsThatWritersRefuse(t *testing.T) {
	good := model.Endpoint{ID: 1, Name: "n1/c1", Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::a00:2")}, NetnsPath: "/run/x"}
	if _, err := EncodeEndpoint(good); err != nil {
		t.Fatal(err)
	}
	many := make(map[string]string)
	for i := range maxLabels + 1 {
		many[fmt.Sprint(i)] = ""
	}
	for what, change := range map[string]func(*model.Endpoint){
		"id 0":         func(e *model.Endpoint) { e.ID = 0 },
		"high id":      func(e *model.Endpoint) { e.ID = model.MaxEndpointID + 1 },
		"no node":      func(e *model.Endpoint) { e.Node = "" },
		"slash node":   func(e *model.Endpoint) { e.Node = "a/b" },
		"no name":      func(e *model.Endpoint) { e.Name = "" },
		"bad name":     func(e *model.Endpoint) { e.Name = "a//b" },
		"long name":    func(e *model.Endpoint) { e.Name = strings.Repeat("abc/", 50) + "a" },
		"carried":      func(e *model.Endpoint) { e.Adopted = &model.Adopted{Prefixes: prefixes("10.88.0.1/16")} },
		"device":       func(e *model.Endpoint) { e.Device = "a/b" },
		"CNI":          func(e *model.Endpoint) { e.CNI = &model.CNIAttachment{Network: "net", ContainerID: "../x"} },
		"no address":   func(e *model.Endpoint) { e.Addrs = nil },
		"one family":   func(e *model.Endpoint) { e.Addrs = []netip.Addr{e.Addrs[0], e.Addrs[0].Next()} },
		"three":        func(e *model.Endpoint) { e.Addrs = append(slices.Clone(e.Addrs), e.Addrs[1].Next()) },
		"IPv6 first":   func(e *model.Endpoint) { e.Addrs = []netip.Addr{e.Addrs[1], e.Addrs[0]} },
		"IPv6 only":    func(e *model.Endpoint) { e.Addrs = e.Addrs[1:] },
		"does not fit": func(e *model.Endpoint) { e.Addrs = []netip.Addr{e.Addrs[0], e.Addrs[1].Next()} },
		"zero address": func(e *model.Endpoint) { e.Addrs = []netip.Addr{{}} },
		"path":         func(e *model.Endpoint) { e.NetnsPath = "x" },
		"many labels":  func(e *model.Endpoint) { e.Labels = many },
		"label key":    func(e *model.Endpoint) { e.Labels = map[string]string{"": ""} },
		"label bytes":  func(e *model.Endpoint) { e.Labels = map[string]string{"a": "\xff"} },
		"label line":   func(e *model.Endpoint) { e.Labels = map[string]string{"a": "b\nc"} },
	} {
		e := good
		change(&e)
		if _, err := EncodeEndpoint(e); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

// An address of another network must be outside the pool, two nodes may register it, and readers
// see to the first as well.
func TestAdoptedEndpoints(t *testing.T) {
	network := Network{ID: 1, Pool: prefixes("10.0.0.0/8")}
	n := testNode("a", "192.0.2.1", "10.1.0.0/24")
	e := model.Endpoint{ID: 1, Name: "c", Node: "a", Adopted: &model.Adopted{}, Addrs: []netip.Addr{netip.MustParseAddr("172.16.0.2")}}
	if err := CheckEndpoint(network, n, e, nil); err != nil {
		t.Error(err)
	}
	held := map[netip.Addr]model.EndpointID{e.Addrs[0]: 1}
	if err := CheckHeld(network, n, held, nil); err != nil {
		t.Errorf("the node cannot join: %v", err)
	}
	e.Addrs[0] = netip.MustParseAddr("10.1.0.2")
	if err := CheckEndpoint(network, n, e, nil); err == nil {
		t.Error("an address of the pool was taken for another network's")
	}
	v := NewView(KeysOf(1), slog.New(slog.NewTextHandler(io.Discard, nil)), func() {})
	for i, name := range []string{"a", "b"} {
		value, err := EncodeNode(testNode(name, fmt.Sprintf("192.0.2.%d", i+1), fmt.Sprintf("10.1.%d.0/24", i)))
		if err != nil {
			t.Fatal(err)
		}
		v.Set(KeysOf(1).Node(name), value, int64(i))
		for id, addr := range map[model.EndpointID]string{1: "172.16.0.2", 2: "10.1.1.7"} {
			value, err := EncodeEndpoint(model.Endpoint{ID: id, Name: "c", Node: name, Adopted: &model.Adopted{}, Addrs: []netip.Addr{netip.MustParseAddr(addr)}})
			if err != nil {
				t.Fatal(err)
			}
			v.Set(KeysOf(1).Endpoint(name, id), value, 9)
		}
	}
	if s := v.State(1); s.Endpoints.Len() != 2 || s.Endpoints[0][0].ID != 1 || s.Endpoints[1][0].ID != 1 {
		t.Errorf("endpoints %+v, want both entries of another network's address, and none in a node's prefix", s.Endpoints)
	}
}
