// Package encrypt_test tries nodes that encrypt (heddled --encrypt wireguard) in a lab, and what
// can be read on the network between them. It needs a kernel with WireGuard: `make test-encrypt`
// runs it in an emulated machine that has Debian's.
package encrypt_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

const (
	encrypted, plain = "--agent-arg=--encrypt=wireguard", "--agent-arg=--encrypt=none"
	keepOpen         = "--agent-arg=--encrypt-open=keep"
)

func TestMain(m *testing.M) {
	lab.Flags = []string{"--containers", "1", encrypted}
	os.Exit(lab.Main(m, "encrypt"))
}

// watcher is Python that reads what passes a device: how many packets, how many of them have the
// pattern, and what else there is than WireGuard's packets, the store's and the agents' TLS, ARP
// and neighbour discovery.
const watcher = `
PATTERN = b"heddle-plain-text"
seen = {"packets": 0, "pattern": 0, "other": []}
def watch(device):
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    s.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)
    s.bind((device, 0))
    def run():
        while True:
            b = s.recv(1 << 17)
            seen["packets"] += 1
            seen["pattern"] += PATTERN in b
            if b[12:14] == b"\x08\x00":
                protocol, at = b[23], 14 + (b[14] & 15) * 4
            elif b[12:14] == b"\x86\xdd" and b[20] not in (0, 58):
                protocol, at = b[20], 54
            else:
                continue
            if protocol == 1 and b[at] == 3:  # unreachable: of what, is what counts
                quoted = at + 8
                protocol, at = b[quoted + 9], quoted + (b[quoted] & 15) * 4
            ports = struct.unpack(">HH", b[at:at + 4])
            if not (protocol == 17 and 51872 in ports or protocol == 6 and (2379 in ports or 17472 in ports)) and len(seen["other"]) < 20:
                seen["other"].append([protocol, *ports, len(b)])
    threading.Thread(target=run, daemon=True).start()
def reset():
    seen.update(packets=0, pattern=0, other=[])
`

// program is Python of containers.
const program = `
TEXT = b"heddle-plain-text" * 2048
def patient(s):
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        s.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 120, 0))
    return s
beats, longest, wrong = [0], [0.0], []
def read(s, n):
    got = b""
    while len(got) < n:
        b = s.recv(n - len(got))
        if not b:
            raise OSError(errno.ECONNRESET, "end")
        got += b
    return got
def beat(s):
    def run():
        try:
            while True:
                began = time.monotonic()
                s.sendall(TEXT)
                if read(s, len(TEXT)) != TEXT:
                    wrong.append("other bytes")
                longest[0] = max(longest[0], time.monotonic() - began)
                beats[0] += 1
                time.sleep(0.2)  # an emulated machine has agents to start beside it
        except OSError as e:
            wrong.append(str(e))
    threading.Thread(target=run, daemon=True).start()
def echo(s):
    def run():
        try:
            while True:
                s.sendall(read(s, len(TEXT)))
        except OSError as e:
            wrong.append(str(e))
    threading.Thread(target=run, daemon=True).start()
`

type seen struct {
	Packets, Pattern int
	Other            [][]int
}

// scene is two containers, each intercepted and not, and who watches the network between them.
type scene struct {
	t                                        *testing.T
	client, server, plainClient, plainServer *lab.Peer
	watch                                    *lab.Peer
	address, plainAddress                    string
}

func newScene(t *testing.T) *scene {
	s := &scene{t: t,
		client: lab.StartPeer(t, "heddle", "n1/c1"), server: lab.StartPeer(t, "heddle", "n2/c1"),
		plainClient: lab.StartPeer(t, "overlay", "n1/c1"), plainServer: lab.StartPeer(t, "overlay", "n2/c1"),
		watch:   lab.RunEntered(t, lab.Name+"-n2"),
		address: lab.Address(t, "heddle", "n2/c1"), plainAddress: lab.Address(t, "overlay", "n2/c1"),
	}
	for _, p := range []*lab.Peer{s.client, s.server, s.plainClient, s.plainServer} {
		p.Must("%s", program)
	}
	s.watch.Must("%s", watcher)
	s.watch.Must(`watch("eth0")`)
	return s
}

