package engines

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// otherNetwork is what exists beside Heddle: a subnet a node, and routes between the nodes.
const otherNetwork = "10.88.0.0/16"

func subnetOf(node string) string { return "10.88." + strings.TrimPrefix(node, "n") + ".0/24" }

// carrier gives a network of another plugin on both nodes, with heddle-cni behind it, and the same
// without.
func carrier(t *testing.T, plugin string) (behind, alone map[string]*lab.CNIEngine) {
	t.Helper()
	behind, alone = map[string]*lab.CNIEngine{}, map[string]*lab.CNIEngine{}
	for node, other := range map[string]string{"n1": "n2", "n2": "n1"} {
		route := []string{subnetOf(other), "via", lab.Address(t, "host", other+"/c1")}
		lab.InNode(t, node, append([]string{"ip", "route", "add"}, route...)...)
		t.Cleanup(func() {
			ns := "--net=" + netns.Path(lab.Name+"-"+node)
			if out, err := exec.Command("nsenter", append([]string{ns, "ip", "route", "del"}, route...)...).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
			_ = exec.Command("nsenter", ns, "ip", "link", "del", "cni0").Run() // ptp has none
		})
		ipam := fmt.Sprintf(`"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]],"routes":[{"dst":"0.0.0.0/0"}]}`, t.TempDir(), subnetOf(node))
		first := fmt.Sprintf(`{"type":%q,"bridge":"cni0","isGateway":true,%s}`, plugin, ipam)
		behind[node] = lab.NewCNIEngine(t, node, "chained", first+`,{"type":"heddle-cni","socket":"SOCKET","capabilities":{"bandwidth":true},"carried":["`+otherNetwork+`"],"labels":{"net":"other"}}`)
		alone[node] = lab.NewCNIEngine(t, node, "chained", first)       // of one name: it is host-local's key
		for _, e := range []*lab.CNIEngine{behind[node], alone[node]} { // Debian's plugins speak this version
			conf := bytes.ReplaceAll(e.List.Bytes, []byte(`"cniVersion":"1.1.0"`), []byte(`"cniVersion":"1.0.0"`))
			var err error
			if e.List, err = libcni.NetworkConfFromBytes(conf); err != nil {
				t.Fatal(err)
			}
		}
	}
	return behind, alone
}

// TestCNIChainedBridge and TestCNIChainedPtp: containers whose device and address are another
// plugin's; TCP between the intercepted goes direct, or over lo, and all else by the other network,
// as it would without Heddle.
func TestCNIChainedBridge(t *testing.T) {
	behind, alone := carrier(t, "bridge")
	addrs, peers := chained(t, behind, alone)
	obey(t, addrs, peers)
	keptFromStore(t, peers)
}

func TestCNIChainedPtp(t *testing.T) {
	behind, alone := carrier(t, "ptp")
	addrs, peers := chained(t, behind, alone)
	n1 := behind["n1"]
	// A restart of the agent, and a deletion while none runs.
	lab.EndAgent(t, "n1", syscall.SIGTERM)
	if err := n1.CNI.DelNetworkList(t.Context(), n1.List, n1.Conf("cni-b1")); err != nil {
		t.Errorf("delete: %v", err)
	}
	testutil.NoError(t, lab.Command("up"))
	if n1.Endpoint(n1.Conf("cni-b1")) != nil || n1.Endpoint(n1.Conf("cni-a1")) == nil {
		t.Error("the endpoint that was deleted is there, or another is not")
	}
	lab.ConnectPeers(t, peers["a2"], peers["a1"], addrs["a1"])
	lab.ConnectPeers(t, peers["p1"], peers["a1"], addrs["a1"])
	leavesNothing(t, n1, n1.Conf("cni-a1"), addrs["a1"])
}

