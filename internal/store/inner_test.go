package store

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func encrypting(name, outer, prefix string, key byte) model.Node {
	return model.Node{Name: name, ReadsSchema: Schema, WireGuard: model.WireGuardNode{
		Endpoint: netip.AddrPortFrom(netip.MustParseAddr(outer), 51872), Prefix: netip.MustParsePrefix(prefix), Key: model.PublicKey{key}}}
}

// TestInnerAddresses: a node that encrypts gets an inner address of its own, and keeps it.
func TestInnerAddresses(t *testing.T) {
	network := Network{}.WithDefaults()
	var nodes []model.Node
	for i, want := range []string{"100.72.0.1", "100.72.0.2"} {
		n, err := AllocatePrefixes(network, nodes, encrypting([]string{"n1", "n2"}[i], []string{"192.0.2.1", "192.0.2.2"}[i], "100.72.0.0/16", byte(i+1)))
		if err != nil || n.Underlay != netip.MustParseAddr(want) {
			t.Fatalf("%s: %v, want %s", n.Underlay, err, want)
		}
		nodes = append(nodes, n)
	}
	if n, err := AllocatePrefixes(network, nodes[1:], encrypting("n2", "192.0.2.9", "100.72.0.0/16", 3)); err != nil || n.Underlay != nodes[1].Underlay {
		t.Errorf("a node that joins again: %v, %v, want %v", n.Underlay, err, nodes[1].Underlay)
	}
	plain := model.Node{Name: "n3", Underlay: netip.MustParseAddr("192.0.2.1")}
	var inUse *UnderlayInUseError
	if _, err := AllocatePrefixes(network, nodes, plain); !errors.As(err, &inUse) || inUse.Node != "n1" {
		t.Errorf("the address of a node that encrypts, again: %v", err)
	}
	var overlap *OverlapError
	if _, err := AllocatePrefixes(network, nodes, encrypting("n3", "192.0.2.3", "10.244.0.0/24", 3)); !errors.As(err, &overlap) {
		t.Errorf("inner addresses in the pool: %v", err)
	}
	full := nodes
	for i := range 6 {
		n := encrypting("m"+string('0'+rune(i)), "192.0.2.3", "100.80.0.0/29", byte(10+i))
		n.WireGuard.Endpoint = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(10 + i)}), 1)
		got, err := AllocatePrefixes(network, full, n)
		if err != nil {
			t.Fatal(err)
		}
		full = append(full, got)
	}
	if _, err := AllocatePrefixes(network, full, encrypting("n3", "192.0.2.3", "100.80.0.0/29", 3)); !errors.Is(err, ErrPoolExhausted) {
		t.Errorf("a seventh of six: %v", err)
	}
}

// TestReaders: no node of a build that would misread it hears of one that encrypts.
func TestReaders(t *testing.T) {
	n := encrypting("n1", "192.0.2.1", "100.72.0.0/16", 1)
	old := model.Node{Name: "n2", ReadsSchema: WireGuardSchema - 1}
	var readers *ReadersError
	if _, err := CheckReaders([]model.Node{n, old}, n); !errors.As(err, &readers) || readers.Node != "n2" {
		t.Errorf("beside an earlier build: %v", err)
	}
	old.Name = n.Name // it was one itself
	if schema, err := CheckReaders([]model.Node{old}, n); err != nil || schema != WireGuardSchema {
		t.Errorf("%d, %v", schema, err)
	}
	if schema, err := CheckReaders([]model.Node{old}, model.Node{Name: "n3"}); err != nil || schema != 0 {
		t.Errorf("a node that does not encrypt: %d, %v", schema, err)
	}
}

func byIPv6(name, outer, prefix string) model.Node {
	return model.Node{Name: name, ReadsSchema: Schema, IPv6: model.IPv6Underlay{Address: netip.MustParseAddr(outer), Prefix: netip.MustParsePrefix(prefix)}}
}

// TestIPv6Underlay: a node with an IPv6 address gets an inner one, and keeps it also when it begins
// to encrypt with the same prefix; what no node may have is refused, with the field's name.
func TestIPv6Underlay(t *testing.T) {
	network := Network{}.WithDefaults()
	n1, err := AllocatePrefixes(network, nil, byIPv6("n1", "fd00::1", "100.73.0.0/16"))
	if err != nil || n1.Underlay != netip.MustParseAddr("100.73.0.1") || n1.Outer() != n1.IPv6.Address || n1.VTEP() != n1.IPv6.Address {
		t.Fatalf("%+v, %v", n1, err)
	}
	n2, err := AllocatePrefixes(network, []model.Node{n1}, byIPv6("n2", "fd00::2", "100.73.0.0/16"))
	if err != nil || n2.Underlay != netip.MustParseAddr("100.73.0.2") {
		t.Fatalf("%+v, %v", n2, err)
	}
	value, err := EncodeNode(n2)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseNode("n2", value); err != nil || !got.Equal(&n2) {
		t.Errorf("read again: %+v, %v", got, err)
	}
	var inUse *UnderlayInUseError
	if _, err := AllocatePrefixes(network, []model.Node{n1, n2}, byIPv6("n3", "fd00::1", "100.73.0.0/16")); !errors.As(err, &inUse) || inUse.Node != "n1" {
		t.Errorf("another node's address: %v", err)
	}
	for address, want := range map[string]string{
		"fe80::1": "link-local", "::1": "want a unicast IPv6 address", "ff02::1": "want a unicast IPv6 address", "::ffff:192.0.2.1": "want a unicast IPv6 address", "192.0.2.1": "want a unicast IPv6 address",
	} {
		if _, err := AllocatePrefixes(network, nil, byIPv6("n1", address, "100.73.0.0/16")); err == nil || !strings.Contains(err.Error(), "ipv6_underlay: address "+address+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", address, err)
		}
	}
	both := encrypting("n1", "192.0.2.1", "100.72.0.0/16", 1)
	both.IPv6 = n1.IPv6
	if _, err := AllocatePrefixes(network, nil, both); err == nil || !strings.Contains(err.Error(), "wireguard's endpoint") {
		t.Errorf("encrypting and translated: %v", err)
	}
	old := model.Node{Name: "n9", ReadsSchema: IPv6UnderlaySchema - 1}
	var readers *ReadersError
	if _, err := CheckReaders([]model.Node{old}, n1); !errors.As(err, &readers) || !strings.Contains(err.Error(), "does not know of an IPv6 underlay") {
		t.Errorf("beside an earlier build: %v", err)
	}
	if schema, err := CheckReaders([]model.Node{n2}, n1); err != nil || schema != IPv6UnderlaySchema {
		t.Errorf("%d, %v", schema, err)
	}
}
