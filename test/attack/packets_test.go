package attack

import (
	_ "embed"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestForgedPackets sends what no node or container may send, and expects each to be dropped under
// its reason, on the right node, with nothing reaching the listener it is for.
func TestForgedPackets(t *testing.T) {
	server := lab.StartPeer(t, "heddle", "n2/c1")
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	server.Must(`l.setblocking(False)`)
	id := lab.Numbers(t).ID
	c1, c2, victim := lab.Address(t, "heddle", "n1/c1"), lab.Address(t, "heddle", "n1/c2"), lab.Address(t, "heddle", "n2/c1")
	n1, n2 := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	outside := netip.MustParseAddr(n1).As4()
	outside[3] = 250
	unknown := netip.AddrFrom4(outside).String()
	direct := model.DefaultDirectPorts.First + 5
	option := func(src string) string { return fmt.Sprintf("heddle_option(%d, %q, %q, %d)", id, src, victim, port) }
	syn := func(src, dst string, dport int, options string) string {
		return fmt.Sprintf("forge(syn(%q, 33333, %q, %d, %s), %q)", src, dst, dport, options, dst)
	}
	plain, intercepted := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1")), lab.Forger(t, lab.StartPeer(t, "heddle", "n1/c1"))
	host, stranger := lab.Forger(t, lab.StartPeer(t, "host", "n1/c1")), lab.Forger(t, lab.StartOutside(t))
	for _, c := range []struct {
		name   string
		by     *lab.Peer
		line   string
		node   string
		reason string
	}{
		{"SYN option from a plain process", plain, syn(c1, n2, int(direct), option(c1)), "n1", "drop_forged_direct"},
		{"SYN option from a raw socket of an intercepted process", intercepted, syn(c1, n2, int(direct), option(c2)), "n1", "drop_forged_direct"},
		{"SYN option to the own node", plain, syn(c1, n1, int(direct), option(c1)), "n1", "drop_forged_direct"},
		{"plain SYN to a direct port", plain, syn(c1, n2, int(direct), `b""`), "n1", "drop_forged_direct"},
		{"spoofed source, other container", plain, syn(c2, victim, port, `b""`), "n1", "drop_spoofed_source"},
		{"spoofed source, node", plain, syn(n1, n2, int(direct), option(c1)), "n1", "drop_spoofed_source"},
		{"spoofed source, other node's container", plain, syn(victim, c2, port, `b""`), "n1", "drop_spoofed_source"},
		{"spoofed source, UDP", intercepted, fmt.Sprintf(`forge(udp(%q, 5, %q, 6, b"x"), %q)`, c2, victim, victim), "n1", "drop_spoofed_source"},
		{"VXLAN from a container", plain, fmt.Sprintf(`forge(udp(%q, 4789, %q, 4789, b"\x08" + bytes(60)), %q)`, c1, n2, n2), "n1", "drop_forged_overlay"},
		{"unknown underlay address", stranger, syn(unknown, n2, int(direct), option(c1)), "n2", "drop_unknown_node"},
		{"source of another node", host, syn(n1, n2, int(direct), option(victim)), "n2", "drop_source_not_of_node"},
		{"source of no node", host, syn(n1, n2, int(direct), option("192.0.2.1")), "n2", "drop_source_not_of_node"},
		{"other network", host, syn(n1, n2, int(direct), fmt.Sprintf("heddle_option(%d, %q, %q, %d)", id+1, c1, victim, port)), "n2", "drop_option_network"},
		{"other version", host, syn(n1, n2, int(direct), fmt.Sprintf("heddle_option(%d, %q, %q, %d, version=4)", id, c1, victim, port)), "n2", "drop_option_version"},
		{"port 0", host, syn(n1, n2, int(direct), fmt.Sprintf("heddle_option(%d, %q, %q, 0)", id, c1, victim)), "n2", "drop_option_malformed"},
		{"wrong length", host, syn(n1, n2, int(direct), fmt.Sprintf("heddle_option(%d, %q, %q, %d, length=12)", id, c1, victim, port)), "n2", "drop_option_malformed"},
		{"no such endpoint", host, syn(n1, n2, int(direct), fmt.Sprintf("heddle_option(%d, %q, %q, %d)", id, c1, victim[:strings.LastIndex(victim, ".")]+".222", port)), "n2", "drop_no_endpoint"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := lab.Counters(t, c.node)[c.reason]
			c.by.In(t).Must("%s", c.line)
			testutil.Eventually(t, c.reason+" of "+c.node+" to rise", func() (bool, string) {
				after := lab.Counters(t, c.node)
				return after[c.reason] > before, fmt.Sprint(after)
			})
			server.In(t).Expect(`"EAGAIN"`, `error_of(l.accept)`)
		})
	}
	// The listener is not deaf: the same SYN from where it may come from reaches it.
	t.Run("a node may", func(t *testing.T) {
		before := lab.Counters(t, "n2")
		host.In(t).Must("%s", syn(n1, n2, int(direct), option(c1)))
		client := lab.StartPeer(t, "heddle", "n1/c1")
		client.Must(`s = connect(4, %q, %d)`, victim, port)
		server.In(t).Must(`l.setblocking(True)`)
		server.In(t).Must(`c, who = l.accept()`)
		after := lab.Counters(t, "n2")
		for reason, n := range after {
			if strings.HasPrefix(reason, "drop_") && n != before[reason] {
				t.Errorf("%s rose from %d to %d", reason, before[reason], n)
			}
		}
	})
}

