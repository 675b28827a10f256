package model

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
)

// TestWireGuardNode: what a node may say of itself, and that a key has one spelling.
func TestWireGuardNode(t *testing.T) {
	inner := netip.MustParseAddr("100.72.0.1")
	good := WireGuardNode{Endpoint: netip.MustParseAddrPort("192.0.2.1:51872"), Prefix: netip.MustParsePrefix("100.72.0.0/16"), Key: PublicKey{1}, Next: PublicKey{2}}
	raw, err := json.Marshal(good)
	var again WireGuardNode
	if err == nil {
		err = json.Unmarshal(raw, &again)
	}
	if err != nil || again != good || good.Validate(inner) != nil {
		t.Fatalf("%s: %+v, %v, %v", raw, again, err, good.Validate(inner))
	}
	for what, c := range map[string]struct {
		change func(*WireGuardNode)
		want   string
	}{
		"no endpoint":        {func(w *WireGuardNode) { w.Endpoint = netip.AddrPort{} }, "endpoint"},
		"no port":            {func(w *WireGuardNode) { w.Endpoint = netip.MustParseAddrPort("192.0.2.1:0") }, "endpoint"},
		"endpoint inside":    {func(w *WireGuardNode) { w.Endpoint = netip.MustParseAddrPort("100.72.0.9:1") }, "reached through it"},
		"no prefix":          {func(w *WireGuardNode) { w.Prefix = netip.Prefix{} }, "prefix"},
		"prefix of loopback": {func(w *WireGuardNode) { w.Prefix = netip.MustParsePrefix("127.0.0.0/8") }, "prefix"},
		"long prefix":        {func(w *WireGuardNode) { w.Prefix = netip.MustParsePrefix("100.72.0.0/30") }, "prefix"},
		"other prefix":       {func(w *WireGuardNode) { w.Prefix = netip.MustParsePrefix("100.73.0.0/16") }, "underlay"},
		"no key":             {func(w *WireGuardNode) { w.Key = PublicKey{} }, "public_key"},
		"the same key":       {func(w *WireGuardNode) { w.Next = w.Key }, "next_key"},
	} {
		w := good
		c.change(&w)
		if err := w.Validate(inner); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
	}
	key := PublicKey{1}.String()
	for _, bad := range []string{"", "x", key[:40], key + "A", strings.TrimSuffix(key, "=") + "\n=", key[:42] + "B="} {
		var k PublicKey
		if err := k.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is taken for a key", bad)
		}
	}
}
