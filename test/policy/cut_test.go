package policy

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// live is one open connection of TestPolicyCut.
type live struct {
	what           string
	client, server *lab.Peer
	socket         string // the client's variable
	port           int
	cut            bool
}

// openLive opens connections at places, of each pair of modes one to a port that stays allowed and
// one to each that will be forbidden.
func openLive(t testing.TB, clients, servers map[string]*lab.Peer, at []lab.Place, ports map[string]policyPorts) (all []live) {
	t.Helper()
	for _, pl := range at {
		for _, m := range pl.Modes {
			p := ports[m[1]]
			c := clients[pl.Client+m[0]]
			for _, port := range p.all() {
				addrs := map[int]string{4: pl.Target(t)}
				if isEndpoint(m[1], pl.Server) && pl.Client != pl.Server {
					addrs[6] = lab.Overlay6(t, pl.Server)
				}
				for family, addr := range addrs {
					l := live{
						what:   fmt.Sprintf("%s, %s to %s, IPv%d, port %d", pl.Name, m[0], m[1], family, port),
						client: c, server: servers[pl.Server+m[1]], socket: fmt.Sprintf("live%d", len(all)), port: port,
						cut: p.want(pl, m, port) != "hi",
					}
					c.Must("%s = opened(%d, %q, %d)", l.socket, family, addr, port)
					all = append(all, l)
				}
			}
		}
	}
	return all
}

// TestPolicyCut opens connections at every place and then forbids some of them: those end at both
// ends, also at one that only waits, and no others.
func TestPolicyCut(t *testing.T) {
	ports := newPolicyPorts()
	at := policyPlaces(t)
	clients, servers := policyPeers(t, at, ports)
	all := openLive(t, clients, servers, at, ports)
	var egress, ingress []map[string]any
	for _, p := range ports {
		egress = append(egress, lab.DenyRule("reject", p.egressReject), lab.DenyRule("drop", p.egressDrop))
		ingress = append(ingress, lab.DenyRule("reject", p.ingressReject), lab.DenyRule("drop", p.ingressDrop))
	}
	lab.ApplyPolicy(t, "cut", ingress, egress)
	want := map[*lab.Peer]map[int]int{}
	for _, l := range all {
		var how string
		answer(t, l.client, &how, "outcome(%s, %s)", l.socket, map[bool]string{true: "False", false: "True"}[l.cut])
		switch {
		case l.cut && !slices.Contains([]string{"ECONNABORTED", "ECONNRESET", "EPIPE"}, how):
			t.Errorf("%s: %s, want it cut", l.what, how)
		case !l.cut && how != "alive":
			t.Errorf("%s: %s, want it alive", l.what, how)
		}
		if want[l.server] == nil {
			want[l.server] = map[int]int{}
		}
		if l.cut {
			want[l.server][l.port]++
		}
	}
	for key, s := range servers {
		testutil.Eventually(t, "connections cut at "+key, func() (bool, string) {
			var ended map[int][]string
			answer(t, s, &ended, "ended")
			ok := true
			for port, n := range want[s] {
				ok = ok && len(ended[port]) == n && !slices.Contains(ended[port], "EOF")
			}
			for port, how := range ended {
				ok = ok && len(how) == want[s][port]
			}
			return ok, fmt.Sprintf("ended %v, want %v", ended, want[s])
		})
	}
}

// TestPolicyCutMany forbids half of 10,000 live connections, direct ones and ones on one node:
// within a second of the change being in force both ends see that they ended, and the other half
// lives.
func TestPolicyCutMany(t *testing.T) {
	const each = 2500 // of 2 ports and 2 paths
	stays, goes := lab.FreePort(), lab.FreePort()
	pairs := map[string][2]*lab.Peer{}
	for _, path := range [][2]string{{"n1/c1", "n2/c1"}, {"n1/c2", "n1/c1"}} {
		c, s := startPolicyPeer(t, "heddle", path[0]), startPolicyPeer(t, "heddle", path[1])
		s.Must("serve_many([%d, %d])", stays, goes)
		c.Must("hold(4, %q, [%d, %d], %d)", lab.Address(t, "overlay", path[1]), stays, goes, each)
		pairs[path[0]+" to "+path[1]] = [2]*lab.Peer{c, s}
	}
	began := time.Now()
	lab.ApplyPolicy(t, "many", []map[string]any{lab.DenyRule("reject", goes)}, nil)
	applied := time.Now()
	var slow []string
	for name, ends := range pairs {
		for i, end := range ends {
			var n int
			answer(t, end, &n, "await_lost(%d, %d, %f)", goes, each, max(0, time.Second-time.Since(applied)).Seconds())
			if n != each {
				slow = append(slow, fmt.Sprintf("%s, end %d: %d of %d", name, i, n, each))
			}
		}
	}
	t.Logf("in force after %s, all seen %s later", applied.Sub(began).Round(time.Millisecond), time.Since(applied).Round(time.Millisecond))
	if len(slow) > 0 {
		t.Errorf("not cut within a second: %s", strings.Join(slow, "; "))
	}
	for name, ends := range pairs {
		for _, end := range ends {
			if got := end.Must("all_echo(%d, %d)", stays, each); got != "true" {
				t.Errorf("%s: a connection that stays allowed did not live on", name)
			}
		}
	}
}

