package engines

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
	"heddle.dev/heddle/test/labstore"
)

// TestMigrateCNI moves an attachment of CNI to the other node, by `heddle migrate` in place of DEL
// and ADD with its address, as docs/howto/migrate.md has it.
func TestMigrateCNI(t *testing.T) {
	old, next := lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin), lab.NewCNIEngine(t, "n2", "heddle", lab.CNIPlugin)
	rt := old.Sandbox("cni-mover")
	result := old.Add(rt)
	addr := lab.AddrOf(result, 0)
	old.Run("cni-mover", rt.NetNS)
	client := lab.StartPeer(t, "heddle", "n2/c1")
	lab.ConnectPeers(t, client, old.Peer("cni-mover"), addr)

	old.Ended("cni-mover")
	old.MigrateTo(rt, "n2")
	if err := old.CNI.DelNetworkList(t.Context(), old.List, rt); err != nil { // an engine's, late
		t.Errorf("DEL where it was: %v", err)
	}
	lab.AwaitMove(t, "n2", addr, "n2")
	there := next.Sandbox("cni-moved")
	there.CapabilityArgs = map[string]any{"ips": []string{addr.String() + "/24"}}
	moved := next.Add(there)
	for i := range result.IPs {
		if lab.AddrOf(moved, i) != lab.AddrOf(result, i) {
			t.Errorf("address %s on the other node, was %s", lab.AddrOf(moved, i), lab.AddrOf(result, i))
		}
	}
	if e := next.Endpoint(there); e == nil || e.Labels["by"] != "cni" || e.Labels["io.heddle.pod"] != "cni-moved" {
		t.Errorf("endpoint %+v: want the labels of the ADD that took it up", e)
	}
	if err := next.CNI.CheckNetworkList(t.Context(), next.List, there); err != nil {
		t.Errorf("check: %v", err)
	}
	next.Run("cni-moved", there.NetNS)
	server := next.Peer("cni-moved")
	far := lab.StartPeer(t, "heddle", "n1/c1")
	lab.AwaitMove(t, "n1", addr, "n2")
	for i := range moved.IPs {
		lab.ConnectPeers(t, far, server, lab.AddrOf(moved, i))
	}
	next.Ended("cni-moved")
	if err := next.CNI.DelNetworkList(t.Context(), next.List, there); err != nil {
		t.Errorf("DEL: %v", err)
	}
	lab.AwaitMove(t, "n1", addr, "")
	again := old.Sandbox("cni-again")
	again.CapabilityArgs = there.CapabilityArgs
	old.Add(again) // the address is its home's
}

// moveBehind writes the migration of an endpoint into the store as its agent would, which does not
// hear how it ended.
func moveBehind(t *testing.T, e model.Endpoint, to string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	client, err := labstore.Open(t)
	testutil.NoError(t, err)
	defer client.Close()
	value, err := store.EncodeMove(model.Move{Addr: e.Addr4(), Node: to, From: e.Node, Home: e.Node, Name: e.Name, Since: time.Now().UTC()})
	testutil.NoError(t, err)
	keys := store.KeysOf(model.NetworkID(lab.Numbers(t).ID))
	_, err = client.Txn(ctx).Then(clientv3.OpPut(keys.Move(e.Addr4()), string(value)), clientv3.OpDelete(keys.Endpoint(e.Node, e.ID)),
		clientv3.OpDelete(keys.Addr(e.Node, e.Addr4()))).Commit()
	testutil.NoError(t, err)
}

