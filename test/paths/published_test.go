package paths

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

//go:embed testdata/published.py
var publishedScript string

// talking adds the functions of published.py to a peer.
func talking(p *lab.Peer) *lab.Peer {
	p.T.Helper()
	p.Must("%s", publishedScript)
	return p
}

// tryPublish runs heddle endpoints publish for a container of n1.
func tryPublish(container string, ports ...string) (said string, err error) {
	args := append([]string{"endpoints", "publish", "--lab", lab.Name, "--node", "n1", container}, ports...)
	out, err := exec.Command(lab.Bin, args...).CombinedOutput()
	return string(out), err
}

// publish has ports of n1 lead to a container of it until the test ends or others do.
func publish(t *testing.T, container string, ports ...string) string {
	t.Helper()
	t.Cleanup(func() {
		if said, err := tryPublish(container); err != nil {
			t.Errorf("withdraw ports: %v: %s", err, said)
		}
	})
	said, err := tryPublish(container, ports...)
	if err != nil {
		t.Fatalf("publish %v: %v: %s", ports, err, said)
	}
	return said
}

// published are ports of a node that lead to a server in n1/c1.
type published struct{ tcp, udp int }

func newPublished(t *testing.T, mode string, at ...string) (p published, server *lab.Peer) {
	t.Helper()
	server = talking(lab.StartPeer(t, mode, "n1/c1"))
	p = published{lab.FreePort(), lab.FreePort()}
	inTCP, inUDP := lab.FreePort(), lab.FreePort()
	server.Must("who(%d, %d)", inTCP, inUDP)
	var ports []string
	for _, a := range append(at, "")[:max(1, len(at))] {
		ports = append(ports, fmt.Sprintf("%s%d:%d", a, p.tcp, inTCP), fmt.Sprintf("%s%d:%d/udp", a, p.udp, inUDP))
	}
	publish(t, "n1/c1", ports...)
	return p, server
}

// TestPublishedPorts: a published port leads to the container from everywhere, by both protocols
// and families, and the container sees the client's own address.
func TestPublishedPorts(t *testing.T) {
	for _, mode := range lab.Modes {
		t.Run(mode, func(t *testing.T) { publishedEverywhere(t, mode, lab.Address(t, "host", "n1/c1")) })
	}
}

// TestPublishedPortsBeside: the same beside what changes how packets get to containers: caps, which
// what goes by a published port pays from, rules of the operator's in the forward chain, and nodes
// that have IPv6 addresses only.
func TestPublishedPortsBeside(t *testing.T) {
	t.Run("limits", func(t *testing.T) {
		for _, mode := range lab.Modes {
			t.Run(mode, func(t *testing.T) {
				for _, c := range []string{"n1/c1", "n1/c2"} {
					lab.Limit(t, c, "--egress", "100mbit", "--ingress", "100mbit")
				}
				publishedEverywhere(t, mode, lab.Address(t, "host", "n1/c1"))
				answersPay(t, mode)
			})
		}
	})
	t.Run("overlay firewall", func(t *testing.T) {
		lab.Another(t, "f", "--agent-arg=--overlay-firewall=1h")
		for _, mode := range lab.Modes {
			t.Run(mode, func(t *testing.T) { publishedEverywhere(t, mode, lab.Address(t, "host", "n1/c1")) })
		}
	})
	t.Run("IPv6 underlay", func(t *testing.T) {
		lab.Another(t, "6", "--underlay", "ipv6")
		for _, mode := range lab.Modes {
			t.Run(mode, func(t *testing.T) { publishedEverywhere(t, mode, "") })
		}
	})
}

// answersPay: what n1/c1 answers by a published port waits for its cap, also what stays on the node.
func answersPay(t *testing.T, mode string) {
	const asked = 20
	p, _ := newPublished(t, mode)
	shaped := func() (packets int) {
		var qdiscs []struct {
			Kind    string
			Packets int
		}
		testutil.NoError(t, json.Unmarshal([]byte(lab.InNode(t, "n1", "tc", "-s", "-j", "qdisc", "show", "dev", "heddle-sh0", "root")), &qdiscs))
		for _, q := range qdiscs {
			if q.Kind == "htb" {
				packets = q.Packets
			}
		}
		return packets
	}
	lab.Heddle(t, "limit", "set", "n1/c1", "--ingress", "none")
	outside, node := talking(lab.StartOutside(t)), talking(lab.StartPeer(t, "host", "n1/c1"))
	for _, c := range []struct {
		from *lab.Peer
		to   string
	}{{outside, lab.Address(t, "host", "n1/c1")}, {outside, lab.Underlay6(t, "n1")}, {node, lab.Address(t, "host", "n1/c1")}, {node, lab.Underlay6(t, "n1")}, {node, "127.0.0.1"}} {
		for kind, port := range map[string]int{"SOCK_STREAM": p.tcp, "SOCK_DGRAM": p.udp} {
			before := shaped()
			c.from.Must(`s = opened(%q, %d, socket.%s)`, c.to, port, kind)
			c.from.Must(`[ask(s) for _ in range(%d)]`, asked)
			if n := shaped() - before; n < asked {
				t.Errorf("%s to %s: of %d answers, %d packets waited for the cap", kind, c.to, asked, n)
			}
		}
	}
}