// look gives what was seen since the last look.
func (s *scene) look() (got seen) {
	s.t.Helper()
	testutil.NoError(s.t, json.Unmarshal([]byte(s.watch.Must("seen")), &got))
	s.watch.Must("reset()")
	return got
}

// connect connects two peers, and says by which path the client's node has it.
func (s *scene) connect(client, server *lab.Peer, address string) (path model.Path) {
	s.t.Helper()
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`c = patient(connect(4, %q, %d))`, address, port)
	server.Must(`s = patient(l.accept()[0])`)
	if client == s.client {
		for _, c := range lab.Connections(s.t, "n1/c1") {
			if int(c.Remote.Port()) == port {
				path = c.Path
			}
		}
	}
	return path
}

// exchange sends the pattern over TCP, direct and by the overlay, and in datagrams of a container that
// is not intercepted.
func (s *scene) exchange() {
	s.t.Helper()
	if path := s.connect(s.client, s.server, s.address); path != "direct" {
		s.t.Errorf("the path is %s, want %s", path, "direct")
	}
	s.transfer(s.client, s.server)
	s.connect(s.client, s.plainServer, s.plainAddress) // by the overlay
	s.transfer(s.client, s.plainServer)
	s.connect(s.plainClient, s.plainServer, s.plainAddress)
	s.transfer(s.plainClient, s.plainServer)
	port := lab.FreePort()
	s.plainServer.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", %d)); u.settimeout(60)`, port)
	s.plainClient.Must(`v = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); v.sendto(TEXT[:1000], (%q, %d))`, s.plainAddress, port)
	s.plainServer.Expect("1000", `len(u.recv(2000))`)
	// Larger than the overlay carries in one piece.
	s.plainClient.Must(`v.sendto(TEXT[:4000], (%q, %d))`, s.plainAddress, port)
	s.plainServer.Expect("4000", `len(u.recv(5000))`)
}

func (s *scene) transfer(client, server *lab.Peer) {
	s.t.Helper()
	client.Begin(`c.sendall(TEXT * 8)`)
	server.Expect("true", `read(s, len(TEXT) * 8) == TEXT * 8`)
	client.Reply("sendall")
}

// encryption gives what a node's agent says of it.
func encryption(t *testing.T, node string) api.Encryption {
	t.Helper()
	var list []api.Encryption
	lab.Query(t, &list, "encryption", "--node", node)
	return list[0]
}

func awaitEncryption(t *testing.T, node, what string, is func(api.Encryption) bool) (e api.Encryption) {
	t.Helper()
	testutil.Eventually(t, what, func() (bool, string) {
		e = encryption(t, node)
		return is(e), fmt.Sprintf("%+v", e)
	})
	return e
}

func restart(t *testing.T, flag string, nodes ...string) {
	t.Helper()
	restartWith(t, []string{flag}, nodes...)
}

func restartWith(t *testing.T, flags []string, nodes ...string) {
	t.Helper()
	for _, node := range nodes {
		testutil.NoError(t, lab.KillAgent(lab.AgentPID(t, node), syscall.SIGTERM))
	}
	testutil.NoError(t, lab.Command("up", flags...))
}

// TestEncryption is one scene, because an emulated machine is slow in starting agents: each step
// begins where the one before ended.
func TestEncryption(t *testing.T) {
	s := newScene(t)
	for _, step := range []struct {
		name string
		run  func(*scene)
	}{
		{"nothing can be read", (*scene).hidden}, {"packets have room", (*scene).sizes}, {"forged", (*scene).forged}, {"translated", (*scene).translated}, {"rotation", (*scene).rotation},
		{"rotation waits for an agent", (*scene).rotationWaits}, {"a node that does not encrypt", (*scene).leftOut},
		{"without encryption all can be read", (*scene).readable},
		{"opened before, kept", (*scene).openKept}, {"opened before, ended", (*scene).openEnded}, {"encrypted again", (*scene).hidden},
		{"the device is gone", (*scene).deviceGone}, {"a node is gone", (*scene).nodeGone},
	} {
		ok := t.Run(step.name, func(t *testing.T) {
			in := *s
			in.t, in.client, in.server, in.watch = t, s.client.In(t), s.server.In(t), s.watch.In(t)
			in.plainClient, in.plainServer = s.plainClient.In(t), s.plainServer.In(t)
			step.run(&in)
		})
		if !ok {
			return
		}
	}
}

