package test

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

//go:embed testdata/policy.py
var policyScript string

// startPolicyPeer starts a peer that knows policy.py as well.
func startPolicyPeer(t testing.TB, mode, container string) *peer {
	t.Helper()
	p := startPeerAt(t, mode, container)
	p.must("exec(%s)", quoted(t, policyScript))
	return p
}

func quoted(t testing.TB, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// rule denies these TCP ports, and says how.
func denyRule(deny string, ports ...int) map[string]any {
	var names []string
	for _, p := range ports {
		names = append(names, fmt.Sprintf("tcp/%d", p))
	}
	return map[string]any{"action": "deny", "deny": deny, "ports": names}
}

// applyPolicy puts a policy about every endpoint in force on all nodes, until the end of the test.
func applyPolicy(t testing.TB, name string, ingress, egress []map[string]any) {
	t.Helper()
	applyDocument(t, everybody(name, ingress, egress))
}

// everybody is a policy about every endpoint.
func everybody(name string, ingress, egress []map[string]any) map[string]any {
	doc := map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": name, "subject": map[string]any{}}
	if ingress != nil {
		doc["ingress"] = map[string]any{"rules": ingress}
	}
	if egress != nil {
		doc["egress"] = map[string]any{"rules": egress}
	}
	return doc
}

// applyDocument puts a policy in force on all nodes, until the end of the test.
func applyDocument(t testing.TB, doc map[string]any) {
	t.Helper()
	t.Cleanup(func() { // the test's context is over by then
		if out, err := exec.Command(heddleBin, "policy", "delete", "--all", "--lab", labName).CombinedOutput(); err != nil {
			t.Errorf("delete policies: %v\n%s", err, out)
		}
	})
	changePolicy(t, doc)
}

// changePolicy is applyDocument for one that is in force already.
func changePolicy(t testing.TB, doc map[string]any) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(file, []byte(quoted(t, doc)), 0o600); err != nil {
		t.Fatal(err)
	}
	heddle(t, "policy", "apply", "--lab", labName, "-f", file)
}

// policyPorts are the ports of one server. Servers of different modes cannot share a node's ports.
type policyPorts struct{ free, egressReject, egressDrop, ingressReject, ingressDrop int }

func newPolicyPorts() map[string]policyPorts {
	out := map[string]policyPorts{}
	for _, mode := range []string{"heddle", "overlay", "host"} {
		out[mode] = policyPorts{freePort(), freePort(), freePort(), freePort(), freePort()}
	}
	return out
}

func (p policyPorts) all() []int {
	return []int{p.free, p.egressReject, p.egressDrop, p.ingressReject, p.ingressDrop}
}

// policyPlaces are the places, and the host outside as a client.
func policyPlaces(t testing.TB) []place {
	t.Helper()
	outsideTargets(t, "n1/c1")
	return append(slices.Clone(places), place{"from outside", "outside", "n1/c1", overlayOf("n1/c1"), fromHost, false})
}

// outsideTargets gives the host outside routes to a container, until the end of the test, and its addresses by family.
func outsideTargets(t testing.TB, container string) map[int]string {
	t.Helper()
	node, _, _ := strings.Cut(container, "/")
	out := map[int]string{4: address(t, "overlay", container), 6: own6(t, container)}
	for to, via := range map[string]string{out[4] + "/32": address(t, "host", container), out[6] + "/128": underlay6(t, node)} {
		if out, err := exec.Command("ip", "-n", labName+"-outside", "route", "replace", to, "via", via).CombinedOutput(); err != nil {
			t.Fatalf("route of the outside: %v\n%s", err, out)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "-n", labName+"-outside", "route", "del", to).Run() })
	}
	return out
}

// underlay6 is a node's IPv6 address on the underlay.
func underlay6(t testing.TB, node string) string {
	t.Helper()
	out, err := exec.Command("ip", "-n", labName+"-"+node, "-6", "-json", "addr", "show", "dev", "eth0", "scope", "global").Output()
	var links []struct {
		Addrs []struct{ Local string } `json:"addr_info"`
	}
	if err == nil {
		err = json.Unmarshal(out, &links)
	}
	if err != nil || len(links) != 1 || len(links[0].Addrs) == 0 {
		t.Fatalf("IPv6 address of %s: %s %v", node, out, err)
	}
	return links[0].Addrs[0].Local
}

