package store

import (
	"io"
	"log/slog"
	"net/netip"
	"reflect"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// FuzzView feeds keys and values from a store nobody vouches for. What is accepted must be what a
// writer of this schema would store, and states must keep the promises of State.
func FuzzView(f *testing.F) {
	const root = "/heddle/v1/1/"
	const node = `{"name":"n1","underlay":"10.0.0.1","prefixes":["10.1.0.0/24"],"vtep_mac":"","direct_ports":{"first":0,"last":0}}`
	f.Add(root+"nodes/n1", []byte(node))
	f.Add(root+"nodes/n2", []byte(`{"name":"n2","underlay":"fd00::1","prefixes":["10.1.1.0/24","10.1.2.0/30"],"new":{"a":[1]}}`))
	f.Add(root+"endpoints/n1/7", []byte(`{"id":7,"name":"n1/c1","node":"n1","addrs":["10.1.0.2"],"intercepted":true,"netns_path":"/x","labels":{"A":"b"},"created":"2026-01-02T03:04:05.6Z"}`))
	f.Add(root+"endpoints/n1/7", []byte(`{"id":7,"name":"c","node":"n1","addrs":["10.1.0.2","fd48:6464:1::a01:2"],"created":"2026-01-02T03:04:05Z"}`))
	f.Add(root+"endpoints/n1/7", []byte(`{"id":7,"name":"c","node":"n1","addrs":["10.1.0.2"],"limits":{"egress_bps":1000000,"dscp":46,"priority":"low"},"created":"2026-01-02T03:04:05Z"}`))
	f.Add(root+"network", []byte(`{"id":1,"pool":["10.1.0.0/16"],"node_prefix_len":24,"vni":1,"vxlan_port":4789}`))
	f.Add(root+"network", []byte(`{"id":1,"pool":["10.1.0.0/16"],"node_prefix_len":24,"prefix6":"fd48:6464:1::/96","vni":1,"vxlan_port":4789}`))
	f.Add(root+"addrs/n1/10.1.0.2", []byte("7"))
	f.Add(root+"holders/n1", []byte(`{"node":"n1","instance":"0123456789abcdef0123456789abcdef","underlay":"10.0.0.1","since":"2026-01-02T03:04:05Z"}`))
	f.Add(root+"away/n1", []byte(`{"node":"n1","since":"2026-01-02T03:04:05Z","seen":"2026-01-02T03:05:00Z"}`))
	f.Add(root+"moves/10.1.0.2", []byte(`{"addr":"10.1.0.2","node":"n1","from":"n2","home":"n2","name":"c","labels":{"A":"b"},"since":"2026-01-02T03:04:05Z"}`))
	f.Add(root+"endpoints/n1/7", []byte(`{"labels":{"a":"b","a":"c"}}`))
	f.Add(root+"policies/a", []byte(`{"name":"a","subject":{"labels":{"X":"y"}},"ingress":{"default":"deny","rules":[{"action":"allow","peers":[{"prefix":"10.0.0.0/8","except":["10.1.0.0/16"]}],"ports":["tcp/80"]}]}}`))
	f.Add(root+"policies/a/b", []byte(`{"name":"a/b","subject":{"namespace":{"name":"a"}},"egress":{"rules":[{"action":"deny","new":1}]}}`))
	f.Add(root+"namespaces/a", []byte(`{"name":"a","labels":{"X":"y"}}`))
	f.Add(root+"stacks/wan", []byte(`{"name":"wan","selector":{"labels":{"X":"y"}},"stack":"kernel","settings":{"congestion":"bbr","pacing_rate":"1mbit","keepalive":{"idle":"1m0s","interval":"10s","count":5}},"changeable":["congestion"]}`))
	f.Add(root+"congestion/c", []byte(`{"name":"c","sha256":"2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881","object":"eA=="}`))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		keys := KeysOf(1)
		v := NewView(keys, slog.New(slog.NewTextHandler(io.Discard, nil)), func() {})
		v.Set(keys.Node("n1"), []byte(node), 1)
		v.Set(key, value, 2)
		s := v.State(2)
		moved := 0
		for _, n := range s.Nodes {
			moved += len(n.Moved)
			n.Moved = nil // not its own to say
			b, err := EncodeNode(n)
			if err != nil {
				t.Fatalf("accepted %+v, but: %v", n, err)
			}
			if again, err := ParseNode(n.Name, b); err != nil || !reflect.DeepEqual(again, n) {
				t.Fatalf("%+v is read back as %+v, %v", n, again, err)
			}
		}
		if moved != len(s.Moves) {
			t.Fatalf("%d moves, of which nodes know %d", len(s.Moves), moved)
		}
		for _, p := range s.Stacks {
			b, err := EncodeStack(p)
			if err != nil {
				t.Fatalf("accepted %+v, but: %v", p, err)
			}
			if again, err := ParseStack(p.Name, b); err != nil || !reflect.DeepEqual(again, p) {
				t.Fatalf("%+v is read back as %+v, %v", p, again, err)
			}
		}
		for _, o := range s.Congestion {
			b, err := EncodeObject(o)
			if err != nil {
				t.Fatalf("accepted %+v, but: %v", o, err)
			}
			if again, err := ParseObject(o.Name, b); err != nil || !reflect.DeepEqual(again, o) {
				t.Fatalf("%+v is read back as %+v, %v", o, again, err)
			}
		}
		for _, m := range s.Moves {
			b, err := EncodeMove(m)
			if err != nil {
				t.Fatalf("accepted %+v, but: %v", m, err)
			}
			if again, err := ParseMove(m.Addr, b); err != nil || again.Node != m.Node || again.Addr != m.Addr {
				t.Fatalf("%s is read back as %+v, %v", b, again, err)
			}
		}
		for e := range s.Endpoints.All() {
			if len(s.Nodes) == 0 {
				t.Fatalf("endpoint %+v without a node", e)
			}
			if a := e.Addr6(); !e.Addr4().IsValid() || a.IsValid() && !model.Embeds(a, e.Addr4()) {
				t.Fatalf("addresses %v do not belong together", e.Addrs)
			}
			b, err := EncodeEndpoint(e)
			if err != nil {
				t.Fatalf("accepted %+v, but: %v", e, err)
			}
			if again, err := ParseEndpoint(e.Node, e.ID, b); err != nil || !again.Created.Equal(e.Created) || !reflect.DeepEqual(again.Addrs, e.Addrs) {
				t.Fatalf("%+v is read back as %+v, %v", e, again, err)
			}
		}
		for _, p := range s.Policies {
			b, err := EncodePolicy(p)
			if err != nil {
				t.Fatalf("accepted %+v, but: %v", p, err)
			}
			if again, err := ParsePolicy(p.Name, b); err != nil || !reflect.DeepEqual(again, p) {
				t.Fatalf("%s is read back as %+v, %v", b, again, err)
			}
		}
		for _, n := range s.Namespaces {
			if _, err := EncodeNamespace(n); err != nil {
				t.Fatalf("accepted %+v, but: %v", n, err)
			}
		}
		if n, err := ParseNetwork(1, value); err == nil {
			if _, err := EncodeNetwork(n); err != nil {
				t.Fatalf("accepted %+v, but: %v", n, err)
			}
			if n.Prefix6.IsValid() && model.Overlay4(n.Prefix6, model.Overlay6(n.Prefix6, n.Pool[0].Addr())) != n.Pool[0].Addr() {
				t.Fatalf("prefix6 %s does not map %s back", n.Prefix6, n.Pool[0].Addr())
			}
			if allocated, err := AllocatePrefixes(n, s.Nodes, model.Node{Name: "new", Underlay: netip.MustParseAddr("192.0.2.1")}); err == nil && !n.inPool(allocated.Prefixes[0]) {
				t.Fatalf("%s is outside pool %s", allocated.Prefixes, n.Pool)
			}
		}
		if id, err := ParseOwner(value); err == nil && string(EncodeOwner(id)) != string(value) {
			t.Fatalf("owner %q is read as %d", value, id)
		}
	})
}
