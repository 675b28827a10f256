package lifecycle

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
	"heddle.dev/heddle/test/labstore"
)

// longNodes is for `make test-nodes`: what takes minutes, because leases and ages have to run out.
var longNodes = flag.Bool("nodes.long", false, "run the scenarios of many nodes and of the store's cluster that take minutes")

// inLab has the test use a lab of its own until it ends. Tests that use the lab of TestMain go on
// there afterwards.
func inLab(t *testing.T, suffix string, args ...string) {
	t.Helper()
	common := lab.Name
	lab.Name += suffix
	t.Cleanup(func() {
		if t.Failed() {
			lab.Dump(os.Stderr)
		}
		if err := lab.Command("down"); err != nil {
			t.Error(err)
		}
		lab.Name = common
	})
	if err := lab.Command("down"); err != nil { // what a killed run left
		t.Fatal(err)
	}
	testutil.NoError(t, lab.Command("up", args...))
}

// networkNodes gives the nodes as a node's agent knows them, by name.
func networkNodes(t testing.TB, asked string) map[string]seenNode {
	t.Helper()
	var list []seenNode
	lab.Query(t, &list, "nodes", "--node", asked)
	out := map[string]seenNode{}
	for _, n := range list {
		out[n.Name] = n
	}
	return out
}

type seenNode struct {
	Name        string
	Underlay    netip.Addr
	Prefixes    []netip.Prefix
	State       string
	Since, Seen time.Time
	Endpoints   int
}

// awaitNode waits until a node's agent knows another as wanted.
func awaitNode(t testing.TB, asked, name, what string, ok func(seenNode) bool) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("%s to know %s as %s", asked, name, what), func() (bool, string) {
		all := networkNodes(t, asked)
		return ok(all[name]), fmt.Sprintf("%+v", all)
	})
}

// TestEightNodes: in a network of eight nodes every container reaches every other directly.
func TestEightNodes(t *testing.T) {
	const nodes = 8
	inLab(t, "-8", "--nodes", fmt.Sprint(nodes), "--containers", "1")
	port := lab.FreePort()
	var peers []*lab.Peer
	var addrs []string
	for i := range nodes {
		container := fmt.Sprintf("n%d/c1", i+1)
		p := lab.StartPeer(t, "heddle", container)
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		peers, addrs = append(peers, p), append(addrs, lab.Address(t, "heddle", container))
	}
	for i, p := range peers {
		others, err := json.Marshal(slices.Delete(slices.Clone(addrs), i, i+1))
		testutil.NoError(t, err)
		p.Must(`out = [connect(4, a, %d) for a in %s]`, port, others)
	}
	for i, p := range peers {
		others := slices.Sorted(slices.Values(slices.Delete(slices.Clone(addrs), i, i+1)))
		want, err := json.Marshal(others)
		testutil.NoError(t, err)
		p.Must(`got = [l.accept() for _ in range(%d)]`, nodes-1)
		var who []string
		testutil.NoError(t, json.Unmarshal([]byte(p.Do(`[a[0] for _, a in got]`)), &who))
		if slices.Sort(who); !slices.Equal(who, others) {
			t.Errorf("%s is reached by %v, want %s", p.Name, who, want)
		}
		direct := 0
		for _, c := range lab.Connections(t, fmt.Sprintf("n%d/c1", i+1)) {
			if c.State == "ESTABLISHED" && c.Path == names.PathDirect {
				direct++
			}
		}
		if direct != 2*(nodes-1) {
			t.Errorf("%s has %d direct connections, want %d", p.Name, direct, 2*(nodes-1))
		}
	}
}

