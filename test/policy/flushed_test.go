package policy

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestRulesTakenAway: somebody flushes a node's nftables rules and removes its routing rules. What
// policy rejects gets nowhere even while the agent does nothing about it, and then all works again.
func TestRulesTakenAway(t *testing.T) {
	clearPolicy(t)
	lab.UnlimitedICMP(t)
	free, rejected, own, shut := lab.FreePort(), lab.FreePort(), lab.FreePort(), lab.FreePort()
	plain, intercepted := lab.StartPeer(t, "overlay", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	node, outside := lab.StartPeer(t, "host", "n1/c2"), lab.StartOutside(t)
	for _, server := range []*lab.Peer{node, outside} {
		server.Must(`l = {p: listen(4, "0.0.0.0", p) for p in (%d, %d)}`, free, rejected)
		server.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", %d)); u.setblocking(False)`, rejected)
	}
	intercepted.Must(`l = listen(4, "0.0.0.0", %d)`, own)
	targets := []string{lab.Address(t, "host", "n1/c1"), lab.OutsideTarget(t)}
	toShut := lab.DenyRule("reject", shut)
	toShut["peers"] = []any{map[string]any{"entity": "host"}}
	lab.ApplyPolicy(t, "flushed", []map[string]any{toShut}, []map[string]any{{"action": "deny", "deny": "reject", "ports": []string{fmt.Sprintf("tcp/%d", rejected), fmt.Sprintf("udp/%d", rejected)}}})
	works := func(when string) {
		t.Helper()
		for _, target := range targets {
			for port, want := range map[int]string{free: `"ok"`, rejected: `"ECONNREFUSED"`} {
				if got := plain.Do(`error_of(lambda: connect(4, "%s", %d).close())`, target, port); got != want {
					t.Errorf("%s: %s port %d: %s, want %s", when, target, port, got, want)
				}
			}
		}
		outside.Expect(fmt.Sprintf("%q", targets[0]), "l[%d].accept()[1][0]", free) // masqueraded
		node.Must("l[%d].accept()[0].close()", free)
		node.Expect(`"ok"`, `error_of(lambda: connect(4, "%s", %d).close())`, lab.Address(t, "overlay", "n1/c2"), own) // diverted
		intercepted.Must("l.accept()[0].close()")
	}
	works("before")
	before, pid := lab.Counters(t, "n1"), lab.AgentPID(t, "n1")
	testutil.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	stopped := true
	goOn := func() {
		if stopped {
			testutil.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
		}
		stopped = false
	}
	t.Cleanup(goOn)
	lab.InNode(t, "n1", "nft", "flush", "ruleset")
	lab.InNode(t, "n1", "sh", "-c", "for f in -4 -6; do while ip $f rule del pref $(ip $f rule | grep 'proto 72' | cut -d: -f1) 2>/dev/null; do :; done; done")
	plain.Must("made = [tcp() for _ in range(2)]; [s.setblocking(False) for s in made]")
	for i, target := range targets {
		plain.Must(`socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("%s", %d))`, target, rejected)
		plain.Expect(fmt.Sprint(int(syscall.EINPROGRESS)), `made[%d].connect_ex(("%s", %d))`, i, target, rejected)
	}
	node.Expect(fmt.Sprint(int(syscall.EINPROGRESS)), `(m := tcp(), m.setblocking(False), m.connect_ex(("%s", %d)))[2]`, lab.Address(t, "overlay", "n1/c1"), shut)
	// What passes is there by now: the container sends it in the call itself.
	if out := lab.InNode(t, "n1-c1", "ss", "-Htn", "state", "syn-sent"); strings.Count(out, fmt.Sprint(":", rejected)) != len(targets) {
		t.Errorf("connects that policy rejects, without nftables: waiting are\n%s", out)
	}
	for _, server := range []*lab.Peer{node, outside} {
		server.Expect(`"EAGAIN"`, "error_of(lambda: u.recv(10))")
	}
	goOn()
	testutil.Eventually(t, "nftables and routing to be back", func() (bool, string) {
		now := lab.Counters(t, "n1")
		return now["mend_firewall"] > before["mend_firewall"] && now["mend_routing"] > before["mend_routing"], fmt.Sprint(now)
	})
	// Some of each connect, and none that went round between the node and the container.
	if rose := lab.Counters(t, "n1")["drop_policy_rejected"] - before["drop_policy_rejected"]; rose > 40 {
		t.Errorf("%d packets were rejected by policy: what is stopped on its way into a container went round", rose)
	}
	for i := range targets { // by the SYN that is sent again
		plain.Expect(`"ECONNREFUSED"`, `(select.select([], [made[%d]], [], PATIENCE), errno.errorcode[made[%[1]d].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)])[1]`, i)
	}
	works("after")
	for _, server := range []*lab.Peer{node, outside} {
		server.Expect(`"EAGAIN"`, "(l[%d].setblocking(False), error_of(lambda: l[%[1]d].accept()))[1]", rejected)
	}
	if out := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(out, "after changes by nft (process ") {
		t.Errorf("status does not say who:\n%s", out)
	}
}
