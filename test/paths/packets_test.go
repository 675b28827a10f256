package paths

import (
	_ "embed"
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

//go:embed testdata/packets.py
var packetsScript string

// awaitPackets waits until a node redirects packets, or does not.
func awaitPackets(t *testing.T, node string, redirected bool) (p api.Packets) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("redirected on %s to be %v", node, redirected), func() (bool, string) {
		var st []api.Status
		lab.Query(t, &st, "status", "--node", node)
		p = st[0].Packets
		return p.Redirected == redirected, fmt.Sprintf("%+v", p)
	})
	return p
}

// rises reports which of some counters of a node f makes rise.
func rises(t *testing.T, node string, f func(), names ...string) (out []string) {
	t.Helper()
	before := lab.Counters(t, node)
	f()
	after := lab.Counters(t, node)
	for _, name := range names {
		if after[name] > before[name] {
			out = append(out, name)
		}
	}
	return out
}

// TestPackets: packets of plain containers, and datagrams of others, go past the stacks of both
// nodes.
func TestPackets(t *testing.T) {
	for _, mode := range lab.Modes {
		server, beside := datagrams(lab.StartPeer(t, mode, "n2/c1")), datagrams(lab.StartPeer(t, mode, "n1/c2"))
		client := datagrams(lab.StartPeer(t, mode, "n1/c1"))
		port := lab.FreePort()
		for _, p := range []*lab.Peer{server, beside} {
			p.Must(`serve_udp(%d)`, port)
		}
		awaitPackets(t, "n1", true)
		awaitPackets(t, "n2", true)
		far, near := lab.Address(t, mode, "n2/c1"), lab.Address(t, mode, "n1/c2")
		got := rises(t, "n2", func() { client.Must(`echo(%q, %d, 3000)`, far, port) }, "redirect_overlay", "redirect_container", "route_size", "route_options")
		if strings.Join(got, " ") != "redirect_overlay redirect_container" {
			t.Errorf("%s: datagram and its answer, on n2: %v", mode, got)
		}
		got = rises(t, "n1", func() { client.Must(`echo(%q, %d, 40)`, near, port) }, "redirect_overlay", "redirect_container")
		if strings.Join(got, " ") != "redirect_container" {
			t.Errorf("%s: on one node: %v", mode, got)
		}
	}
}

// TestPacketsNeedARouter: what the node's stack has to answer, cut up or translate it does.
func TestPacketsNeedARouter(t *testing.T) {
	lab.UnlimitedICMP(t)
	server, client := datagrams(lab.StartPeer(t, "overlay", "n2/c1")), datagrams(lab.StartPeer(t, "overlay", "n1/c1"))
	client.Must("%s", packetsScript)
	far, port, service := lab.Address(t, "overlay", "n2/c1"), lab.FreePort(), lab.FreePort()
	server.Must(`serve_udp(%d)`, port)
	awaitPackets(t, "n1", true)
	gateway := func(node string) string { return lab.GatewayOf(node + "/c1")(t) }
	for hops, node := range []string{"n1", "n2"} {
		var who string
		got := rises(t, node, func() { who = client.Do(`expires(%q, %d, %d)`, far, port, hops+1) }, "route_hops")
		if want := fmt.Sprintf("[11, %q]", gateway(node)); who != want || len(got) != 1 {
			t.Errorf("after %d hops: %s, want %s; counted: %v", hops+1, who, want, got)
		}
	}
	got := rises(t, "n1", func() {
		client.Expect(fmt.Sprintf(`["hello", [%q, %d]]`, far, port), `with_options(%q, %d)`, far, port)
	}, "route_options")
	if len(got) != 1 {
		t.Error("options: not counted as route_options")
	}
	t.Run("MTU", func(t *testing.T) {
		device := strings.Fields(lab.InNode(t, "n1", "ip", "-br", "route", "get", lab.Address(t, "overlay", "n1/c1")))
		widen := func(mtu string) {
			lab.InNode(t, "n1", "ip", "link", "set", device[2], "mtu", mtu)
			lab.InNode(t, "n1-c1", "ip", "link", "set", "eth0", "mtu", mtu)
		}
		widen("1500")
		t.Cleanup(func() {
			widen("1450")
			lab.InNode(t, "n1-c1", "ip", "route", "flush", "cache")
		})
		got := rises(t, "n1", func() { client.In(t).Expect(`["EMSGSIZE", 1450]`, `path_mtu(%q, %d)[2:]`, far, port) }, "route_size")
		if len(got) != 1 {
			t.Error("not counted as route_size")
		}
	})
	t.Run("translated", func(t *testing.T) {
		lab.Spoil(t, "n1", "ip", fmt.Sprintf("chain pre { type nat hook prerouting priority dstnat; ip daddr %s udp dport %d dnat to %s:%d; }",
			lab.ServiceAddr, service, far, port))
		c := client.In(t)
		got := rises(t, "n1", func() {
			c.Expect(`[true, true]`, `[echo(%q, %d, 40, True)[1], echo(%[1]q, %[2]d, 3000, True)[1]]`, lab.ServiceAddr, service)
			c.Expect(`true`, `echo(%q, %d, 40, True)[1]`, far, port)
		}, "route_translated")
		if len(got) != 1 {
			t.Error("not counted as route_translated")
		}
		awaitPackets(t, "n1", true) // chains that translate are no reason
	})
}

