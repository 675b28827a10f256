package paths

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// ipv6Status is what an agent says of IPv6.
type ipv6Status struct {
	Enabled  bool
	Prefixes []netip.Prefix
	Reason   string
	Detail   string
}

func ipv6Of(t testing.TB, name, node string) ipv6Status {
	t.Helper()
	var status []struct{ IPv6 ipv6Status }
	raw := lab.Heddle(t, "status", "--lab", name, "--node", node, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &status); err != nil || len(status) != 1 {
		t.Fatalf("status of %s: %v\n%s", node, err, raw)
	}
	return status[0].IPv6
}

// gateway6 is the IPv6 overlay address of a node.
func gateway6(t testing.TB, node string) netip.Addr {
	t.Helper()
	s := ipv6Of(t, lab.Name, node)
	if !s.Enabled || len(s.Prefixes) != 1 {
		t.Fatalf("IPv6 of %s: %+v", node, s)
	}
	return model.Gateway(s.Prefixes[0])
}

// TestIPv6AddressesEmbedIPv4 compares what the lab says with what the containers have, and both
// with IPv4.
func TestIPv6AddressesEmbedIPv4(t *testing.T) {
	for _, c := range []string{"n1/c1", "n1/c2", "n2/c1", "n2/c2"} {
		v4, v6 := netip.MustParseAddr(lab.Address(t, "overlay", c)), lab.Address6(t, "overlay", c)
		if !model.Embeds(v6, v4) || lab.Address6(t, "heddle", c) != v6 {
			t.Errorf("%s: %s and %s do not belong together", c, v4, v6)
		}
		node, _, _ := strings.Cut(c, "/")
		if s := ipv6Of(t, lab.Name, node); !s.Enabled || len(s.Prefixes) != 1 || !s.Prefixes[0].Contains(v6) {
			t.Errorf("%s: %s is in no IPv6 prefix of its node: %+v", c, v6, s)
		}
		shown := lab.MustRun(t, "overlay", c, "ip", "-6", "-oneline", "address", "show", "dev", "eth0")
		if strings.Count(shown, "inet6") != 1 || !strings.Contains(shown, v6.String()+"/128 scope global") {
			t.Errorf("%s: want %s alone on its device:\n%s", c, v6, shown)
		}
		if list := lab.Heddle(t, "endpoints", "--node", node); !strings.Contains(list, v4.String()+","+v6.String()+" ") {
			t.Errorf("%s: not listed with %s and %s:\n%s", c, v4, v6, list)
		}
	}
}

// place6 is one end of a path of TestIPv6Paths: addr is where it is reached, as is how peers see
// it.
type place6 struct {
	mode, container string
	addr, as        netip.Addr
}

func (p place6) start(t testing.TB) *lab.Peer { return lab.StartPeerAt(t, p.mode, p.container) }

// TestIPv6Paths: plain containers reach each other, the node and the outside over IPv6, and the
// node reaches them. What is not TCP does so from intercepted containers, too.
func TestIPv6Paths(t *testing.T) {
	plain := func(c string) place6 {
		a := lab.Address6(t, "overlay", c)
		return place6{"overlay", c, a, a}
	}
	intercepted := func(c string) place6 { p := plain(c); p.mode = "heddle"; return p }
	node := func(n string) place6 {
		return place6{"host", n + "/c1", lab.Address6(t, "host", n+"/c1"), gateway6(t, n)}
	}
	gateway := node("n1")
	gateway.addr = gateway6(t, "n1")
	outside := place6{container: "outside", addr: lab.Outside6(t)}
	masqueraded := plain("n1/c1")
	masqueraded.as = lab.Address6(t, "host", "n1/c1")
	for _, c := range []struct {
		name     string
		from, to place6
		tcp      bool
	}{
		{"other node", plain("n1/c1"), plain("n2/c1"), true},
		{"other node, back", plain("n2/c1"), plain("n1/c1"), true},
		{"same node", plain("n1/c1"), plain("n1/c2"), true},
		{"itself", plain("n1/c1"), plain("n1/c1"), true},
		{"node to its container", node("n1"), plain("n1/c1"), true},
		{"node to another's container", node("n1"), plain("n2/c1"), true},
		{"container to its node", plain("n1/c1"), node("n1"), true},
		{"container to its gateway", plain("n1/c1"), gateway, true},
		{"outside", masqueraded, outside, true},
		{"intercepted, other node", intercepted("n1/c1"), intercepted("n2/c1"), false},
		{"intercepted, same node", intercepted("n1/c1"), intercepted("n1/c2"), false},
		{"intercepted to plain", intercepted("n1/c1"), plain("n2/c2"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, server := c.from.start(t), c.to.start(t)
			if c.tcp {
				tcp6(t, client, server, c.from.as, c.to.addr)
			}
			udp6(t, client, server, c.from.as, c.to.addr, c.to.container == "outside")
			for _, size := range []string{"56", "1402", "8000"} {
				lab.MustRun(t, c.from.mode, c.from.container, "ping", "-6", "-c", "1", "-W", "10", "-s", size, c.to.addr.String())
			}
		})
	}
}

