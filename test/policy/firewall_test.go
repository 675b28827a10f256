package policy

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// firewallRules are an operator's own rules against packets between containers to a port: commands
// that put them into a node's namespace and take them out again.
var firewallRules = []struct{ name, in, out, says string }{
	{"nftables, RST", `nft 'table inet operator { chain forward { type filter hook forward priority 0; tcp dport %d reject with tcp reset; }; }'`, `nft delete table inet operator`, "ECONNREFUSED"},
	{"nftables, silence", `nft 'table inet operator { chain forward { type filter hook forward priority 0; tcp dport %d drop; }; }'`, `nft delete table inet operator`, "hangs"},
	{"iptables, RST", `%[2]s -I FORWARD -p tcp --dport %[1]d -j REJECT --reject-with tcp-reset`, `%[2]s -D FORWARD -p tcp --dport %[1]d -j REJECT --reject-with tcp-reset`, "ECONNREFUSED"},
}

// put puts the rule into a node and gives what takes it out.
func put(t *testing.T, node, in, out string, port, family int) (remove func()) {
	t.Helper()
	iptables := map[int]string{4: "iptables", 6: "ip6tables"}[family]
	run := func(line string) {
		if strings.Contains(line, "%") {
			line = strings.ReplaceAll(strings.ReplaceAll(line, "%[1]d", fmt.Sprint(port)), "%[2]s", iptables)
			line = strings.ReplaceAll(line, "%d", fmt.Sprint(port))
		}
		lab.Shell(t, lab.Name+"-"+node, line)
	}
	there := true
	run(in)
	remove = func() {
		if there {
			there = false
			run(out)
		}
	}
	t.Cleanup(remove)
	return remove
}

// TestOverlayFirewall: an operator's rules in the forward chain of either node see the first
// connection from a container to an address and port, and one each time that it may go past them is
// over; the others go direct. Without --overlay-firewall they see none.
func TestOverlayFirewall(t *testing.T) {
	t.Run("without", func(t *testing.T) {
		client, port := startPolicyPeer(t, "heddle", "n1/c1"), lab.FreePort()
		startPolicyPeer(t, "heddle", "n2/c1").Must("serve([%d])", port)
		put(t, "n1", firewallRules[0].in, firewallRules[0].out, port, 4)
		client.Must("opened(4, %q, %d)", lab.Address(t, "overlay", "n2/c1"), port)
	})
	lab.Another(t, "w", "--agent-arg=--overlay-firewall=1s")
	for _, family := range []int{4, 6} {
		address := map[int]func(testing.TB, string) string{4: func(t testing.TB, c string) string { return lab.Address(t, "overlay", c) }, 6: lab.Overlay6}[family]
		for _, server := range []string{"n2/c1", "n1/c2"} {
			for _, node := range []string{"n1", server[:2]}[:map[bool]int{true: 1, false: 2}[server[:2] == "n1"]] {
				for _, r := range firewallRules {
					t.Run(fmt.Sprintf("IPv%d to %s by a rule of %s/%s", family, server, node, r.name), func(t *testing.T) {
						client, port := startPolicyPeer(t, "heddle", "n1/c1"), lab.FreePort()
						startPolicyPeer(t, "heddle", server).Must("serve([%d])", port)
						try := fmt.Sprintf("attempts([[%d, %q, %d, %s, '']], 1)[0]", family, address(t, server), port, map[bool]string{true: "True", false: "False"}[r.says == "hangs"])
						remove := put(t, node, r.in, r.out, port, family)
						client.Expect(fmt.Sprintf("%q", r.says), "%s", try)
						remove()
						client.Expect(`"hi"`, "%s", try)
						put(t, node, r.in, r.out, port, family)
						testutil.Eventually(t, "the rule to be noticed", func() (bool, string) {
							said := client.Must("%s", try)
							return said == fmt.Sprintf("%q", r.says), said
						})
					})
				}
			}
		}
	}
	t.Run("goes direct", firewallPassed)
	t.Run("live", firewallLive)
	t.Run("bytes", firewallBytes)
	t.Run("a port that waits", firewallWaits)
	t.Run("bound to IPv6", firewallBound6)
	t.Run("own loopback", firewallOwnLoopback)
}

