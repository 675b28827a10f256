package tcp

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// TestNeighbourProbe: an echo request of ICMP, with all checksums right.
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
	got = neighbourProbe(to, netip.MustParseAddr("fd48:6464:1::10.244.0.1"), netip.MustParseAddr("fd48:6464:1::10.244.1.1"), 0x480007)
	want = []byte{
		2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd,
		0x60, 0, 0, 0, 0, 8, 58, 255,
		0xfd, 0x48, 0x64, 0x64, 0, 1, 0, 0, 0, 0, 0, 0, 10, 244, 0, 1, 0xfd, 0x48, 0x64, 0x64, 0, 1, 0, 0, 0, 0, 0, 0, 10, 244, 1, 1,
		128, 0, 0, 0, 0, 0x48, 0, 7,
	}
	sum := uint32(58 + 8) // the pseudo-header's, and what is summed with it
	for i := 22; i < len(want); i += 2 {
		sum += uint32(want[i])<<8 | uint32(want[i+1])
	}
	sum = sum&0xffff + sum>>16
	want[56], want[57] = byte(^sum>>8), byte(^sum)
	if !bytes.Equal(got, want) {
		t.Errorf("IPv6: %x, want %x", got, want)
	}
}
