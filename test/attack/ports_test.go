package attack

import (
	"fmt"
	"math/big"
	"strconv"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
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
	if _, err := fmt.Sscan(lab.InNode(t, node, "cat", "/proc/sys/net/ipv4/ip_local_port_range"), &first, &last); err != nil {
		t.Fatal(err)
	}
	return first, last
}

// portsOf gives how many of its node's ports an endpoint holds, as the node counts them.
func portsOf(t testing.TB, container string) uint64 {
	t.Helper()
	return trafficOf(t, container).Ports
}

// takePorts binds every ephemeral port in n1/c1, in two processes because one may not have so many
// sockets, and sees whether a victim on that node can still connect.
func takePorts(t *testing.T, what, mode, container string) string {
	first, last := ephemeralPorts(t, "n1")
	half := (first + last) / 2
	return starve(t, what, lab.StartPeer(t, mode, container), []string{"ports", "127.0.0.77", strconv.Itoa(first), strconv.Itoa(half)},
		[]string{"ports", "127.0.0.77", strconv.Itoa(half + 1), strconv.Itoa(last)}) // a loopback address where no earlier connection is in TIME_WAIT
}

// starve runs hostile programs in n1/c1 and has a victim on the same node connect beside them.
func starve(t *testing.T, what string, victim *lab.Peer, attackers ...[]string) string {
	t.Helper()
	server, port := lab.StartPeer(t, "host", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	var takers []*lab.Program
	for _, args := range attackers {
		takers = append(takers, lab.Start(t, "heddle", "n1/c1", append([]string{hostile(t)}, args...)...))
	}
	for _, p := range takers {
		p.WaitFor("bound: ")
	}
	said := victim.Do(`error_of(connect, 4, %q, %d)`, lab.Address(t, "host", "n2/c1"), port)
	for _, p := range takers {
		p.Stop()
	}
	testutil.Eventually(t, "the sockets to be gone", func() (bool, string) {
		sockets, ports := socketsOf(t, "n1/c1"), portsOf(t, "n1/c1")
		return sockets == 0 && ports == 0, fmt.Sprint(sockets, " sockets, ", ports, " ports")
	})
	return gained(t, what, said, `"ok"`, `"EADDRNOTAVAIL"`)
}

// TestNodePorts: the ports that the node keeps are to be had by name, like all others, until a
// container has as many of them as it may; the kernel chooses none of them for it, whatever range a
// program asks for, and it is not told of the agent's limit.
func TestNodePorts(t *testing.T) {
	first, last := ephemeralPorts(t, "n1")
	n := last - first + 1
	keeps := n / 8 // and so many more that the rest has no divisor in common with all
	for new(big.Int).GCD(nil, nil, big.NewInt(int64(n&^1)), big.NewInt(int64(n-keeps))).Int64() != 1 {
		keeps++
	}
	kept := last + 1 - keeps
	share := (last + 1 - kept) / 16
	p, neighbour := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	for addr, family := range map[string]int{"0.0.0.0": 4, "127.0.0.1": 4, lab.Address(t, "heddle", "n1/c1"): 4, "::": 6, "::1": 6} {
		for _, port := range []int{kept - 1, kept, kept + share, last, last + 1} {
			p.Expect(`"ok"`, `error_of(tcp(%d).bind, (%q, %d))`, family, addr, port)
		}
	}
	p.Must(`ranged = lambda low, high: (s := tcp(4), s.setsockopt(0, 51, struct.pack("I", low | high << 16)))[0]`)
	p.Must(`asked = lambda s: (lambda v: [v & 0xffff, v >> 16 & 0xffff])(s.getsockopt(0, 51))`)
	p.Expect(`[0, 0]`, `asked(tcp(4))`)
	p.Expect(fmt.Sprintf(`[%d, %d]`, first, first+9), `asked(ranged(%d, %d))`, first, first+9)
	p.Expect(fmt.Sprintf(`[%d, 0]`, first+1), `asked(ranged(%d, %d))`, first+1, last)
	p.Expect(`{"error": "EINVAL"}`, `ranged(%d, %d)`, last, first)
	p.Must(`port_of = lambda s: (s.bind(("0.0.0.0", 0)), s.getsockname()[1])[1]`)
	p.Expect(strconv.Itoa(kept-1), `port_of(ranged(%d, %d))`, kept, last)
	p.Expect(`true`, `all(%d <= port_of(s) < %d for s in [tcp(4) for _ in range(100)] + [ranged(%d, 0), ranged(0, %d)])`, first, kept, kept-50, last)

	p.Must(`held = []`)
	p.Must(`take = lambda first, n: sum(error_of(s.bind, ("127.0.0.77", first + i)) == "ok" for i in range(n) for s in [tcp(4)] if held.append(s) is None)`)
	before := lab.Counters(t, "n1")["refuse_node_port"]
	p.Expect(strconv.Itoa(share), `take(%d, %d)`, kept, share+5)
	if n := lab.Counters(t, "n1")["refuse_node_port"] - before; n != 5 {
		t.Errorf("refuse_node_port is %d more, want 5", n)
	}
	neighbour.Expect(`"ok"`, `error_of(tcp(4).bind, ("127.0.0.77", %d))`, kept) // one that another has is no further one for the node
	neighbour.Expect(`"ok"`, `error_of(tcp(4).bind, ("127.0.0.77", %d))`, last)
	p.Must(`held.pop(0).close()`)
	p.Expect(`1`, `take(%d, 2)`, last-2) // what is let go may be had again
	p.Must(`[s.close() for s in held], held.clear()`)
	p.Expect(strconv.Itoa(share), `take(%d, %d)`, kept, share)
}

// TestPortQuota: an endpoint's ports are counted for as long as the kernel gives nobody else a
// connect from them, however its programs let them go; ports that the kernel shares are not.
func TestPortQuota(t *testing.T) {
	// Ports that earlier tests left in TIME_WAIT count for more than a minute: there must be room
	// for them.
	const limit, some = 2000, 40
	lab.EndAgent(t, "n1", syscall.SIGTERM) // brings its successor up in the end, with the limit it had
	testutil.NoError(t, lab.Command("up", "--agent-arg=--endpoint-ports="+strconv.Itoa(limit)))
	limited := lab.AgentPID(t, "n1")
	t.Cleanup(func() {
		if err := lab.KillAgent(limited, syscall.SIGTERM); err != nil {
			t.Error(err)
		}
	})
	own, low := lab.Address(t, "heddle", "n1/c1"), lab.FreePort()
	p, client := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	p.Must(`held = []`)
	p.Must(`take = lambda n, addr="0.0.0.0", port=0: [held.append(s) for s in [tcp(4) for _ in range(n)] if error_of(s.bind, (addr, port)) == "ok"] and len(held)`)
	p.Must(`drop = lambda: ([s.close() for s in held], held.clear())`)
	count := func(what string, want uint64) {
		t.Helper()
		testutil.Eventually(t, fmt.Sprintf("%d ports: %s", want, what), func() (bool, string) {
			n := portsOf(t, "n1/c1")
			return n == want, fmt.Sprint(n)
		})
	}
	count("nothing yet", 0)
	t.Run("bind", func(t *testing.T) {
		p := p.In(t)
		n, err := strconv.ParseUint(p.Must(`take(%d)`, limit+50), 10, 64)
		if err != nil || n > limit || n < limit/2 {
			t.Fatalf("%d ports taken (%v), want %d, but for what waits", n, err, limit)
		}
		count("all it may", n)
		for family, addr := range map[int]string{4: "127.0.0.1", 6: "::"} {
			testutil.Eventually(t, "a bind to be refused", func() (bool, string) { // what waited may have ended
				said := p.Must(`(take(2), error_of(tcp(%d).bind, (%q, 0)))[1]`, family, addr)
				return said == `"EADDRINUSE"`, said
			})
		}
		p.Expect(`"ok"`, `error_of(tcp(4).bind, ("0.0.0.0", %d))`, low) // no ephemeral one
		p.Must(`held.pop().close()`)
		p.Expect(`"ok"`, `error_of((s := tcp(4)).bind, ("0.0.0.0", 0))`)
		p.Must(`s.close()`)
		if neighbour := lab.StartPeer(t, "heddle", "n1/c2"); neighbour.Must(`error_of(tcp(4).bind, ("0.0.0.0", 0))`) != `"ok"` {
			t.Error("another endpoint pays for it")
		}
		if n := lab.Counters(t, "n1")["refuse_port_quota"]; n < 2 {
			t.Errorf("refuse_port_quota is %d", n)
		}
		p.Must(`drop()`)
		count("all closed", 0)
	})
	t.Run("connects are not counted", func(t *testing.T) {
		p, port := p.In(t), lab.FreePort()
		client.Must(`l = listen(4, "0.0.0.0", %d, backlog=4096)`, port)
		p.Must(`c = [connect(4, %q, %d) for _ in range(%d)]`, lab.Address(t, "heddle", "n2/c1"), port, some)
		p.Must(`s = tcp(4)`)
		p.Must(`s.setsockopt(socket.IPPROTO_IP, 24, 1)`) // IP_BIND_ADDRESS_NO_PORT
		p.Must(`s.bind((%q, 0))`, own)
		p.Must(`s.connect((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), port)
		count("connected sockets", 0)
		p.Must(`s.close(), [s.close() for s in c]`)
		client.Must(`l.close()`)
	})
	t.Run("a bound socket that connects", func(t *testing.T) {
		p, port := p.In(t), lab.FreePort()
		client.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		p.Must(`s = bound(4, "0.0.0.0", 0)`)
		p.Must(`s.connect((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), port)
		client.Must(`a = l.accept()[0]`)
		count("connected", 1)
		p.Must(`s.close()`)
		count("in TIME_WAIT", 0)
		client.Must(`a.close()`)
		client.Must(`l.close()`)
	})
	t.Run("what a listener accepted keeps its port", func(t *testing.T) {
		p := p.In(t)
		p.Must(`l = listen(4, "0.0.0.0", 0)`)
		port := p.Must(`l.getsockname()[1]`)
		count("a listener", 1)
		client.Must(`c = [connect(4, %q, %s) for _ in range(5)]`, own, port) // direct: at another port underneath
		p.Must(`d = [l.accept()[0] for _ in range(5)]`)
		p.Must(`c = [connect(4, %q, %s) for _ in range(5)]`, own, port)
		p.Must(`a = [l.accept()[0] for _ in range(5)]`)
		count("and what it accepted", 1)
		p.Must(`l.close()`)
		count("it is gone, they are not", 1)
		p.Must(`[s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER) for s in a]`)
		p.Must(`[s.close() for s in a[1:]]`)
		count("one is left", 1)
		p.Must(`a[0].close()`)
		count("none", 0)
		p.Must(`[s.close() for s in c + d]`)
		client.Must(`[s.close() for s in c]`)
	})
	t.Run("listen without bind", func(t *testing.T) {
		p := p.In(t)
		p.Must(`held.extend(tcp(4) for _ in range(%d))`, limit+5)
		p.Must(`[s.listen() for s in held[:%d]]`, limit/2)
		count("half of what it may", limit/2)
		p.Must(`[s.listen() for s in held[%d:]]`, limit/2)
		listening := `sum(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for s in held)`
		testutil.Eventually(t, "the agent to end those above the limit", func() (bool, string) {
			n, err := strconv.Atoi(p.Must("%s", listening))
			return err == nil && n <= limit, fmt.Sprint(n, err)
		})
		if n := lab.Counters(t, "n1")["cut_port_quota"]; n == 0 {
			t.Error("cut_port_quota was not counted")
		}
		p.Must(`drop()`)
		count("all closed", 0)
	})
}