// isEndpoint says whether rules about endpoints hold for a program.
func isEndpoint(mode, container string) bool { return mode != "host" && container != "outside" }

// want is what a connect to port must come to.
func (p policyPorts) want(pl place, m [2]string, port int) string {
	from, to := isEndpoint(m[0], pl.client), isEndpoint(m[1], pl.server)
	switch {
	case pl.client == pl.server && from && to: // an endpoint with itself
	case port == p.egressReject && from, port == p.ingressReject && to:
		return "ECONNREFUSED"
	case port == p.egressDrop && from, port == p.ingressDrop && to:
		return "hangs"
	}
	return "hi"
}

// policyTarget is one connect of attempts in policy.py: family, address, port, whether it hangs, source address.
type policyTarget [5]any

// targets are the connects to try at a place, in the families that try says: each port by IPv4 and, where the server is an endpoint, by IPv6; and from
// a socket that is bound, which takes another path.
func (p policyPorts) targets(t testing.TB, pl place, m [2]string, try func(pl place, family int) bool) (targets []policyTarget, want []string) {
	add := func(family int, addr string, source string) {
		if !try(pl, family) {
			return
		}
		for _, port := range p.all() {
			w := p.want(pl, m, port)
			targets = append(targets, policyTarget{family, addr, port, w == "hangs", source})
			want = append(want, w)
		}
	}
	add(4, pl.target(t), "")
	if isEndpoint(m[1], pl.server) && pl.client != pl.server {
		add(6, own6(t, pl.server), "")
	}
	if isEndpoint(m[0], pl.client) && pl.client != pl.server {
		add(4, pl.target(t), address(t, "overlay", pl.client))
	}
	return targets, want
}

// policyPeers starts clients and servers at places, by container and mode; servers serve their mode's ports.
func policyPeers(t testing.TB, at []place, ports map[string]policyPorts) (clients, servers map[string]*peer) {
	t.Helper()
	clients, servers = map[string]*peer{}, map[string]*peer{}
	for _, pl := range at {
		for _, m := range pl.modes {
			if key := pl.client + m[0]; clients[key] == nil {
				clients[key] = startPolicyPeer(t, m[0], pl.client)
			}
			if key := pl.server + m[1]; servers[key] == nil {
				servers[key] = startPolicyPeer(t, m[1], pl.server)
				servers[key].must("serve(%s)", quoted(t, ports[m[1]].all()))
			}
		}
	}
	return clients, servers
}

// TestPolicyPaths tries, at every place and in every pair of modes, ports that policy leaves alone, rejects and drops, by
// the rules of either end.
func TestPolicyPaths(t *testing.T) {
	ports := newPolicyPorts()
	var egress, ingress []map[string]any
	for _, p := range ports {
		egress = append(egress, denyRule("reject", p.egressReject), denyRule("drop", p.egressDrop))
		ingress = append(ingress, denyRule("reject", p.ingressReject), denyRule("drop", p.ingressDrop))
	}
	applyPolicy(t, "paths", ingress, egress)
	tryPaths(t, policyPlaces(t), ports, func(place, int) bool { return true })
}

// TestPolicyCookies tries the paths to intercepted processes while the nodes answer every SYN with a cookie: the
// connection is then made of the last ACK alone.
func TestPolicyCookies(t *testing.T) {
	for _, node := range []string{"n1", "n2"} {
		setSysctl(t, node, "ipv4/tcp_syncookies", "2")
	}
	ports := newPolicyPorts()
	p := ports["heddle"]
	applyPolicy(t, "cookies", []map[string]any{denyRule("reject", p.ingressReject), denyRule("drop", p.ingressDrop)},
		[]map[string]any{denyRule("reject", p.egressReject), denyRule("drop", p.egressDrop)})
	var at []place
	for _, pl := range policyPlaces(t) {
		pl.modes = slices.DeleteFunc(slices.Clone(pl.modes), func(m [2]string) bool { return m[1] != "heddle" })
		if len(pl.modes) > 0 && pl.client != pl.server {
			at = append(at, pl)
		}
	}
	before := kernelCounter(t, "n1", "SyncookiesRecv")
	// On one node a cookie's ACK over IPv6 does not find a listener on [::] (docs/differences.md).
	tryPaths(t, at, ports, func(pl place, family int) bool { return family == 4 || pl.name != "same node" })
	if kernelCounter(t, "n1", "SyncookiesRecv") == before {
		t.Error("no cookie came back: this has tried nothing")
	}
}

