package underlay6_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/lab/fabric"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// packets6 is Python that makes whole packets of IPv6, beside what test/lab's has.
const packets6 = `
def ipv6(src, dst, protocol, payload):
    return struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst) + payload

def checked6(src, dst, protocol, payload, at):
    pseudo = socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst) + struct.pack("!II", len(payload), protocol)
    return payload[:at] + struct.pack("!H", internet_sum(pseudo + payload)) + payload[at + 2:]

def tcp6(src, sport, dst, dport, options=b"", flags=2):
    tcp = struct.pack("!HHIIBBHHH", sport, dport, 12345, 0, (20 + len(options)) // 4 << 4, flags, 64240, 0, 0) + options
    return ipv6(src, dst, 6, checked6(src, dst, 6, tcp, 16))

def udp6(src, sport, dst, dport, payload, headers=0):
    udp = checked6(src, dst, 17, struct.pack("!HHHH", sport, dport, 8 + len(payload), 0) + payload, 6)
    for i in range(headers):  # destination options, of padding
        udp = bytes([17 if i == 0 else 60, 0, 1, 4, 0, 0, 0, 0]) + udp
    return ipv6(src, dst, 60 if headers else 17, udp)

def vxlan6(vni, mac, packet):
    return struct.pack("!II", 0x08000000, vni << 8) + bytes.fromhex(mac.replace(":", "")) + bytes(6) + b"\x08\x00" + packet
`

// noProtection is that of what cannot be taken.
const noProtection = model.Protection(255)

// forgery is something forged: what it is dropped for by n2, and what it gains where it is not.
type forgery struct {
	name       string
	protection model.Protection
	reason     string // counted on node
	node       string
	try        func(t *testing.T, s *scene) (gained func() string)
}

// scene has who listens in n2/c1, for connections and for datagrams, and where.
type scene struct {
	server, datagrams *lab.Peer
	port, udpPort     int
	n1, n2            string // the nodes
	vni, network      int
	mac               string // of n2's overlay device
}

func newScene(t *testing.T) *scene {
	s := &scene{server: lab.StartPeer(t, "heddle", "n2/c1"), port: lab.FreePort(), n1: lab.Underlay6(t, "n1"), n2: lab.Underlay6(t, "n2")}
	s.server.Must(`l = listen(4, "0.0.0.0", %d)`, s.port)
	s.server.Must(`l.setblocking(False)`)
	s.datagrams, s.udpPort = lab.WaitForDatagrams(t)
	s.vni, s.network = lab.Numbers(t).VNI, lab.Numbers(t).ID
	s.mac = address(t, "n2", "heddle-vx0")
	return s
}

// address gives the hardware address of a device of a node.
func address(t *testing.T, node, device string) string {
	t.Helper()
	_, rest, _ := strings.Cut(lab.Shell(t, lab.Name+"-"+node, "ip link show "+device), "link/ether ")
	return strings.Fields(rest)[0]
}

func forger(t *testing.T, p *lab.Peer) *lab.Peer {
	lab.Forger(t, p)
	p.Must("%s", packets6)
	return p
}

// answered says whether n2 took a SYN: there was a SYN-ACK on the network.
func (s *scene) answered(t *testing.T) func() string {
	count := packets(t, map[string]string{"answer": "meta protocol ip6 tcp sport 17410 tcp flags & (syn | ack) == syn | ack"})
	return func() string {
		if count("answer") == 0 {
			return ""
		}
		return "a SYN-ACK"
	}
}

// option is Python for the option of a SYN from n1/c1 to the listener.
func (s *scene) option(t *testing.T) string {
	return fmt.Sprintf("heddle_option(%d, %q, %q, %d)", s.network, lab.Address(t, "overlay", "n1/c1"), lab.Address(t, "overlay", "n2/c1"), s.port)
}

func (s *scene) came() string { return strings.Trim(s.datagrams.Must(`came()`), `"`) }