// tcp6 sends data both ways over one connection and compares the names of its ends.
func tcp6(t *testing.T, client, server *lab.Peer, from, to netip.Addr) {
	t.Helper()
	port := lab.FreePort()
	server.Must(`l = listen(6, "::", %d)`, port)
	client.Must(`s = connect(6, %q, %d)`, to, port)
	server.Must(`c, who = l.accept()`)
	server.Expect(fmt.Sprintf("%q", from), `who[0]`)
	server.Expect(fmt.Sprintf("%q", to), `c.getsockname()[0]`)
	client.Expect(fmt.Sprintf("%q", to), `s.getpeername()[0]`)
	client.Must(`send(s, 3000000)`)
	want := server.Must(`receive(c, 3000000)`)
	client.Must(`drained()`)
	server.Must(`send(c, 3000000)`)
	client.Expect(want, `receive(s, 3000000)`)
	server.Must(`drained()`)
	for _, p := range []*lab.Peer{client, server} {
		p.Must(`l = s = c = None`)
	}
	client.Expect(`"ECONNREFUSED"`, `error_of(connect, 6, %q, %d)`, to, port)
}

// udp6 sends datagrams that fit one packet, and one that has to be fragmented, and gets them back.
// Routers do not fragment IPv6: a server behind a link with a larger MTU (narrower) has to be told
// by the node what fits.
func udp6(t *testing.T, client, server *lab.Peer, from, to netip.Addr, narrower bool) {
	t.Helper()
	port := lab.FreePort()
	for _, p := range []*lab.Peer{client, server} {
		p.Must(`u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); u.settimeout(10)`)
	}
	server.Must(`u.bind((%q, %d))`, to, port)
	client.Must(`u.connect((%q, %d))`, to, port)
	for _, size := range []int{1, 1402, 9000} {
		client.Must(`u.send(pattern(%d))`, size)
		server.Must(`data, who = u.recvfrom(65536)`)
		server.Expect(fmt.Sprintf("[%q, %d]", from, size), `[who[0], len(data)]`)
		if narrower && size > 1402 {
			server.Must(`u.connect(who)`)
			testutil.Eventually(t, "the server to learn the path MTU", func() (bool, string) {
				server.Must(`error_of(u.send, data)`)                       // that it was too large is told to the next call
				mtu := server.Must(`u.getsockopt(socket.IPPROTO_IPV6, 24)`) // IPV6_MTU
				return mtu == "1450", mtu
			})
			server.Must(`u.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)`)
		}
		server.Must(`u.sendto(data, who)`)
		client.Expect("true", `u.recv(65536) == pattern(%d)`, size)
	}
}

// TestIPv6MTU: a container knows what fits, so a packet that must not be fragmented fails at once.
func TestIPv6MTU(t *testing.T) {
	to := lab.Address6(t, "overlay", "n2/c1").String()
	for _, mode := range lab.Modes {
		lab.MustRun(t, mode, "n1/c1", "ping", "-6", "-c", "1", "-W", "10", "-M", "do", "-s", "1402", to)
		r := lab.Run(t, mode, "n1/c1", nil, "ping", "-6", "-c", "1", "-W", "10", "-M", "do", "-s", "1403", to)
		if r.Code == 0 || !strings.Contains(r.Stdout+r.Stderr, "mtu: 1450") {
			t.Errorf("%s: one byte too many: exit code %d\n%s%s", mode, r.Code, r.Stdout, r.Stderr)
		}
	}
}

