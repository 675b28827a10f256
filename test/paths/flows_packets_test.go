package paths

import (
	"fmt"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestFlowsOfPackets: of plain containers the node where a flow begins tells of its first packet
// and of no other, and of what policy stops, with the rule. Intercepted ones have no more of theirs
// told than before.
func TestFlowsOfPackets(t *testing.T) {
	client, server := lab.StartPeer(t, "overlay", "n1/c1"), lab.StartPeer(t, "overlay", "n2/c1")
	here, there := lab.Address(t, "overlay", "n1/c1"), lab.Address(t, "overlay", "n2/c1")
	told := func(port int, args ...string) (list []string) {
		for _, f := range observe(t, port, args...) {
			list = append(list, fmt.Sprintf("%s %s %s", flowText(f), f.Protocol, f.Verdict))
		}
		slices.Sort(list)
		return list
	}
	await := func(t *testing.T, port int, want ...string) {
		t.Helper()
		testutil.Eventually(t, fmt.Sprint(want), func() (bool, string) {
			got := told(port)
			return slices.Equal(got, want), fmt.Sprintf("%q", got)
		})
	}
	const from, to = "n1/c1", "n2/c1" // the modes of a container share its endpoint

	t.Run("tcp", func(t *testing.T) {
		port := lab.FreePort()
		server.Must(`l = listen(4, %q, %d)`, there, port)
		client.Must(`s = connect(4, %q, %d)`, there, port)
		server.Must(`c, who = l.accept()`)
		client.Must(`s.sendall(bytes(100000)), s.close()`)
		server.Must(`receive(c, 100000), c.close(), l.close()`)
		await(t, port, fmt.Sprintf("n1 from open %s>%s tcp allowed", from, to))
	})
	t.Run("denied", func(t *testing.T) {
		port, udp := lab.FreePort(), lab.FreePort()
		rule := lab.DenyRule("drop", port)
		rule["name"], rule["ports"] = "nobody", []string{fmt.Sprintf("udp/%d", udp), fmt.Sprintf("tcp/%d", port)}
		rule["deny"] = "reject"
		lab.ApplyPolicy(t, "plain-closed", []map[string]any{rule}, nil)
		client.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, there, port)
		by := fmt.Sprintf("drop_policy_rejected %s: reject by rule 0 (nobody) of policy plain-closed", to)
		await(t, port, fmt.Sprintf("n1 from deny %s>%s %s tcp denied", from, to, by))
		client.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
		client.Must(`u.sendto(b"q", (%q, %d))`, there, udp)
		await(t, udp, fmt.Sprintf("n1 from deny %s>%s %s udp denied", from, to, by))
	})
	t.Run("udp", func(t *testing.T) {
		port := lab.FreePort()
		lab.ApplyPolicy(t, "plain-open", []map[string]any{{"action": "allow", "name": "all"}}, nil)
		server.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
		server.Must(`u.bind((%q, %d))`, there, port)
		client.Must(`v = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
		client.Must(`v.bind((%q, 0))`, here)
		for range 3 {
			client.Must(`v.sendto(b"q", (%q, %d))`, there, port)
			server.Must(`u.sendto(b"a", u.recvfrom(9)[1])`)
			client.Expect(`1`, `len(v.recv(9))`)
		}
		by := to + ": allow by rule 0 (all) of policy plain-open"
		await(t, port, fmt.Sprintf("n1 from open %s>%s %s udp allowed", from, to, by), fmt.Sprintf("n2 to open %s>%s %s udp allowed", from, to, by))
	})
}