// TestDirectPortsFromContainer: an intercepted socket that dials a direct port itself gets no
// further than anybody else.
func TestDirectPortsFromContainer(t *testing.T) {
	client := lab.StartPeer(t, "heddle", "n1/c1")
	for _, container := range []string{"n1/c1", "n2/c1"} {
		client.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, lab.Address(t, "host", container), model.DefaultDirectPorts.First)
	}
}

// TestOptionsThatReachTheNode: options that would act on the node or show it are refused, or kept
// by Heddle and never given to the node's socket.
func TestOptionsThatReachTheNode(t *testing.T) {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	for _, c := range []struct{ name, set, want string }{
		{"SO_SNDBUFFORCE", `socket.SOL_SOCKET, 32, 1 << 20`, "EPERM"},
		{"SO_RCVBUFFORCE", `socket.SOL_SOCKET, 33, 1 << 20`, "EPERM"},
		{"SO_DEBUG", `socket.SOL_SOCKET, 1, 1`, "EACCES"},
		{"SO_BINDTODEVICE of the node", `socket.SOL_SOCKET, 25, b"heddle-vx0"`, "ENODEV"},
		{"IP_OPTIONS", `socket.IPPROTO_IP, 4, bytes(4)`, "EPERM"},
		{"TCP_REPAIR", `socket.IPPROTO_TCP, 19, 1`, "EPERM"},
		{"TCP_MD5SIG", `socket.IPPROTO_TCP, 14, bytes(216)`, "EPERM"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.In(t).Expect(`"`+c.want+`"`, `error_of(tcp(4).setsockopt, %s)`, c.set)
		})
	}
	t.Run("SO_MARK and SO_BINDTODEVICE stay with Heddle", func(t *testing.T) {
		p, port := p.In(t), lab.FreePort()
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		p.Must(`s = tcp(4)`)
		p.Expect(`"ok"`, `error_of(s.setsockopt, socket.SOL_SOCKET, 36, 0x1234)`)
		p.Expect(`"ok"`, `error_of(s.setsockopt, socket.SOL_SOCKET, 25, b"eth0")`)
		p.Expect(`4660`, `s.getsockopt(socket.SOL_SOCKET, 36)`)
		p.Must(`s.connect((%q, %d))`, lab.Address(t, "heddle", "n1/c1"), port)
		out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "ss", "-tneH", "dport", "=", fmt.Sprint(port)).CombinedOutput()
		if err != nil {
			t.Fatalf("ss: %v\n%s", err, out)
		}
		if !strings.Contains(string(out), "fwmark:0x4864") || strings.Contains(string(out), "0x1234") || strings.Contains(string(out), "%") {
			t.Errorf("the node's socket:\n%s\nwant Heddle's mark and no device", out)
		}
	})
}