// TestEncryptionIPv6: nodes that reach each other by IPv6 only encrypt as others do.
func TestEncryptionIPv6(t *testing.T) {
	lab.Another(t, "-6", "--underlay", "ipv6", "--containers", "1", encrypted)
	s := newScene(t)
	s.hidden()
	if e := encryption(t, "n1"); !e.Endpoint.Addr().Is6() {
		t.Errorf("WireGuard's endpoint is %v, want an IPv6 address", e.Endpoint)
	}
}

func (s *scene) hidden() {
	if !encryption(s.t, "n1").Enabled {
		restart(s.t, encrypted, "n2", "n1")
	}
	lab.AwaitPath(s.t, "n1", model.PeerProven)
	s.look()
	s.exchange()
	got := s.look()
	if got.Pattern != 0 || len(got.Other) != 0 || got.Packets < 20 {
		s.t.Errorf("on the network between the nodes: %+v, want many packets, the pattern in none, and no others", got)
	}
	e := awaitEncryption(s.t, "n1", "a session with n2", func(e api.Encryption) bool { return len(e.Peers) == 1 && e.Peers[0].State == api.PeerEncrypted })
	if p := e.Peers[0]; p.Node != "n2" || p.Key != encryption(s.t, "n2").Key || p.Sent < 1<<18 || p.Handshake.IsZero() {
		s.t.Errorf("n1 says of n2: %+v", p)
	}
	if said := lab.Heddle(s.t, "status", "--node", "n1"); !strings.Contains(said, "n2 encrypted, key "+e.Peers[0].Key.String()+", handshake ") {
		s.t.Errorf("status says\n%s", said)
	}
}

func (s *scene) sizes() {
	for what, want := range map[string]string{"heddle-wg0": "mtu 1420", "heddle-vx0": "mtu 1370"} {
		if said := lab.InNode(s.t, "n1", "ip", "link", "show", what); !strings.Contains(said, want) {
			s.t.Errorf("%s has not %s: %s", what, want, said)
		}
	}
	if said := lab.InNode(s.t, "n1-c1", "ip", "link", "show", "eth0"); !strings.Contains(said, "mtu 1370") {
		s.t.Errorf("the container's device: %s", said)
	}
}

// forged sends n1, in the clear, what would be of n2 if it came encrypted: a packet of the overlay, and
// one of a direct connection.
func (s *scene) forged() {
	own, peer := encryption(s.t, "n1"), encryption(s.t, "n2")
	before := lab.Counters(s.t, "n1")["drop_plain"]
	s.watch.Must(`
def checksum(b):
    n = sum(struct.unpack(">%%dH" %% (len(b) // 2), b))
    n = (n & 0xffff) + (n >> 16)
    return ~(n + (n >> 16)) & 0xffff
def forge(mac, source, to, protocol, payload):
    h = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0, 64, protocol, 0, socket.inet_aton(source), socket.inet_aton(to))
    h = h[:10] + struct.pack(">H", checksum(h)) + h[12:]
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    s.bind(("eth0", 0))
    s.send(bytes.fromhex(mac.replace(":", "")) + bytes.fromhex("020000000099") + b"\x08\x00" + h + payload)
`)
	var links []struct{ Address string }
	testutil.NoError(s.t, json.Unmarshal([]byte(lab.InNode(s.t, "n1", "ip", "-json", "link", "show", "eth0")), &links))
	vxlan := `struct.pack(">HHHHII", 40000, 4789, 8 + 8 + 40, 0, 0x08000000, 4718593 << 8) + bytes(40)`
	syn := `struct.pack(">HHIIBBHHH", 40001, 17408, 1, 0, 0x50, 2, 1000, 0, 0)`
	s.watch.Must(`forge(%q, %q, %q, 17, %s)`, links[0].Address, peer.Inner, own.Inner, vxlan)
	s.watch.Must(`forge(%q, %q, %q, 6, %s)`, links[0].Address, peer.Inner, own.Inner, syn)
	testutil.Eventually(s.t, "both packets to be dropped", func() (bool, string) {
		now := lab.Counters(s.t, "n1")["drop_plain"]
		return now == before+2, fmt.Sprintf("%d of them", now-before)
	})
}

