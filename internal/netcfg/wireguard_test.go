package netcfg

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"heddle.dev/heddle/internal/model"
)

// TestPeerChanges: what is as it should be is left alone; the address of a key that is replaced goes
// to the new one before the old one goes.
func TestPeerChanges(t *testing.T) {
	at := netip.MustParseAddrPort("192.0.2.2:51872")
	inner := netip.MustParseAddr("100.72.0.2")
	allowed := []net.IPNet{{IP: net.IP{100, 72, 0, 2}, Mask: net.CIDRMask(32, 32)}}
	old := wgtypes.Peer{PublicKey: wgtypes.Key{1}, Endpoint: net.UDPAddrFromAddrPort(at), AllowedIPs: allowed}
	next := wgtypes.Peer{PublicKey: wgtypes.Key{2}, Endpoint: net.UDPAddrFromAddrPort(at)}
	one := WireGuardPeer{Key: model.PublicKey{1}, Endpoint: at, Inner: inner}
	accepted := WireGuardPeer{Key: model.PublicKey{2}, Endpoint: at}
	now := time.Unix(10000, 0)
	if got := peerChanges([]wgtypes.Peer{old, next}, []WireGuardPeer{accepted, one}, now); len(got) != 0 {
		t.Errorf("nothing to do: %+v", got)
	}
	got := peerChanges([]wgtypes.Peer{old}, []WireGuardPeer{one, accepted}, now)
	if len(got) != 1 || got[0].PublicKey != next.PublicKey || len(got[0].AllowedIPs) != 0 || got[0].Remove {
		t.Errorf("a key that is accepted: %+v", got)
	}
	accepted.Inner = inner
	got = peerChanges([]wgtypes.Peer{old, next}, []WireGuardPeer{accepted}, now)
	if len(got) != 2 || got[0].PublicKey != next.PublicKey || got[0].AllowedIPs[0].String() != "100.72.0.2/32" || !got[0].ReplaceAllowedIPs ||
		got[1].PublicKey != old.PublicKey || !got[1].Remove {
		t.Errorf("a key that takes the place of another: %+v", got)
	}
	one.Endpoint = netip.MustParseAddrPort("192.0.2.9:51872")
	if got = peerChanges([]wgtypes.Peer{old}, []WireGuardPeer{one}, now); len(got) != 1 || got[0].Endpoint.String() != "192.0.2.9:51872" {
		t.Errorf("a node that is elsewhere: %+v", got)
	}
	heard := old
	heard.LastHandshakeTime = now.Add(1 - WireGuardSession)
	if got = peerChanges([]wgtypes.Peer{heard}, []WireGuardPeer{one}, now); len(got) != 0 {
		t.Errorf("a node with a session, heard from behind a router that translates: %+v", got)
	}
	heard.LastHandshakeTime = now.Add(-WireGuardSession)
	if got = peerChanges([]wgtypes.Peer{heard}, []WireGuardPeer{one}, now); len(got) != 1 || got[0].Endpoint.String() != "192.0.2.9:51872" {
		t.Errorf("a node whose session has ended: %+v", got)
	}
}

// TestGreetings: each peer gets an interval and loses it again, and nothing else of it changes.
func TestGreetings(t *testing.T) {
	greet, rest := greetings([]wgtypes.Peer{{PublicKey: wgtypes.Key{1}}, {PublicKey: wgtypes.Key{2}}})
	for i, c := range append(greet, rest...) {
		if c.PublicKey != (wgtypes.Key{byte(i%2 + 1)}) || !c.UpdateOnly || c.Remove || c.ReplaceAllowedIPs || c.AllowedIPs != nil || c.Endpoint != nil {
			t.Errorf("%d: %+v", i, c)
		}
		if on := *c.PersistentKeepaliveInterval > 0; on != (i < 2) {
			t.Errorf("%d: an interval of %v", i, *c.PersistentKeepaliveInterval)
		}
	}
}