// innerAddress is the IPv4 address of a node that has IPv6 addresses only.
func innerAddress(t *testing.T, node string) string {
	t.Helper()
	var status []struct {
		Node struct{ Underlay string }
	}
	lab.Query(t, &status, "status", "--node", node)
	return status[0].Node.Underlay
}

// publishedEverywhere has all kinds of clients ask a server in n1/c1. node4 is its node's address
// on the network, "" if it has none of IPv4.
func publishedEverywhere(t *testing.T, mode, node4 string) {
	beyond := talking(lab.StartOutside(t))
	type client struct {
		name, mode, at string
		seen4, seen6   string // "": not looked at
	}
	node6, own4, other4 := lab.Underlay6(t, "n1"), node4, ""
	if own4 == "" { // what stands for 127.0.0.1 is its inner address
		own4 = innerAddress(t, "n1")
	} else {
		other4 = lab.Address(t, "host", "n2/c1")
	}
	c2, c26 := lab.Address(t, "overlay", "n1/c2"), lab.Overlay6(t, "n1/c2")
	other6 := lab.Underlay6(t, "n2")
	p, _ := newPublished(t, mode)
	for _, c := range []client{
		{"outside", "", "", "", ""},
		{"another node", "host", "n2/c1", other4, other6},
		{"the node", "host", "n1/c1", own4, node6},
		{"an intercepted sibling", "heddle", "n1/c2", c2, c26},
		{"a plain sibling", "overlay", "n1/c2", c2, c26},
		{"an intercepted container of another node", "heddle", "n2/c1", other4, other6},
		{"a plain container of another node", "overlay", "n2/c1", other4, other6},
		{"itself", mode, "n1/c1", "", ""},
	} {
		peer := beyond.In(t)
		if c.mode != "" {
			peer = talking(lab.StartPeer(t, c.mode, c.at))
		}
		for addr, want := range map[string]string{node4: c.seen4, node6: c.seen6} {
			for kind, port := range map[string]int{"SOCK_STREAM": p.tcp, "SOCK_DGRAM": p.udp} {
				if addr == "" {
					continue
				}
				got := peer.Do("asked(%q, %d, socket.%s)", addr, port, kind)
				if strings.Contains(got, "error") || want != "" && got != `"`+want+`"` {
					t.Errorf("%s, %s to %s: %s, want %q", c.name, kind, addr, got, want)
				}
			}
		}
	}
	host := talking(lab.StartPeer(t, "host", "n1/c1"))
	host.Expect(`"`+own4+`"`, `asked("127.0.0.1", %d)`, p.tcp)
	host.Expect(`"`+own4+`"`, `asked("127.0.0.1", %d, socket.SOCK_DGRAM)`, p.udp)
	host.Expect(`{"error": "ECONNREFUSED"}`, `asked("::1", %d)`, p.tcp)
	host.Expect(`{"error": "ECONNREFUSED"}`, `asked("127.0.0.2", %d)`, p.tcp)
}

// TestPublishedPortsGo: what is withdrawn is refused, also what was open, TCP and UDP; at one
// address, others are not published.
func TestPublishedPortsGo(t *testing.T) {
	node4, node6 := lab.Address(t, "host", "n1/c1"), lab.Underlay6(t, "n1")
	for _, mode := range lab.Modes {
		p, _ := newPublished(t, mode, node4+":")
		client := talking(lab.StartOutside(t))
		client.Expect(`{"error": "ECONNREFUSED"}`, `asked(%q, %d)`, node6, p.tcp)
		client.Must(`stream, datagrams = opened(%q, %d), opened(%[1]q, %[3]d, socket.SOCK_DGRAM)`, node4, p.tcp, p.udp)
		client.Must(`[ask(stream), ask(datagrams)]`)
		publish(t, "n1/c1")
		client.Expect(`{"error": "ECONNREFUSED"}`, `ask(datagrams)`)
		if got := client.Do(`ask(stream)`); !strings.Contains(got, "ECONNRESET") && !strings.Contains(got, "timed out") {
			t.Errorf("%s: a connection by a port that was withdrawn: %s", mode, got)
		}
		client.Expect(`{"error": "ECONNREFUSED"}`, `asked(%q, %d)`, node4, p.tcp)
	}
}