// TestNodesComeAndGo: a node whose agent is gone is away, not dead; it is forgotten when somebody
// says so, and not before its agent is gone; it comes back with what it had; and with another
// underlay address its peers follow.
func TestNodesComeAndGo(t *testing.T) {
	a, b := lab.BareNodes(t)
	a.Start(t, a.Args())
	join := []string{"--join-file", filepath.Join(a.Dir, "state", "join.pem")}
	b.Start(t, b.Args(join...))
	prefix := ""
	known := func(what, state, underlay string) {
		t.Helper()
		testutil.Eventually(t, "b to be "+what, func() (bool, string) {
			var list struct{ Nodes []seenNode }
			_, body := lab.AskAgent(t, a.Socket(), "GET", "/v1/nodes", "")
			if err := json.Unmarshal([]byte(body), &list); err != nil {
				t.Fatalf("%v: %s", err, body)
			}
			for _, n := range list.Nodes {
				if n.Name == "bad-b" {
					prefix = n.Prefixes[0].String()
					return n.State == state && n.Underlay.String() == underlay, body
				}
			}
			return state == "", body
		})
	}
	reached := func() {
		t.Helper()
		testutil.Eventually(t, "a's direct path to b to be proven", func() (bool, string) {
			_, body := lab.AskAgent(t, a.Socket(), "GET", "/v1/status", "")
			var status struct {
				Direct model.DirectPaths `json:"direct_paths"`
			}
			testutil.NoError(t, json.Unmarshal([]byte(body), &status))
			return status.Direct.Peers[model.PeerProven] == 1, body
		})
		lab.Shell(t, a.Name, "ping -c1 -W20 "+strings.Replace(prefix, ".0/24", ".1", 1)) // by the overlay
	}
	forget := func(want int) {
		t.Helper()
		if code, body := lab.AskAgent(t, a.Socket(), "DELETE", "/v1/nodes/bad-b", ""); code != want {
			t.Errorf("forget b: %d, want %d: %s", code, want, body)
		}
	}
	known("live", "live", b.Underlay)
	reached()
	forget(http.StatusConflict)
	b.End(t, syscall.SIGTERM)
	known("away: its programs answer probes", "away", b.Underlay)
	before := prefix
	if code, body := lab.AskAgent(t, a.Socket(), "DELETE", "/v1/nodes/bad-a", ""); code != http.StatusConflict {
		t.Errorf("a forgets itself: %d: %s", code, body)
	}
	forget(http.StatusNoContent)
	known("forgotten", "", "")
	forget(http.StatusNotFound)
	b.Start(t, b.Args(join...))
	known("live again", "live", b.Underlay)
	reached()
	if prefix != before {
		t.Errorf("it has prefix %s, had %s", prefix, before)
	}

	b.End(t, syscall.SIGTERM)
	const moved = "192.0.2.77"
	lab.Shell(t, b.Name, "ip addr del "+b.Underlay+"/24 dev eth0 && ip addr add "+moved+"/24 dev eth0")
	b.Underlay = moved
	b.Start(t, b.Args(join...))
	known("live at its new address", "live", moved)
	reached()
	if prefix != before {
		t.Errorf("it has prefix %s, had %s", prefix, before)
	}
}

func memberGroup(member string) string {
	return filepath.Join(lab.Cgroup2, "heddle-"+lab.Name, member)
}

// killMembers ends store members without a word.
func killMembers(t testing.TB, members ...string) {
	t.Helper()
	for _, m := range members {
		testutil.NoError(t, os.WriteFile(filepath.Join(memberGroup(m), "cgroup.kill"), []byte("1"), 0))
		testutil.Eventually(t, m+" to end", func() (bool, string) {
			raw, err := os.ReadFile(filepath.Join(memberGroup(m), "cgroup.procs"))
			return errors.Is(err, os.ErrNotExist) || len(raw) == 0, string(raw)
		})
	}
}

// leader gives the store member that leads.
func leader(t testing.TB) (name string) {
	t.Helper()
	testutil.Eventually(t, "a leader", func() (bool, string) {
		for _, m := range labstore.Members {
			out := lab.Shell(t, lab.Name+"-"+m, fmt.Sprintf("curl -s --cacert %s --cert %s --key %[2]s %s/metrics || true", labstore.File("ca-crt.pem"), labstore.File("store.pem"), labstore.MemberURL(t, m)))
			if strings.Contains(out, "\netcd_server_is_leader 1\n") {
				name = m
				return true, ""
			}
		}
		return false, "nobody leads"
	})
	return name
}

