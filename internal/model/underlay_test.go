package model

import (
	"net/netip"
	"testing"
)

// TestUnfitFamilies: nodes of one family with one prefix of inner addresses fit, and others are
// told apart by why.
func TestUnfitFamilies(t *testing.T) {
	at := func(outer, prefix string) Node {
		return Node{IPv6: IPv6Underlay{Address: netip.MustParseAddr(outer), Prefix: netip.MustParsePrefix(prefix)}}
	}
	plain, six := Node{Underlay: netip.MustParseAddr("192.0.2.1")}, at("fd00::1", "100.73.0.0/16")
	encrypted := Node{WireGuard: WireGuardNode{Endpoint: netip.MustParseAddrPort("[fd00::9]:51872"), Key: PublicKey{1}}}
	for _, c := range []struct {
		self, peer Node
		want       PlainReason
	}{
		{plain, plain, ""}, {six, at("fd00::2", "100.73.0.0/16"), ""}, {six, plain, PeerFamily}, {plain, six, SelfFamily},
		{six, at("fd00::2", "100.74.0.0/16"), OtherPrefix}, {six, six, SameEndpoint}, {six, encrypted, SelfPlain}, {encrypted, six, PeerPlain},
	} {
		if got := c.self.Unfit(c.peer); got != c.want {
			t.Errorf("%+v and %+v: %q, want %q", c.self, c.peer, got, c.want)
		}
	}
}
