// Package underlays_test tries networks between nodes that operators have: devices on top of others,
// nodes with several addresses, large and small packets, and what middleboxes do. What this
// machine's kernel cannot make (VLAN, bond) is tried in an emulated machine, by `make test-underlay-devices`.
package underlays_test

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/lab/fabric"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Main(m, "underlays")) }

var nodes = []string{"n1", "n2"}

// inFabric runs a command where the nodes' cables end.
func inFabric(t *testing.T, format string, args ...any) string {
	t.Helper()
	return lab.Shell(t, lab.Name+"-fabric", fmt.Sprintf(format, args...))
}

func inNode(t *testing.T, node, format string, args ...any) string {
	t.Helper()
	return lab.Shell(t, lab.Name+"-"+node, fmt.Sprintf(format, args...))
}

// needs skips the test where the kernel has no devices of a kind.
func needs(t *testing.T, kind string) {
	t.Helper()
	script := "ip link add probe0 type veth peer name probe1 && ip link add probe2 " + strings.ReplaceAll(kind, "LOWER", "link probe0")
	if out, err := exec.Command("unshare", "--net", "sh", "-c", script).CombinedOutput(); err != nil {
		t.Skipf("this kernel makes no device of %s: `make test-underlay-devices` tries it in an emulated machine (%s)", kind, strings.TrimSpace(string(out)))
	}
}

// under makes the nodes' device another one, which script makes of port0, what it was before, until
// the end of the test. The agents find their address there when they start anew; what is to be done
// while none runs is done by script, too.
func under(t *testing.T, script string) {
	t.Helper()
	ended := endAgents(t)
	t.Cleanup(func() {
		ended()
		for _, node := range nodes {
			inNode(t, node, `ip link del %s; ip link del port1 2>/dev/null; ip link set port0 down mtu 1500 && ip link set port0 name %[1]s`, fabric.Device)
			inFabric(t, "ip link set %s mtu 1500", node)
		}
	})
	for _, node := range nodes {
		inNode(t, node, "set -e\nip addr flush dev %s\nip link set %[1]s down\nip link set %[1]s name port0\nNODE=%[2]s\n%[3]s\nip link set port0 up", fabric.Device, node, script)
	}
	startAgents(t)
}

// endAgents ends the nodes' agents, whose place others take in any case at the end of the test. again
// does so once more, then.
func endAgents(t *testing.T) (again func()) {
	t.Helper()
	for _, node := range nodes {
		lab.EndAgent(t, node, syscall.SIGTERM)
	}
	return func() {
		for _, node := range nodes {
			testutil.NoError(t, lab.KillAgent(pids[node], syscall.SIGTERM))
		}
	}
}

// pids are the agents that startAgents started.
var pids = map[string]int{}

func startAgents(t *testing.T) {
	t.Helper()
	testutil.NoError(t, lab.Command("up"))
	for _, node := range nodes {
		pids[node] = lab.AgentPID(t, node)
		lab.AwaitPath(t, node, model.PeerProven)
	}
}

// underlayOf says by which device a node's agent reaches the others.
func underlayOf(t *testing.T, node string) api.Underlay {
	t.Helper()
	var status []struct{ Underlay api.Underlay }
	lab.Query(t, &status, "status", "--node", node)
	return status[0].Underlay
}

// pair is a connection from n1/c1 to n2/c1.
type pair struct {
	client, server *lab.Peer
	path           model.Path // what the client's node says of it
	reason         string
}