// obey: policy holds on every path of such containers.
func obey(t *testing.T, addrs map[string]netip.Addr, peers map[string]*lab.Peer) {
	t.Helper()
	port := lab.FreePort()
	for _, p := range peers {
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		p.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(1); u.bind(("0.0.0.0", %d))`, port)
	}
	ports := []string{fmt.Sprintf("tcp/%d", port), fmt.Sprintf("udp/%d", port)}
	rule := []map[string]any{{"action": "deny", "ports": ports}}
	lab.ApplyDocument(t, map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "chained",
		"subject": map[string]any{"labels": map[string]string{"net": "other"}}, "ingress": map[string]any{"rules": rule}})
	for _, c := range [][2]string{{"a1", "a2"}, {"a1", "b1"}, {"p1", "a1"}, {"p2", "a1"}, {"p1", "a2"}} {
		from, to := peers[c[0]], addrs[c[1]]
		if got := from.Do(`error_of(connect, 4, %q, %d)`, to, port); got != `"ECONNREFUSED"` {
			t.Errorf("%s to %s: %s, want ECONNREFUSED", c[0], c[1], got)
		}
		from.Must(`u.sendto(b"x", (%q, %d))`, to, port)
		if got := peers[c[1]].Do(`error_of(u.recv, 10)`); got == `"ok"` {
			t.Errorf("%s to %s: a datagram came", c[0], c[1])
		}
	}
	for _, c := range [][2]string{{"a1", "p1"}, {"a1", "p2"}} {
		if got := peers[c[0]].Do(`error_of(connect, 4, %q, %d)`, addrs[c[1]], port); got != `"ok"` {
			t.Errorf("%s to %s: %s", c[0], c[1], got)
		}
	}
}

// keptFromStore: so is the store's port, for what is intercepted and what is not.
func keptFromStore(t *testing.T, peers map[string]*lab.Peer) {
	t.Helper()
	store := lab.Address(t, "host", "n1/c1")
	for name, c := range map[string]struct {
		peer *lab.Peer
		want string
	}{
		"intercepted":          {peers["a1"], `"ECONNREFUSED"`},
		"on another node":      {peers["a2"], `"ECONNREFUSED"`},
		"not intercepted":      {lab.RunEntered(t, lab.Name+"-cni-a1"), `"ECONNREFUSED"`},
		"of the other network": {peers["p1"], `"ok"`},
	} {
		if got := c.peer.Do(`error_of(connect, 4, %q, 2379)`, store); got != c.want {
			t.Errorf("store asked by a process that is %s: %s, want %s", name, got, c.want)
		}
	}
}

// chained has a1, b1 and a2 connect to each other and to the plain p1 and p2; the digit is the
// node's.
func chained(t *testing.T, behind, alone map[string]*lab.CNIEngine) (map[string]netip.Addr, map[string]*lab.Peer) {
	t.Helper()
	n1, n2 := behind["n1"], behind["n2"]
	addrs, peers := map[string]netip.Addr{}, map[string]*lab.Peer{}
	for id, e := range map[string]*lab.CNIEngine{"a1": n1, "b1": n1, "a2": n2, "p1": alone["n1"], "p2": alone["n2"]} {
		addrs[id], peers[id] = e.Joined("cni-" + id)
		if want := netip.MustParsePrefix(subnetOf(e.Node)); !want.Contains(addrs[id]) {
			t.Fatalf("%s has address %s, want one of %s", id, addrs[id], want)
		}
	}
	if err := n1.CNI.CheckNetworkList(t.Context(), n1.List, n1.Conf("cni-a1")); err != nil {
		t.Errorf("check: %v", err)
	}
	if e := n1.Endpoint(n1.Conf("cni-a1")); e == nil || e.Limits == nil || e.Limits.Egress != 1e9 {
		t.Errorf("limits of %+v, want the cap that was asked for", e)
	}
	name := func(id string) string { return "chained/cni-" + id + "/eth0" }
	awaitKnown(t, "n1", addrs["a2"])
	awaitKnown(t, "n2", addrs["a1"])
	for _, c := range []struct {
		from, to string
		path     model.Path // of the client, if it is intercepted
	}{
		{"a1", "a2", names.PathDirect},
		{"a2", "a1", names.PathDirect},
		{"a1", "b1", names.PathLocal},
		{"a1", "p1", names.PathOverlay},
		{"a1", "p2", names.PathOverlay},
		{"p1", "a1", model.PathNone},
		{"p1", "a2", model.PathNone},
		{"p2", "a1", model.PathNone},
		{"p1", "p2", model.PathNone},
	} {
		port := lab.FreePort()
		server, client := peers[c.to], peers[c.from]
		server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Must(`s = connect(4, %q, %d)`, addrs[c.to], port)
		server.Must(`c, who = l.accept()`)
		local := client.PortOf("s")
		want := fmt.Sprintf("[%q, %d]", addrs[c.from], local)
		if got := server.Do(`list(c.getpeername())`); got != want {
			t.Errorf("%s to %s: the server sees %s, want %s", c.from, c.to, got, want)
		}
		client.Must(`send(s, 300000)`)
		server.Must(`receive(c, 300000)`)
		if c.path != model.PathNone {
			e := behind["n"+c.from[1:]]
			if path := e.Path(name(c.from), local); path != c.path {
				t.Errorf("%s to %s: path %s, want %s", c.from, c.to, path, c.path)
			}
		}
		client.Must(`s.close()`)
		server.Must(`c.close()`)
		server.Must(`l.close()`)
	}
	// What is bound before takes the other network, from the address it is bound to.
	port, source := lab.FreePort(), lab.FreePort()
	peers["a2"].Must(`l = listen(4, "0.0.0.0", %d)`, port)
	peers["a1"].Must(`s = connect(4, %q, %d, (%q, %d))`, addrs["a2"], port, addrs["a1"], source)
	peers["a2"].Must(`c, who = l.accept()`)
	peers["a2"].Expect(fmt.Sprintf("[%q, %d]", addrs["a1"], source), `list(c.getpeername())`)
	peers["a1"].Must(`send(s, 5000)`)
	peers["a2"].Must(`receive(c, 5000)`)
	// Not TCP.
	peers["a2"].Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(5); u.bind(("0.0.0.0", %d))`, port)
	peers["a1"].Must(`v = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); v.sendto(b"x", (%q, %d))`, addrs["a2"], port)
	peers["a2"].Expect(fmt.Sprintf("%q", addrs["a1"]), `u.recvfrom(10)[1][0]`)

	return addrs, peers
}