// TestMigrateUnlearned: an agent that did not hear how a migration of its endpoint ended lets go of
// it when the store says so, while it runs and when it starts. Nobody has the address twice.
func TestMigrateUnlearned(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(map[bool]string{false: "while it runs", true: "when it starts"}[restart], func(t *testing.T) {
			before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
			old, next := lab.NewCNIEngine(t, "n2", "heddle", lab.CNIPlugin), lab.NewCNIEngine(t, "n1", "heddle", lab.CNIPlugin)
			rt := old.Sandbox("cni-unlearned")
			addr := lab.AddrOf(old.Add(rt), 0)
			old.Run("cni-unlearned", rt.NetNS)
			client, server, port := old.Peer("cni-unlearned"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
			server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
			client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n1/c1"), port)
			server.Must(`c, who = l.accept()`)
			e := old.Endpoint(rt)
			if restart {
				testutil.NoError(t, lab.KillAgent(lab.AgentPID(t, "n2"), syscall.SIGKILL))
			}
			moveBehind(t, *e, "n1")
			lab.AwaitMove(t, "n1", addr, "n1")
			there := next.Sandbox("cni-learned")
			there.CapabilityArgs = map[string]any{"ips": []string{addr.String() + "/24"}}
			if restart { // the other has it before this one is back
				next.Add(there)
				testutil.NoError(t, lab.Command("up"))
			}
			testutil.Eventually(t, "n2 to let go", func() (bool, string) {
				got := old.Endpoint(rt)
				return got == nil, fmt.Sprint(got)
			})
			if !restart {
				next.Add(there)
			}
			client.Expect(`"ECONNABORTED"`, `error_of(s.recv, 1)`)
			if got := next.Endpoint(there); got == nil || got.Addr4() != addr {
				t.Errorf("the endpoint of the node that has the address: %+v", got)
			}
			next.Run("cni-learned", there.NetNS)
			lab.ConnectPeers(t, lab.StartPeer(t, "heddle", "n2/c1"), next.Peer("cni-learned"), addr)
			old.Ended("cni-unlearned")
			next.Ended("cni-learned")
			for _, del := range []struct {
				e  *lab.CNIEngine
				rt *libcni.RuntimeConf
			}{{old, rt}, {next, there}} {
				if err := del.e.CNI.DelNetworkList(t.Context(), del.e.List, del.rt); err != nil {
					t.Error(err)
				}
			}
			for node := range before {
				sameNode(t, node, before[node])
			}
		})
	}
}

// TestMigratePublished: published ports end with what they had opened when an endpoint leaves their
// node; on the other one it has those that are asked for there.
func TestMigratePublished(t *testing.T) {
	const plugin = `{"type":"heddle-cni","socket":"SOCKET","capabilities":{"portMappings":true,"ips":true}}`
	old, next := lab.NewCNIEngine(t, "n1", "heddle", plugin), lab.NewCNIEngine(t, "n2", "heddle", plugin)
	port, inside := lab.FreePort(), lab.FreePort()
	mappings := []map[string]any{{"hostPort": port, "containerPort": inside, "protocol": "tcp"}, {"hostPort": port, "containerPort": inside, "protocol": "udp"}}
	serve := func(e *lab.CNIEngine, id, netns string) (server *lab.Peer) {
		e.Run(id, netns)
		server = e.Peer(id)
		server.Must(`l = listen(4, "0.0.0.0", %d)`, inside)
		server.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
		server.Must(`u.bind(("0.0.0.0", %d))`, inside)
		server.Must(`u.settimeout(5)`)
		return server
	}
	rt := old.Sandbox("cni-leaver")
	rt.CapabilityArgs = map[string]any{"portMappings": mappings}
	addr := lab.AddrOf(old.Add(rt), 0)
	server := serve(old, "cni-leaver", rt.NetNS)
	client := lab.StartOutside(t)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "host", "n1/c1"), port)
	client.Must(`d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	client.Must(`d.settimeout(5)`)
	client.Must(`d.connect((%q, %d))`, lab.Address(t, "host", "n1/c1"), port)
	client.Must(`d.send(b"here")`)
	server.Expect(`"here"`, `u.recv(10).decode()`)

	old.Ended("cni-leaver")
	old.MigrateTo(rt, "n2")
	if ports := portsOn(t, "n1"); len(ports) > 0 {
		t.Errorf("ports of an endpoint that has left: %v", ports)
	}
	lab.AwaitMove(t, "n2", addr, "n2")
	there := next.Sandbox("cni-left")
	there.CapabilityArgs = map[string]any{"portMappings": mappings, "ips": []string{addr.String() + "/24"}}
	next.Add(there)
	server = serve(next, "cni-left", there.NetNS)
	lab.AwaitMove(t, "n1", addr, "n2")
	client.Must(`d.send(b"late")`)
	client.Expect(`"ECONNREFUSED"`, `error_of(d.recv, 10)`)
	client.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, lab.Address(t, "host", "n1/c1"), port)
	client.Must(`connect(4, %q, %d).close()`, lab.Address(t, "host", "n2/c1"), port)
	client.Must(`d.connect((%q, %d))`, lab.Address(t, "host", "n2/c1"), port)
	client.Must(`d.send(b"there")`)
	server.Expect(`"there"`, `u.recv(10).decode()`)
	next.Ended("cni-left")
	testutil.NoError(t, next.CNI.DelNetworkList(t.Context(), next.List, there))
	lab.AwaitMove(t, "n1", addr, "")
}