// TestIPv6Unreachable: addresses that nobody has are refused by the node, not left to a time-out.
func TestIPv6Unreachable(t *testing.T) {
	c := lab.StartPeer(t, "overlay", "n1/c1")
	own := lab.Address6(t, "overlay", "n1/c1").As16()
	own[15] = 200
	for what, a := range map[string]string{
		"own prefix": netip.AddrFrom16(own).String(), "no route": "2001:db8::1",
	} {
		t.Run(what, func(t *testing.T) {
			c.In(t).Expect(`"ENETUNREACH"`, `error_of(connect, 6, %q, 80)`, a)
		})
	}
}

// TestIPv6SwitchedOff: a node whose kernel has IPv6 switched off goes on with IPv4 and says why;
// when it is on again, the endpoints get their addresses back.
func TestIPv6SwitchedOff(t *testing.T) {
	before := lab.Address6(t, "overlay", "n2/c1")
	restart := func(disable string) {
		t.Helper()
		lab.EndAgent(t, "n2", syscall.SIGTERM)
		lab.InNode(t, "n2", "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6="+disable)
		testutil.NoError(t, lab.Command("up"))
	}
	t.Cleanup(func() { // runs before those of EndAgent, which bring the agent back
		cmd := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n2", "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("switch IPv6 on again: %v\n%s", err, out)
		}
	})
	restart("1")
	if s := ipv6Of(t, lab.Name, "n2"); s.Enabled || s.Reason != "ipv6_enabled" || !strings.Contains(s.Detail, "disable_ipv6 = 1") {
		t.Errorf("status: %+v, want reason ipv6_enabled", s)
	}
	if table := lab.Heddle(t, "status", "--node", "n2"); !strings.Contains(table, "none: ipv6_enabled: net.ipv6.conf.all.disable_ipv6 = 1") {
		t.Errorf("status does not say why:\n%s", table)
	}
	if list := lab.Heddle(t, "endpoints", "--node", "n2"); strings.Contains(list, before.String()) {
		t.Errorf("endpoints with IPv6 addresses:\n%s", list)
	}
	if shown := lab.MustRun(t, "overlay", "n2/c1", "ip", "-6", "address", "show", "dev", "eth0"); shown != "" {
		t.Errorf("the container still has\n%s", shown)
	}
	lab.MustRun(t, "overlay", "n1/c1", "ping", "-4", "-c", "1", "-W", "10", lab.Address(t, "overlay", "n2/c1"))

	restart("0")
	if after := lab.Address6(t, "overlay", "n2/c1"); after != before {
		t.Errorf("address %s, was %s", after, before)
	}
	lab.MustRun(t, "overlay", "n1/c1", "ping", "-6", "-c", "1", "-W", "10", before.String())
	lab.MustRun(t, "overlay", "n2/c1", "ping", "-6", "-c", "1", "-W", "10", lab.Outside6(t).String())
}

// TestIPv4OnlyLab: a network made without prefix6 has IPv4 and nothing else.
func TestIPv4OnlyLab(t *testing.T) {
	lab4 := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), lab.Bin, append([]string{"lab", args[0], "--lab", lab.Name + "-4"}, args[1:]...)...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := lab4(args...)
		if err != nil {
			t.Fatalf("heddle lab %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	must("down")
	t.Cleanup(func() {
		if out, err := exec.Command(lab.Bin, "lab", "down", "--lab", lab.Name+"-4").CombinedOutput(); err != nil {
			t.Errorf("take the lab down: %v\n%s", err, out)
		}
	})
	must("up", "--nodes", "1", "--containers", "2", "--prefix6", "none")
	if s := ipv6Of(t, lab.Name+"-4", "n1"); s.Enabled || s.Reason != "network_ipv4_only" {
		t.Errorf("status: %+v, want reason network_ipv4_only", s)
	}
	if out, err := lab4("ip", "--family", "6", "n1/c1"); err == nil || !strings.Contains(out, "IPv4-only") {
		t.Errorf("lab ip --family 6: %v\n%s", err, out)
	}
	if out, err := lab4("up", "--prefix6", "fd00:1::/96"); err == nil || !strings.Contains(out, "lab down") {
		t.Errorf("another prefix: %v\n%s", err, out)
	}
	if out := must("exec", "--mode", "overlay", "n1/c1", "--", "ip", "-6", "address", "show", "dev", "eth0"); out != "" {
		t.Errorf("the container has\n%s", out)
	}
	must("exec", "--mode", "overlay", "n1/c1", "--", "ping", "-4", "-c", "1", "-W", "10", strings.TrimSpace(must("ip", "n1/c2")))
}
