package attack

import (
	"strconv"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks, attack{"send a deferred SYN when the rules have changed", model.ProtectLate, "n1", lateSYN})
}

// lateSYN connects with TCP_FASTOPEN_CONNECT, which sends nothing before there is data, to where
// policy then forbids it, and sends.
func lateSYN(t *testing.T) string {
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	lab.Start(t, "heddle", "n1/c2", lab.Python, "-c", greeter, strconv.Itoa(port), "victim").WaitFor("ready")
	target := lab.Address(t, "heddle", "n1/c2")
	p.Must(`s = tcp(4)`)
	p.Must(`s.setsockopt(6, 30, 1)`) // TCP_FASTOPEN_CONNECT
	p.Must(`s.setsockopt(6, 34, 1)`) // TCP_FASTOPEN_NO_COOKIE
	p.Must(`s.connect((%q, %d))`, target, port)
	p.Expect(`0`, `int.from_bytes(s.getsockopt(6, 11, 192)[136:140], "little")`) // TCP_INFO: segments sent
	lab.ApplyPolicy(t, "late", nil, []map[string]any{lab.DenyRule("reject", port)})
	testutil.Eventually(t, "the policy to be in force", func() (bool, string) {
		got := p.Do(`error_of(connect, 4, %q, %d)`, target, port)
		return got == `"ECONNREFUSED"`, got
	})
	return gained(t, "the victim said", p.Do(`(s.sendall(b"x"), s.recv(10).decode())[1]`), `{"error": "ECONNABORTED"}`, `"victim"`)
}
