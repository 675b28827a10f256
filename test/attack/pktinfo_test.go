package attack

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestPeersNodeIsNotTold has a listener on [::] ask for what IPV6_2292PKTOPTIONS tells of
// connections it accepts. Of a direct one that would be the underlay's address of the peer's node.
func TestPeersNodeIsNotTold(t *testing.T) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(6, "::", %d)`, port)
	server.Must(`[l.setsockopt(41, o, 1) for o in (49, 2)] and None`) // IPV6_RECVPKTINFO, IPV6_2292PKTINFO
	server.Expect(`[1, 1]`, `[l.getsockopt(41, o) for o in (49, 2)]`)
	client.Must(`s = tcp()`)
	client.Must(`s.connect((%q, %d))`, target, port)
	server.Must(`c, who = l.accept()`)
	server.Must(`[c.setsockopt(41, o, 1) for o in (49, 2)] and None`)
	server.Begin(`c.getsockopt(41, 6, 512).hex()`)
	told := server.Reply("IPV6_2292PKTOPTIONS")
	underlay := strings.TrimSpace(lab.InNode(t, "n1", "sh", "-c", "ip -4 -o addr show scope global | awk '{print $4}'"))
	for _, field := range strings.Fields(underlay) {
		a := netip.MustParsePrefix(field).Addr().As4()
		if strings.Contains(told, hex.EncodeToString(a[:])) {
			t.Errorf("the program was told %s, in which is %s of the peer's node", told, fmt.Sprint(netip.AddrFrom4(a)))
		}
	}
	if !strings.Contains(told, `"`) {
		t.Errorf("no answer: %s", told)
	}
}
