package engines

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// reachIsPrompt is within what a peer reaches an endpoint at its new node.
const reachIsPrompt = time.Second

// migrant is a web server in a container that moves from node to node with its address.
type migrant struct {
	t     *testing.T
	name  string
	dirs  map[string]string
	node  string // where it is
	run   engineCLI
	addrs []netip.Addr
	label string
}

// arrive makes the endpoint on a node, as docs/howto/migrate.md has it, and starts the container.
func (m *migrant) arrive(node string) {
	m.t.Helper()
	space := engineNetwork() + "-" + m.name + "-" + node
	if !netns.Exists(space) {
		testutil.NoError(m.t, netns.Create(space))
		m.t.Cleanup(func() {
			if err := netns.Delete(space); err != nil {
				m.t.Error(err)
			}
		})
	}
	args := []string{"endpoints", "add", m.name, "--netns", netns.Path(space), "--lab", lab.Name, "--node", node, "--output", "json"}
	if m.label != "" {
		args = append(args, "--label", m.label)
	}
	var e model.Endpoint
	if raw := lab.Heddle(m.t, args...); json.Unmarshal([]byte(raw), &e) != nil {
		m.t.Fatalf("endpoints add: %s", raw)
	}
	if m.addrs != nil && fmt.Sprint(e.Addrs) != fmt.Sprint(m.addrs) {
		m.t.Fatalf("%s has %v on %s, want %v", m.name, e.Addrs, node, m.addrs)
	}
	m.node, m.addrs, m.label = node, e.Addrs, ""
	m.run = runBundle(m.t, node, m.dirs[node], m.name, netns.Path(space), serveWeb)
}

// stop ends the container.
func (m *migrant) stop() {
	m.t.Helper()
	m.run.must("delete", "-f", m.name)
}

// migrate runs heddle migrate where the endpoint is.
func (m *migrant) migrate(to string) (said string, err error) {
	m.t.Helper()
	out, err := exec.CommandContext(m.t.Context(), lab.Bin, "migrate", m.name, "--to", to, "--lab", lab.Name, "--node", m.node).CombinedOutput()
	return string(out), err
}

// gone takes the endpoint away for good.
func (m *migrant) gone() {
	m.stop()
	lab.Heddle(m.t, "endpoints", "delete", m.name, "--node", m.node)
}

// fetcher is a peer that asks the migrant for its page.
type fetcher struct {
	*lab.Peer
	family int
}

const fetchScript = `
def fetch(family, addr, port=80, timeout=2.0):
    s = tcp(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1000000)))
    try:
        s.connect((addr, port))
        s.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return receive_all(s).decode().strip().rpartition("\n")[2]
    finally:
        s.close()

def receive_all(s):
    got = b""
    while True:
        b = s.recv(1 << 16)
        if not b: return got
        got += b

def await_page(family, addr, want):
    "Seconds until the page is there."
    began = time.monotonic()
    while time.monotonic() - began < 30:
        asked = time.monotonic()
        try:
            if fetch(family, addr) == want: return time.monotonic() - began
        except OSError: pass
        time.sleep(0.005)
    raise ValueError("no page")

def hold(family, addr):
    "A connection on which the server has more to send than it can."
    s = tcp(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect((addr, 80))
    s.sendall(b"GET /big HTTP/1.0\r\n\r\n")
    got = b""
    while b"\r\n\r\n" not in got: # a server that is killed behind its head has nothing more to send
        b = s.recv(1)
        if not b: raise ValueError("no page")
        got += b
    s.recv(1)
    return s

def rest(s):
    "How it ends."
    try:
        receive_all(s)
        return "end"
    except OSError as e:
        return errno.errorcode[e.errno]
`

// fetchers are peers on both nodes, intercepted and not.
func fetchers(t *testing.T) (all []fetcher) {
	for _, container := range []string{"n1/c1", "n2/c1"} {
		for _, mode := range lab.Modes {
			p := lab.StartPeer(t, mode, container)
			p.Must("%s", fetchScript)
			for _, family := range []int{4, 6} {
				all = append(all, fetcher{p, family})
			}
		}
	}
	return all
}

