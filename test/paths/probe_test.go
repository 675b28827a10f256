package test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// directPaths gives what a node's agent knows of the direct paths to the others.
func directPaths(t testing.TB, node string) model.DirectPaths {
	t.Helper()
	var status []struct {
		Direct model.DirectPaths `json:"direct_paths"`
	}
	raw := heddle(t, "status", "--lab", labName, "--node", node, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &status); err != nil || len(status) != 1 {
		t.Fatalf("status of %s: %v\n%s", node, err, raw)
	}
	return status[0].Direct
}

// awaitPath waits until a node's path to the other one is in a state.
func awaitPath(t testing.TB, node string, state model.PeerState) {
	t.Helper()
	eventually(t, fmt.Sprintf("the direct path from %s to be %s", node, state), func() (bool, string) {
		d := directPaths(t, node)
		return d.Peers[state] == 1, fmt.Sprintf("%+v", d)
	})
}

// spoil puts a table of nftables into a namespace of the lab until mend, or the end of the test.
func spoil(t testing.TB, suffix, family, rules string) (mend func()) {
	t.Helper()
	table, there := family+" heddle-test", true
	sh(t, labName+"-"+suffix, fmt.Sprintf("nft 'table %s {\n%s\n}'", table, rules))
	mend = func() {
		if there {
			there = false
			sh(t, labName+"-"+suffix, "nft delete table "+table)
		}
	}
	t.Cleanup(func() {
		mend()
		if t.Failed() { // later tests need the direct path
			_ = labCommand("up")
		}
	})
	return mend
}

// attempts is a program that tries again when a connect fails.
const attempts = `
def attempts(target, port):
    for _ in range(100):
        s = socket.socket()
        s.settimeout(3)
        try:
            s.connect((target, port))
            s.settimeout(None)
            return s
        except OSError:
            s.close()
            time.sleep(.1)
`

