package policy

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"heddle.dev/heddle/test/lab"
)

//go:embed testdata/policy.py
var policyScript string

// startPolicyPeer starts a peer that knows policy.py as well.
func startPolicyPeer(t testing.TB, mode, container string) *lab.Peer {
	t.Helper()
	p := lab.StartPeerAt(t, mode, container)
	p.Must("exec(%s)", lab.JSON(t, policyScript))
	return p
}

// policyPorts are the ports of one server. Servers of different modes cannot share a node's ports.
type policyPorts struct{ free, egressReject, egressDrop, ingressReject, ingressDrop int }

func newPolicyPorts() map[string]policyPorts {
	out := map[string]policyPorts{}
	for _, mode := range []string{"heddle", "overlay", "host"} {
		out[mode] = policyPorts{lab.FreePort(), lab.FreePort(), lab.FreePort(), lab.FreePort(), lab.FreePort()}
	}
	return out
}

func (p policyPorts) all() []int {
	return []int{p.free, p.egressReject, p.egressDrop, p.ingressReject, p.ingressDrop}
}

// policyPlaces are the places, and the host outside as a client.
func policyPlaces(t testing.TB) []lab.Place {
	t.Helper()
	lab.OutsideTargets(t, "n1/c1")
	return append(slices.Clone(lab.Places), lab.Place{Name: "from outside", Client: "outside", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: lab.FromHostModes})
}

// isEndpoint says whether rules about endpoints hold for a program.
func isEndpoint(mode, container string) bool { return mode != "host" && container != "outside" }

// want is what a connect to port must come to.
func (p policyPorts) want(pl lab.Place, m [2]string, port int) string {
	from, to := isEndpoint(m[0], pl.Client), isEndpoint(m[1], pl.Server)
	switch {
	case pl.Client == pl.Server && from && to: // an endpoint with itself
	case port == p.egressReject && from, port == p.ingressReject && to:
		return "ECONNREFUSED"
	case port == p.egressDrop && from, port == p.ingressDrop && to:
		return "hangs"
	}
	return "hi"
}

// policyTarget is one connect of attempts in policy.py: family, address, port, whether it hangs,
// source address.
type policyTarget [5]any

// targets are the connects to try at a place, in the families that try says: each port by IPv4 and,
// where the server is an endpoint, by IPv6; and from a socket that is bound, which takes another
// path.
func (p policyPorts) targets(t testing.TB, pl lab.Place, m [2]string, try func(pl lab.Place, family int) bool) (targets []policyTarget, want []string) {
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
	add(4, pl.Target(t), "")
	if isEndpoint(m[1], pl.Server) && pl.Client != pl.Server {
		add(6, lab.Overlay6(t, pl.Server), "")
	}
	if isEndpoint(m[0], pl.Client) && pl.Client != pl.Server {
		add(4, pl.Target(t), lab.Address(t, "overlay", pl.Client))
	}
	return targets, want
}

// policyPeers starts clients and servers at places, by container and mode; servers serve their
// mode's ports.
func policyPeers(t testing.TB, at []lab.Place, ports map[string]policyPorts) (clients, servers map[string]*lab.Peer) {
	t.Helper()
	clients, servers = map[string]*lab.Peer{}, map[string]*lab.Peer{}
	for _, pl := range at {
		for _, m := range pl.Modes {
			if key := pl.Client + m[0]; clients[key] == nil {
				clients[key] = startPolicyPeer(t, m[0], pl.Client)
			}
			if key := pl.Server + m[1]; servers[key] == nil {
				servers[key] = startPolicyPeer(t, m[1], pl.Server)
				servers[key].Must("serve(%s)", lab.JSON(t, ports[m[1]].all()))
			}
		}
	}
	return clients, servers
}

// TestPolicyPaths tries, at every place and in every pair of modes, ports that policy leaves alone,
// rejects and drops, by the rules of either end.
func TestPolicyPaths(t *testing.T) {
	ports := newPolicyPorts()
	var egress, ingress []map[string]any
	for _, p := range ports {
		egress = append(egress, lab.DenyRule("reject", p.egressReject), lab.DenyRule("drop", p.egressDrop))
		ingress = append(ingress, lab.DenyRule("reject", p.ingressReject), lab.DenyRule("drop", p.ingressDrop))
	}
	lab.ApplyPolicy(t, "paths", ingress, egress)
	tryPaths(t, policyPlaces(t), ports, func(lab.Place, int) bool { return true })
}

