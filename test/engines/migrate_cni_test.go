package test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

func init() {
	attacks = append(attacks,
		attack{"go on as an endpoint that has migrated", model.ProtectMigrated, "n1", speakAfterMigration},
		attack{"speak for an address from the node that it left", model.ProtectSYNSender, "n2", speakFromOldNode},
	)
}

// migrateTo gives an attachment whose container has ended to another node.
func (e *engine) migrateTo(rt *libcni.RuntimeConf, to string) {
	e.t.Helper()
	said := heddle(e.t, "migrate", e.nameOf(rt), "--to", to, "--lab", labName, "--node", e.node)
	if !strings.Contains(said, "waits on node "+to) {
		e.t.Fatalf("migrate: %s", said)
	}
}

func (e *engine) nameOf(rt *libcni.RuntimeConf) string {
	return e.list.Name + "/" + rt.ContainerID + "/" + rt.IfName
}

// awaitMove waits until a node knows where addr has moved to; "" is home.
func awaitMove(t *testing.T, node string, addr netip.Addr, to string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s to know that %s is on %q", node, addr, to), func() (bool, string) {
		got := ""
		for _, m := range movesOf(t, node) {
			if m.Addr == addr {
				got = m.Node
			}
		}
		return got == to, got
	})
}

// giveBack takes a move that waits away: its address goes home.
func (e *engine) giveBack(rt *libcni.RuntimeConf, addr netip.Addr, from string) {
	e.t.Helper()
	eventually(e.t, from+" to give the address back", func() (bool, string) { // it may have yet to hear of it
		heddle(e.t, "endpoints", "delete", "--ignore-missing", e.nameOf(rt), "--lab", labName, "--node", from)
		left := movesOf(e.t, from)
		for _, m := range left {
			if m.Addr == addr {
				return false, fmt.Sprint(left)
			}
		}
		return true, ""
	})
}

// ended ends a container that run started.
func (e *engine) ended(id string) {
	e.t.Helper()
	if out, err := e.runtime(e.t.Context(), "delete", "--force", id).CombinedOutput(); err != nil {
		e.t.Fatalf("delete %s: %v\n%s", id, err, out)
	}
}

// TestMigrateCNI moves an attachment of CNI to the other node, by `heddle migrate` in place of DEL and ADD with its address, as
// docs/howto/migrate.md has it.
func TestMigrateCNI(t *testing.T) {
	old, next := newEngine(t, "n1", "heddle", mainPlugin), newEngine(t, "n2", "heddle", mainPlugin)
	rt := old.sandbox("cni-mover")
	result := old.add(rt)
	addr := addrOf(result, 0)
	old.run("cni-mover", rt.NetNS)
	client := startPeer(t, "heddle", "n2/c1")
	connectPeers(t, client, old.peer("cni-mover"), addr)

	old.ended("cni-mover")
	old.migrateTo(rt, "n2")
	if err := old.cni.DelNetworkList(t.Context(), old.list, rt); err != nil { // an engine's, late
		t.Errorf("DEL where it was: %v", err)
	}
	awaitMove(t, "n2", addr, "n2")
	there := next.sandbox("cni-moved")
	there.CapabilityArgs = map[string]any{"ips": []string{addr.String() + "/24"}}
	moved := next.add(there)
	for i := range result.IPs {
		if addrOf(moved, i) != addrOf(result, i) {
			t.Errorf("address %s on the other node, was %s", addrOf(moved, i), addrOf(result, i))
		}
	}
	if e := next.endpoint(there); e == nil || e.Labels["by"] != "cni" || e.Labels["io.heddle.pod"] != "cni-moved" {
		t.Errorf("endpoint %+v: want the labels of the ADD that took it up", e)
	}
	if err := next.cni.CheckNetworkList(t.Context(), next.list, there); err != nil {
		t.Errorf("check: %v", err)
	}
	next.run("cni-moved", there.NetNS)
	server := next.peer("cni-moved")
	far := startPeer(t, "heddle", "n1/c1")
	awaitMove(t, "n1", addr, "n2")
	for i := range moved.IPs {
		connectPeers(t, far, server, addrOf(moved, i))
	}
	next.ended("cni-moved")
	if err := next.cni.DelNetworkList(t.Context(), next.list, there); err != nil {
		t.Errorf("DEL: %v", err)
	}
	awaitMove(t, "n1", addr, "")
	again := old.sandbox("cni-again")
	again.CapabilityArgs = there.CapabilityArgs
	old.add(again) // the address is its home's
}

// moveBehind writes the migration of an endpoint into the store as its agent would, which does not hear how it ended.
func moveBehind(t *testing.T, e model.Endpoint, to string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client, err := labStore(t)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	value, err := store.EncodeMove(model.Move{Addr: e.Addr4(), Node: to, From: e.Node, Home: e.Node, Name: e.Name, Since: time.Now().UTC()})
	if err != nil {
		t.Fatal(err)
	}
	keys := store.KeysOf(model.NetworkID(labNetwork(t).ID))
	_, err = client.Txn(ctx).Then(clientv3.OpPut(keys.Move(e.Addr4()), string(value)), clientv3.OpDelete(keys.Endpoint(e.Node, e.ID)),
		clientv3.OpDelete(keys.Addr(e.Node, e.Addr4()))).Commit()
	if err != nil {
		t.Fatal(err)
	}
}

