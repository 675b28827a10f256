package test

import (
	"strconv"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks, attack{"send a deferred SYN when the rules have changed", model.ProtectLate, "n1", lateSYN})
}

// lateSYN connects with TCP_FASTOPEN_CONNECT, which sends nothing before there is data, to where policy then forbids it, and
// sends.
func lateSYN(t *testing.T) string {
	p, port := startPeer(t, "heddle", "n1/c1"), freePort()
	start(t, "heddle", "n1/c2", python, "-c", greeter, strconv.Itoa(port), "victim").waitFor("ready")
	target := address(t, "heddle", "n1/c2")
	p.must(`s = tcp(4)`)
	p.must(`s.setsockopt(6, 30, 1)`) // TCP_FASTOPEN_CONNECT
	p.must(`s.setsockopt(6, 34, 1)`) // TCP_FASTOPEN_NO_COOKIE
	p.must(`s.connect((%q, %d))`, target, port)
	p.expect(`0`, `int.from_bytes(s.getsockopt(6, 11, 192)[136:140], "little")`) // TCP_INFO: segments sent
	applyPolicy(t, "late", nil, []map[string]any{denyRule("reject", port)})
	eventually(t, "the policy to be in force", func() (bool, string) {
		got := p.do(`error_of(connect, 4, %q, %d)`, target, port)
		return got == `"ECONNREFUSED"`, got
	})
	return gained(t, "the victim said", p.do(`(s.sendall(b"x"), s.recv(10).decode())[1]`), `{"error": "ECONNABORTED"}`, `"victim"`)
}