// TestPacketsAndForwardRules: rules of the node's FORWARD chain hold, once the agent has seen them;
// when they are gone packets are redirected again.
func TestPacketsAndForwardRules(t *testing.T) {
	server, client := datagrams(lab.StartPeer(t, "overlay", "n2/c1")), datagrams(lab.StartPeer(t, "overlay", "n1/c1"))
	far, port, forbidden := lab.Address(t, "overlay", "n2/c1"), lab.FreePort(), lab.FreePort()
	for _, p := range []int{port, forbidden} {
		server.Must(`serve_udp(%d)`, p)
	}
	awaitPackets(t, "n2", true)
	repair := lab.Spoil(t, "n2", "inet", fmt.Sprintf("chain forwarded { type filter hook forward priority 0; udp dport %d drop; }", forbidden))
	if p := awaitPackets(t, "n2", false); !strings.Contains(p.Reason, "nftables chain inet heddle-test forwarded") {
		t.Errorf("the reason does not name the chain: %+v", p)
	}
	client.Must(`echo(%q, %d, 40)`, far, port)
	client.Expect(`"timeout"`, `outcome(echo, %q, %d, 40, False, 0.5)`, far, forbidden)
	repair()
	awaitPackets(t, "n2", true)
	client.Must(`echo(%q, %d, 40)`, far, forbidden)
}

// byDevice gives how many of n1's packets the overlay's device had to do with, out and in, while f
// ran.
func byDevice(t *testing.T, f func()) (sent, taken int) {
	t.Helper()
	count := func() (n int) {
		out := lab.InNode(t, "n1", "awk", "/heddle-vx0/ { print $11 }", "/proc/net/dev")
		if _, err := fmt.Sscan(out, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	sent, taken = count(), int(lab.Counters(t, "n1")["tunnel_device"])
	f()
	return count() - sent, int(lab.Counters(t, "n1")["tunnel_device"]) - taken
}

// awaitDevice waits until n1's packets go by the overlay's device for a reason with this word, or
// until they do not: "".
func awaitDevice(t *testing.T, word string) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("the device's part for %q", word), func() (bool, string) {
		var st []api.Status
		lab.Query(t, &st, "status", "--node", "n1")
		p := st[0].Packets
		return p.Redirected && (word == "") == (p.DeviceReason == "") && strings.Contains(p.DeviceReason, word), fmt.Sprintf("%+v", p)
	})
}

// TestTunnel: between nodes the programs send and take packets, past the overlay's device and the
// nodes' own hooks, unless rules or routes of the node are about what it sends itself.
func TestTunnel(t *testing.T) {
	// Between c1 of both nodes a firewall has translated, and packets go through the node's stack
	// since.
	server, client := datagrams(lab.StartPeer(t, "overlay", "n2/c1")), datagrams(lab.StartPeer(t, "overlay", "n1/c2"))
	far, port := lab.Address(t, "overlay", "n2/c1"), lab.FreePort()
	server.Must(`serve_udp(%d)`, port)
	const trips = 20
	echo := func() {
		for range trips {
			client.Must(`echo(%q, %d, 40)`, far, port)
		}
	}
	past := func() {
		t.Helper()
		awaitDevice(t, "")
		echo() // the way is known, and what follows what the device took has come
		testutil.Eventually(t, "packets past the device", func() (bool, string) {
			sent, taken := byDevice(t, echo)
			return sent+taken == 0, fmt.Sprintf("%d sent by it, %d left to it", sent, taken)
		})
	}
	past()
	repair := lab.Spoil(t, "n1", "inet", fmt.Sprintf("chain incoming { type filter hook input priority 0; udp dport %d drop; }", port))
	awaitDevice(t, "nftables chain inet heddle-test incoming")
	if sent, _ := byDevice(t, echo); sent < trips {
		t.Errorf("%d of %d packets by the device, which the node's rules ask for", sent, trips)
	}
	repair()
	past()
	to := strings.Fields(lab.InNode(t, "n1", "ip", "-br", "route", "get", lab.Address(t, "host", "n2/c1")))
	lab.InNode(t, "n1", "ip", "route", "add", to[0], "dev", to[2], "mtu", "1400")
	t.Cleanup(func() { lab.InNode(t, "n1", "ip", "route", "del", to[0], "dev", to[2]) })
	awaitDevice(t, "has MTU 1400")
	if sent, _ := byDevice(t, echo); sent < trips {
		t.Errorf("%d of %d packets by the device, which knows the route's MTU", sent, trips)
	}
}