func (f fetcher) target(m *migrant) string { return m.addrs[f.family/6].String() }

// reached checks that every peer reaches the migrant, and on the permitted port only, and gives how
// long each took.
func (m *migrant) reached(all []fetcher) (took []time.Duration) {
	m.t.Helper()
	for _, f := range all {
		raw := f.In(m.t).Must(`await_page(%d, %q, %q)`, f.family, f.target(m), greeting)
		seconds, err := strconv.ParseFloat(raw, 64)
		if err != nil {
			m.t.Fatalf("%s: %s", f.Name, raw)
		}
		took = append(took, time.Duration(seconds*float64(time.Second)))
	}
	for _, f := range all {
		if f.family == 6 {
			continue
		}
		// Nothing listens there: without policy it would be refused.
		if got := f.In(m.t).Must(`error_of(fetch, %d, %q, 81, 0.1)`, f.family, f.target(m)); got == `"ECONNREFUSED"` || got == `"ok"` {
			m.t.Errorf("%s, port that policy closes, at %s: %s", f.Name, m.node, got)
		}
	}
	return took
}

// newMigrant starts one on n1, with a label that a policy is about, and a limit.
func newMigrant(t *testing.T) *migrant {
	lab.NeedPrograms(t, "runc", "runc")
	m := &migrant{t: t, name: "migrant", dirs: engineDirs(t, "n1", "n2"), label: "app=migrant"}
	for _, node := range []string{"n1", "n2"} {
		lab.AwaitPath(t, node, model.PeerProven)
	}
	lab.ApplyDocument(t, map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "migrant",
		"subject": map[string]any{"labels": map[string]any{"app": "migrant"}},
		"ingress": map[string]any{"default": "deny", "deny": "drop", "rules": []any{map[string]any{"action": "allow", "ports": []string{"tcp/80"}}}}})
	for _, dir := range m.dirs {
		www := filepath.Join(dir, "rootfs/www")
		testutil.NoError(t, os.MkdirAll(www, 0o755))
		lab.WriteFile(t, filepath.Join(www, "big"), make([]byte, 16<<20))
	}
	t.Cleanup(func() { // what a test that failed leaves
		for node := range m.dirs {
			if m.node == node {
				_, _, _ = m.run.try("delete", "-f", m.name)
			}
			_ = exec.Command(lab.Bin, "endpoints", "delete", "--ignore-missing", m.name, "--lab", lab.Name, "--node", node).Run()
		}
	})
	m.arrive("n1")
	lab.Heddle(t, "limit", "set", m.name, "--egress", "2gbit", "--node", "n1")
	return m
}

// TestMigrate moves a server with policy and limit to the other node and back. Peers on both nodes
// reach it, by every path and in both families, within a second; nobody but the node that has it
// speaks for it.
func TestMigrate(t *testing.T) {
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
	m, all := newMigrant(t), fetchers(t)
	m.reached(all)
	for to, want := range map[string]string{"n2": "is in use", "n9": "n9 is not in the network", "n1": "is on node n1 already"} {
		if said, err := m.migrate(to); err == nil || !strings.Contains(said, want) {
			t.Errorf("to %s while its container runs: %v, want %q\n%s", to, err, want, said)
		}
	}
	m.name, m.node = "nobody", "n1"
	if said, err := m.migrate("n2"); err == nil || !strings.Contains(said, "not found") {
		t.Errorf("an endpoint that is not there: %v\n%s", err, said)
	}
	m.name = "migrant"
	best := make([]time.Duration, len(all))
	for i, to := range []string{"n2", "n1"} {
		from := m.node
		m.leave(to, all, i == 0)
		m.arrive(to)
		for j, took := range m.reached(all) {
			t.Logf("%s, IPv%d, reached it on %s after %s", all[j].Name, all[j].family, to, took)
			if best[j] == 0 || took < best[j] {
				best[j] = took
			}
		}
		m.carried(to)
		if i == 0 {
			direct(t, "n1", 1, func() { all[2].In(t).Must(`await_page(4, %q, %q)`, m.addrs[0].String(), greeting) })
			m.attack(from)
		}
	}
	for j, took := range best {
		if took > reachIsPrompt {
			t.Errorf("%s, IPv%d, took %s at best, want %s", all[j].Name, all[j].family, took, reachIsPrompt)
		}
	}
	m.gone()
	for node := range before {
		sameNode(t, node, before[node])
	}
}

