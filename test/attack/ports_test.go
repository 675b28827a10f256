package test

import (
	"fmt"
	"strconv"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"take every port that the node connects from", model.ProtectPorts, "n1", func(t *testing.T) string {
			return takePorts(t, "the node's own connect", "host", "n1/c1")
		}},
		attack{"take every port that other containers connect from", model.ProtectPortQuota, "n1", func(t *testing.T) string {
			return takePorts(t, "another container's connect", "heddle", "n1/c2")
		}},
	)
}

// ephemeralPorts gives a node's ephemeral ports.
func ephemeralPorts(t testing.TB, node string) (first, last int) {
	t.Helper()
	if _, err := fmt.Sscan(nodeExec(t, node, "cat", "/proc/sys/net/ipv4/ip_local_port_range"), &first, &last); err != nil {
		t.Fatal(err)
	}
	return first, last
}

// portsOf gives how many of its node's ports an endpoint holds, as the node counts them.
func portsOf(t testing.TB, container string) uint64 {
	t.Helper()
	return trafficOf(t, container).Ports
}

// takePorts binds every ephemeral port in n1/c1, in two processes because one may not have so many sockets, and sees
// whether a victim on that node can still connect.
func takePorts(t *testing.T, what, mode, container string) string {
	first, last := ephemeralPorts(t, "n1")
	half := (first + last) / 2
	return starve(t, what, startPeer(t, mode, container), []string{"ports", "127.0.0.77", strconv.Itoa(first), strconv.Itoa(half)},
		[]string{"ports", "127.0.0.77", strconv.Itoa(half + 1), strconv.Itoa(last)}) // a loopback address where no earlier connection is in TIME_WAIT
}