// tryPaths tries every port at every place, and compares what comes of it, and what is accepted, with what policy says.
func tryPaths(t *testing.T, at []place, ports map[string]policyPorts, try func(pl place, family int) bool) {
	t.Helper()
	clients, servers := policyPeers(t, at, ports)
	accepted := map[string]map[int]int{}
	for _, pl := range at {
		for _, m := range pl.modes {
			t.Run(fmt.Sprintf("%s, %s to %s", pl.name, m[0], m[1]), func(t *testing.T) {
				targets, want := ports[m[1]].targets(t, pl, m, try)
				var got []string
				answer(t, clients[pl.client+m[0]], &got, "attempts(json.loads(%s), 0.5)", quoted(t, quoted(t, targets)))
				if !slices.Equal(got, want) {
					t.Errorf("connects to %v:\n%v, want\n%v", targets, got, want)
				}
				server := pl.server + m[1]
				if accepted[server] == nil {
					accepted[server] = map[int]int{}
				}
				for i, w := range want {
					if w == "hi" {
						accepted[server][targets[i][2].(int)]++
					}
				}
				var took map[int]int
				answer(t, servers[server], &took, "accepted")
				if !maps.Equal(took, accepted[server]) {
					t.Errorf("accepted by port: %v, want %v", took, accepted[server])
				}
			})
		}
	}
}

// answer has a peer carry out a line and decodes what it says.
func answer(t testing.TB, p *peer, into any, format string, args ...any) {
	t.Helper()
	raw := p.in(t).must(format, args...)
	if err := json.Unmarshal([]byte(raw), into); err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
}

// TestPolicyDatagrams sends datagrams, whole and in fragments, between processes that are not intercepted, to ports that
// policy leaves alone, rejects and drops. Answers to what is allowed pass, although the other way all is forbidden.
func TestPolicyDatagrams(t *testing.T) {
	free, reject, drop := freePort(), freePort(), freePort()
	for _, path := range [][2]string{{"n1/c1", "n2/c1"}, {"n1/c1", "n1/c2"}} {
		client, server := startPolicyPeer(t, "overlay", path[0]), startPolicyPeer(t, "overlay", path[1])
		from := []string{address(t, "overlay", path[0]) + "/32", own6(t, path[0]) + "/128"}
		applyDocument(t, map[string]any{
			"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "datagrams",
			"subject": map[string]any{"prefixes": from[:1]},
			"ingress": map[string]any{"default": "deny", "deny": "drop"},
			"egress": map[string]any{"rules": []map[string]any{
				{"action": "deny", "ports": []string{fmt.Sprintf("udp/%d", reject)}},
				{"action": "deny", "deny": "drop", "ports": []string{fmt.Sprintf("udp/%d", drop)}}}},
		})
		for _, port := range []int{free, reject, drop} {
			server.must("answer_datagrams(%d)", port)
		}
		for family, addr := range map[int]string{4: address(t, "overlay", path[1]), 6: own6(t, path[1])} {
			for _, size := range []int{10, 4000} {
				client.expect(fmt.Sprint(size), "datagram(%d, %q, %d, %d, False)", family, addr, free, size)
				client.expect(`"silence"`, "datagram(%d, %q, %d, %d, True)", family, addr, drop, size)
			}
			// An error for a datagram in fragments would need all of them.
			client.expect(`"ECONNREFUSED"`, "datagram(%d, %q, %d, 10, False)", family, addr, reject)
		}
	}
}