// leave stops the container and gives its endpoint to another node. With connections, what was open
// ends. While it waits peers get an answer, and the node it left does not give its address out.
func (m *migrant) leave(to string, all []fetcher, connections bool) {
	m.t.Helper()
	if connections {
		for i, f := range all {
			f.In(m.t).Must(`held%d = hold(%d, %q)`, i, f.family, f.target(m))
		}
	}
	m.stop()
	said, err := m.migrate(to)
	if err != nil || !strings.Contains(said, "waits on node "+to) {
		m.t.Fatalf("migrate to %s: %v\n%s", to, err, said)
	}
	if again, err := m.migrate(to); err != nil || !strings.Contains(again, "waits on node "+to) {
		m.t.Errorf("once more: %v\n%s", err, again)
	}
	if connections {
		for i, f := range all {
			if got := f.In(m.t).Must(`rest(held%d)`, i); got != `"ECONNRESET"` {
				m.t.Errorf("%s, IPv%d: a connection to it that was open ended by %s", f.Name, f.family, got)
			}
		}
	}
	if !connections {
		return
	}
	for _, f := range all { // no answer would be EAGAIN
		if got := f.In(m.t).Must(`error_of(fetch, %d, %q)`, f.family, f.target(m)); got != `"ECONNREFUSED"` && got != `"EHOSTUNREACH"` && got != `"ENETUNREACH"` {
			m.t.Errorf("%s, IPv%d, while it waits: %s", f.Name, f.family, got)
		}
	}
	thief := m.name + "-thief"
	if out, err := m.add(thief, m.node, m.addrs[0]); err == nil || !strings.Contains(out, "address not available") {
		m.t.Errorf("its address given out by the node it left: %v\n%s", err, out)
	}
}

// add tries to make an endpoint with an address.
func (m *migrant) add(name, node string, addr netip.Addr) (out string, err error) {
	space := engineNetwork() + "-" + name
	if err := netns.Create(space); err != nil {
		return "", err
	}
	raw, err := exec.CommandContext(m.t.Context(), lab.Bin, "endpoints", "add", name, "--netns", netns.Path(space), "--addr", addr.String(),
		"--lab", lab.Name, "--node", node).CombinedOutput()
	if err := netns.Delete(space); err != nil {
		m.t.Error(err)
	}
	return string(raw), err
}

// carried checks that labels and limits came with it.
func (m *migrant) carried(node string) {
	m.t.Helper()
	for _, e := range endpointsOn(m.t, node) {
		if e.Name == m.name && (e.Labels["app"] != "migrant" || e.Limits == nil || e.Limits.Egress != 2e9) {
			m.t.Errorf("labels %v and limits %+v did not come with it", e.Labels, e.Limits)
		}
	}
	if got := lab.LimitsOf(m.t); !strings.HasPrefix(got, m.name+" ") || strings.Count(got, "\n") != 1 {
		m.t.Errorf("limits in force: %s", got)
	}
}