// TestSpoiltPath has the underlay drop or strip what direct connections need, in several ways. Programs must get
// through all the same, by the overlay, with the same outcome as there; status says why; and when the underlay is well
// again, connections are direct again. A direct connection that lives is left alone.
func TestSpoiltPath(t *testing.T) {
	ports := model.DefaultDirectPorts.String()
	for _, c := range []struct {
		name, suffix, family, rules string
		state                       model.PeerState // of the path from n1
	}{
		{"option stripped in one direction", "fabric", "bridge",
			"chain c { type filter hook forward priority 0\n iifname n1 tcp flags & syn == syn reset tcp option 253\n}",
			model.PeerStripped},
		{"ports blocked in one direction", "fabric", "bridge",
			"chain c { type filter hook forward priority 0\n iifname n1 tcp dport " + ports + " drop\n}",
			model.PeerBlocked},
		{"ports blocked by the node's own firewall", "n2", "inet",
			"chain c { type filter hook input priority 0\n iifname != heddle-vx0 tcp dport " + ports + " drop\n}",
			model.PeerBlocked},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
			plain := startPeer(t, "overlay", "n1/c2")
			client.must("%s", attempts)
			plain.must("%s", attempts)
			target, port := address(t, "heddle", "n2/c1"), freePort()
			server.must(`l = listen(4, "0.0.0.0", %d)`, port)
			talk := func(p *peer, s, c string) {
				t.Helper()
				p.must(`send(%s, 200000)`, s)
				server.expect(`[200000, "16a7de9d66951288"]`, `receive(%s, 200000)`, c)
			}
			accept := func(p *peer, s, c string) {
				t.Helper()
				server.must(`%s, who = l.accept()`, c)
				server.expect(fmt.Sprintf("%q", p.addr("heddle", strings.Fields(p.name)[0])), `who[0]`)
				talk(p, s, c)
			}
			pathOf := func(s string) seen {
				t.Helper()
				local := client.portOf(s)
				for _, c := range connections(t, "n1/c1") {
					if c.Local.Port() == local && c.Remote == netip.AddrPortFrom(netip.MustParseAddr(target), uint16(port)) {
						return c
					}
				}
				t.Fatalf("connection of %s not listed", s)
				return seen{}
			}
			client.must(`before = attempts(%q, %d)`, target, port)
			accept(client, "before", "b")
			if got := pathOf("before"); got.Path != model.PathDirect {
				t.Fatalf("at first %+v", got)
			}

			mend := spoil(t, c.suffix, c.family, c.rules)
			plain.must(`during = attempts(%q, %d)`, target, port)
			accept(plain, "during", "o")
			client.must(`during = attempts(%q, %d)`, target, port)
			accept(client, "during", "d")
			if got := pathOf("during"); got.Path != model.PathOverlay || got.Reason != "fallback_"+c.state.String() {
				t.Errorf("while the path fails: %+v", got)
			}
			server.must(`l6 = listen(6, "::", %d)`, freePort())
			client.must(`six = connect(6, %q, %d)`, address6(t, "heddle", "n2/c1"), server.portOf("l6"))
			server.must(`x, who = l6.accept()`)
			server.expect(fmt.Sprintf("%q", address6(t, "heddle", "n1/c1")), `who[0]`)
			talk(client, "six", "x")

			d := directPaths(t, "n1")
			if len(d.Overlay) != 1 || d.Overlay[0].State != c.state || d.Overlay[0].Reason != "fallback_"+c.state.String() || d.Overlay[0].Next.IsZero() {
				t.Errorf("reported as %+v", d)
			}
			if out := heddle(t, "status", "--lab", labName, "--node", "n1"); !strings.Contains(out, "by the overlay (fallback_"+c.state.String()+")") {
				t.Errorf("status:\n%s", out)
			}
			if d := directPaths(t, "n2"); d.Peers[model.PeerProven] != 1 {
				t.Errorf("the other direction is %+v", d)
			}

			mend()
			awaitPath(t, "n1", model.PeerProven)
			client.must(`after = attempts(%q, %d)`, target, port)
			accept(client, "after", "a")
			if got := pathOf("after"); got.Path != model.PathDirect {
				t.Errorf("after it: %+v", got)
			}
			talk(client, "before", "b")
			talk(client, "during", "d")
			if got := pathOf("before"); got.Path != model.PathDirect {
				t.Errorf("the connection from before is now %+v", got)
			}
		})
	}
}

// probeWithoutAgent has n1 probe n2, whose agent does not run: the path must be found to work, because n2's programs
// are there. p is a peer on n1.
func probeWithoutAgent(t *testing.T, p *peer) {
	t.Helper()
	probed := directPaths(t, "n1").Probes["answered"]
	p.do(`connect(4, %q, %d)`, address(t, "heddle", "n2/c1"), freePort()) // is refused, and so asks for a probe
	eventually(t, "n1 to probe n2", func() (bool, string) {
		d := directPaths(t, "n1")
		return d.Probes["answered"] > probed, fmt.Sprintf("%+v", d)
	})
	if d := directPaths(t, "n1"); d.Peers[model.PeerProven] != 1 {
		t.Errorf("without the agent the path is %+v", d)
	}
}

