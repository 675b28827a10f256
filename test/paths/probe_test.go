package paths

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

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

// TestSpoiltPath has the underlay drop or strip what direct connections need, in several ways.
// Programs must get through all the same, by the overlay, with the same outcome as there; status
// says why; and when the underlay is well again, connections are direct again. A direct connection
// that lives is left alone.
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
			client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
			plain := lab.StartPeer(t, "overlay", "n1/c2")
			client.Must("%s", attempts)
			plain.Must("%s", attempts)
			target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
			server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
			talk := func(p *lab.Peer, s, c string) {
				t.Helper()
				p.Must(`send(%s, 200000)`, s)
				server.Expect(`[200000, "16a7de9d66951288"]`, `receive(%s, 200000)`, c)
			}
			accept := func(p *lab.Peer, s, c string) {
				t.Helper()
				server.Must(`%s, who = l.accept()`, c)
				server.Expect(fmt.Sprintf("%q", p.Addr("heddle", strings.Fields(p.Name)[0])), `who[0]`)
				talk(p, s, c)
			}
			pathOf := func(s string) lab.ListedConnection {
				t.Helper()
				local := client.PortOf(s)
				for _, c := range lab.Connections(t, "n1/c1") {
					if c.Local.Port() == local && c.Remote == netip.AddrPortFrom(netip.MustParseAddr(target), uint16(port)) {
						return c
					}
				}
				t.Fatalf("connection of %s not listed", s)
				return lab.ListedConnection{}
			}
			client.Must(`before = attempts(%q, %d)`, target, port)
			accept(client, "before", "b")
			if got := pathOf("before"); got.Path != names.PathDirect {
				t.Fatalf("at first %+v", got)
			}

			repair := lab.Spoil(t, c.suffix, c.family, c.rules)
			plain.Must(`during = attempts(%q, %d)`, target, port)
			accept(plain, "during", "o")
			client.Must(`during = attempts(%q, %d)`, target, port)
			accept(client, "during", "d")
			if got := pathOf("during"); got.Path != names.PathOverlay || got.Reason != "fallback_"+c.state.String() {
				t.Errorf("while the path fails: %+v", got)
			}
			server.Must(`l6 = listen(6, "::", %d)`, lab.FreePort())
			client.Must(`six = connect(6, %q, %d)`, lab.Address6(t, "heddle", "n2/c1"), server.PortOf("l6"))
			server.Must(`x, who = l6.accept()`)
			server.Expect(fmt.Sprintf("%q", lab.Address6(t, "heddle", "n1/c1")), `who[0]`)
			talk(client, "six", "x")

			d := lab.DirectPaths(t, "n1")
			if len(d.Overlay) != 1 || d.Overlay[0].State != c.state || d.Overlay[0].Reason != "fallback_"+c.state.String() || d.Overlay[0].Next.IsZero() {
				t.Errorf("reported as %+v", d)
			}
			if out := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(out, "by the overlay (fallback_"+c.state.String()+")") {
				t.Errorf("status:\n%s", out)
			}
			if d := lab.DirectPaths(t, "n2"); d.Peers[model.PeerProven] != 1 {
				t.Errorf("the other direction is %+v", d)
			}

			repair()
			lab.AwaitPath(t, "n1", model.PeerProven)
			client.Must(`after = attempts(%q, %d)`, target, port)
			accept(client, "after", "a")
			if got := pathOf("after"); got.Path != names.PathDirect {
				t.Errorf("after it: %+v", got)
			}
			talk(client, "before", "b")
			talk(client, "during", "d")
			if got := pathOf("before"); got.Path != names.PathDirect {
				t.Errorf("the connection from before is now %+v", got)
			}
		})
	}
}

// TestForgedProbes has a host on the underlay, which sees nothing between the nodes, and the
// containers of one try to make a path that works fail, and one that fails work. Probes go on all
// the while.
func TestForgedProbes(t *testing.T) {
	n1, n2, victim := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1"), lab.Address(t, "heddle", "n2/c1")
	c1, id := lab.Address(t, "heddle", "n1/c1"), lab.Numbers(t).ID
	stranger, container := lab.Forger(t, lab.StartOutside(t)), lab.StartPeer(t, "heddle", "n1/c1")
	raw := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1"))
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
	stranger.Must("%s", answers)
	raw.Must("%s", answers)
	container.Must("%s", answers)
	container.Must(`def refused(target, port):
    with socket.socket() as s:
        s.settimeout(1)
        s.connect_ex((target, port))
    time.sleep(.05)`)
	attack := func(flags int, probes uint64) {
		t.Helper()
		before := lab.DirectPaths(t, "n1").Probes
		// Connects that are refused, so that probes are made; and what a container can say with its
		// own address, or another's.
		container.Must(`again(refused, %q, %d)`, victim, lab.FreePort())
		stranger.Must(`again(answer_all, %q, %q, %d, %d)`, n2, n1, first, flags)
		raw.Do(`forge(tcp_answer(%q, %d, %q, 40000, %d, 1, 1), %q)`, n2, first, n1, flags, n1)
		raw.Do(`forge(syn(%q, 33333, %q, %d, heddle_option(%d, %q, %q, 1, version=3)), %q)`, c1, n2, first, id, c1, victim, n2)
		stranger.Must(`forge(syn(%q, 33333, %q, %d), %q)`, n1, n2, first, n2)
		testutil.Eventually(t, "a probe since", func() (bool, string) {
			now := lab.DirectPaths(t, "n1").Probes
			return now["answered"]+now["silent"] > before["answered"]+before["silent"]+probes, fmt.Sprint(now)
		})
		container.Must(`end()`)
		stranger.Must(`end()`)
	}
	const syn, rst, ack = 2, 4, 16
	attack(rst|ack, 12)
	if d := lab.DirectPaths(t, "n1"); d.Peers[model.PeerProven] != 1 {
		t.Errorf("forged refusals made the path %+v", d)
	}
	repair := lab.Spoil(t, "fabric", "bridge", "chain c { type filter hook forward priority 0\n iifname n1 tcp dport "+model.DefaultDirectPorts.String()+" drop\n}")
	container.Begin(fmt.Sprintf(`connect(4, %q, %d)`, victim, lab.FreePort()))
	lab.AwaitPath(t, "n1", model.PeerBlocked)
	container.Reply("the connect that was refused or not")
	attack(syn|ack, 4)
	if d := lab.DirectPaths(t, "n1"); d.Peers[model.PeerBlocked] != 1 {
		t.Errorf("forged answers made the path %+v", d)
	}
	repair()
	lab.AwaitPath(t, "n1", model.PeerProven)
}

// TestConnectInFlight has the underlay block a path while a program connects. It must not wait for
// the kernel's two minutes, although nothing can bring its SYN through any more.
func TestConnectInFlight(t *testing.T) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	repair := lab.Spoil(t, "fabric", "bridge", "chain c { type filter hook forward priority 0\n iifname n1 tcp dport "+model.DefaultDirectPorts.String()+" drop\n}")
	client.Must(`s = tcp(4)`)
	client.Must(`s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 60, 0))`) // the probes' time on a busy machine
	if got := client.Do(`s.connect((%q, %d))`, target, port); got != `{"error": "ETIMEDOUT"}` {
		t.Errorf("the connect gave %s", got)
	}
	if lab.Counters(t, "n1")["cut_path_blocked"] == 0 {
		t.Error("cut_path_blocked is 0")
	}
	client.Must(`s = connect(4, %q, %d)`, target, port)
	repair()
	lab.AwaitPath(t, "n1", model.PeerProven)
}