// storeScene is a lab with a store of its own, a connection between its nodes, and namespaces for
// more endpoints.
type storeScene struct {
	t              *testing.T
	client, server *lab.Peer
	target         string
	port           int
	pids           [2]int
}

func newStoreScene(t *testing.T, args ...string) *storeScene {
	inLab(t, "-s", append([]string{"--nodes", "2", "--containers", "1", "--store-members", "3"}, args...)...)
	s := &storeScene{t: t, client: lab.StartPeer(t, "heddle", "n1/c1"), server: lab.StartPeer(t, "heddle", "n2/c1"), port: lab.FreePort(), target: lab.Address(t, "heddle", "n2/c1")}
	s.server.Must(`l = listen(4, "0.0.0.0", %d)`, s.port)
	s.client.Must(`live = connect(4, %q, %d)`, s.target, s.port)
	s.server.Must(`other, who = l.accept()`)
	s.pids = [2]int{lab.AgentPID(t, "n1"), lab.AgentPID(t, "n2")}
	return s
}

// goesOn fails unless the connection there is goes on, a new one is made directly, and both agents
// are those of the start.
func (s *storeScene) goesOn(when string) {
	s.t.Helper()
	s.client.Must(`send(live, 5000)`)
	s.server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(other, 5000)`)
	s.client.Must(`fresh = connect(4, %q, %d)`, s.target, s.port)
	s.server.Must(`c, who = l.accept()`)
	s.client.Must(`send(fresh, 5000)`)
	s.server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	local := s.client.PortOf("fresh")
	for _, c := range lab.Connections(s.t, "n1/c1") {
		if c.Local.Port() == local && c.Path != names.PathDirect {
			s.t.Errorf("%s: a new connection goes by %s (%s)", when, c.Path, c.Reason)
		}
	}
	if now := [2]int{lab.AgentPID(s.t, "n1"), lab.AgentPID(s.t, "n2")}; now != s.pids {
		s.t.Errorf("%s: agents %v, were %v", when, now, s.pids)
	}
}

// space makes a network namespace for one more endpoint and gives its path.
func (s *storeScene) space(name string) string {
	s.t.Helper()
	full := lab.Name + "-x-" + name
	if out, err := exec.Command("ip", "netns", "add", full).CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	s.t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", full).Run() })
	return "/run/netns/" + full
}

// add attaches one more endpoint, as soon as the store takes it.
func (s *storeScene) add(node, name string) {
	s.t.Helper()
	body := fmt.Sprintf(`{"name": %q, "netns_path": %q}`, name, s.space(name))
	testutil.Eventually(s.t, "endpoint "+name+" to be made", func() (bool, string) {
		code, answer := lab.AskAgent(s.t, s.api(node), "POST", "/v1/endpoints", body)
		return code == http.StatusOK, answer
	})
}

// keptFromStore fails unless containers, intercepted or not, are refused by each member, which
// answers their nodes.
func (s *storeScene) keptFromStore() {
	s.t.Helper()
	node, plain := lab.StartPeer(s.t, "host", "n1/c1"), lab.StartPeer(s.t, "overlay", "n1/c1")
	for _, m := range labstore.Members {
		at, err := url.Parse(labstore.MemberURL(s.t, m))
		testutil.NoError(s.t, err)
		family := 4
		if strings.Contains(at.Hostname(), ":") {
			family = 6
		}
		for _, p := range []*lab.Peer{s.client, plain} {
			p.Expect(`"ECONNREFUSED"`, `error_of(connect, %d, %q, %s)`, family, at.Hostname(), at.Port())
		}
		node.Expect(`"ok"`, `error_of(connect, %d, %q, %s)`, family, at.Hostname(), at.Port())
	}
}

func (s *storeScene) api(node string) string {
	return "/run/heddle/lab/" + lab.Name + "/" + node + "/api.sock"
}

// refused fails unless the agent of node refuses one more endpoint because the store is away, and
// leaves nothing of it.
func (s *storeScene) refused(node, name string) {
	s.t.Helper()
	_, before := lab.AskAgent(s.t, s.api(node), "GET", "/v1/endpoints", "")
	code, answer := lab.AskAgent(s.t, s.api(node), "POST", "/v1/endpoints", fmt.Sprintf(`{"name": %q, "netns_path": %q}`, name, s.space(name)))
	if code != http.StatusServiceUnavailable || !strings.Contains(answer, `"code":"unavailable"`) {
		s.t.Errorf("an endpoint without the store: %d: %s", code, answer)
	}
	if _, after := lab.AskAgent(s.t, s.api(node), "GET", "/v1/endpoints", ""); after != before {
		s.t.Errorf("endpoints %s, were %s", after, before)
	}
	if _, status := lab.AskAgent(s.t, s.api(node), "GET", "/v1/status", ""); !strings.Contains(status, `"healthy":false`) {
		s.t.Errorf("status does not say that the store is away: %s", status)
	}
}

// dataOf is a store member's data directory.
func dataOf(member string) string { return "/run/heddle/lab/" + lab.Name + "/" + member + "/data" }

func labUp(t testing.TB) {
	t.Helper()
	testutil.NoError(t, lab.Command("up"))
}

// TestStoreCluster: nodes on an etcd cluster of three lose its leader, then all of it, and get it
// back as it was some time before. Connections between the nodes go on and new ones are made all
// the time; what needs the store is refused while there is none; and a store that was set back
// hears from the nodes what it has lost.
func TestStoreCluster(t *testing.T) {
	for _, underlay := range []string{"ipv4", "ipv6"} {
		t.Run(underlay, func(t *testing.T) { storeCluster(t, underlay) })
	}
}

func storeCluster(t *testing.T, underlay string) {
	s := newStoreScene(t, "--underlay", underlay)
	s.goesOn("at first")
	s.keptFromStore()
	killMembers(t, leader(t))
	s.goesOn("without the leader")
	s.add("n1", "early")

	killMembers(t, labstore.Members...)
	s.goesOn("without the store")
	s.refused("n2", "never")
	snapshot := t.TempDir()
	for _, m := range labstore.Members {
		testutil.NoError(t, os.CopyFS(filepath.Join(snapshot, m), os.DirFS(dataOf(m))))
	}
	labUp(t)
	s.add("n2", "late")
	lab.Heddle(t, "endpoints", "delete", "early", "--node", "n1")
	lab.ApplyDocument(t, lab.EverybodyPolicy("late", nil, []map[string]any{{"action": "deny", "peers": []map[string]any{{"prefix": "203.0.113.0/24"}}}}))
	s.goesOn("with the store again")

	killMembers(t, labstore.Members...)
	for _, m := range labstore.Members {
		err := errors.Join(os.RemoveAll(dataOf(m)), os.CopyFS(dataOf(m), os.DirFS(filepath.Join(snapshot, m))))
		testutil.NoError(t, err)
	}
	labUp(t)
	awaitNode(t, "n1", "n2", "having two endpoints", func(n seenNode) bool { return n.State == "live" && n.Endpoints == 2 })
	awaitNode(t, "n2", "n1", "having one endpoint", func(n seenNode) bool { return n.State == "live" && n.Endpoints == 1 })
	for _, node := range []string{"n1", "n2"} {
		// Both give it back; who comes second reads it a moment later.
		testutil.Eventually(t, node+" to have the policy again", func() (bool, string) {
			out := lab.Heddle(t, "policy", "list", "--node", node)
			return strings.Contains(out, "late"), out
		})
	}
	s.goesOn("with the store as it was")
	lab.Heddle(t, "endpoints", "delete", "late", "--node", "n2")
	awaitNode(t, "n1", "n2", "having one endpoint", func(n seenNode) bool { return n.Endpoints == 1 })
}

// eventuallyLong is eventually for what takes minutes: ages that have to be reached.
func eventuallyLong(t testing.TB, what string, condition func() (ok bool, saw string)) {
	t.Helper()
	for deadline := time.Now().Add(4 * time.Minute); ; time.Sleep(time.Second) {
		ok, saw := condition()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited for %s\n%s", what, saw)
		}
	}
}

// TestStoreClusterLong: each member of the store is lost in turn; then one node is cut off from all
// of them for longer than dead nodes are remembered, and is not forgotten, because it answers; then
// it is dead, and is.
func TestStoreClusterLong(t *testing.T) {
	if !*longNodes {
		t.Skip("takes minutes: make test-nodes")
	}
	const forgetAfter = time.Minute
	s := newStoreScene(t, "--agent-arg=--forget-nodes-after="+forgetAfter.String())
	for _, m := range labstore.Members {
		killMembers(t, m)
		s.goesOn("without " + m)
		s.add("n1", "without-"+m)
		labUp(t)
	}
	repair := lab.Spoil(t, "fabric", "bridge", "chain c { type filter hook forward priority 0\n iifname n2 oifname { s1, s2, s3 } drop\n oifname n2 iifname { s1, s2, s3 } drop\n}")
	s.goesOn("cut off from the store, at first")
	var away seenNode
	eventuallyLong(t, "n2 to be away for longer than dead nodes are remembered", func() (bool, string) {
		away = networkNodes(t, "n1")["n2"]
		return away.State == "away" && away.Seen.Sub(away.Since) > forgetAfter+30*time.Second, fmt.Sprintf("%+v", away)
	})
	s.goesOn("cut off from the store")
	s.refused("n2", "never")
	repair()
	awaitNode(t, "n1", "n2", "live", func(n seenNode) bool { return n.State == "live" })
	s.add("n2", "again")
	s.goesOn("with the store again")

	testutil.NoError(t, lab.KillAgent(s.pids[1], syscall.SIGKILL))
	lab.Shell(t, lab.Name+"-fabric", "ip link set n2 down")
	eventuallyLong(t, "n2 to be dead and forgotten", func() (bool, string) {
		all := networkNodes(t, "n1")
		_, there := all["n2"]
		return !there, fmt.Sprintf("%+v", all)
	})
}

// TestStoreSnapshot restores the cluster from a snapshot, as docs/howto/external-etcd.md has it.
func TestStoreSnapshot(t *testing.T) {
	if !*longNodes {
		t.Skip("needs etcdctl: make test-nodes")
	}
	s := newStoreScene(t)
	s.add("n1", "early")
	dir := "/run/heddle/lab/" + lab.Name + "/store/"
	file := filepath.Join(t.TempDir(), "snapshot")
	addr := map[string]string{}
	for _, m := range labstore.Members {
		addr[m], _, _ = strings.Cut(strings.Fields(lab.Shell(t, lab.Name+"-"+m, "ip -4 -o addr show scope global"))[3], "/")
	}
	lab.Shell(t, lab.Name+"-s1", fmt.Sprintf("ETCDCTL_API=3 etcdctl --endpoints https://%s:2379 --cacert %sca-crt.pem --cert %sstore.pem --key %sstore.pem snapshot save %s",
		addr["s1"], dir, dir, dir, file))
	s.add("n2", "late")
	lab.Heddle(t, "endpoints", "delete", "early", "--node", "n1")
	killMembers(t, labstore.Members...)
	var cluster []string
	for _, m := range labstore.Members {
		cluster = append(cluster, m+"=https://"+addr[m]+":2380")
	}
	for _, m := range labstore.Members {
		lab.Shell(t, lab.Name+"-"+m, fmt.Sprintf("rm -r %[1]s && ETCDCTL_API=3 etcdctl snapshot restore %[2]s --name %[3]s --data-dir %[1]s --initial-cluster %[4]s --initial-cluster-token heddle-2 "+
			"--initial-advertise-peer-urls https://%[5]s:2380", dataOf(m), file, m, strings.Join(cluster, ","), addr[m]))
	}
	s.goesOn("without the store")
	labUp(t)
	awaitNode(t, "n1", "n2", "having two endpoints", func(n seenNode) bool { return n.State == "live" && n.Endpoints == 2 })
	awaitNode(t, "n2", "n1", "having one endpoint", func(n seenNode) bool { return n.State == "live" && n.Endpoints == 1 })
	s.goesOn("with the store as it was")
}
