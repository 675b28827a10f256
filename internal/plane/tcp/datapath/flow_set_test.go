package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestFilterFlood: what others send does not make the programs forget whom a container asked, nor
// who opened its connections.
func TestFilterFlood(t *testing.T) {
	d := loadFilter(t)
	own, peer, other := policyPlace(2, 2, false), policyPlace(1, 2, false), policyPlace(1, 3, false)
	stranger := netip.MustParseAddr("203.0.113.7")
	out, in := d.objs.FromEndpoint, d.objs.FromOverlay
	asks := model.PairVerdict{Default: model.VerdictDrop, Ports: []model.PortVerdict{
		{Protocol: model.ProtocolTCP, First: 50, Last: 60, Verdict: model.VerdictAllow}, {Protocol: model.ProtocolUDP, First: 53, Last: 53, Verdict: model.VerdictAllow},
	}}
	tables := twoWays(own, peer, asks, model.PairVerdict{Default: model.VerdictDrop})
	apply(t, d, tables)
	answers := []step{
		{"answer", in, ip(peer, own, 17, datagram(53, 40)), allowed},
		{"SYN-ACK to the lower port", in, ip(peer, own, 6, segment(55, 40, tcpSYN|tcpACK)), allowed},
	}
	follow(t, d, []step{
		{"request", out, ip(own, peer, 17, datagram(40, 53)), allowed},
		{"SYN", out, ip(own, peer, 6, segment(40, 55, tcpSYN)), allowed},
	})
	follow(t, d, answers)
	flood := func(from, to netip.Addr, n int) {
		t.Helper()
		udp, tcp := ip(from, to, 17, datagram(0, 0)), ip(from, to, 6, segment(0, 0, tcpSYN))
		for i := range n {
			for _, frame := range [][]byte{udp, tcp} {
				binary.BigEndian.PutUint32(frame[34:], uint32(i)<<8|1<<30)
				if _, _, err := d.objs.ToEndpoint.Test(frame); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	flood(other, own, 30000)
	flood(stranger, own, 1000)
	follow(t, d, answers)
	// The floods had the sets of those that they were from, all of them.
	sets := map[uint32]int{}
	var (
		key heddleFlowSetKey
		set heddleFlowSet
	)
	it := d.objs.DatagramsByOwner.Iterate()
	for it.Next(&key, &set) {
		sets[key.Owner]++
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	of := func(a netip.Addr) int { return sets[fromAddr(a).Word[3]] }
	if of(other) < 4000 || of(own) != 1 || sets[0] < 500 || len(sets) != 3 {
		t.Errorf("sets: %d of the flood's sender, %d of the container's, %d of hosts outside, %d owners", of(other), of(own), sets[0], len(sets))
	}
}

// TestFilterForgetsClosed: connections that are closed make the programs forget none that lives,
// however many there are.
func TestFilterForgetsClosed(t *testing.T) {
	d := loadFilter(t)
	own, peer := policyPlace(2, 2, false), policyPlace(1, 2, false)
	apply(t, d, twoWays(own, peer, model.PairVerdict{}, model.PairVerdict{Default: model.VerdictDrop}))
	out, in := d.objs.FromEndpoint, d.objs.FromOverlay
	follow(t, d, []step{{"SYN", out, ip(own, peer, 6, segment(40, 55, tcpSYN)), allowed}})
	for i := range 30000 {
		for _, flags := range []byte{tcpSYN, []byte{tcpRST, 0x01 | tcpACK}[i%2]} {
			frame := ip(own, peer, 6, segment(0, 0, flags))
			binary.BigEndian.PutUint32(frame[34:], uint32(i)<<8|1<<30)
			if _, _, err := out.Test(frame); err != nil {
				t.Fatal(err)
			}
		}
	}
	follow(t, d, []step{{"data to the lower port", in, ip(peer, own, 6, segment(55, 40, tcpACK)), allowed}})
}
