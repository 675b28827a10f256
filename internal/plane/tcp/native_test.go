package tcp

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// TestNeighbourProbe: an ICMP echo request, with both checksums right.
func TestNeighbourProbe(t *testing.T) {
	to := datapath.Neighbour{Peer: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Self: net.HardwareAddr{2, 0, 0, 0, 0, 2}}
	got := neighbourProbe(to, netip.MustParseAddr("10.244.0.1"), netip.MustParseAddr("10.244.1.1"), 0x480007)
	want := []byte{
		2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0,
		0x45, 0, 0, 28, 0, 0, 0, 0, 255, 1, 0xa4, 0xf7, 10, 244, 0, 1, 10, 244, 1, 1,
		8, 0, 0xf7, 0xb0, 0, 0x48, 0, 7,
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}