// connect makes one, of a family, whose client is in a mode.
func connect(t *testing.T, mode string, family int) *pair {
	t.Helper()
	p := &pair{client: lab.StartPeer(t, mode, "n1/c1"), server: lab.StartPeer(t, "heddle", "n2/c1")}
	port, target := lab.FreePort(), lab.Address(t, "heddle", "n2/c1")
	if family == 6 {
		target = lab.Overlay6(t, "n2/c1")
	}
	p.server.Must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], port)
	p.client.Must(`s = connect(%d, %q, %d)`, family, target, port)
	p.server.Must(`c, who = l.accept()`)
	want := lab.Address(t, mode, "n1/c1")
	if family == 6 {
		want = lab.Overlay6(t, "n1/c1")
	}
	p.server.Expect(strconv.Quote(want), `who[0]`)
	if mode == "heddle" {
		local := p.client.PortOf("s")
		for _, c := range lab.Connections(t, "n1/c1") {
			if c.Local.Port() == local && c.Remote == netip.AddrPortFrom(netip.MustParseAddr(target), uint16(port)) {
				p.path, p.reason = c.Path, c.Reason
			}
		}
	}
	return p
}

// talk sends bytes both ways and compares them.
func (p *pair) talk(n int) {
	p.client.Must(`send(s, %d)`, n)
	p.server.Expect(p.server.Must(`digest(pattern(%d))`, n), `receive(c, %d)`, n)
	p.server.Must(`send(c, %d)`, n)
	p.client.Expect(p.client.Must(`digest(pattern(%d))`, n), `receive(s, %d)`, n)
}

// expect checks that connections of both families are direct, with all bytes, and that a plain
// container's pass, too.
func expectDirect(t *testing.T, families ...int) {
	t.Helper()
	for _, family := range families {
		p := connect(t, "heddle", family)
		p.talk(1_000_000)
		if p.path != names.PathDirect {
			t.Errorf("IPv%d: path %s (%s)", family, p.path, p.reason)
		}
	}
	connect(t, "overlay", 4).talk(1_000_000)
}

// expectMTU checks what fits: into a segment of a direct connection, and into a packet of the
// overlay; and that status says so.
func expectMTU(t *testing.T, mtu int) {
	t.Helper()
	p := connect(t, "heddle", 4)
	p.client.Expect(strconv.Itoa(mtu-40-12), `s.getsockopt(6, 2)`) // TCP_MAXSEG, less timestamps
	overlay := mtu - 50
	if u := underlayOf(t, "n1"); u != (api.Underlay{Device: fabric.Device, MTU: mtu, OverlayMTU: overlay}) {
		t.Errorf("status: %+v", u)
	}
	if out := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(out, fmt.Sprintf(" on %s, MTU %d, overlay %d\n", fabric.Device, mtu, overlay)) {
		t.Errorf("status:\n%s", out)
	}
	n2 := lab.Address(t, "overlay", "n2/c1")
	if out := lab.MustRun(t, "overlay", "n1/c1", "ping", "-c", "1", "-W", "5", "-M", "do", "-s", strconv.Itoa(overlay-28), n2); !strings.Contains(out, " 1 received") {
		t.Errorf("the largest packet does not pass: %s", out)
	}
	if r := lab.Run(t, "overlay", "n1/c1", nil, "ping", "-c", "1", "-W", "1", "-M", "do", "-s", strconv.Itoa(overlay-27), n2); r.Code == 0 {
		t.Errorf("a packet larger than the overlay's passes: %s", r.Stdout)
	}
}

// expectLimit checks that what a cap holds back is held back once, and not at each of two devices
// that it passes, both ways.
func expectLimit(t *testing.T) {
	t.Helper()
	for container, flag := range map[string]string{"n1/c1": "--egress", "n2/c1": "--ingress"} {
		lab.Limit(t, container, flag, "8mbit")
	}
	p := connect(t, "heddle", 4)
	queued := func(node string) int {
		words := strings.Fields(inNode(t, node, "grep heddle-sh0: /proc/net/dev"))
		n, err := strconv.Atoi(words[9]) // bytes sent
		testutil.NoError(t, err)
		return n
	}
	before := map[string]int{"n1": queued("n1"), "n2": queued("n2")}
	p.client.Must(`send(s, 200000)`)
	p.server.Expect(p.client.Must(`digest(pattern(200000))`), `receive(c, 200000)`)
	for node, was := range before {
		if n := queued(node) - was; n < 200000 || n > 300000 {
			t.Errorf("%s: %d bytes passed the shaping device for 200000 sent", node, n)
		}
	}
}