// firewallOwnLoopback: what a client on [::] sends to ::1 stays in its container: no forward chain
// sees it.
func firewallOwnLoopback(t *testing.T) {
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	p.Must(`l = listen(6, "::", %d, v6only=1)`, port)
	put(t, "n1", firewallRules[0].in, firewallRules[0].out, port, 6)
	p.Must(`bound(6, "::", 0).connect(("::1", %d))`, port)
}

// firewallPassed: the forward chains see one SYN of many connections, and the rest is direct, or
// local.
func firewallPassed(t *testing.T) {
	for _, c := range []struct{ server, counter string }{{"n2/c1", "connect_direct"}, {"n1/c2", "connect_local"}} {
		client, port := startPolicyPeer(t, "heddle", "n1/c1"), lab.FreePort()
		startPolicyPeer(t, "heddle", c.server).Must("serve([%d])", port)
		before := lab.Counters(t, "n1")
		client.Must("[opened(4, %q, %d).close() for _ in range(50)]", lab.Address(t, "overlay", c.server), port)
		after := lab.Counters(t, "n1")
		through, past := after["fallback_firewall"]-before["fallback_firewall"], after[c.counter]-before[c.counter]
		if through == 0 || past == 0 || through+past != 50 {
			t.Errorf("to %s: %d connections went by the firewall, %d were counted by %s; want 50 in all, some of each", c.server, through, past, c.counter)
		}
	}
}

// past opens a connection that goes past the forward chains, and names it name.
func past(t *testing.T, client *lab.Peer, name string, family int, address string, port int) {
	t.Helper()
	testutil.Eventually(t, "a connection past the forward chains", func() (bool, string) {
		client.Must("%s = opened(%d, %q, %d)", name, family, address, port)
		own := client.PortOf(name)
		for _, c := range lab.Connections(t, "n1/c1") {
			if c.Local.Port() == own && c.Remote.Port() == uint16(port) && (c.Path == names.PathDirect || c.Path == names.PathLocal) {
				return true, ""
			}
		}
		client.Must("%s.close()", name)
		return false, "it goes by them"
	})
}

// firewallLive: live connections past the forward chains end when either node's would not let them
// pass any more, by IPv4 and IPv6, also those that only wait; the others live on, and listeners
// never see what asks.
func firewallLive(t *testing.T) {
	client := startPolicyPeer(t, "heddle", "n1/c1")
	servers := map[string]*lab.Peer{"n2/c1": startPolicyPeer(t, "heddle", "n2/c1"), "n1/c2": startPolicyPeer(t, "heddle", "n1/c2")}
	for _, r := range firewallRules {
		t.Run(r.name, func(t *testing.T) {
			stays, ports := lab.FreePort(), map[string]int{"n1": lab.FreePort(), "n2": lab.FreePort()}
			var goes, alive []string
			for where, server := range servers {
				server.Must("serve([%d, %d, %d])", stays, ports["n1"], ports["n2"])
				addresses := map[int]string{4: lab.Address(t, "overlay", where)}
				if !strings.HasPrefix(r.in, "%[2]s") { // the rule is for one family
					addresses[6] = lab.Overlay6(t, where)
				}
				for family, address := range addresses {
					for node, port := range map[string]int{"": stays, "n1": ports["n1"], "n2": ports["n2"]} {
						name := fmt.Sprintf("live%d", len(goes)+len(alive))
						past(t, client, name, family, address, port)
						if node == "" || node == "n2" && where == "n1/c2" {
							alive = append(alive, name)
						} else {
							goes = append(goes, name)
						}
					}
				}
			}
			before := lab.Counters(t, "n1")["cut_firewall"]
			for node, port := range ports {
				defer put(t, node, r.in, r.out, port, 4)()
			}
			for _, name := range goes {
				client.Expect(`"ECONNABORTED"`, "outcome(%s, False)", name)
			}
			for _, name := range alive {
				client.Expect(`"alive"`, "outcome(%s, True)", name)
			}
			if n := lab.Counters(t, "n1")["cut_firewall"] - before; n != uint64(len(goes)) {
				t.Errorf("cut_firewall rose by %d, want %d", n, len(goes))
			}
		})
	}
}