// overlaid sends a datagram for n2/c1 in VXLAN, by p, from address from, with source inside.
func (s *scene) overlaid(t *testing.T, p *lab.Peer, from, source string, headers int) func() string {
	p.Must(`forge6(udp6(%q, 40000, %q, 4789, vxlan6(%d, %q, udp(%q, 5, %q, %d, b"forged")), %d), %[2]q)`, from, s.n2, s.vni, s.mac, source,
		lab.Address(t, "overlay", "n2/c1"), s.udpPort, headers)
	return s.came
}

var forgeries = []forgery{
	// Nothing has to keep it off: what is of no node is not translated, and so not steered.
	{"a SYN from a host that is no node", noProtection, "drop_unknown_node", "n2", func(t *testing.T, s *scene) func() string {
		p, answered := forger(t, lab.StartOutside(t)), s.answered(t)
		own := strings.TrimSuffix(s.n2, "2") + "fa" // the lab's host outside
		p.Must(`forge6(tcp6(%q, 4711, %q, 17410, %s), %[2]q)`, own, s.n2, s.option(t))
		return answered
	}},
	{"a SYN of a node for a container of another", model.ProtectSYNSender, "drop_source_not_of_node", "n2", func(t *testing.T, s *scene) func() string {
		p, answered := forger(t, lab.StartPeer(t, "host", "n1/c1")), s.answered(t)
		option := fmt.Sprintf("heddle_option(%d, %q, %q, %d)", s.network, lab.Address(t, "overlay", "n2/c2"), lab.Address(t, "overlay", "n2/c1"), s.port)
		p.Must(`forge6(tcp6(%q, 4711, %q, 17410, %s), %[2]q)`, s.n1, s.n2, option)
		return answered
	}},
	{"a SYN out of a container, masqueraded", model.ProtectDirectPorts, "drop_forged_direct", "n1", func(t *testing.T, s *scene) func() string {
		p, answered := forger(t, lab.StartPeer(t, "overlay", "n1/c1")), s.answered(t)
		p.Must(`forge6(tcp6(%q, 4711, %q, 17410, %s), %[2]q)`, lab.Overlay6(t, "n1/c1"), s.n2, s.option(t))
		return answered
	}},
	{"VXLAN from a host that is no node", model.ProtectOverlay, "drop_overlay_stranger", "n2", func(t *testing.T, s *scene) func() string {
		return s.overlaid(t, forger(t, lab.StartOutside(t)), strings.TrimSuffix(s.n2, "2")+"fa", lab.Address(t, "overlay", "n1/c1"), 0)
	}},
	{"VXLAN of a node with another's source", model.ProtectOverlay, "drop_overlay_source", "n2", func(t *testing.T, s *scene) func() string {
		return s.overlaid(t, forger(t, lab.StartPeer(t, "host", "n1/c1")), s.n1, "192.0.2.77", 0)
	}},
	{"the same behind three extension headers", model.ProtectOverlay, "drop_overlay_source", "n2", func(t *testing.T, s *scene) func() string {
		return s.overlaid(t, forger(t, lab.StartPeer(t, "host", "n1/c1")), s.n1, "192.0.2.77", 3)
	}},
}

// forge tries f, until it gained something or was counted.
func (f forgery) forge(t *testing.T) (gained string) {
	s := newScene(t)
	before := lab.Counters(t, f.node)[f.reason]
	look := f.try(t, s)
	testutil.Eventually(t, "the forged packet to be taken, or "+f.reason+" to rise", func() (bool, string) {
		gained = look()
		counters := lab.Counters(t, f.node)
		return gained != "" || counters[f.reason] > before, fmt.Sprint(counters)
	})
	return gained
}

// TestForged: nothing that is forged is taken.
func TestForged(t *testing.T) {
	for _, f := range forgeries {
		t.Run(f.name, func(t *testing.T) {
			if gained := f.forge(t); gained != "" {
				t.Errorf("it was taken: %s", gained)
			}
		})
	}
}

