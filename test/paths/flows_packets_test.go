package paths

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
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

// TestFlowsOfRelays: the node of a listener that is not intercepted tells of connections that are
// relayed to it, as the other end's node does: established, ended, reset, cut by policy, and of
// direct SYNs that policy stops there. What nobody answered it does not tell as established.
func TestFlowsOfRelays(t *testing.T) {
	lab.AwaitPath(t, "n1", model.PeerProven)
	start := func(t *testing.T) observed {
		o := observed{lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "overlay", "n2/c1"), lab.Address(t, "overlay", "n2/c1"), lab.FreePort()}
		o.server.Must(`l = listen(4, "0.0.0.0", %d)`, o.port)
		return o
	}
	const opened, openedThere = "n1 from open n1/c1>n2/c1 direct", "n2 to open n1/c1>n2/c1 direct relay_opened"
	t.Run("ended", func(t *testing.T) {
		o := start(t)
		o.open(`connect(4, %q, %d)`)
		o.client.Must(`s.close()`)
		o.server.Must(`c.close()`)
		list := expectFlows(t, o.port, opened, openedThere,
			"n1 from end n1/c1>n2/c1 direct 1000/300", "n2 to end n1/c1>n2/c1 direct 0/0 relay_opened")
		for _, f := range list {
			if f.From.Port == 0 || f.From.Port != list[0].From.Port || f.To.Port != uint16(o.port) || f.To.Node != "n2" {
				t.Errorf("%s is from %v to %v", flowText(f), f.From, f.To)
			}
			if f.Node == "n2" && (f.Event == flow.End) != (f.Duration > 0) {
				t.Errorf("%s took %v", flowText(f), f.Duration)
			}
		}
	})
	t.Run("reset", func(t *testing.T) {
		o := start(t)
		o.open(`connect(4, %q, %d)`)
		o.client.Must(`s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); s.close()`)
		expectFlows(t, o.port, opened, openedThere,
			"n1 from end n1/c1>n2/c1 direct 1000/300", "n2 to end n1/c1>n2/c1 direct 0/0 relay_opened ECONNRESET")
	})
	t.Run("refused", func(t *testing.T) {
		o := start(t)
		o.server.Must(`l.close()`)
		o.client.Do(`connect(4, %q, %d)`, o.target, o.port)
		expectFlows(t, o.port, "n1 from fail n1/c1>n2/c1 direct ECONNREFUSED")
	})
	// The client's node hears of the policy later: its agent stands still.
	t.Run("cut", func(t *testing.T) {
		o := observed{lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "overlay", "n1/c1"), lab.Address(t, "overlay", "n1/c1"), lab.FreePort()}
		o.server.Must(`l = listen(4, "0.0.0.0", %d)`, o.port)
		o.open(`connect(4, %q, %d)`)
		o.client.Must(`later = tcp()`)
		agent := lab.AgentPID(t, "n2")
		testutil.NoError(t, syscall.Kill(agent, syscall.SIGSTOP))
		resume := sync.OnceFunc(func() { _ = syscall.Kill(agent, syscall.SIGCONT) })
		t.Cleanup(resume)
		defer func() { lab.Heddle(t, "policy", "delete", "--all", "--node", "n1") }()
		file := filepath.Join(t.TempDir(), "policy.json")
		testutil.NoError(t, os.WriteFile(file, []byte(lab.JSON(t, lab.EverybodyPolicy("relays-closed", []map[string]any{lab.DenyRule("reject", o.port)}, nil))), 0o600))
		lab.Heddle(t, "policy", "apply", "--node", "n1", "-f", file)
		o.client.Expect(`"ECONNREFUSED"`, `error_of(later.connect, (%q, %d))`, o.target, o.port)
		o.client.Do(`error_of(s.sendall, b"?")`)
		resume()
		const by = " n1/c1: reject by rule 0 of policy relays-closed"
		testutil.Eventually(t, "the relay to be told of as cut, and the SYN as denied", func() (bool, string) {
			var got []string
			for _, f := range observe(t, o.port, "--node", "n1") {
				got = append(got, flowText(f))
			}
			slices.Sort(got)
			return slices.Equal(slices.Compact(got), []string{"n1 to cut n2/c1>n1/c1 direct cut_policy" + by,
				"n1 to deny n2/c1>n1/c1 drop_policy_rejected" + by, "n1 to open n2/c1>n1/c1 direct relay_opened"}), strings.Join(got, ", ")
		})
	})
}