// translated has a router between the nodes that translates all of what n1 sends, and lets nothing in
// to n1 but answers: n2 sends where it has heard n1 from, on the direct path and by the overlay.
func (s *scene) translated() {
	router, translate := lab.RouteNodes(s.t)
	undo := translate("", "chain f { type filter hook forward priority 0\n iifname n2 udp dport 51872 ct state new drop\n}")
	heard := func(where string) {
		s.t.Helper()
		awaitEncryption(s.t, "n2", "n2 to hear n1 from "+where, func(e api.Encryption) bool { return e.Peers[0].Endpoint.Addr().String() == where })
	}
	heard(router)
	lab.AwaitPath(s.t, "n1", model.PeerProven)
	lab.AwaitPath(s.t, "n2", model.PeerProven)
	s.look()
	s.exchange()
	if got := s.look(); got.Pattern != 0 || len(got.Other) != 0 {
		s.t.Errorf("on the network behind the router: %+v", got)
	}
	undo()
	heard(encryption(s.t, "n1").Endpoint.Addr().String())
}

// beating begins a transfer without an end, by a direct connection and by the overlay.
func (s *scene) beating() (check func(what string)) {
	s.t.Helper()
	pairs := [][2]*lab.Peer{{s.client, s.server}, {s.plainClient, s.plainServer}}
	for i, address := range []string{s.address, s.plainAddress} {
		s.connect(pairs[i][0], pairs[i][1], address)
		pairs[i][0].Must(`beats[0], longest[0] = 0, 0.0; wrong.clear(); beat(c)`)
		pairs[i][1].Must(`wrong.clear(); echo(s)`)
	}
	return func(what string) {
		s.t.Helper()
		for _, p := range pairs {
			began := p[0].Must(`beats[0]`)
			testutil.Eventually(s.t, what+": the transfer to go on", func() (bool, string) {
				now := p[0].Must(`beats[0]`)
				return now != began, now
			})
			p[0].Expect("[]", `wrong`)
			p[1].Expect("[]", `wrong`)
			s.t.Logf("%s: %s transfers, the longest of which took %s s", what, p[0].Must(`beats[0]`), p[0].Must(`longest[0]`))
		}
	}
}

// rotation changes the keys of both nodes while bytes are on their way.
func (s *scene) rotation() {
	check := s.beating()
	check("before")
	s.look()
	for _, node := range []string{"n1", "n2"} {
		old := encryption(s.t, node).Key
		lab.Heddle(s.t, "encryption", "rotate", "--node", node)
		other := map[string]string{"n1": "n2", "n2": "n1"}[node]
		now := awaitEncryption(s.t, node, node+" to use its next key", func(e api.Encryption) bool { return e.Key != old && e.Next.IsZero() })
		awaitEncryption(s.t, other, other+" to have a session by it", func(e api.Encryption) bool {
			p := e.Peers[0]
			return p.Key == now.Key && p.Next.IsZero() && p.State == api.PeerEncrypted
		})
		if key := lab.InNode(s.t, other, "wg", "show", "heddle-wg0", "peers"); strings.TrimSpace(key) != now.Key.String() {
			s.t.Errorf("the peers of %s are %s, want %s alone", other, key, now.Key)
		}
		check("after the rotation of " + node)
	}
	if got := s.look(); got.Pattern != 0 || len(got.Other) != 0 {
		s.t.Errorf("during the rotation there is on the network: %+v", got)
	}
}

// rotationWaits has a node wait with its next key until the other's agent is back: that one's kernel
// knows the old one only, and its connections live on.
func (s *scene) rotationWaits() {
	check := s.beating()
	old := encryption(s.t, "n1").Key
	testutil.NoError(s.t, lab.KillAgent(lab.AgentPID(s.t, "n2"), syscall.SIGKILL))
	testutil.Eventually(s.t, "n2's name to be free", func() (bool, string) {
		var st []api.Status
		lab.Query(s.t, &st, "status", "--node", "n1")
		return slices.Contains(st[0].PeersAway, "n2"), fmt.Sprint(st[0].PeersAway)
	})
	lab.Heddle(s.t, "encryption", "rotate", "--node", "n1")
	e := awaitEncryption(s.t, "n1", "n1 to wait for n2", func(e api.Encryption) bool { return slices.Equal(e.Waits, []string{"n2"}) })
	if e.Key != old {
		s.t.Errorf("n1 has changed its key while n2's agent is away")
	}
	check("with a key that waits")
	testutil.NoError(s.t, lab.Command("up", encrypted))
	awaitEncryption(s.t, "n1", "n1 to use its next key", func(e api.Encryption) bool { return e.Key != old && e.Next.IsZero() && len(e.Waits) == 0 })
	check("after it")
}

