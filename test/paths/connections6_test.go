package paths

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// connections6 listens on every kind of IPv6 address, connects to each by a name that another end
// could have used, and prints the port each connection comes from. Arguments: own IPv6 address,
// first port.
const connections6 = `
import socket, sys
own, first = sys.argv[1], int(sys.argv[2])
def listen(i, host, v6only=0):
    s = socket.socket(socket.AF_INET6)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    s.bind((host, first + i)); s.listen(7)
    return s
listeners = [listen(0, "::"), listen(1, "::", 1), listen(2, own), listen(3, "::1")]
held = []
for i, host in [(0, own), (0, "::1"), (0, "127.0.0.1"), (1, own), (1, "::1"), (2, own), (3, "::1")]:
    c = socket.create_connection((host, first + i))
    a, _ = listeners[i].accept()
    held += [c, a]
    print("from", c.getsockname()[1], flush=True)
print("up", flush=True)
sys.stdin.read()
`

// TestConnectionsIPv6: what the node and what the container calls the ends of IPv6 listeners and
// connections.
func TestConnectionsIPv6(t *testing.T) {
	const container, first = "n1/c2", 23440
	own4, own := netip.MustParseAddr(lab.Address(t, "heddle", container)), lab.Address6(t, "heddle", container)
	lo4, lo := netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()
	p := lab.Start(t, "heddle", container, "python3", "-c", connections6, own.String(), fmt.Sprint(first))
	p.WaitFor("up")
	got := map[[2]netip.AddrPort]lab.ListedConnection{}
	list := lab.Connections(t, container, "--all")
	for _, c := range list {
		got[[2]netip.AddrPort{c.Local, c.Remote}] = c
	}
	// An alias of the node's loopback is wanted where its address is the container's loopback.
	check := func(shown, remote netip.AddrPort, node, nodeRemote netip.Addr) {
		t.Helper()
		c, ok := got[[2]netip.AddrPort{shown, remote}]
		if !ok {
			t.Errorf("%s to %s is not listed", shown, remote)
			return
		}
		for _, end := range []struct{ node, want netip.Addr }{{c.NodeLocal.Addr(), node}, {c.NodeRemote.Addr(), nodeRemote}} {
			is := end.node
			if a, alias := model.LoopbackShown(c.Endpoint, is); alias {
				is = a
			}
			if is != end.want {
				t.Errorf("%s to %s: %s to %s on the node, want %s to %s", shown, remote, c.NodeLocal, c.NodeRemote, node, nodeRemote)
			}
		}
	}
	at := func(a netip.Addr, i int) netip.AddrPort { return netip.AddrPortFrom(a, uint16(first+i)) }
	none := netip.AddrPort{}
	check(at(netip.IPv6Unspecified(), 0), none, own4, none.Addr())
	check(at(netip.IPv6Unspecified(), 1), none, own, none.Addr())
	check(at(own, 2), none, own, none.Addr())
	check(at(lo, 3), none, lo, none.Addr())
	ports := regexp.MustCompile(`from (\d+)`).FindAllStringSubmatch(p.Output(), -1)
	for i, x := range []struct {
		listener           int
		addr, server, from netip.Addr // as it was dialed, and both ends on the node
	}{{0, own, own, own}, {0, lo, own4, lo}, {0, lo4, own4, lo4}, {1, own, own, own}, {1, lo, own, own}, {2, own, own, own}, {3, lo, lo, lo}} {
		port, err := strconv.ParseUint(ports[i][1], 10, 16)
		testutil.NoError(t, err)
		client := netip.AddrPortFrom(x.addr, uint16(port))
		check(client, at(x.addr, x.listener), x.from, x.server)
		check(at(x.addr, x.listener), client, x.server, x.from)
	}
	if t.Failed() {
		t.Logf("%+v", list)
	}
	inside := strings.Join(strings.Fields(lab.Heddle(t, "connections", "--container", container, "--listening")), " ")
	for _, want := range []string{"[::]:23440 [::]:*", "[::]:23441 [::]:*", fmt.Sprintf("[%s]:23442 [::]:*", own), "[::1]:23443 [::]:*"} {
		if !strings.Contains(inside, "LISTEN 0 7 "+want+" listen") {
			t.Errorf("no listener %q in\n%s", want, inside)
		}
	}
	inside = lab.Heddle(t, "connections", "--container", container, "--state", "established")
	if n := strings.Count(inside, "ESTABLISHED"); n != 2*len(ports) || strings.Contains(inside, "127.128.") || strings.Contains(inside, own4.String()) {
		t.Errorf("%d connections, want %d, by no name of the node\n%s", n, 2*len(ports), inside)
	}
}