// TestPublishedPortsWithoutAgent: connections and ports live on while no agent runs and over its
// start, and a socket that asked in vain before finds the port.
func TestPublishedPortsWithoutAgent(t *testing.T) {
	for _, mode := range lab.Modes {
		node := lab.Address(t, "host", "n1/c1")
		p, _ := newPublished(t, mode)
		client := talking(lab.StartOutside(t))
		client.Must(`stream, datagrams = opened(%q, %d), opened(%[1]q, %[3]d, socket.SOCK_DGRAM)`, node, p.tcp, p.udp)
		works := func(when string) {
			t.Helper()
			got := client.Do(`len({ask(stream), ask(datagrams), asked(%q, %d), asked(%[1]q, %[3]d, socket.SOCK_DGRAM)})`, node, p.tcp, p.udp)
			if got != "1" {
				t.Errorf("%s, %s: %s", mode, when, got)
			}
		}
		works("before")
		lab.EndAgent(t, "n1", syscall.SIGKILL)
		works("without an agent")
		testutil.NoError(t, lab.Command("up"))
		works("with a new agent")
		if list := lab.Heddle(t, "endpoints", "--node", "n1"); !strings.Contains(list, fmt.Sprintf("*:%d->", p.tcp)) {
			t.Errorf("not listed any more:\n%s", list)
		}
	}
}

// TestPublishedPortsAreRefused: ports that somebody has, and addresses that are not the node's; and
// nothing of a request with one of them is done.
func TestPublishedPortsAreRefused(t *testing.T) {
	host := lab.StartPeer(t, "host", "n1/c1")
	inUse, udp, other, free := lab.FreePort(), lab.FreePort(), lab.FreePort(), lab.FreePort()
	host.Must(`l, d = listen(4, "0.0.0.0", %d), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`, inUse)
	host.Must(`d.bind(("0.0.0.0", %d))`, udp)
	lab.StartPeer(t, "heddle", "n1/c1").Must(`l = listen(4, "0.0.0.0", %d)`, free) // a container's own is nobody's
	publish(t, "n1/c1", fmt.Sprintf("%d:80", other))
	for bad, want := range map[string]string{
		fmt.Sprintf("%d:80", inUse):           "ss -lnp",
		fmt.Sprintf("%d:80/udp", udp):         "ss -lnp",
		fmt.Sprintf("%d:80", other):           "leads to n1/c1",
		fmt.Sprintf("127.0.0.1:%d:80", other): "leads to n1/c1",
		"192.0.2.77:8080:80":                  "the node does not have this address",
		"17410:80":                            "direct connections",
		"4789:80/udp":                         "a process of the node has this port",
	} {
		out, err := tryPublish("n1/c2", fmt.Sprintf("%d:80", free), bad)
		if err == nil || !strings.Contains(out, want) || !strings.Contains(out, "ports") {
			t.Errorf("%s: %v, want %q in %s", bad, err, want, out)
		}
		host.Expect(`{"error": "ECONNREFUSED"}`, `connect(4, "127.0.0.1", %d)`, free)
	}
	out := publish(t, "n1/c2", fmt.Sprintf("%d:80", free), fmt.Sprintf("%d-%d:81", inUse, inUse+1), ":82")
	if !strings.Contains(out, fmt.Sprintf("*:%d->81/tcp", inUse+1)) || !strings.Contains(out, ":49153->82") {
		t.Errorf("ports of the agent's choice: %s", out)
	}
}

// TestPublishedPortsAlone: a container's listener is at no port of the node that was not published.
func TestPublishedPortsAlone(t *testing.T) {
	node := lab.Address(t, "host", "n1/c1")
	server := talking(lab.StartPeer(t, "overlay", "n1/c1"))
	tcp, udp := lab.FreePort(), lab.FreePort()
	server.Must("who(%d, %d)", tcp, udp)
	lab.StartPeer(t, "heddle", "n1/c2").Must(`l = listen(4, "0.0.0.0", %d)`, tcp)
	for name, client := range map[string]*lab.Peer{"outside": lab.StartOutside(t), "another node": lab.StartPeer(t, "host", "n2/c1"), "the node": lab.StartPeer(t, "host", "n1/c1")} {
		talking(client).Expect(`{"error": "ECONNREFUSED"}`, `asked(%q, %d)`, node, tcp)
		if got := client.Do(`asked(%q, %d, socket.SOCK_DGRAM)`, node, udp); got != `{"error": "ECONNREFUSED"}` {
			t.Errorf("%s: a datagram: %s", name, got)
		}
	}
}