// starve runs hostile programs in n1/c1 and has a victim on the same node connect beside them.
func starve(t *testing.T, what string, victim *peer, attackers ...[]string) string {
	t.Helper()
	server, port := startPeer(t, "host", "n2/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	var takers []*program
	for _, args := range attackers {
		takers = append(takers, start(t, "heddle", "n1/c1", append([]string{hostile(t)}, args...)...))
	}
	for _, p := range takers {
		p.waitFor("bound: ")
	}
	said := victim.do(`error_of(connect, 4, %q, %d)`, address(t, "host", "n2/c1"), port)
	for _, p := range takers {
		p.stop()
	}
	eventually(t, "the sockets to be gone", func() (bool, string) {
		sockets, ports := socketsOf(t, "n1/c1"), portsOf(t, "n1/c1")
		return sockets == 0 && ports == 0, fmt.Sprint(sockets, " sockets, ", ports, " ports")
	})
	return gained(t, what, said, `"ok"`, `"EADDRNOTAVAIL"`)
}

// TestNodePorts: the ports that the node keeps are to be had by name, like all others, until a container has as many of them
// as it may; the kernel chooses none of them for it, whatever range a program asks for, and it is not told of the agent's limit.
func TestNodePorts(t *testing.T) {
	first, last := ephemeralPorts(t, "n1")
	kept := last + 1 - (last-first+1)/8
	share := (last + 1 - kept) / 16
	p, neighbour := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n1/c2")
	for addr, family := range map[string]int{"0.0.0.0": 4, "127.0.0.1": 4, address(t, "heddle", "n1/c1"): 4, "::": 6, "::1": 6} {
		for _, port := range []int{kept - 1, kept, kept + share, last, last + 1} {
			p.expect(`"ok"`, `error_of(tcp(%d).bind, (%q, %d))`, family, addr, port)
		}
	}
	p.must(`ranged = lambda low, high: (s := tcp(4), s.setsockopt(0, 51, struct.pack("I", low | high << 16)))[0]`)
	p.must(`asked = lambda s: (lambda v: [v & 0xffff, v >> 16 & 0xffff])(s.getsockopt(0, 51))`)
	p.expect(`[0, 0]`, `asked(tcp(4))`)
	p.expect(fmt.Sprintf(`[%d, %d]`, first, first+9), `asked(ranged(%d, %d))`, first, first+9)
	p.expect(fmt.Sprintf(`[%d, 0]`, first+1), `asked(ranged(%d, %d))`, first+1, last)
	p.expect(`{"error": "EINVAL"}`, `ranged(%d, %d)`, last, first)
	p.must(`port_of = lambda s: (s.bind(("0.0.0.0", 0)), s.getsockname()[1])[1]`)
	p.expect(strconv.Itoa(kept-1), `port_of(ranged(%d, %d))`, kept, last)
	p.expect(`true`, `all(%d <= port_of(s) < %d for s in [tcp(4) for _ in range(100)] + [ranged(%d, 0), ranged(0, %d)])`, first, kept, kept-50, last)

	p.must(`held = []`)
	p.must(`take = lambda first, n: sum(error_of(s.bind, ("127.0.0.77", first + i)) == "ok" for i in range(n) for s in [tcp(4)] if held.append(s) is None)`)
	before := counters(t, "n1")["refuse_node_port"]
	p.expect(strconv.Itoa(share), `take(%d, %d)`, kept, share+5)
	if n := counters(t, "n1")["refuse_node_port"] - before; n != 5 {
		t.Errorf("refuse_node_port is %d more, want 5", n)
	}
	neighbour.expect(`"ok"`, `error_of(tcp(4).bind, ("127.0.0.77", %d))`, kept) // one that another has is no further one for the node
	neighbour.expect(`"ok"`, `error_of(tcp(4).bind, ("127.0.0.77", %d))`, last)
	p.must(`held.pop(0).close()`)
	p.expect(`1`, `take(%d, 2)`, last-2) // what is let go may be had again
	p.must(`[s.close() for s in held], held.clear()`)
	p.expect(strconv.Itoa(share), `take(%d, %d)`, kept, share)
}

// TestPortQuota: an endpoint's ports are counted for as long as the kernel gives nobody else a connect from them, however
// its programs let them go; ports that the kernel shares are not.
func TestPortQuota(t *testing.T) {
	// Ports that earlier tests left in TIME_WAIT count for more than a minute: there must be room for them.
	const limit, some = 2000, 40
	endAgent(t, "n1", syscall.SIGTERM) // brings its successor up in the end, with the limit it had
	if err := labCommand("up", "--agent-arg=--endpoint-ports="+strconv.Itoa(limit)); err != nil {
		t.Fatal(err)
	}
	limited := agentPID(t, "n1")
	t.Cleanup(func() {
		if err := killAgent(limited, syscall.SIGTERM); err != nil {
			t.Error(err)
		}
	})
	own, low := address(t, "heddle", "n1/c1"), freePort()
	p, client := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	p.must(`held = []`)
	p.must(`take = lambda n, addr="0.0.0.0", port=0: [held.append(s) for s in [tcp(4) for _ in range(n)] if error_of(s.bind, (addr, port)) == "ok"] and len(held)`)
	p.must(`drop = lambda: ([s.close() for s in held], held.clear())`)
	count := func(what string, want uint64) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d ports: %s", want, what), func() (bool, string) {
			n := portsOf(t, "n1/c1")
			return n == want, fmt.Sprint(n)
		})
	}
	count("nothing yet", 0)
	t.Run("bind", func(t *testing.T) {
		p := p.in(t)
		n, err := strconv.ParseUint(p.must(`take(%d)`, limit+50), 10, 64)
		if err != nil || n > limit || n < limit/2 {
			t.Fatalf("%d ports taken (%v), want %d, but for what waits", n, err, limit)
		}
		count("all it may", n)
		for family, addr := range map[int]string{4: "127.0.0.1", 6: "::"} {
			eventually(t, "a bind to be refused", func() (bool, string) { // what waited may have ended
				said := p.must(`(take(2), error_of(tcp(%d).bind, (%q, 0)))[1]`, family, addr)
				return said == `"EADDRINUSE"`, said
			})
		}
		p.expect(`"ok"`, `error_of(tcp(4).bind, ("0.0.0.0", %d))`, low) // no ephemeral one
		p.must(`held.pop().close()`)
		p.expect(`"ok"`, `error_of((s := tcp(4)).bind, ("0.0.0.0", 0))`)
		p.must(`s.close()`)
		if neighbour := startPeer(t, "heddle", "n1/c2"); neighbour.must(`error_of(tcp(4).bind, ("0.0.0.0", 0))`) != `"ok"` {
			t.Error("another endpoint pays for it")
		}
		if n := counters(t, "n1")["refuse_port_quota"]; n < 2 {
			t.Errorf("refuse_port_quota is %d", n)
		}
		p.must(`drop()`)
		count("all closed", 0)
	})
	t.Run("connects are not counted", func(t *testing.T) {
		p, port := p.in(t), freePort()
		client.must(`l = listen(4, "0.0.0.0", %d, backlog=4096)`, port)
		p.must(`c = [connect(4, %q, %d) for _ in range(%d)]`, address(t, "heddle", "n2/c1"), port, some)
		p.must(`s = tcp(4)`)
		p.must(`s.setsockopt(socket.IPPROTO_IP, 24, 1)`) // IP_BIND_ADDRESS_NO_PORT
		p.must(`s.bind((%q, 0))`, own)
		p.must(`s.connect((%q, %d))`, address(t, "heddle", "n2/c1"), port)
		count("connected sockets", 0)
		p.must(`s.close(), [s.close() for s in c]`)
		client.must(`l.close()`)
	})
	t.Run("a bound socket that connects", func(t *testing.T) {
		p, port := p.in(t), freePort()
		client.must(`l = listen(4, "0.0.0.0", %d)`, port)
		p.must(`s = bound(4, "0.0.0.0", 0)`)
		p.must(`s.connect((%q, %d))`, address(t, "heddle", "n2/c1"), port)
		client.must(`a = l.accept()[0]`)
		count("connected", 1)
		p.must(`s.close()`)
		count("in TIME_WAIT", 0)
		client.must(`a.close()`)
		client.must(`l.close()`)
	})
	t.Run("what a listener accepted keeps its port", func(t *testing.T) {
		p := p.in(t)
		p.must(`l = listen(4, "0.0.0.0", 0)`)
		port := p.must(`l.getsockname()[1]`)
		count("a listener", 1)
		client.must(`c = [connect(4, %q, %s) for _ in range(5)]`, own, port) // direct: at another port underneath
		p.must(`d = [l.accept()[0] for _ in range(5)]`)
		p.must(`c = [connect(4, %q, %s) for _ in range(5)]`, own, port)
		p.must(`a = [l.accept()[0] for _ in range(5)]`)
		count("and what it accepted", 1)
		p.must(`l.close()`)
		count("it is gone, they are not", 1)
		p.must(`[s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER) for s in a]`)
		p.must(`[s.close() for s in a[1:]]`)
		count("one is left", 1)
		p.must(`a[0].close()`)
		count("none", 0)
		p.must(`[s.close() for s in c + d]`)
		client.must(`[s.close() for s in c]`)
	})
	t.Run("listen without bind", func(t *testing.T) {
		p := p.in(t)
		p.must(`held.extend(tcp(4) for _ in range(%d))`, limit+5)
		p.must(`[s.listen() for s in held[:%d]]`, limit/2)
		count("half of what it may", limit/2)
		p.must(`[s.listen() for s in held[%d:]]`, limit/2)
		listening := `sum(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for s in held)`
		eventually(t, "the agent to end those above the limit", func() (bool, string) {
			n, err := strconv.Atoi(p.must("%s", listening))
			return err == nil && n <= limit, fmt.Sprint(n, err)
		})
		if n := counters(t, "n1")["cut_port_quota"]; n == 0 {
			t.Error("cut_port_quota was not counted")
		}
		p.must(`drop()`)
		count("all closed", 0)
	})
}