// leftOut: nothing goes to a node that does not encrypt, and it says so itself.
func (s *scene) leftOut() {
	restart(s.t, plain, "n2")
	for node, want := range map[string]model.PlainReason{"n1": model.PeerPlain, "n2": model.SelfPlain} {
		awaitEncryption(s.t, node, node+" to leave the other out", func(e api.Encryption) bool {
			return len(e.Peers) == 1 && e.Peers[0].State == api.PeerLeftOut && e.Peers[0].Reason == want
		})
	}
	if said := lab.Heddle(s.t, "encryption", "--node", "n1"); !strings.Contains(said, "start its agent with --encrypt wireguard") {
		s.t.Errorf("n1 says\n%s", said)
	}
	s.look()
	for _, p := range []*lab.Peer{s.client, s.plainClient} {
		for _, address := range []string{s.address, s.plainAddress} {
			// The kernel limits what it says of such, and an emulated machine is slow: not in 5 s.
			if said := p.Do(`patient(tcp(4)).connect((%q, 9))`, address); !strings.Contains(said, "EHOSTUNREACH") && !strings.Contains(said, "ENETUNREACH") {
				s.t.Errorf("%s connects to a node that is left out: %s", p.Name, said)
			}
		}
	}
	s.plainClient.Do(`v.sendto(TEXT[:1000], (%q, 9))`, s.plainAddress)
	if got := s.look(); got.Pattern != 0 || len(got.Other) != 0 {
		s.t.Errorf("there is on the network: %+v", got)
	}
}

// readable is the control: the same exchange, and the same watcher.
func (s *scene) readable() {
	s.switchOff()
	if said, err := lab.TryInNode(s.t, "n1", "ip", "link", "show", "heddle-wg0"); err == nil {
		s.t.Errorf("without encryption there is still %s", said)
	}
	s.look()
	s.exchange()
	if got := s.look(); got.Pattern < 20 {
		s.t.Errorf("without encryption the watcher sees %+v: it would not see what is not encrypted", got)
	}
	// What was opened in the clear stays so until it ends.
	for _, p := range []*lab.Peer{s.client, s.plainClient, s.server, s.plainServer} {
		p.Must(`[x.close() for x in (globals().get("c"), globals().get("s")) if x] and None`)
	}
}

// switchOff has the nodes that encrypt do so no more.
func (s *scene) switchOff() {
	s.t.Helper()
	var nodes []string
	for _, node := range []string{"n2", "n1"} {
		if encryption(s.t, node).Enabled {
			nodes = append(nodes, node)
		}
	}
	restart(s.t, plain, nodes...)
	lab.AwaitPath(s.t, "n1", model.PeerProven)
}

// openBefore opens a direct connection in the clear, and a plain one over the overlay.
func (s *scene) openBefore() {
	s.t.Helper()
	s.switchOff()
	s.connect(s.plainClient, s.plainServer, s.plainAddress)
	if path := s.connect(s.client, s.server, s.address); path != "direct" {
		s.t.Errorf("the path is %s, want %s", path, "direct")
	}
	s.transfer(s.client, s.server)
}

// inTheClear gives how many connections a node says that it has in the clear.
func inTheClear(t *testing.T, node string) int { return encryption(t, node).Clear }

