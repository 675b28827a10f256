package attack

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"have it forgotten whom another container asked", model.ProtectFlowMemory, "n1", forgetDatagrams},
		attack{"have another container's relayed connection forgotten", model.ProtectFlowMemory, "n1", forgetRelay},
	)
}

// floodScript is Python that sends datagrams from more and more ports to every port of a host, for
// two seconds at least: the node tells seconds apart.
const floodScript = `
def flood(addr, but):
    begin, rounds = time.monotonic(), 0
    while rounds < 2 or time.monotonic() - begin < 2:
        s, rounds = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), rounds + 1
        for port in range(1, 65536):
            try:
                if port != but:
                    s.sendto(b"", (addr, port))
            except OSError:
                pass
    return rounds
`

// forgetDatagrams floods the node with datagrams between a victim's question and the answer, which
// passes only as long as the node remembers the question.
func forgetDatagrams(t *testing.T) string {
	const asks, answers, free = 3999, 4999, 3998
	attacker, victim, server := lab.StartPeer(t, "overlay", "n1/c1"), lab.StartPeer(t, "overlay", "n1/c2"), lab.StartPeer(t, "overlay", "n2/c1")
	lab.ApplyPolicy(t, "no-datagrams-to-the-victim", []map[string]any{{"action": "deny", "deny": "drop", "ports": []string{"udp/3999"}}}, nil)
	ask := func(p *lab.Peer, name, addr string, port int) {
		p.Must(`%s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`, name)
		p.Must(`%s.bind((%q, %d)), %[1]s.settimeout(30)`, name, addr, port)
	}
	here, there := lab.Address(t, "overlay", "n1/c2"), lab.Address(t, "overlay", "n2/c1")
	ask(victim, "u", here, asks)
	ask(victim, "m", here, free)
	ask(server, "u", there, answers)
	victim.Must(`u.sendto(b"q", (%q, %d))`, there, answers)
	server.Expect(`1`, `len(u.recv(9))`)
	attacker.Must("exec(%s)", lab.JSON(t, floodScript))
	attacker.Must(`flood(%q, %d)`, lab.Address(t, "overlay", "n2/c2"), asks)
	// The second datagram is behind the answer, and nothing keeps it.
	server.Must(`u.sendto(b"a", (%q, %d)), u.sendto(b"m", (%[1]q, %[3]d))`, here, asks, free)
	victim.Expect(`1`, `len(m.recv(9))`)
	victim.Must(`u.settimeout(1)`)
	return gained(t, "the answer to another container", victim.Do(`error_of(u.recv, 9)`), `"ok"`, `"timed out"`)
}

// synScript is Python that sends SYNs from every port of a container's own stack to its intercepted
// listeners, twice each, so that they count as used.
const synScript = `
def flood_syns(own, device, ports):
    here = bytes.fromhex(open(f"/sys/class/net/{device}/address").read().replace(":", ""))
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    s.bind((device, 0))
    addr = socket.inet_aton(own)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0, 64, 6, 0, addr, addr)
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xffff) + (total >> 16)
    ip = ip[:10] + struct.pack("!H", ~((total & 0xffff) + (total >> 16)) & 0xffff) + ip[12:]
    head, sent = here[:2] + b"\x45" + here[3:] + here + b"\x08\x00" + ip, 0
    for port in ports:
        tail = struct.pack("!HIIBBHHH", port, 1, 0, 5 << 4, 2, 1024, 0, 0)  # the checksum is wrong: none is answered
        for sport in range(1024, 65536):
            frame = head + struct.pack("!H", sport) + tail
            for _ in range(2):
                try:
                    s.send(frame)
                    sent += 1
                except OSError:
                    pass
    return sent
`

// forgetRelay floods the node with SYNs of a container's to itself while a connection that the node
// relays to another one is idle: what is remembered of that must stay.
func forgetRelay(t *testing.T) string {
	attacker, plain := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "overlay", "n1/c1")
	victim, client := lab.StartPeer(t, "overlay", "n1/c2"), lab.StartPeer(t, "heddle", "n2/c2")
	port, first, own := lab.FreePort(), lab.FreePort(), lab.Address(t, "heddle", "n1/c1")
	opened := lab.Counters(t, "n1")["relay_opened"]
	victim.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n1/c2"), port)
	victim.Must(`c = l.accept()[0]`)
	if lab.Counters(t, "n1")["relay_opened"] == opened {
		t.Fatal("the connection is not relayed")
	}
	ports := []int{first, lab.FreePort(), lab.FreePort(), lab.FreePort(), lab.FreePort()}
	for _, p := range ports {
		attacker.Must(`l%d = listen(4, "0.0.0.0", %[1]d)`, p)
	}
	plain.Must("exec(%s)", lab.JSON(t, synScript))
	plain.Must(`flood_syns(%q, "eth0", %s)`, own, strings.ReplaceAll(fmt.Sprint(ports), " ", ", "))
	client.Must(`error_of(s.sendall, b"still there")`)
	client.Must(`s.settimeout(2)`)
	victim.Must(`c.settimeout(2)`)
	victim.Do(`c.sendall(b"yes")`)
	said := client.Do(`error_of(lambda: s.recv(3) == b"yes" or 1 / 0)`)
	return gained(t, "another container's connection", said, `"ok"`, `"ECONNRESET"`)
}
