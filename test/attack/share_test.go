package attack

import (
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"flood the ring of events by connects", model.ProtectFlowShare, "n1", func(t *testing.T) string { return takeRoom(t, "heddle", "SOCK_STREAM", "reject") }},
		attack{"flood the ring of events by datagrams", model.ProtectFlowShare, "n1", func(t *testing.T) string { return takeRoom(t, "overlay", "SOCK_DGRAM", "drop") }},
	)
}

// forbiddenScript is Python that asks for what policy forbids, so many times by one socket.
const forbiddenScript = `
def ask(s, addr, port, times):
    for _ in range(times):
        try:
            s.connect((addr, port))
            s.send(b"q")
        except OSError:
            pass
`

// takeRoom has policy stop more of the attacker's than the ring of events has room for, while the
// agent gets no processor time, and then something of a victim's. It gains if that is not told of.
func takeRoom(t *testing.T, mode, kind, deny string) (gained string) {
	port, marker := lab.FreePort(), lab.FreePort()
	var ports []string
	for _, p := range []int{port, marker} {
		ports = append(ports, fmt.Sprintf("tcp/%d", p), fmt.Sprintf("udp/%d", p))
	}
	attacker, victim, there := lab.StartPeer(t, mode, "n1/c1"), lab.StartPeer(t, mode, "n1/c2"), lab.Address(t, mode, "n2/c1")
	lab.ApplyPolicy(t, "nobody", []map[string]any{{"action": "deny", "deny": deny, "ports": ports}}, nil)
	for _, p := range []*lab.Peer{attacker, victim} {
		p.Must("exec(%s)", lab.JSON(t, forbiddenScript))
		p.Must(`s, m = socket.socket(socket.AF_INET, socket.%s), socket.socket(socket.AF_INET, socket.%[1]s)`, kind)
	}
	agent := lab.AgentPID(t, "n1")
	resume := func() { testutil.NoError(t, syscall.Kill(agent, syscall.SIGCONT)) }
	testutil.NoError(t, syscall.Kill(agent, syscall.SIGSTOP))
	stopped := true
	defer func() {
		if stopped {
			resume()
		}
	}()
	attacker.Must(`ask(s, %q, %d, 40000)`, there, port)
	victim.Must(`ask(s, %q, %d, 1)`, there, port)
	resume()
	stopped = false
	told := func(port int) (n int) {
		for line := range strings.Lines(lab.Heddle(t, "observe", "--node", "n1", "--json", "--verdict", "denied", "--port", fmt.Sprint(port), "--from", lab.Address(t, mode, "n1/c2"))) {
			var f flow.Flow
			testutil.NoError(t, json.Unmarshal([]byte(line), &f))
			n++
		}
		return n
	}
	testutil.EventuallyTrue(t, "the agent to have read what was told before", func() bool {
		victim.Must(`ask(m, %q, %d, 1)`, there, marker)
		return told(marker) > 0
	})
	if told(port) == 0 {
		return "the agent does not hear of what policy stopped of another container's"
	}
	return ""
}