// attack has the node that it left, and a container there, speak for it.
func (m *migrant) attack(from string) {
	m.t.Helper()
	t, id, port := m.t, lab.Numbers(m.t), lab.FreePort()
	server := lab.StartPeer(t, "heddle", "n2/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	server.Must(`l.setblocking(False)`)
	datagrams, at := lab.WaitForDatagrams(t)
	host, plain := lab.Forger(t, lab.StartPeer(t, "host", from+"/c1")), lab.Forger(t, lab.StartPeer(t, "overlay", from+"/c2"))
	own, other, addr := lab.Address(t, "host", from+"/c1"), lab.Address(t, "host", "n2/c1"), m.addrs[0].String()
	victim := lab.Address(t, "heddle", "n2/c1")
	for _, c := range []struct{ reason, node, line string }{
		{"drop_source_not_of_node", "n2", fmt.Sprintf(`forge(syn(%q, 33333, %q, %d, heddle_option(%d, %q, %q, %d)), %[2]q)`, own, other, model.DefaultDirectPorts.First, id.ID, addr, victim, port)},
		{"drop_overlay_source", "n2", fmt.Sprintf(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %[2]q, udp(%[4]q, 5, %q, %d, b"forged"))), %[2]q)`, own, other, id.VNI, addr, victim, at)},
	} {
		before := lab.Counters(t, c.node)[c.reason]
		host.Must("%s", c.line)
		testutil.Eventually(t, c.reason+" to rise", func() (bool, string) {
			after := lab.Counters(t, c.node)
			return after[c.reason] > before, fmt.Sprint(after)
		})
	}
	before := lab.Counters(t, from)["drop_spoofed_source"]
	plain.Must(`forge(udp(%q, 5, %q, %d, b"forged"), %[2]q)`, addr, victim, at)
	testutil.Eventually(t, "drop_spoofed_source to rise", func() (bool, string) {
		after := lab.Counters(t, from)
		return after["drop_spoofed_source"] > before, fmt.Sprint(after)
	})
	server.Expect(`"EAGAIN"`, `error_of(l.accept)`)
	datagrams.Expect(`""`, `came()`)
	if out, err := m.add(m.name+"-thief", from, m.addrs[0]); err == nil || !strings.Contains(out, "has moved to") {
		t.Errorf("its address given out by the node it left: %v\n%s", err, out)
	}
}

// TestMigrateCut kills the agent that has taken an endpoint up, and both in the midst of the next
// migration: the endpoint is on the one node or the other, and the command, run again, brings it
// on.
func TestMigrateCut(t *testing.T) {
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
	m, all := newMigrant(t), slices.DeleteFunc(fetchers(t), func(f fetcher) bool { return f.family == 6 })
	m.leave("n2", all, false)
	m.arrive("n2")
	m.reached(all)
	testutil.NoError(t, lab.KillAgent(lab.AgentPID(t, "n2"), syscall.SIGKILL))
	testutil.NoError(t, lab.Command("up"))
	m.reached(all)
	// The node that it leaves is not the one that has the store.
	m.stop()
	pid := lab.AgentPID(t, "n2")
	ended := make(chan string, 1)
	go func() {
		said, err := m.migrate("n1")
		ended <- fmt.Sprint(err, " ", said)
	}()
	after := rand.N(150 * time.Millisecond) // in the midst, or thereabouts
	time.AfterFunc(after, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	t.Logf("cut after %s: %s", after, <-ended)
	for _, pid := range []int{pid, lab.AgentPID(t, "n1")} {
		if err := lab.KillAgent(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	testutil.NoError(t, lab.Command("up"))
	testutil.Eventually(t, "the endpoint to be in one place", func() (bool, string) { // agents that start have yet to hear of all
		n := m.places()
		return n == 1, fmt.Sprint(n, " places")
	})
	if said, err := m.migrate("n1"); err != nil || !strings.Contains(said, "waits on node n1") {
		t.Fatalf("again: %v\n%s", err, said)
	}
	m.arrive("n1")
	m.reached(all)
	if moves := lab.MovesOf(t, "n2"); len(moves) != 0 {
		t.Errorf("it is home, but the moves are %+v", moves)
	}
	m.gone()
	for node := range before {
		sameNode(t, node, before[node])
	}
}

// places counts where the endpoint is: attached, or waiting.
func (m *migrant) places() (n int) {
	m.t.Helper()
	for _, node := range []string{"n1", "n2"} {
		for _, e := range endpointsOn(m.t, node) {
			if e.Name == m.name {
				n++
			}
		}
	}
	for _, move := range lab.MovesOf(m.t, "n1") {
		if move.Name == m.name && move.Waiting {
			n++
		}
	}
	return n
}