// awaitKnown waits until node knows that addr is an endpoint of another.
func awaitKnown(t *testing.T, node string, addr netip.Addr) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("%s to know %s", node, addr), func() (bool, string) {
		out := lab.Heddle(t, "policy", "explain", addr.String(), addr.String(), "80", "--node", node)
		return strings.Contains(out, "chained/"), out
	})
}

// leavesNothing deletes an attachment and looks for what is left of it on the node.
func leavesNothing(t *testing.T, e *lab.CNIEngine, rt *libcni.RuntimeConf, addr netip.Addr) {
	t.Helper()
	heddleOnly, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":%q,"plugins":[%s]}`, e.List.Name, e.List.Plugins[1].Bytes))
	testutil.NoError(t, err)
	testutil.NoError(t, e.CNI.DelNetworkList(context.Background(), heddleOnly, rt))
	for _, argv := range [][]string{{"ip", "route", "show", "table", "18532"}, {"nft", "list", "table", "inet", "heddle"}} {
		if out := lab.InNode(t, e.Node, argv...); strings.Contains(out, addr.String()) {
			t.Errorf("%v shows %s:\n%s", argv, addr, out)
		}
	}
	links := lab.InNode(t, e.Node, "ip", "-o", "link", "show", "type", "veth")
	for line := range strings.Lines(links) {
		device, _, _ := strings.Cut(strings.Fields(line)[1], "@")
		if strings.HasPrefix(device, "hd") || strings.HasPrefix(device, "heddle-") {
			continue
		}
		if filters := lab.InNode(t, e.Node, "tc", "filter", "show", "dev", device, "egress"); strings.Contains(filters, "heddle:") && device != "eth0" {
			t.Errorf("device %s has %s", device, filters)
		}
	}
}