// TestPacketsRouted is TestDatagrams between containers where nothing is redirected.
func TestPacketsRouted(t *testing.T) {
	lab.Another(t, "r", "--agent-arg=--packets=route")
	compareContainers(t)
	for _, node := range []string{"n1", "n2"} {
		counts := lab.Counters(t, node)
		if n := counts["redirect_overlay"] + counts["redirect_container"]; n > 0 {
			t.Errorf("%s: %d packets redirected by --packets route", node, n)
		}
	}
}

// compareContainers is TestDatagrams between containers.
func compareContainers(t *testing.T) {
	t.Helper()
	lab.UnlimitedICMP(t)
	for _, suffix := range []string{"n1-c1", "n1", "n2"} {
		lab.SetSysctl(t, suffix, "ipv4/ping_group_range", "0 65535")
	}
	var places []lab.Place
	for _, pl := range lab.Places {
		if pl.Name == "same node" || pl.Name == "other node" {
			places = append(places, pl)
		}
	}
	compareDatagrams(t, places, datagramSteps, "")
}

// TestPacketsNative: nodes that share a network send packets without a tunnel, of all kinds, and in
// it as soon as one of them does not take them so.
func TestPacketsNative(t *testing.T) {
	lab.Another(t, "t", "--agent-arg=--tunnel=auto")
	server, client := datagrams(lab.StartPeer(t, "overlay", "n2/c1")), datagrams(lab.StartPeer(t, "overlay", "n1/c1"))
	far, port := lab.Address(t, "overlay", "n2/c1"), lab.FreePort()
	server.Must(`serve_udp(%d)`, port)
	await := func(native bool) {
		t.Helper()
		way := map[bool]string{true: "redirect_native", false: "redirect_overlay"}
		testutil.Eventually(t, fmt.Sprintf("packets without a tunnel: %v", native), func() (bool, string) {
			var went [][]string
			for _, node := range []string{"n1", "n2"} {
				went = append(went, rises(t, node, func() { client.Must(`echo(%q, %d, 40)`, far, port) }, way[true], way[false]))
			}
			want := fmt.Sprint([][]string{{way[native]}, {way[native]}})
			return fmt.Sprint(went) == want, fmt.Sprint(went)
		})
		var st []api.Status
		lab.Query(t, &st, "status", "--node", "n1")
		if got := st[0].Packets.Native; (got == 1) != native {
			t.Errorf("status: without a tunnel to %d nodes", got)
		}
	}
	await(true)
	compareContainers(t)
	stream := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, stream)
	client.Must(`c = connect(4, %q, %d)`, far, stream)
	server.Must(`a = l.accept()[0]`)
	const large = 20 << 20
	whole := client.Do(`digest(pattern(%d))`, large)
	got := rises(t, "n1", func() {
		client.Must(`send(c, %d)`, large)
		server.Expect(whole, `receive(a, %d)`, large)
	}, "redirect_native", "redirect_overlay")
	if len(got) != 1 || got[0] != "redirect_native" {
		t.Errorf("TCP of plain containers: %v", got)
	}
	client.Must(`c.close()`)
	six := lab.Address6(t, "overlay", "n2/c1")
	server.Must(`serve_udp(%d, V6)`, port+1)
	if got := rises(t, "n1", func() { client.Must(`echo(%q, %d, 40)`, six, port+1) }, "redirect_native"); len(got) != 1 {
		t.Error("IPv6: in the tunnel")
	}
	captureEchoes(t)
	t.Run("limit", func(t *testing.T) {
		lab.Limit(t, "n2/c1", "--ingress", "1gbit")
		before := lab.Counters(t, "n2")["route_limit"]
		client.In(t).Must(`echo(%q, %d, 40)`, far, port)
		if n := lab.Counters(t, "n2")["route_limit"] - before; n != 2 {
			t.Errorf("a datagram and its answer: counted %d times", n)
		}
	})
	// Rules about what the node takes see VXLAN: then the node asks for it.
	repair := lab.Spoil(t, "n2", "inet", "chain incoming { type filter hook input priority 0; udp dport 7 drop; }")
	await(false)
	repair()
	await(true)
}
