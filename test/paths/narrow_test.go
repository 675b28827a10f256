package paths

import (
	"fmt"
	"os/exec"
	"testing"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// A host behind the host outside, which is its router: on the way to it packets are narrower.
const (
	beyond, beyond6     = "192.0.2.2", "2001:db8:7::2"
	toBeyond, toBeyond6 = "192.0.2.1", "2001:db8:7::1"
)

// startBeyond starts a peer on such a host, which the nodes have a route to.
func startBeyond(t *testing.T) *lab.Peer {
	t.Helper()
	name, outside := lab.Name+"-beyond", lab.Name+"-outside"
	run := func(format string, args ...any) {
		t.Helper()
		if out, err := exec.Command("sh", "-ec", fmt.Sprintf(format, args...)).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", fmt.Sprintf(format, args...), err, out)
		}
	}
	testutil.NoError(t, netns.Create(name))
	t.Cleanup(func() { testutil.NoError(t, netns.Delete(name)) })
	run("ip -n %s link add narrow mtu 1300 type veth peer name eth0 netns %s", outside, name)
	for _, end := range []struct{ netns, device, addr, addr6, mtu string }{
		{outside, "narrow", toBeyond, toBeyond6, "1300"},
		{name, "eth0", beyond, beyond6, "1500"},
	} {
		run("ip -n %s addr add %s/24 dev %s", end.netns, end.addr, end.device)
		run("ip -n %s addr add %s/64 dev %s nodad", end.netns, end.addr6, end.device)
		run("ip -n %s link set %s mtu %s up", end.netns, end.device, end.mtu)
	}
	run("ip -n %s route add default via %s", name, toBeyond)
	run("ip -n %s route add default via %s", name, toBeyond6)
	run("ip netns exec %s sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1", outside)
	for to, router := range map[string]string{beyond: lab.OutsideTarget(t), beyond6: lab.Outside6(t).String()} {
		run("ip -n %s-n1 route add %s via %s dev eth0 onlink", lab.Name, to, router)
		t.Cleanup(func() { run("ip -n %s-n1 route del %s", lab.Name, to) })
	}
	return lab.RunEntered(t, name)
}

// TestNarrowBeyond: a router beyond the overlay that says that packets are too large is heard by the
// socket that sends them, where that is the node's and has the container's address: behind a port
// that the node translates, and bound.
func TestNarrowBeyond(t *testing.T) {
	client := startBeyond(t)
	const whole = 1 << 20
	const send, receive = `threading.Thread(target=lambda: (s.sendall(bytes(%d)), s.close())).start()`, `sum(iter(lambda: len(c.recv(65536)), 0))`
	for _, mode := range lab.Modes {
		t.Run(mode, func(t *testing.T) {
			p := lab.StartPeer(t, mode, "n1/c1")
			outer, inner, back := lab.FreePort(), lab.FreePort(), lab.FreePort()
			own := map[int]string{4: lab.Address(t, "overlay", "n1/c1"), 6: lab.Overlay6(t, "n1/c1")}
			lab.TranslateTo(t, "n1", map[int]string{outer: fmt.Sprintf("%s:%d", own[4], inner)}, map[int]string{outer: fmt.Sprintf("[%s]:%d", own[6], inner)})
			for family, at := range map[int]string{4: lab.Address(t, "host", "n1/c1"), 6: lab.Underlay6(t, "n1")} {
				p.Must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], inner)
				client.Must(`c = connect(%d, %q, %d)`, family, at, outer)
				p.Must(`s = l.accept()[0]`)
				p.Must(`l.close()`)
				p.Must(send, whole)
				client.Expect(fmt.Sprint(whole), receive)
			}
			for family, at := range map[int]string{4: beyond, 6: beyond6} {
				client.Must(`l = listen(%d, %q, %d)`, family, at, back)
				p.Must(`s = socket.socket(%s)`, map[int]string{4: "socket.AF_INET", 6: "socket.AF_INET6"}[family])
				p.Must(`s.bind((%q, 0))`, own[family])
				p.Must(`s.connect((%q, %d))`, at, back)
				client.Must(`c = l.accept()[0]`)
				client.Must(`l.close()`)
				p.Must(send, whole)
				client.Expect(fmt.Sprint(whole), receive)
			}
		})
	}
}
