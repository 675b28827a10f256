package lab

import (
	"strings"
	"testing"
)

// RouteNodes puts a router between the lab's two nodes, which answers in either one's place for the
// other's addresses, until the end of the test. translate has it translate what n1 sends and a rule
// matches, to its address router; more are chains beside that one.
func RouteNodes(t *testing.T) (router string, translate func(match, more string) (undo func())) {
	t.Helper()
	n1, n2 := Address(t, "host", "n1/c1"), Address(t, "host", "n2/c1")
	router = n2[:strings.LastIndex(n2, ".")] + ".200"
	forget := func() {
		for _, node := range []string{"n1", "n2"} {
			InNode(t, node, "ip", "neigh", "flush", "all")
		}
	}
	inFabric := func(script string) { Shell(t, Name+"-fabric", script) }
	t.Cleanup(func() {
		inFabric("ip addr flush dev n2; ip addr flush dev fabric; ip route flush table main; ip link set n2 master fabric")
		forget()
	})
	inFabric("set -e\nip link set n2 nomaster\nip addr add " + router + "/32 dev n2\nip route add " + n2 + "/32 dev n2\nip route add " + n1 + `/32 dev fabric
for s in n2/proxy_arp fabric/proxy_arp all/forwarding; do echo 1 >/proc/sys/net/ipv4/conf/$s; done
for s in n2 fabric all; do echo 0 >/proc/sys/net/ipv4/conf/$s/rp_filter; done`)
	forget()
	return router, func(match, more string) func() {
		return Spoil(t, "fabric", "ip", "chain c { type nat hook postrouting priority srcnat\n oifname n2 ip saddr "+n1+" "+match+" masquerade\n}\n"+more)
	}
}
