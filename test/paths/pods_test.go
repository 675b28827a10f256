package test

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
)

// inPod are the modes of two containers that share one network namespace, of which one is intercepted. In the lab a
// container's modes are such a pair: two runc containers in one namespace.
var inPod = [][2]string{{"overlay", "overlay"}, {"heddle", "overlay"}, {"overlay", "heddle"}}

func at(addr string) func(testing.TB) string { return func(testing.TB) string { return addr } }

var pods = []place{
	{"pod 127.0.0.1", "n1/c1", "n1/c1", at("127.0.0.1"), inPod, false},
	{"pod 127.0.0.11", "n1/c1", "n1/c1", at("127.0.0.11"), inPod, false},
	{"pod own address", "n1/c1", "n1/c1", overlayOf("n1/c1"), inPod, false},
}

var pods6 = []place{
	{"pod ::1", "n1/c1", "n1/c1", at("::1"), inPod, true},
	{"pod own IPv6 address", "n1/c1", "n1/c1", overlay6Of("n1/c1"), inPod, true},
}

func (pl place) inPod() bool { return strings.HasPrefix(pl.name, "pod ") }

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

// TestPods: within one network namespace, a process that is intercepted and one that is not reach each other as two
// that are not.
func TestPods(t *testing.T) {
	for _, pl := range pods {
		t.Run(pl.name, func(t *testing.T) { compareAt(t, pl, slices.Concat(scripts, boundInPod)...) })
	}
	for _, pl := range pods6 {
		t.Run(pl.name, func(t *testing.T) {
			more := boundInPod6
			if pl.name != "pod ::1" {
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
		compareAt(t, place{"pod loopback", "n1/c1", "n1/c1", overlayOf("n1/c1"), inPod, false}, loopbackScripts()...)
	})
}

// lookPod is look for a connection between an intercepted process and one that is not, of one container.
func (r pathRun) lookPod(t *testing.T, sport uint16) {
	t.Helper()
	var c seen
	var names, reason string
	switch "heddle" {
	case r.clientMode:
		c = awaitConnection(t, r.place.client, sport, uint16(r.port), 300000, 70001)
		names, reason = r.client.must(`"%%s %%s" %% (s.getsockname()[0], s.getpeername()[0])`), "fallback_own_plain"
	case r.serverMode:
		c = awaitConnection(t, r.place.server, uint16(r.port), sport, 70001, 300000)
		names = r.server.must(`"%%s %%s" %% (c.getsockname()[0], c.getpeername()[0])`)
	default:
		return
	}
	path := model.PathLoopback
	if strings.Contains(r.place.name, "own") {
		path = model.PathLocal
	}
	if c.Path != path || c.Reason != reason || c.State != "ESTABLISHED" {
		t.Errorf("path %s, reason %q, %s; want %s, %q, ESTABLISHED", c.Path, c.Reason, c.State, path, reason)
	}
	listed := strconv.Quote(fmt.Sprintf("%s %s", c.Local.Addr(), c.Remote.Addr()))
	if strings.ReplaceAll(names, "::ffff:", "") != listed {
		t.Errorf("the node lists %s, the program sees %s", listed, names)
	}
	if !model.MirrorRange.Contains(c.NodeRemote.Addr()) {
		t.Errorf("the connection's remote address on the node is %s, want one of %s", c.NodeRemote, model.MirrorRange)
	}
}

// podWays are the two directions, by the modes of client and server.
var podWays = [][2]string{{"heddle", "overlay"}, {"overlay", "heddle"}}

// TestPodsTransfer sends much both ways at a time: the segments of lo must not meet the smaller MTU of a veth.
func TestPodsTransfer(t *testing.T) {
	const size = 16 << 20
	for _, target := range []string{"127.0.0.1", "::1", address(t, "overlay", "n1/c1"), address6(t, "overlay", "n1/c1").String()} {
		for _, m := range podWays {
			t.Run(m[0]+" to "+m[1]+" at "+target, func(t *testing.T) {
				client, server, port := startPeer(t, m[0], "n1/c1"), startPeer(t, m[1], "n1/c1"), freePort()
				server.must(`l = listen(6, "::", %d)`, port)
				client.must(`s = connect(6 if ":" in %q else 4, %[1]q, %d)`, target, port)
				server.must(`c, who = l.accept()`)
				began := time.Now()
				for _, p := range []*peer{client, server} {
					p.must(`end = globals().get("c") or s`)
					p.must(`send(end, %d)`, size)
				}
				client.begin(fmt.Sprintf(`receive(end, %d)`, size))
				got := server.must(`receive(end, %d)`, size)
				if reply := client.reply("receive"); reply != got || !strings.HasPrefix(got, fmt.Sprintf("[%d,", size)) {
					t.Errorf("received %s and %s", got, reply)
				}
				for _, p := range []*peer{client, server} {
					p.must(`drained()`)
					// tcpi_total_retrans
					raw := p.must(`struct.unpack_from("I", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]`)
					// Some are to be had on any veth whose sender changes its processor; wrong sizes cost all of them.
					if n, err := strconv.Atoi(raw); err != nil || n > size/1400/10 {
						t.Errorf("%s retransmitted %s segments", p.name, raw)
					}
				}
				t.Logf("%d MB each way in %s", size>>20, time.Since(began).Round(time.Millisecond))
			})
		}
	}
}

// TestPodsMany has many connections at once and one after another, to one server from intercepted and other clients.
func TestPodsMany(t *testing.T) {
	const n = 300
	for _, target := range []string{"127.0.0.1", "::1"} {
		for _, mode := range modes {
			t.Run("server "+mode+" at "+target, func(t *testing.T) {
				server, port, family := startPeer(t, mode, "n1/c1"), freePort(), 4
				if target == "::1" {
					family = 6
				}
				server.must(`l = listen(%d, %q, %d, backlog=1000)`, family, target, port)
				clients := map[string]*peer{}
				for _, m := range modes {
					clients[m] = startPeer(t, m, "n1/c1")
					clients[m].must(`many = [tcp(%d) for _ in range(%d)]`, family, n)
					clients[m].must(`[s.setblocking(False) for s in many] and None`)
				}
				for _, c := range clients {
					c.must(`[s.connect_ex((%q, %d)) for s in many] and None`, target, port)
					c.begin(`greet(many)`)
				}
				want := fmt.Sprintf(`[%d, []]`, 2*n)
				if got := server.must(`greeted(l, %d)`, 2*n); got != want {
					t.Errorf("greeted: %s, want %s", got, want)
				}
				for _, c := range clients {
					if got := c.reply("greet"); got != "0" {
						t.Errorf("%s: %s connections not made", c.name, got)
					}
				}
				server.must(`l.close()`)
				server.must(`serve_forked(lambda: listen(%d, %q, %d), 1)`, family, target, port+10000)
				for _, c := range clients {
					c.must(`ask_many(%d, %q, %d, %d)`, family, target, port+10000, n)
				}
				server.must(`stop_served()`)
			})
		}
	}
}

// TestPodsEnds: connections end for both ends however one of them goes.
func TestPodsEnds(t *testing.T) {
	for _, m := range podWays {
		t.Run(m[0]+" to "+m[1], func(t *testing.T) {
			client, server, port := startPeer(t, m[0], "n1/c1"), startPeer(t, m[1], "n1/c1"), freePort()
			source := freePort()
			connected := func() {
				t.Helper()
				server.must(`l = listen(4, "127.0.0.1", %d)`, port)
				client.must(`s = connect(4, "127.0.0.1", %d, ("127.0.0.1", %d))`, port, source)
				server.must(`c, who = l.accept()`)
				server.must(`l.close()`)
			}
			// The client's port is in TIME_WAIT, and is taken again at once.
			connected()
			client.must(`s.close()`)
			server.expect(`0`, `len(c.recv(1))`)
			server.must(`c.close()`)
			connected()
			client.must(`s.sendall(b"again")`)
			server.expect(`5`, `len(c.recv(10))`)
			// Unread data: a RST by the server's end, and one by the stack of an end that is long gone.
			client.must(`s.sendall(b"unread")`)
			server.must(`select.select([c], [], [], 5)[0] and c.close()`)
			client.expect(`"ECONNRESET"`, `error_of(s.recv, 1)`)
			connected()
			server.must(`c.close()`)
			client.expect(`0`, `len(s.recv(1))`)
			client.must(`s.send(b"x")`)
			eventually(t, "an answer to data for a closed socket", func() (bool, string) {
				got := client.do(`error_of(s.send, b"x")`)
				return got == `"EPIPE"`, got
			})
		})
	}
}

// kubeletRule is the chain KUBE-FIREWALL of kubelet and kube-proxy, which drops what goes to loopback addresses from others.
const kubeletRule = `add table ip heddle-test-kubelet
add chain ip heddle-test-kubelet input { type filter hook input priority 0; }
add rule ip heddle-test-kubelet input ip daddr 127.0.0.0/8 ip saddr != 127.0.0.0/8 ct state != { established, related } counter drop
`

// TestPodsByNsenter: what enters the namespace from the node, as `kubectl port-forward` does, also on a node of Kubernetes.
func TestPodsByNsenter(t *testing.T) {
	t.Run("alone", podByNsenter)
	t.Run("kubelet", func(t *testing.T) {
		nft := func(text string) {
			cmd := exec.Command("nsenter", "--net=/run/netns/"+labName+"-n1", "nft", "-f", "-")
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
	server, port := startPeer(t, "heddle", "n1/c1"), freePort()
	server.must(`l = listen(6, "::", %d)`, port)
	entered := runEntered(t, labName+"-n1-c1")
	for _, target := range []string{"127.0.0.1", "::1", address(t, "overlay", "n1/c1")} {
		entered.must(`s = connect(6 if ":" in %q else 4, %[1]q, %d)`, target, port)
		server.must(`c, who = l.accept()`)
		entered.must(`s.sendall(b"hello")`)
		server.expect(`5`, `len(c.recv(10))`)
	}
	entered.must(`l = listen(6, "::", %d)`, port+10000)
	for _, target := range []string{"127.0.0.1", "::1", address(t, "overlay", "n1/c1")} {
		server.must(`s = connect(6 if ":" in %q else 4, %[1]q, %d)`, target, port+10000)
		entered.must(`c, who = l.accept()`)
		entered.must(`c.sendall(b"hello")`)
		server.expect(`5`, `len(s.recv(10))`)
	}
	// A listener at loopback, and another one beside it at the own address.
	own := address(t, "overlay", "n1/c1")
	both := freePort()
	server.must(`l1, l2 = listen(4, "127.0.0.1", %d), listen(4, %q, %[1]d)`, both, own)
	for name, target := range map[string]string{"l1": "127.0.0.1", "l2": own} {
		entered.must(`s = connect(4, %q, %d)`, target, both)
		server.must(`c, who = %s.accept()`, name)
		server.expect(strconv.Quote(target), `c.getsockname()[0]`)
		entered.must(`s.sendall(b"hello")`)
		server.expect(`5`, `len(c.recv(10))`)
	}
}

// TestPodsApart: what is open on one container's loopback is not on another's.
func TestPodsApart(t *testing.T) {
	for _, mode := range modes {
		owner, port := startPeer(t, mode, "n1/c1"), freePort()
		owner.must(`l = listen(4, "127.0.0.1", %d)`, port)
		owner.must(`l6 = listen(6, "::1", %d)`, port)
		for _, other := range modes {
			thief := startPeer(t, other, "n1/c2")
			for _, target := range []string{"127.0.0.1", "::1", address(t, "overlay", "n1/c1"), address6(t, "overlay", "n1/c1").String()} {
				family := 4
				if netip.MustParseAddr(target).Is6() {
					family = 6
				}
				thief.expect(`{"error": "ECONNREFUSED"}`, `connect(%d, %q, %d)`, family, target, port)
			}
		}
	}
}

// startPod opens connections between an intercepted process and one that is not, and gives what checks that they live
// and that new ones are made: from client by its sockets inside.
func startPod(t *testing.T, client, plain *peer) (check func()) {
	t.Helper()
	port, plainPort := freePort(), freePort()
	client.must(`podl = listen(6, "::", %d)`, port)
	plain.must(`podl = listen(6, "::", %d)`, plainPort)
	client.must(`podc = [connect(6, "::1", %d)]`, plainPort)
	plain.must(`podc = [connect(4, "127.0.0.1", %d)]`, port)
	for _, p := range []*peer{client, plain} {
		p.must(`podc.append(podl.accept()[0])`)
	}
	return func() {
		t.Helper()
		client.must(`inside.pop().connect(("127.0.0.1", %d))`, plainPort)
		plain.must(`connect(6, "::1", %d)`, port)
		for _, p := range []*peer{client, plain} {
			p.must(`podl.accept()[0]`)
			p.must(`[c.sendall(b"alive") for c in podc] and None`)
		}
		for _, p := range []*peer{client, plain} {
			p.expect(`[5, 5]`, `[len(c.recv(100)) for c in podc]`)
		}
	}
}

// TestPodsBindConflicts: a program is told that a process that is not intercepted listens at its port.
func TestPodsBindConflicts(t *testing.T) {
	first, second := startPeer(t, "overlay", "n1/c1"), map[string]*peer{"overlay": startPeer(t, "overlay", "n1/c1"), "heddle": startPeer(t, "heddle", "n1/c1")}
	own, own6 := address(t, "overlay", "n1/c1"), address6(t, "overlay", "n1/c1").String()
	names := [][3]any{{4, "0.0.0.0", "None"}, {4, "127.0.0.1", "None"}, {4, own, "None"}, {6, "::", 0}, {6, "::", 1}, {6, "::1", "None"}, {6, own6, "None"}}
	for _, held := range names {
		for _, reuseaddr := range []string{"False", "True"} {
			port := freePort()
			first.must(`l = listen(%d, %q, %d, v6only=%v)`, held[0], held[1], port, held[2])
			for _, wanted := range names {
				answers := map[string]string{}
				for mode, p := range second {
					answers[mode] = p.must(`error_of(lambda: bound(%d, %q, %d, %v, reuseaddr=%s).close())`, wanted[0], wanted[1], port, wanted[2], reuseaddr)
				}
				if answers["heddle"] != answers["overlay"] {
					t.Errorf("%v listens, bind of %v (SO_REUSEADDR %s): %s, want %s", held, wanted, reuseaddr, answers["heddle"], answers["overlay"])
				}
			}
			first.must(`l.close()`)
		}
	}
}