// TestForgedProbes has a host on the underlay, which sees nothing between the nodes, and the containers of one try to
// make a path that works fail, and one that fails work. Probes go on all the while.
func TestForgedProbes(t *testing.T) {
	n1, n2, victim := address(t, "host", "n1/c1"), address(t, "host", "n2/c1"), address(t, "heddle", "n2/c1")
	c1, id := address(t, "heddle", "n1/c1"), labNetwork(t).ID
	stranger, container := forger(t, startOutside(t)), startPeer(t, "heddle", "n1/c1")
	raw := forger(t, startPeer(t, "overlay", "n1/c1"))
	first := int(model.DefaultDirectPorts.First)
	const answers = `
def tcp_answer(src, sport, dst, dport, flags, seq, ack):
    h = struct.pack("!HHIIBBHHH", sport, dport, seq, ack, 5 << 4, flags, 65535, 0, 0)
    pseudo = socket.inet_aton(src) + socket.inet_aton(dst) + struct.pack("!BBH", 0, 6, len(h))
    h = h[:16] + struct.pack("!H", internet_sum(pseudo + h)) + h[18:]
    return ip_packet(src, dst, 6, h)

def answer_all(src, dst, first, flags):
    # One answer for each ephemeral port, from some direct port, with a sequence number that is a guess.
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as s:
        for port in range(32768, 61000):
            s.sendto(tcp_answer(src, first + port % 64, dst, port, flags, 1, int.from_bytes(os.urandom(4), "big")), (dst, 0))

def again(f, *args):
    global going
    going = True
    def loop():
        while going:
            f(*args)
    global thread
    thread = threading.Thread(target=loop)
    thread.start()

def end():
    global going
    going = False
    thread.join()
`
	stranger.must("%s", answers)
	raw.must("%s", answers)
	container.must("%s", answers)
	container.must(`def refused(target, port):
    with socket.socket() as s:
        s.settimeout(1)
        s.connect_ex((target, port))
    time.sleep(.05)`)
	attack := func(flags int, probes uint64) {
		t.Helper()
		before := directPaths(t, "n1").Probes
		// Connects that are refused, so that probes are made; and what a container can say with its own address, or another's.
		container.must(`again(refused, %q, %d)`, victim, freePort())
		stranger.must(`again(answer_all, %q, %q, %d, %d)`, n2, n1, first, flags)
		raw.do(`forge(tcp_answer(%q, %d, %q, 40000, %d, 1, 1), %q)`, n2, first, n1, flags, n1)
		raw.do(`forge(syn(%q, 33333, %q, %d, heddle_option(%d, %q, %q, 1, version=3)), %q)`, c1, n2, first, id, c1, victim, n2)
		stranger.must(`forge(syn(%q, 33333, %q, %d), %q)`, n1, n2, first, n2)
		eventually(t, "a probe since", func() (bool, string) {
			now := directPaths(t, "n1").Probes
			return now["answered"]+now["silent"] > before["answered"]+before["silent"]+probes, fmt.Sprint(now)
		})
		container.must(`end()`)
		stranger.must(`end()`)
	}
	const syn, rst, ack = 2, 4, 16
	attack(rst|ack, 12)
	if d := directPaths(t, "n1"); d.Peers[model.PeerProven] != 1 {
		t.Errorf("forged refusals made the path %+v", d)
	}
	mend := spoil(t, "fabric", "bridge", "chain c { type filter hook forward priority 0\n iifname n1 tcp dport "+model.DefaultDirectPorts.String()+" drop\n}")
	container.begin(fmt.Sprintf(`connect(4, %q, %d)`, victim, freePort()))
	awaitPath(t, "n1", model.PeerBlocked)
	container.reply("the connect that was refused or not")
	attack(syn|ack, 4)
	if d := directPaths(t, "n1"); d.Peers[model.PeerBlocked] != 1 {
		t.Errorf("forged answers made the path %+v", d)
	}
	mend()
	awaitPath(t, "n1", model.PeerProven)
}

// TestConnectInFlight has the underlay block a path while a program connects. It must not wait for the kernel's two
// minutes, although nothing can bring its SYN through any more.
func TestConnectInFlight(t *testing.T) {
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	target, port := address(t, "heddle", "n2/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	mend := spoil(t, "fabric", "bridge", "chain c { type filter hook forward priority 0\n iifname n1 tcp dport "+model.DefaultDirectPorts.String()+" drop\n}")
	client.must(`s = tcp(4)`)
	client.must(`s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 60, 0))`) // the probes' time on a busy machine
	if got := client.do(`s.connect((%q, %d))`, target, port); got != `{"error": "ETIMEDOUT"}` {
		t.Errorf("the connect gave %s", got)
	}
	if counters(t, "n1")["cut_path_blocked"] == 0 {
		t.Error("cut_path_blocked is 0")
	}
	client.must(`s = connect(4, %q, %d)`, target, port)
	mend()
	awaitPath(t, "n1", model.PeerProven)
}