// TestPolicyCookies tries the paths to intercepted processes while the nodes answer every SYN with
// a cookie: the connection is then made of the last ACK alone.
func TestPolicyCookies(t *testing.T) {
	for _, node := range []string{"n1", "n2"} {
		lab.SetSysctl(t, node, "ipv4/tcp_syncookies", "2")
	}
	ports := newPolicyPorts()
	p := ports["heddle"]
	lab.ApplyPolicy(t, "cookies", []map[string]any{lab.DenyRule("reject", p.ingressReject), lab.DenyRule("drop", p.ingressDrop)},
		[]map[string]any{lab.DenyRule("reject", p.egressReject), lab.DenyRule("drop", p.egressDrop)})
	var at []lab.Place
	for _, pl := range policyPlaces(t) {
		pl.Modes = slices.DeleteFunc(slices.Clone(pl.Modes), func(m [2]string) bool { return m[1] != "heddle" })
		if len(pl.Modes) > 0 && pl.Client != pl.Server {
			at = append(at, pl)
		}
	}
	before := lab.KernelCounter(t, "n1", "SyncookiesRecv")
	// On one node a cookie's ACK over IPv6 does not find a listener on [::] (docs/differences.md).
	tryPaths(t, at, ports, func(pl lab.Place, family int) bool { return family == 4 || pl.Name != "same node" })
	if lab.KernelCounter(t, "n1", "SyncookiesRecv") == before {
		t.Error("no cookie came back: this has tried nothing")
	}
}

// tryPaths tries every port at every place, and compares what comes of it, and what is accepted,
// with what policy says.
func tryPaths(t *testing.T, at []lab.Place, ports map[string]policyPorts, try func(pl lab.Place, family int) bool) {
	t.Helper()
	clients, servers := policyPeers(t, at, ports)
	accepted := map[string]map[int]int{}
	for _, pl := range at {
		for _, m := range pl.Modes {
			t.Run(fmt.Sprintf("%s, %s to %s", pl.Name, m[0], m[1]), func(t *testing.T) {
				targets, want := ports[m[1]].targets(t, pl, m, try)
				var got []string
				answer(t, clients[pl.Client+m[0]], &got, "attempts(json.loads(%s), 0.5)", lab.JSON(t, lab.JSON(t, targets)))
				if !slices.Equal(got, want) {
					t.Errorf("connects to %v:\n%v, want\n%v", targets, got, want)
				}
				server := pl.Server + m[1]
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
func answer(t testing.TB, p *lab.Peer, into any, format string, args ...any) {
	t.Helper()
	raw := p.In(t).Must(format, args...)
	if err := json.Unmarshal([]byte(raw), into); err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
}

// TestPolicyDatagrams sends datagrams, whole and in fragments, between processes that are not
// intercepted, to ports that policy leaves alone, rejects and drops. Answers to what is allowed
// pass, although the other way all is forbidden.
func TestPolicyDatagrams(t *testing.T) {
	free, reject, drop := lab.FreePort(), lab.FreePort(), lab.FreePort()
	for _, path := range [][2]string{{"n1/c1", "n2/c1"}, {"n1/c1", "n1/c2"}} {
		client, server := startPolicyPeer(t, "overlay", path[0]), startPolicyPeer(t, "overlay", path[1])
		from := []string{lab.Address(t, "overlay", path[0]) + "/32", lab.Overlay6(t, path[0]) + "/128"}
		lab.ApplyDocument(t, map[string]any{
			"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "datagrams",
			"subject": map[string]any{"prefixes": from[:1]},
			"ingress": map[string]any{"default": "deny", "deny": "drop"},
			"egress": map[string]any{"rules": []map[string]any{
				{"action": "deny", "ports": []string{fmt.Sprintf("udp/%d", reject)}},
				{"action": "deny", "deny": "drop", "ports": []string{fmt.Sprintf("udp/%d", drop)}}}},
		})
		for _, port := range []int{free, reject, drop} {
			server.Must("answer_datagrams(%d)", port)
		}
		for family, addr := range map[int]string{4: lab.Address(t, "overlay", path[1]), 6: lab.Overlay6(t, path[1])} {
			for _, size := range []int{10, 4000} {
				client.Expect(fmt.Sprint(size), "datagram(%d, %q, %d, %d, False)", family, addr, free, size)
				client.Expect(`"silence"`, "datagram(%d, %q, %d, %d, True)", family, addr, drop, size)
			}
			// An error for a datagram in fragments would need all of them.
			client.Expect(`"ECONNREFUSED"`, "datagram(%d, %q, %d, 10, False)", family, addr, reject)
		}
	}
}
