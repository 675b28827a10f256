package test

import (
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks, attack{"have it forgotten whom another container asked", model.ProtectFlowMemory, "n1", forgetDatagrams})
}

// floodScript is Python that sends datagrams from more and more ports to every port of a host, for two seconds at least:
// the node tells seconds apart.
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

// forgetDatagrams floods the node with datagrams between a victim's question and the answer, which passes only as long as the
// node remembers the question.
func forgetDatagrams(t *testing.T) string {
	const asks, answers, free = 3999, 4999, 3998
	attacker, victim, server := startPeer(t, "overlay", "n1/c1"), startPeer(t, "overlay", "n1/c2"), startPeer(t, "overlay", "n2/c1")
	applyPolicy(t, "no-datagrams-to-the-victim", []map[string]any{{"action": "deny", "deny": "drop", "ports": []string{"udp/3999"}}}, nil)
	ask := func(p *peer, name, addr string, port int) {
		p.must(`%s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`, name)
		p.must(`%s.bind((%q, %d)), %[1]s.settimeout(30)`, name, addr, port)
	}
	here, there := address(t, "overlay", "n1/c2"), address(t, "overlay", "n2/c1")
	ask(victim, "u", here, asks)
	ask(victim, "m", here, free)
	ask(server, "u", there, answers)
	victim.must(`u.sendto(b"q", (%q, %d))`, there, answers)
	server.expect(`1`, `len(u.recv(9))`)
	attacker.must("exec(%s)", quoted(t, floodScript))
	attacker.must(`flood(%q, %d)`, address(t, "overlay", "n2/c2"), asks)
	// The second datagram is behind the answer, and nothing keeps it.
	server.must(`u.sendto(b"a", (%q, %d)), u.sendto(b"m", (%[1]q, %[3]d))`, here, asks, free)
	victim.expect(`1`, `len(m.recv(9))`)
	victim.must(`u.settimeout(1)`)
	return gained(t, "the answer to another container", victim.do(`error_of(u.recv, 9)`), `"ok"`, `"timed out"`)
}