// TestMigrateUnlearned: an agent that did not hear how a migration of its endpoint ended lets go of it when the store says so,
// while it runs and when it starts. Nobody has the address twice.
func TestMigrateUnlearned(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(map[bool]string{false: "while it runs", true: "when it starts"}[restart], func(t *testing.T) {
			before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
			old, next := newEngine(t, "n2", "heddle", mainPlugin), newEngine(t, "n1", "heddle", mainPlugin)
			rt := old.sandbox("cni-unlearned")
			addr := addrOf(old.add(rt), 0)
			old.run("cni-unlearned", rt.NetNS)
			client, server, port := old.peer("cni-unlearned"), startPeer(t, "heddle", "n1/c1"), freePort()
			server.must(`l = listen(4, "0.0.0.0", %d)`, port)
			client.must(`s = connect(4, %q, %d)`, address(t, "heddle", "n1/c1"), port)
			server.must(`c, who = l.accept()`)
			e := old.endpoint(rt)
			if restart {
				if err := killAgent(agentPID(t, "n2"), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			moveBehind(t, *e, "n1")
			awaitMove(t, "n1", addr, "n1")
			there := next.sandbox("cni-learned")
			there.CapabilityArgs = map[string]any{"ips": []string{addr.String() + "/24"}}
			if restart { // the other has it before this one is back
				next.add(there)
				if err := labCommand("up"); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "n2 to let go", func() (bool, string) {
				got := old.endpoint(rt)
				return got == nil, fmt.Sprint(got)
			})
			if !restart {
				next.add(there)
			}
			client.expect(`"ECONNABORTED"`, `error_of(s.recv, 1)`)
			if got := next.endpoint(there); got == nil || got.Addr4() != addr {
				t.Errorf("the endpoint of the node that has the address: %+v", got)
			}
			next.run("cni-learned", there.NetNS)
			connectPeers(t, startPeer(t, "heddle", "n2/c1"), next.peer("cni-learned"), addr)
			old.ended("cni-unlearned")
			next.ended("cni-learned")
			for _, del := range []struct {
				e  *engine
				rt *libcni.RuntimeConf
			}{{old, rt}, {next, there}} {
				if err := del.e.cni.DelNetworkList(t.Context(), del.e.list, del.rt); err != nil {
					t.Error(err)
				}
			}
			for node := range before {
				sameNode(t, node, before[node])
			}
		})
	}
}

// speakAfterMigration has a container hand a connection to one that stays, before its endpoint migrates, and sockets that
// connect while it does: each as soon as the one before is ended.
func speakAfterMigration(t *testing.T) string {
	e, id := newEngine(t, "n1", "heddle", mainPlugin), fmt.Sprintf("cni-leaver%d", freePort())
	rt := e.sandbox(id)
	addr := addrOf(e.add(rt), 0)
	e.run(id, rt.NetNS)
	leaver, accomplice, server, port := e.peer(id), startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	leaver.must(`s = connect(4, %q, %d)`, address(t, "heddle", "n2/c1"), port)
	server.must(`c, who = l.accept()`)
	path := filepath.Join(os.TempDir(), labName+"-"+id)
	t.Cleanup(func() { _ = os.Remove(path) })
	accomplice.must(`u = taker(%q)`, path)
	accomplice.begin(`s, *spare = take_all(u)`)
	leaver.must(`give(%q, s, *[tcp() for _ in range(50)])`, path)
	accomplice.reply(`s, *spare = take_all(u)`)
	e.ended(id)
	accomplice.must(`said = insist(spare, %q, %d)`, address(t, "heddle", "n2/c1"), port)
	server.must(`kept = l.accept()`) // of the first of them
	e.migrateTo(rt, "n2")
	defer e.giveBack(rt, addr, "n2")
	got := gained(t, "to send as "+addr.String(), accomplice.do(`error_of(s.sendall, b"late")`), `"ECONNABORTED"`, `"ok"`)
	if got != "" {
		server.expect(`"late"`, `c.recv(4).decode()`)
		return got
	}
	late := accomplice.do(`sum(error_of(x.sendall, b"late") == "ok" for x in spare)`)
	said := accomplice.do(`said`)
	t.Logf("connects during the migration: %s", said)
	if late != "0" {
		got = fmt.Sprintf("to send as %s by %s of the connections made during the migration: %s", addr, late, said)
	}
	return got
}

// speakFromOldNode sends a SYN with the address of an endpoint that has left, from the node that it left.
func speakFromOldNode(t *testing.T) string {
	e, id := newEngine(t, "n1", "heddle", mainPlugin), fmt.Sprintf("cni-left%d", freePort())
	rt := e.sandbox(id)
	addr := addrOf(e.add(rt), 0)
	e.migrateTo(rt, "n2")
	defer e.giveBack(rt, addr, "n2")
	awaitMove(t, "n2", addr, "n2")
	host, node, own, victim := forger(t, startPeer(t, "host", "n1/c1")), address(t, "host", "n2/c1"), address(t, "host", "n1/c1"), address(t, "heddle", "n2/c1")
	counts := func() (dropped, taken uint64) {
		c := counters(t, "n2")
		return c["drop_source_not_of_node"], c["relay_opened"]
	}
	eventually(t, "n2 to have put into force that it moved", func() (bool, string) {
		routes := inNode(t, "n2", "ip", "route", "show", addr.String())
		return strings.Contains(routes, "unreachable"), routes
	})
	const enough = 20 // the programs' maps may be some milliseconds behind
	dropped, taken := counts()
	got := ""
	eventually(t, "SYNs to be dropped, or taken", func() (bool, string) {
		host.must(`forge(syn(%q, %d, %q, %d, heddle_option(%d, %q, %q, %d)), %[3]q)`, own, freePort(), node,
			model.DefaultDirectPorts.First+7, labNetwork(t).ID, addr.String(), victim, freePort())
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
