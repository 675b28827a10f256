package paths

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// inPod are the modes of two containers that share one network namespace, of which one is
// intercepted. In the lab a container's modes are such a pair: two runc containers in one
// namespace.
var inPod = [][2]string{{"overlay", "overlay"}, {"heddle", "overlay"}, {"overlay", "heddle"}}

func at(addr string) func(testing.TB) string { return func(testing.TB) string { return addr } }

var pods = []lab.Place{
	{Name: "pod 127.0.0.1", Client: "n1/c1", Server: "n1/c1", Target: at("127.0.0.1"), Modes: inPod},
	{Name: "pod 127.0.0.11", Client: "n1/c1", Server: "n1/c1", Target: at("127.0.0.11"), Modes: inPod},
	{Name: "pod own address", Client: "n1/c1", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: inPod},
}

var pods6 = []lab.Place{
	{Name: "pod ::1", Client: "n1/c1", Server: "n1/c1", Target: at("::1"), Modes: inPod, IPv6: true},
	{Name: "pod own IPv6 address", Client: "n1/c1", Server: "n1/c1", Target: lab.Overlay6Of("n1/c1"), Modes: inPod, IPv6: true},
}

// boundInPod are clients bound in every way that a connect within the container can start from.
var boundInPod = []script{
	{name: "bound to 127.0.0.1", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port, ("127.0.0.1", 0))
server: c, who = l.accept()` + exchange},
	{name: "bound to 127.0.0.1 and a port", text: `
server: l = listen(4, "$target", $port)
client: s = connect(4, "$target", $port, ("127.0.0.1", $source))
server: c, who = l.accept()` + exchange},
	{name: "bound to 127.0.0.9", text: `
server: l = listen(4, "$target", $port)
client: s = connect(4, "$target", $port, ("127.0.0.9", 0))
server: c, who = l.accept()` + exchange},
	{name: "bound to a wildcard", text: `
server: l = listen(4, "$target", $port)
client: s = connect(4, "$target", $port, ("0.0.0.0", 0))
server: c, who = l.accept()` + exchange},
	{name: "IPv6 socket, bound to a wildcard and a port", text: `
server: l = listen(6, "::", $port)
client: s = connect(6, "::ffff:$target", $port, ("::", $source))
server: c, who = l.accept()` + exchange},
}

var boundInPod6 = []script{
	{name: "bound to ::1", text: `
server: l = listen(6, "::", $port)
client: s = connect(6, "::1", $port, ("::1", 0))
server: c, who = l.accept()` + exchange},
	{name: "bound to a wildcard and a port", text: `
server: l = listen(6, "::1", $port)
client: s = connect(6, "::1", $port, ("::", $source))
server: c, who = l.accept()` + exchange},
}

// TestPods: within one network namespace, a process that is intercepted and one that is not reach
// each other as two that are not.
func TestPods(t *testing.T) {
	for _, pl := range pods {
		t.Run(pl.Name, func(t *testing.T) { compareAt(t, pl, slices.Concat(scripts, boundInPod)...) })
	}
	for _, pl := range pods6 {
		t.Run(pl.Name, func(t *testing.T) {
			more := boundInPod6
			if pl.Name != "pod ::1" {
				more = nil
			}
			var fit []script
			for _, sc := range scripts6 {
				// A socket bound to the own IPv6 address is IPv6 underneath: differences.md.
				if !sc.bound {
					fit = append(fit, sc)
				}
			}
			compareAt(t, pl, slices.Concat(fit, more)...)
		})
	}
	t.Run("loopback", func(t *testing.T) {
		compareAt(t, lab.Place{Name: "pod loopback", Client: "n1/c1", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: inPod}, loopbackScripts()...)
	})
}

// lookPod is look for a connection between an intercepted process and one that is not, of one
// container.
func (r pathRun) lookPod(t *testing.T, sport uint16) {
	t.Helper()
	var c lab.ListedConnection
	var shown, reason string
	switch "heddle" {
	case r.clientMode:
		c = lab.AwaitConnection(t, r.place.Client, sport, uint16(r.port), 300000, 70001)
		shown, reason = r.client.Must(`"%%s %%s" %% (s.getsockname()[0], s.getpeername()[0])`), "fallback_own_plain"
	case r.serverMode:
		c = lab.AwaitConnection(t, r.place.Server, uint16(r.port), sport, 70001, 300000)
		shown = r.server.Must(`"%%s %%s" %% (c.getsockname()[0], c.getpeername()[0])`)
	default:
		return
	}
	path := names.PathLoopback
	if strings.Contains(r.place.Name, "own") {
		path = names.PathLocal
	}
	if c.Path != path || c.Reason != reason || c.State != "ESTABLISHED" {
		t.Errorf("path %s, reason %q, %s; want %s, %q, ESTABLISHED", c.Path, c.Reason, c.State, path, reason)
	}
	listed := strconv.Quote(fmt.Sprintf("%s %s", c.Local.Addr(), c.Remote.Addr()))
	if strings.ReplaceAll(shown, "::ffff:", "") != listed {
		t.Errorf("the node lists %s, the program sees %s", listed, shown)
	}
	if !model.MirrorRange.Contains(c.NodeRemote.Addr()) {
		t.Errorf("the connection's remote address on the node is %s, want one of %s", c.NodeRemote, model.MirrorRange)
	}
}

// podWays are the two directions, by the modes of client and server.
var podWays = [][2]string{{"heddle", "overlay"}, {"overlay", "heddle"}}

// TestPodsTransfer sends much both ways at a time: the segments of lo must not meet the smaller MTU
// of a veth.
func TestPodsTransfer(t *testing.T) {
	const size = 16 << 20
	for _, target := range []string{"127.0.0.1", "::1", lab.Address(t, "overlay", "n1/c1"), lab.Address6(t, "overlay", "n1/c1").String()} {
		for _, m := range podWays {
			t.Run(m[0]+" to "+m[1]+" at "+target, func(t *testing.T) {
				client, server, port := lab.StartPeer(t, m[0], "n1/c1"), lab.StartPeer(t, m[1], "n1/c1"), lab.FreePort()
				server.Must(`l = listen(6, "::", %d)`, port)
				client.Must(`s = connect(6 if ":" in %q else 4, %[1]q, %d)`, target, port)
				server.Must(`c, who = l.accept()`)
				began := time.Now()
				for _, p := range []*lab.Peer{client, server} {
					p.Must(`end = globals().get("c") or s`)
					p.Must(`send(end, %d)`, size)
				}
				client.Begin(fmt.Sprintf(`receive(end, %d)`, size))
				got := server.Must(`receive(end, %d)`, size)
				if reply := client.Reply("receive"); reply != got || !strings.HasPrefix(got, fmt.Sprintf("[%d,", size)) {
					t.Errorf("received %s and %s", got, reply)
				}
				for _, p := range []*lab.Peer{client, server} {
					p.Must(`drained()`)
					// tcpi_total_retrans
					raw := p.Must(`struct.unpack_from("I", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]`)
					// Some are to be had on any veth whose sender changes its processor; wrong
					// sizes cost all of them.
					if n, err := strconv.Atoi(raw); err != nil || n > size/1400/10 {
						t.Errorf("%s retransmitted %s segments", p.Name, raw)
					}
				}
				t.Logf("%d MB each way in %s", size>>20, time.Since(began).Round(time.Millisecond))
			})
		}
	}
}

// TestPodsMany has many connections at once and one after another, to one server from intercepted
// and other clients.
func TestPodsMany(t *testing.T) {
	const n = 300
	for _, target := range []string{"127.0.0.1", "::1"} {
		for _, mode := range lab.Modes {
			t.Run("server "+mode+" at "+target, func(t *testing.T) {
				server, port, family := lab.StartPeer(t, mode, "n1/c1"), lab.FreePort(), 4
				if target == "::1" {
					family = 6
				}
				server.Must(`l = listen(%d, %q, %d, backlog=1000)`, family, target, port)
				clients := map[string]*lab.Peer{}
				for _, m := range lab.Modes {
					clients[m] = lab.StartPeer(t, m, "n1/c1")
					clients[m].Must(`many = [tcp(%d) for _ in range(%d)]`, family, n)
					clients[m].Must(`[s.setblocking(False) for s in many] and None`)
				}
				for _, c := range clients {
					c.Must(`[s.connect_ex((%q, %d)) for s in many] and None`, target, port)
					c.Begin(`greet(many)`)
				}
				want := fmt.Sprintf(`[%d, []]`, 2*n)
				if got := server.Must(`greeted(l, %d)`, 2*n); got != want {
					t.Errorf("greeted: %s, want %s", got, want)
				}
				for _, c := range clients {
					if got := c.Reply("greet"); got != "0" {
						t.Errorf("%s: %s connections not made", c.Name, got)
					}
				}
				server.Must(`l.close()`)
				server.Must(`serve_forked(lambda: listen(%d, %q, %d), 1)`, family, target, port+10000)
				for _, c := range clients {
					c.Must(`ask_many(%d, %q, %d, %d)`, family, target, port+10000, n)
				}
				server.Must(`stop_served()`)
			})
		}
	}
}

// TestPodsEnds: connections end for both ends however one of them goes.
func TestPodsEnds(t *testing.T) {
	for _, m := range podWays {
		t.Run(m[0]+" to "+m[1], func(t *testing.T) {
			client, server, port := lab.StartPeer(t, m[0], "n1/c1"), lab.StartPeer(t, m[1], "n1/c1"), lab.FreePort()
			source := lab.FreePort()
			connected := func() {
				t.Helper()
				server.Must(`l = listen(4, "127.0.0.1", %d)`, port)
				client.Must(`s = connect(4, "127.0.0.1", %d, ("127.0.0.1", %d))`, port, source)
				server.Must(`c, who = l.accept()`)
				server.Must(`l.close()`)
			}
			// The client's port is in TIME_WAIT, and is taken again at once.
			connected()
			client.Must(`s.close()`)
			server.Expect(`0`, `len(c.recv(1))`)
			server.Must(`c.close()`)
			connected()
			client.Must(`s.sendall(b"again")`)
			server.Expect(`5`, `len(c.recv(10))`)
			// Unread data: a RST by the server's end, and one by the stack of an end that is long
			// gone.
			client.Must(`s.sendall(b"unread")`)
			server.Must(`select.select([c], [], [], 5)[0] and c.close()`)
			client.Expect(`"ECONNRESET"`, `error_of(s.recv, 1)`)
			connected()
			server.Must(`c.close()`)
			client.Expect(`0`, `len(s.recv(1))`)
			client.Must(`s.send(b"x")`)
			testutil.Eventually(t, "an answer to data for a closed socket", func() (bool, string) {
				got := client.Do(`error_of(s.send, b"x")`)
				return got == `"EPIPE"`, got
			})
		})
	}
}

// kubeletRule is the chain KUBE-FIREWALL of kubelet and kube-proxy, which drops what goes to
// loopback addresses from others.
const kubeletRule = `add table ip heddle-test-kubelet
add chain ip heddle-test-kubelet input { type filter hook input priority 0; }
add rule ip heddle-test-kubelet input ip daddr 127.0.0.0/8 ip saddr != 127.0.0.0/8 ct state != { established, related } counter drop
`

// TestPodsByNsenter: what enters the namespace from the node, as `kubectl port-forward` does, also
// on a node of Kubernetes.
func TestPodsByNsenter(t *testing.T) {
	t.Run("alone", podByNsenter)
	t.Run("kubelet", func(t *testing.T) {
		nft := func(text string) {
			cmd := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "nft", "-f", "-")
			cmd.Stdin = strings.NewReader(text)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("nft: %v\n%s", err, out)
			}
		}
		t.Cleanup(func() { nft("add table ip heddle-test-kubelet\ndelete table ip heddle-test-kubelet\n") })
		nft(kubeletRule)
		podByNsenter(t)
	})
}

func podByNsenter(t *testing.T) {
	server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	server.Must(`l = listen(6, "::", %d)`, port)
	entered := lab.RunEntered(t, lab.Name+"-n1-c1")
	for _, target := range []string{"127.0.0.1", "::1", lab.Address(t, "overlay", "n1/c1")} {
		entered.Must(`s = connect(6 if ":" in %q else 4, %[1]q, %d)`, target, port)
		server.Must(`c, who = l.accept()`)
		entered.Must(`s.sendall(b"hello")`)
		server.Expect(`5`, `len(c.recv(10))`)
	}
	entered.Must(`l = listen(6, "::", %d)`, port+10000)
	for _, target := range []string{"127.0.0.1", "::1", lab.Address(t, "overlay", "n1/c1")} {
		server.Must(`s = connect(6 if ":" in %q else 4, %[1]q, %d)`, target, port+10000)
		entered.Must(`c, who = l.accept()`)
		entered.Must(`c.sendall(b"hello")`)
		server.Expect(`5`, `len(s.recv(10))`)
	}
	// A listener at loopback, and another one beside it at the own address.
	own := lab.Address(t, "overlay", "n1/c1")
	both := lab.FreePort()
	server.Must(`l1, l2 = listen(4, "127.0.0.1", %d), listen(4, %q, %[1]d)`, both, own)
	for name, target := range map[string]string{"l1": "127.0.0.1", "l2": own} {
		entered.Must(`s = connect(4, %q, %d)`, target, both)
		server.Must(`c, who = %s.accept()`, name)
		server.Expect(strconv.Quote(target), `c.getsockname()[0]`)
		entered.Must(`s.sendall(b"hello")`)
		server.Expect(`5`, `len(c.recv(10))`)
	}
}

// TestPodsApart: what is open on one container's loopback is not on another's.
func TestPodsApart(t *testing.T) {
	for _, mode := range lab.Modes {
		owner, port := lab.StartPeer(t, mode, "n1/c1"), lab.FreePort()
		owner.Must(`l = listen(4, "127.0.0.1", %d)`, port)
		owner.Must(`l6 = listen(6, "::1", %d)`, port)
		for _, other := range lab.Modes {
			thief := lab.StartPeer(t, other, "n1/c2")
			for _, target := range []string{"127.0.0.1", "::1", lab.Address(t, "overlay", "n1/c1"), lab.Address6(t, "overlay", "n1/c1").String()} {
				family := 4
				if netip.MustParseAddr(target).Is6() {
					family = 6
				}
				thief.Expect(`{"error": "ECONNREFUSED"}`, `connect(%d, %q, %d)`, family, target, port)
			}
		}
	}
}

// TestPodsBindConflicts: a program is told that a process that is not intercepted listens at its
// port.
func TestPodsBindConflicts(t *testing.T) {
	first, second := lab.StartPeer(t, "overlay", "n1/c1"), map[string]*lab.Peer{"overlay": lab.StartPeer(t, "overlay", "n1/c1"), "heddle": lab.StartPeer(t, "heddle", "n1/c1")}
	own, own6 := lab.Address(t, "overlay", "n1/c1"), lab.Address6(t, "overlay", "n1/c1").String()
	names := [][3]any{{4, "0.0.0.0", "None"}, {4, "127.0.0.1", "None"}, {4, own, "None"}, {6, "::", 0}, {6, "::", 1}, {6, "::1", "None"}, {6, own6, "None"}}
	for _, held := range names {
		for _, reuseaddr := range []string{"False", "True"} {
			port := lab.FreePort()
			first.Must(`l = listen(%d, %q, %d, v6only=%v)`, held[0], held[1], port, held[2])
			for _, wanted := range names {
				answers := map[string]string{}
				for mode, p := range second {
					answers[mode] = p.Must(`error_of(lambda: bound(%d, %q, %d, %v, reuseaddr=%s).close())`, wanted[0], wanted[1], port, wanted[2], reuseaddr)
				}
				if answers["heddle"] != answers["overlay"] {
					t.Errorf("%v listens, bind of %v (SO_REUSEADDR %s): %s, want %s", held, wanted, reuseaddr, answers["heddle"], answers["overlay"])
				}
			}
			first.Must(`l.close()`)
		}
	}
}