// TestForeignBind: a container binds its own addresses only, whatever the node has and whatever
// options it sets.
func TestForeignBind(t *testing.T) {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	underlay := lab.Address(t, "host", "n1/c1")
	for name, addr := range map[string]string{
		"node": underlay, "gateway": lab.GatewayOf("n1/c1")(t), "other container": lab.Address(t, "heddle", "n1/c2"),
		"container of another node": lab.Address(t, "heddle", "n2/c1"), "other node": lab.Address(t, "host", "n2/c1"), "outside": lab.OutsideTarget(t),
		"broadcast": "255.255.255.255", "multicast": "224.0.0.1", "mapped node": "::ffff:" + underlay,
		"link-local": "fe80::1", "other container, mapped": "::ffff:" + lab.Address(t, "heddle", "n1/c2"),
	} {
		t.Run(name, func(t *testing.T) {
			p := p.In(t)
			family, freebind := 4, "socket.IPPROTO_IP, 15, 1"
			if strings.Contains(addr, ":") {
				family, freebind = 6, "socket.IPPROTO_IPV6, 78, 1"
			}
			before := lab.Counters(t, "n1")["refuse_bind_foreign"]
			p.Expect(`"EADDRNOTAVAIL"`, `error_of(tcp(%d).bind, (%q, 0))`, family, addr)
			p.Must(`s = tcp(%d)`, family)
			p.Must(`s.setsockopt(%s)`, freebind)
			p.Expect(`"EADDRNOTAVAIL"`, `error_of(s.bind, (%q, 0))`, addr)
			// What is refused leaves the socket as it was.
			p.Must(`s.listen(1)`)
			if after := lab.Counters(t, "n1")["refuse_bind_foreign"]; after != before+2 {
				t.Errorf("refuse_bind_foreign rose by %d, want 2", after-before)
			}
		})
	}
}

// TestAliasBind: binding the address that stands for another container's loopback gives one's own.
func TestAliasBind(t *testing.T) {
	thief, owner := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	for id := range model.EndpointID(4) {
		for _, a := range lab.LoopbackAliases(id) {
			port := lab.FreePort()
			thief.Must(`l = listen(4, %q, %d)`, a, port)
			owner.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, "127.0.0.1", %d)`, port)
			owner.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, a, port)
			owner.Must(`l = listen(4, "127.0.0.1", %d)`, port)
		}
	}
}

// TestLoopbackIsNotTheNodes: a container that connects to its own loopback, where nothing of its
// own listens, does not reach a process of the node that listens on a wildcard, which takes in the
// container's loopback aliases.
func TestLoopbackIsNotTheNodes(t *testing.T) {
	node, p := lab.StartPeer(t, "host", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c1")
	for _, family := range []int{4, 6} {
		port := lab.FreePort()
		node.Must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], port)
		for _, target := range []string{"127.0.0.1", "127.0.0.2", "127.1.2.3", "0.0.0.0", lab.Address(t, "overlay", "n1/c1")} {
			p.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, target, port)
			p.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d, ("127.0.0.1", 0))`, target, port)
			p.Expect(`{"error": "ECONNREFUSED"}`, `connect(6, "::ffff:%s", %d)`, target, port)
		}
		for _, target := range []string{"::1", "::", lab.Overlay6(t, "n1/c1")} {
			p.Expect(`{"error": "ECONNREFUSED"}`, `connect(6, %q, %d)`, target, port)
		}
		node.Must(`l.close()`)
	}
}