// TestPolicyFlips changes policy again and again while programs connect and talk: what is forbidden
// all the time never connects, what is allowed never fails, and of what comes and goes nothing
// outlives its being forbidden.
func TestPolicyFlips(t *testing.T) {
	const flips = 20 // and as many back; internal/plane/tcp/datapath has a test of a hundred
	never, always, sometimes := lab.FreePort(), lab.FreePort(), lab.FreePort()
	client := startPolicyPeer(t, "heddle", "n1/c1")
	servers := map[string]*lab.Peer{}
	lab.ApplyPolicy(t, "flips", []map[string]any{lab.DenyRule("reject", never)}, nil)
	for _, at := range []string{"n2/c1", "n1/c2"} {
		servers[at] = startPolicyPeer(t, "heddle", at)
		servers[at].Must("serve([%d, %d, %d])", never, always, sometimes)
		for family, addr := range map[int]string{4: lab.Address(t, "overlay", at), 6: lab.Overlay6(t, at)} {
			client.Must("hammer('never', %d, %q, %d, False)", family, addr, never)
			client.Must("hammer('always', %d, %q, %d, False)", family, addr, always)
			client.Must("hammer('sometimes', %d, %q, %d, True)", family, addr, sometimes)
			client.Must("stream('stream', %d, %q, %d)", family, addr, always)
		}
	}
	for range flips {
		lab.ChangePolicy(t, lab.EverybodyPolicy("flips", nil, []map[string]any{lab.DenyRule("reject", never), lab.DenyRule("reject", sometimes)}))
		for at, s := range servers {
			testutil.Eventually(t, "no connection of "+at+" that is forbidden", func() (bool, string) {
				n := s.Must("alive(%d)", sometimes)
				return n == "0", n + " alive"
			})
		}
		lab.ChangePolicy(t, lab.EverybodyPolicy("flips", []map[string]any{lab.DenyRule("reject", never)}, nil))
	}
	client.Must("globals().update(hammering=False)")
	var tally map[string]map[string]int
	answer(t, client, &tally, "tally")
	t.Log(tally)
	for name, only := range map[string]string{"never": "ECONNREFUSED", "always": "hi", "stream": "echo"} {
		if len(tally[name]) != 1 || tally[name][only] < flips {
			t.Errorf("%s: %v, want nothing but %s", name, tally[name], only)
		}
	}
	if tally["sometimes"]["hi"] == 0 || tally["sometimes"]["ECONNREFUSED"] == 0 {
		t.Errorf("what comes and goes: %v", tally["sometimes"])
	}
}

// TestPolicyWithheldACK: a host outside opens a connection, and holds the last ACK of the handshake
// back until the rules have changed. The connection does not come to be, and what the ACK carries
// nobody reads; also when the node remembers nothing of the handshake (SYN cookies). One whose port
// stays allowed comes to be then.
func TestPolicyWithheldACK(t *testing.T) {
	stays, goes := lab.FreePort(), lab.FreePort()
	client := startPolicyPeer(t, "host", "outside")
	targets := lab.OutsideTargets(t, "n1/c1")
	for _, mode := range lab.Modes {
		for _, cookies := range []string{"1", "2"} {
			if mode == "overlay" && cookies == "2" {
				continue // that is of the container's own stack
			}
			t.Run(mode+", cookies "+cookies, func(t *testing.T) {
				if mode == "heddle" {
					lab.SetSysctl(t, "n1", "ipv4/tcp_syncookies", cookies)
				}
				server := startPolicyPeer(t, mode, "n1/c1")
				server.Must("serve([%d, %d])", stays, goes)
				release := withholdACKs(t, stays, goes)
				for family, addr := range targets {
					client.Must("v%d = {p: connect(%d, %q, p) for p in (%d, %d)}", family, family, addr, stays, goes)
				}
				lab.ApplyPolicy(t, "withheld", []map[string]any{lab.DenyRule("drop", goes)}, nil)
				release()
				for family := range targets {
					client.Expect("5", "v%d[%d].send(b'hello')", family, goes)
					client.Expect("5", "v%d[%d].send(b'hello')", family, stays)
					client.Expect(`"hihello"`, `received(v%d[%d], 7)`, family, stays)
					// The server takes connections in the order they come: this one would have been
					// taken by now.
					client.Must("v%d[%d].close()", family, stays)
				}
				server.Expect("{}", "{p: n for p, n in accepted.items() if p == %d}", goes)
			})
		}
	}
}

// withholdACKs has the host outside send nothing but SYNs to these ports, until it is released.
func withholdACKs(t testing.TB, ports ...int) (release func()) {
	t.Helper()
	nft := func(text string) {
		cmd := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-outside", "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("nft: %v\n%s", err, out)
		}
	}
	release = sync.OnceFunc(func() { nft("delete table inet withhold\n") })
	nft("add table inet withhold\nadd chain inet withhold output { type filter hook output priority 0; }\n")
	t.Cleanup(release)
	for _, p := range ports {
		nft(fmt.Sprintf("add rule inet withhold output tcp dport %d tcp flags & (syn | ack) == ack drop\n", p))
	}
	return release
}
