package engines

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestCNIChainedFirewall: rules that another plugin has for its containers, in the forward chain
// and for the device that leads to one, are heeded by live connections past it: on one node, and
// between nodes on either.
func TestCNIChainedFirewall(t *testing.T) {
	lab.Another(t, "w", "--agent-arg=--overlay-firewall=1s")
	for _, plugin := range []string{"bridge", "ptp"} {
		t.Run(plugin, func(t *testing.T) {
			behind, _ := carrier(t, plugin)
			addrs, peers := map[string]netip.Addr{}, map[string]*lab.Peer{}
			for _, id := range []string{"a1", "b1", "a2"} {
				addrs[id], peers[id] = behind["n"+id[1:]].Joined("cni-" + id)
			}
			awaitKnown(t, "n1", addrs["a2"])
			awaitKnown(t, "n2", addrs["a1"])
			for _, c := range []struct {
				to, node string
				path     model.Path
			}{{"b1", "n1", names.PathLocal}, {"a2", "n2", names.PathDirect}, {"a2", "n1", names.PathDirect}} {
				t.Run("to "+c.to+" by a rule of "+c.node, func(t *testing.T) {
					// To the container on its node, or from the other one's.
					device := "-o " + deviceTo(t, c.node, addrs[c.to])
					if c.node != "n"+c.to[1:] {
						device = "-i " + deviceTo(t, c.node, addrs["a1"])
					}
					rule := fmt.Sprintf("FORWARD %s -p tcp -s %s -d %s -j DROP --dport", device, addrs["a1"], addrs[c.to])
					firewalledPod(t, behind["n1"], peers["a1"], peers[c.to], addrs[c.to], c.path, c.node, rule)
				})
			}
		})
	}
}

// firewalledPod opens two connections from one container to another and has a node forbid one, by a
// rule for its port; then one that is forbidden when it begins.
func firewalledPod(t *testing.T, e *lab.CNIEngine, client, server *lab.Peer, to netip.Addr, path model.Path, node, rule string) {
	t.Helper()
	goes, stays := lab.FreePort(), lab.FreePort()
	open := func(name string, port int) {
		t.Helper()
		server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Must(`%s = connect(4, %q, %d)`, name, to, port)
		server.Must(`%s, who = l.accept()`, name)
		server.Must(`l.close()`)
		if got := e.Path("chained/cni-a1/eth0", client.PortOf(name)); got != path {
			t.Fatalf("path %s, want %s", got, path)
		}
	}
	open("goes", goes)
	open("stays", stays)
	before := lab.Counters(t, "n1")["cut_firewall"]
	lab.InNode(t, node, append(strings.Fields("iptables -I "+rule), fmt.Sprint(goes))...)
	defer lab.InNode(t, node, append(strings.Fields("iptables -D "+rule), fmt.Sprint(goes))...)
	ends := func(what string, cut uint64) {
		t.Helper()
		began := time.Now()
		testutil.Eventually(t, what+" to end", func() (bool, string) {
			said := client.Must(`error_of(goes.recv, 1)`)
			return said == `"ECONNABORTED"`, said
		})
		t.Logf("%s ended after %s", what, time.Since(began).Round(time.Millisecond))
		if n := lab.Counters(t, "n1")["cut_firewall"] - before; n != cut {
			t.Errorf("cut_firewall rose by %d, want %d", n, cut)
		}
	}
	ends("the live connection", 1)
	server.Must(`goes.close()`)
	open("goes", goes) // it begins, and is judged then
	ends("the new connection", 2)
	client.Must(`send(stays, 5000)`)
	server.Must(`receive(stays, 5000)`)
	client.Must(`stays.close()`)
	server.Must(`stays.close(), goes.close()`)
}

// deviceTo gives the device by which a node reaches a container of its own.
func deviceTo(t *testing.T, node string, to netip.Addr) string {
	t.Helper()
	_, rest, found := strings.Cut(lab.InNode(t, node, "ip", "-o", "route", "get", to.String()), " dev ")
	if !found {
		t.Fatalf("%s has no route to %s", node, to)
	}
	return strings.Fields(rest)[0]
}
