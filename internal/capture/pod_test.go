package capture

import (
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestMatchInPod: packets between the two stacks of one container have addresses of the node's
// only.
func TestMatchInPod(t *testing.T) {
	e := model.Endpoint{ID: 2, Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.3"), netip.MustParseAddr("fd48::af4:3")}}
	m := newMatcher(e, nil)
	for _, c := range [][4]string{
		{"250.0.8.1:40000", "127.128.4.1:80", "127.0.0.1:40000", "127.0.0.1:80"},
		{"127.128.4.1:80", "250.0.8.1:40000", "127.0.0.1:80", "127.0.0.1:40000"},
		{"250.0.9.254:40000", "10.244.0.3:80", "10.244.0.3:40000", "10.244.0.3:80"},
		{"127.128.5.255:80", "250.0.9.255:40000", "[::1]:80", "[::1]:40000"},
	} {
		p := packet{proto: protoTCP, l4: 20, src: netip.MustParseAddrPort(c[0]), dst: netip.MustParseAddrPort(c[1])}
		if src, dst, v := m.match(&p); v != verdictOurs || src.String() != c[2] || dst.String() != c[3] {
			t.Errorf("%s to %s: %s to %s, verdict %d; want %s to %s", c[0], c[1], src, dst, v, c[2], c[3])
		}
	}
	foreign := packet{proto: protoTCP, l4: 20, src: netip.MustParseAddrPort("250.0.12.1:40000"), dst: netip.MustParseAddrPort("127.128.6.1:80")}
	if src, dst, v := m.match(&foreign); v == verdictOurs {
		t.Errorf("another container's packet is taken for %s to %s", src, dst)
	}
}