// firewallBytes: a connection that goes by the firewall carries any amount both ways, the ends have
// the names that they have elsewhere, and one from a port whose last connection waits on the
// server's side is let in.
func firewallBytes(t *testing.T) {
	const large = 8 << 20
	for _, server := range []string{"n2/c1", "n1/c2"} {
		for _, mode := range lab.Modes {
			t.Run(server+", "+mode, func(t *testing.T) {
				client, peer, port, own := startPolicyPeer(t, "heddle", "n1/c1"), startPolicyPeer(t, mode, server), lab.FreePort(), lab.FreePort()
				target, source := lab.Address(t, "overlay", server), lab.Address(t, "overlay", "n1/c1")
				peer.Must(`l = listen(4, "0.0.0.0", %d)`, port)
				for range 2 {
					client.Must(`s = connect(4, %q, %d, (%q, %d))`, target, port, source, own)
					peer.Must(`a = l.accept()[0]`)
					client.Expect(fmt.Sprintf(`[[%q, %d], [%q, %d]]`, source, own, target, port), `names(s)`)
					peer.Expect(fmt.Sprintf(`[[%q, %d], [%q, %d]]`, target, port, source, own), `names(a)`)
					client.Must(`send(s, %d)`, large)
					peer.Must(`send(a, %d)`, large)
					whole := client.Must(`digest(pattern(%d))`, large)
					client.Expect(whole, `receive(s, %d)`, large)
					peer.Expect(whole, `receive(a, %d)`, large)
					peer.Must(`drained(), a.close()`)
					client.Must(`drained(), s.recv(1), s.close()`)
				}
			})
		}
	}
}

// firewallWaits: a connection of the container's own stack from a port at which one of a node
// socket waits, to the same place, gets its answers.
func firewallWaits(t *testing.T) {
	client, plain, server, port, own := startPolicyPeer(t, "heddle", "n1/c1"), startPolicyPeer(t, "overlay", "n1/c1"), startPolicyPeer(t, "overlay", "n2/c1"), lab.FreePort(), lab.FreePort()
	target, source := lab.Address(t, "overlay", "n2/c1"), lab.Address(t, "overlay", "n1/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d, (%q, %d))`, target, port, source, own)
	server.Must(`a = l.accept()[0]`)
	client.Must(`s.shutdown(1)`)
	server.Must(`a.recv(1), a.close()`)
	client.Must(`s.recv(1), s.close()`)
	plain.Must(`s = connect(4, %q, %d, (%q, %d))`, target, port, source, own)
	server.Must(`a = l.accept()[0]`)
	plain.Must(`send(s, 100000)`)
	server.Expect(plain.Must(`digest(pattern(100000))`), `receive(a, 100000)`)
}

// firewallBound6: a socket that is bound to an IPv6 address cannot be sent by the firewall, and so
// goes nowhere that others have not reached.
func firewallBound6(t *testing.T) {
	client, port := startPolicyPeer(t, "heddle", "n1/c1"), lab.FreePort()
	startPolicyPeer(t, "heddle", "n2/c1").Must("serve([%d])", port)
	own, target := lab.Overlay6(t, "n1/c1"), lab.Overlay6(t, "n2/c1")
	before := lab.Counters(t, "n1")["refuse_firewall"]
	client.Expect(`"EADDRNOTAVAIL"`, `error_of(connect, 6, %q, %d, (%q, 0))`, target, port, own)
	if n := lab.Counters(t, "n1")["refuse_firewall"] - before; n != 1 {
		t.Errorf("refuse_firewall rose by %d", n)
	}
	testutil.Eventually(t, "a connect to go where another has been", func() (bool, string) {
		client.Must("opened(6, %q, %d)", target, port)
		said := client.Must("error_of(opened, 6, %q, %d, %q)", target, port, own)
		return !strings.Contains(said, "EADDRNOTAVAIL"), said
	})
}
