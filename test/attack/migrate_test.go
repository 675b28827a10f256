package attack

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"go on as an endpoint that has migrated", model.ProtectMigrated, "n1", speakAfterMigration},
		attack{"speak for an address from the node that it left", model.ProtectSYNSender, "n2", speakFromOldNode},
	)
}

// speakAfterMigration has a container hand a connection to one that stays, before its endpoint
// migrates, and sockets that connect while it does: each as soon as the one before is ended.
func speakAfterMigration(t *testing.T) string {
	e, id := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), fmt.Sprintf("cni-leaver%d", lab.FreePort())
	rt := e.Sandbox(id)
	addr := lab.AddrOf(e.Add(rt), 0)
	e.Run(id, rt.NetNS)
	leaver, accomplice, server, port := e.Peer(id), lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	leaver.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Must(`c, who = l.accept()`)
	path := filepath.Join(os.TempDir(), lab.Name+"-"+id)
	t.Cleanup(func() { _ = os.Remove(path) })
	accomplice.Must(`u = taker(%q)`, path)
	accomplice.Begin(`s, *spare = take_all(u)`)
	leaver.Must(`give(%q, s, *[tcp() for _ in range(50)])`, path)
	accomplice.Reply(`s, *spare = take_all(u)`)
	e.Ended(id)
	accomplice.Must(`said = insist(spare, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Must(`kept = l.accept()`) // of the first of them
	e.MigrateTo(rt, "n2")
	defer e.GiveBack(rt, addr, "n2")
	got := gained(t, "to send as "+addr.String(), accomplice.Do(`error_of(s.sendall, b"late")`), `"ECONNABORTED"`, `"ok"`)
	if got != "" {
		server.Expect(`"late"`, `c.recv(4).decode()`)
		return got
	}
	late := accomplice.Do(`sum(error_of(x.sendall, b"late") == "ok" for x in spare)`)
	said := accomplice.Do(`said`)
	t.Logf("connects during the migration: %s", said)
	if late != "0" {
		got = fmt.Sprintf("to send as %s by %s of the connections made during the migration: %s", addr, late, said)
	}
	return got
}

// speakFromOldNode sends a SYN with the address of an endpoint that has left, from the node that it
// left.
func speakFromOldNode(t *testing.T) string {
	e, id := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), fmt.Sprintf("cni-left%d", lab.FreePort())
	rt := e.Sandbox(id)
	addr := lab.AddrOf(e.Add(rt), 0)
	e.MigrateTo(rt, "n2")
	defer e.GiveBack(rt, addr, "n2")
	lab.AwaitMove(t, "n2", addr, "n2")
	host, node, own, victim := lab.Forger(t, lab.StartPeer(t, "host", "n1/c1")), lab.Address(t, "host", "n2/c1"), lab.Address(t, "host", "n1/c1"), lab.Address(t, "heddle", "n2/c1")
	counts := func() (dropped, taken uint64) {
		c := lab.Counters(t, "n2")
		return c["drop_source_not_of_node"], c["relay_opened"]
	}
	testutil.Eventually(t, "n2 to have put into force that it moved", func() (bool, string) {
		routes := lab.InNode(t, "n2", "ip", "route", "show", addr.String())
		return strings.Contains(routes, "unreachable"), routes
	})
	const enough = 20 // the programs' maps may be some milliseconds behind
	dropped, taken := counts()
	got := ""
	testutil.Eventually(t, "SYNs to be dropped, or taken", func() (bool, string) {
		host.Must(`forge(syn(%q, %d, %q, %d, heddle_option(%d, %q, %q, %d)), %[3]q)`, own, lab.FreePort(), node,
			model.DefaultDirectPorts.First+7, lab.Numbers(t).ID, addr.String(), victim, lab.FreePort())
		d, n := counts()
		switch {
		case d > dropped:
			got = "dropped"
		case n >= taken+enough:
			got = "taken"
		}
		return got != "", fmt.Sprintf("dropped %d, taken %d", d-dropped, n-taken)
	})
	return gained(t, "a SYN of the old node's was", got, "dropped", "taken")
}