// expectNothingBelow checks that no program of Heddle's is left at the device below: it would be
// that of an earlier agent for ever.
func expectNothingBelow(t *testing.T) {
	t.Helper()
	for _, node := range nodes {
		if out := inNode(t, node, "tc filter show dev port0 ingress"); strings.Contains(out, "from_underlay") {
			t.Errorf("%s: the device below still has\n%s", node, out)
		}
	}
}

// TestBridge has the nodes' addresses on a bridge, as hosts of virtual machines have, with jumbo
// frames.
func TestBridge(t *testing.T) {
	for _, node := range nodes {
		inFabric(t, "ip link set %s mtu 9000", node)
	}
	under(t, `ip link set port0 mtu 9000
ip link add eth0 mtu 9000 type bridge
ip link set port0 master eth0`)
	expectNothingBelow(t)
	expectDirect(t, 4, 6)
	expectMTU(t, 9000)
	for _, node := range nodes { // a route to the port, as IPv6 makes one for link-local addresses
		inNode(t, node, "ip -6 addr add fe80::77/64 dev port0 nodad")
	}
	expectLimit(t)
}

// TestVLAN has them on a VLAN, whose device below has another address, of an untagged network.
func TestVLAN(t *testing.T) {
	needs(t, "LOWER type vlan id 77")
	under(t, `ip link add link port0 name eth0 type vlan id 77
ip addr add 192.0.2.${NODE#n}/24 dev port0`)
	expectNothingBelow(t)
	expectDirect(t, 4, 6)
	expectMTU(t, 1500)
	expectLimit(t)
}

// TestBond has them on two cables, of which one is used: it is cut while connections of both kinds
// carry bytes, and none is lost.
func TestBond(t *testing.T) {
	needs(t, "type bond")
	for _, node := range nodes {
		inFabric(t, "ip link add %sb type veth peer name port1 netns %s-%[1]s && ip link set %[1]sb master fabric up", node, lab.Name)
	}
	under(t, `ip link add eth0 type bond mode active-backup miimon 20
ip link set port1 down
ip link set port0 master eth0
ip link set port1 master eth0
ip link set port1 up`)
	expectNothingBelow(t)
	expectDirect(t, 4, 6)
	direct, plain := connect(t, "heddle", 4), connect(t, "overlay", 4)
	for _, p := range []*pair{direct, plain} { // an emulated machine takes its time
		p.client.Must(`[s.setsockopt(socket.SOL_SOCKET, o, struct.pack("ll", 120, 0)) for o in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)] and None`)
		p.server.Must(`[c.setsockopt(socket.SOL_SOCKET, o, struct.pack("ll", 120, 0)) for o in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)] and None`)
	}
	active := func() string {
		return strings.TrimSpace(inNode(t, "n1", "sed -n 's/^Currently Active Slave: //p' /proc/net/bonding/eth0"))
	}
	const all, early = 20_000_000, 2_000_000 // the rest does not fit into buffers
	for _, p := range []*pair{direct, plain} {
		p.client.Must(`send(s, %d)`, all)
		p.server.Expect(p.server.Must(`digest(pattern(%d))`, early), `receive(c, %d)`, early)
	}
	used := active()
	cut := map[string]string{"port0": "n1", "port1": "n1b"}[used]
	inFabric(t, "ip link set %s down", cut)
	testutil.Eventually(t, "the other cable to be used", func() (bool, string) { now := active(); return strings.HasPrefix(now, "port") && now != used, now })
	for _, p := range []*pair{direct, plain} {
		p.server.Expect(p.server.Must(`digest(pattern(%d)[%d:])`, all, early), `receive(c, %d)`, all-early)
		p.talk(100_000)
	}
	expectDirect(t, 4)
	inFabric(t, "ip link set %s up", cut)
	lab.AwaitPath(t, "n1", model.PeerProven)
}