// openKept: with --encrypt-open keep a direct connection from before goes on in the clear, is
// counted until it ends, and no other is.
func (s *scene) openKept() {
	s.openBefore()
	restartWith(s.t, []string{encrypted, keepOpen}, "n2", "n1")
	lab.AwaitPath(s.t, "n1", model.PeerProven)
	s.look()
	s.transfer(s.client, s.server)
	if got := s.look(); got.Pattern < 10 {
		s.t.Errorf("a connection that is kept is not in the clear: %+v", got)
	}
	for _, node := range []string{"n1", "n2"} {
		if n, cut := inTheClear(s.t, node), lab.Counters(s.t, node)["cut_clear"]; n != 1 || cut != 0 {
			s.t.Errorf("%s says that %d connections are in the clear, and has ended %d, want 1 and 0", node, n, cut)
		}
		if said := lab.Heddle(s.t, "status", "--node", node); !strings.Contains(said, "IN THE CLEAR: 1 direct connections from before") {
			s.t.Errorf("status of %s says\n%s", node, said)
		}
	}
	s.transfer(s.plainClient, s.plainServer) // by the overlay, which is encrypted
	for _, p := range []*lab.Peer{s.client, s.server} {
		p.Must(`[x.close() for x in (globals().get("c"), globals().get("s")) if x] and None`)
	}
	testutil.Eventually(s.t, "none to be in the clear", func() (bool, string) {
		n := inTheClear(s.t, "n1")
		return n == 0, fmt.Sprint(n)
	})
	s.look()
	s.exchange()
	if got := s.look(); got.Pattern != 0 || len(got.Other) != 0 {
		s.t.Errorf("what is opened after the switch: on the network there is %+v", got)
	}
}

// openEnded: by default such a connection ends, and no packet of it is sent any more; what is on the
// overlay goes on.
func (s *scene) openEnded() {
	s.openBefore()
	restart(s.t, encrypted, "n2", "n1")
	lab.AwaitPath(s.t, "n1", model.PeerProven)
	s.look()
	for _, p := range []struct {
		*lab.Peer
		of string
	}{{s.client, "c"}, {s.server, "s"}} {
		// The end that is cut second may have heard the other's reset.
		if said := p.Do(`error_of(%s.recv, 1)`, p.of); said != `"ECONNABORTED"` && said != `"ECONNRESET"` {
			s.t.Errorf("%s: a connection from before: %s", p.Name, said)
		}
	}
	if cut := lab.Counters(s.t, "n1")["cut_clear"] + lab.Counters(s.t, "n2")["cut_clear"]; cut == 0 {
		s.t.Error("no node has counted cut_clear")
	}
	for _, node := range []string{"n1", "n2"} {
		if n := inTheClear(s.t, node); n != 0 {
			s.t.Errorf("%s says that %d connections are in the clear", node, n)
		}
	}
	s.transfer(s.plainClient, s.plainServer)
	if got := s.look(); got.Pattern != 0 || len(got.Other) != 0 {
		s.t.Errorf("on the network there is %+v", got)
	}
}

// deviceGone: without WireGuard's device nothing leaves in the clear.
func (s *scene) deviceGone() {
	s.connect(s.client, s.server, s.address)
	s.transfer(s.client, s.server)
	s.look()
	lab.InNode(s.t, "n1", "ip", "route", "add", "default", "dev", "eth0", "metric", "4000000")
	lab.InNode(s.t, "n1", "ip", "link", "set", "heddle-wg0", "down")
	s.client.Must(`c.setblocking(False); c.send(TEXT)`)
	if said := s.client.Do(`connect(4, %q, 9)`, s.address); !strings.Contains(said, "UNREACH") {
		s.t.Errorf("a connect without the device: %s", said)
	}
	s.plainClient.Do(`v.sendto(TEXT[:1000], (%q, 9))`, s.plainAddress)
	if got := s.look(); got.Pattern != 0 || len(got.Other) != 0 {
		s.t.Errorf("there is on the network: %+v", got)
	}
	restart(s.t, encrypted, "n1")
	lab.AwaitPath(s.t, "n1", model.PeerProven)
	s.exchange()
}

// nodeGone: a node that is removed from the network has no key here.
func (s *scene) nodeGone() {
	testutil.NoError(s.t, lab.KillAgent(lab.AgentPID(s.t, "n2"), syscall.SIGTERM))
	lab.Heddle(s.t, "nodes", "forget", "n2", "--node", "n1")
	awaitEncryption(s.t, "n1", "n1 to have no peers", func(e api.Encryption) bool { return len(e.Peers) == 0 })
	if peers := lab.InNode(s.t, "n1", "wg", "show", "heddle-wg0", "peers"); peers != "" {
		s.t.Errorf("the device has peers: %s", peers)
	}
}