// TestForgedWithout: without the protection it is.
func TestForgedWithout(t *testing.T) {
	for _, p := range []struct {
		model.Protection
		node string
	}{{model.ProtectSYNSender, "n2"}, {model.ProtectOverlay, "n2"}, {model.ProtectDirectPorts, "n1"}} {
		t.Run(p.String(), func(t *testing.T) {
			without(t, p.node, p.Protection)
			for _, f := range forgeries {
				if f.protection == p.Protection {
					t.Run(f.name, func(t *testing.T) {
						if f.forge(t) == "" {
							t.Error("it is not taken without the protection either")
						}
					})
				}
			}
		})
	}
}

// without gives a node the attack suite's agent, without a protection, until the end of the test.
func without(t *testing.T, node string, p model.Protection) {
	t.Helper()
	bin := filepath.Join(filepath.Dir(lab.Bin), "attack", "heddle")
	if _, err := os.Stat(bin); err != nil {
		t.Fatalf("%v: run `make attack` first", err)
	}
	lab.EndAgent(t, node, syscall.SIGTERM)
	t.Cleanup(func() { testutil.NoError(t, lab.Command("up")) })
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, "lab", "up", "--lab", lab.Name)
	cmd.Env = append(os.Environ(), "HEDDLE_WITHOUT="+p.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s lab up: %v\n%s", bin, err, out)
	}
	pid := lab.AgentPID(t, node)
	t.Cleanup(func() { testutil.NoError(t, lab.KillAgent(pid, syscall.SIGTERM)) })
	lab.AwaitPath(t, "n1", model.PeerProven)
}

// TestInnerIsNobodysElse: an IPv4 packet for an inner address that comes by the network is dropped,
// and what a container sends to one is, if it is not of a direct connection.
func TestInnerIsNobodysElse(t *testing.T) {
	s, before := newScene(t), lab.Counters(t, "n2")["drop_plain"]
	a, b := inner(t)
	mac := address(t, "n2", fabric.Device)
	p := forger(t, lab.StartPeer(t, "host", "n1/c1"))
	p.Must(`forge_frame(syn(%q, 4711, %q, 17410, %s), "eth0", %q)`, a, b, s.option(t), mac)
	testutil.Eventually(t, "drop_plain to rise", func() (bool, string) {
		counters := lab.Counters(t, "n2")
		return counters["drop_plain"] > before, fmt.Sprint(counters)
	})
	before = lab.Counters(t, "n1")["drop_untranslated"]
	lab.StartPeer(t, "overlay", "n1/c1").Must(`socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (%q, 9))`, b)
	testutil.Eventually(t, "drop_untranslated to rise", func() (bool, string) {
		counters := lab.Counters(t, "n1")
		return counters["drop_untranslated"] > before, fmt.Sprint(counters)
	})
}

// TestOtherFamily: a node with an IPv4 underlay among those with IPv6 is left out, by name, on both
// sides; programs hear of it at once. With its IPv6 address again all is as before.
func TestOtherFamily(t *testing.T) {
	lab.Shell(t, lab.Name+"-n2", "ip addr add 192.0.2.2/24 dev "+fabric.Device)
	lab.EndAgent(t, "n2", syscall.SIGTERM)
	restore := func() {
		lab.EndAgent(t, "n2", syscall.SIGTERM)
		lab.Shell(t, lab.Name+"-n2", "ip addr del 192.0.2.2/24 dev "+fabric.Device)
		testutil.NoError(t, lab.Command("up"))
		lab.AwaitPath(t, "n1", model.PeerProven)
	}
	defer restore()
	_ = lab.Command("up", "--agent-arg=--underlay=192.0.2.2") // says that nodes do not know each other
	for node, want := range map[string]string{"n1": "its underlay address is IPv4, this node's IPv6", "n2": "its underlay address is IPv6, this node's IPv4"} {
		testutil.Eventually(t, node+" to leave the other node out", func() (bool, string) {
			said := lab.Heddle(t, "encryption", "--node", node)
			return strings.Contains(said, want), said
		})
	}
	lab.StartPeer(t, "heddle", "n1/c1").Expect(`"EHOSTUNREACH"`, `error_of(connect, 4, %q, 80)`, lab.Address(t, "heddle", "n2/c1"))
}
