package programs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// ownLab is a lab of a test's own, beside that of the others: its containers are asked for with
// arguments of theirs.
type ownLab struct {
	*testing.T
	name      string
	arguments []string
}

// verbsLab is one whose containers have RDMA devices.
type verbsLab struct {
	ownLab
	marked string // tells packets of its underlay that have mark 46 from others, for tcpdump
}

func newVerbsLab(t *testing.T) verbsLab {
	t.Helper()
	return verbsLab{newOwnLab(t, "v", "--verbs"), "ip[1] & 0xfc == 0xb8"}
}

// newOwnLab brings one up whose name ends in suffix.
func newOwnLab(t *testing.T, suffix string, arguments ...string) ownLab {
	t.Helper()
	l := ownLab{t, lab.Name + suffix, arguments}
	t.Cleanup(func() {
		if t.Failed() {
			l.logLogs(t)
		}
		if out, err := l.heddle(context.Background(), "lab", "down").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	l.up()
	return l
}

// logLogs logs the ends of what agents and what they have started have written: the lab goes with
// the test.
func (l ownLab) logLogs(t *testing.T) {
	files, err := filepath.Glob("/run/heddle/lab/" + l.name + "/*/*.log")
	testutil.NoError(t, err)
	own, err := filepath.Glob("/run/heddle/lab/" + l.name + "/*/modules/*.log")
	testutil.NoError(t, err)
	files = append(files, own...)
	for _, file := range files {
		text, err := os.ReadFile(file)
		testutil.NoError(t, err)
		t.Logf("--- %s\n%s", file, text[max(0, len(text)-8<<10):])
	}
}

// heddle is a command of Heddle's for the lab: what follows on "--" is a program's.
func (l ownLab) heddle(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, lab.Bin, append(args, "--lab", l.name)...)
}

func (l ownLab) up() {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	args := append([]string{"lab", "up", "--nodes", "2", "--containers", "2"}, l.arguments...)
	if out, err := l.heddle(ctx, args...).CombinedOutput(); err != nil {
		l.Fatalf("%v\n%s", err, out)
	}
}

func (l ownLab) exec(ctx context.Context, container string, words []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, lab.Bin, append([]string{"lab", "exec", "--lab", l.name, container, "--"}, words...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // passed on, which KILL is not
	return cmd
}

// Where servers listen before they use RDMA: those of ibverbs-utils and perftest, and of UCX.
const (
	pingpongPort = 18515
	ucxPort      = 13337
)

// awaitListener waits until something in n1/c1 listens at a port.
func (l verbsLab) awaitListener(port int) {
	l.Helper()
	testutil.Eventually(l, fmt.Sprintf("n1/c1 to listen at port %d", port), func() (bool, string) {
		out, err := l.heddle(l.Context(), "connections", "--node", "n1", "--all", "--output", "json").Output()
		var all []struct{ Endpoint, State, Local string }
		if err = errors.Join(err, json.Unmarshal(out, &all)); err != nil {
			return false, err.Error()
		}
		return slices.ContainsFunc(all, func(c struct{ Endpoint, State, Local string }) bool {
			return c.Endpoint == "n1/c1" && c.State == "LISTEN" && strings.HasSuffix(c.Local, fmt.Sprintf(":%d", port))
		}), string(out)
	})
}

// addr gives a container's address.
func (l verbsLab) addr(container string) string {
	l.Helper()
	out, err := l.heddle(l.Context(), "lab", "ip", container).Output()
	testutil.NoError(l, err)
	return strings.TrimSpace(string(out))
}

// program runs in a container until it ends, or stop is called, which waits for it.
type program struct {
	*exec.Cmd
	out  *strings.Builder
	stop func() error
}

func (l verbsLab) start(container string, words ...string) program {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), testutil.WaitTimeout)
	p := program{Cmd: l.exec(ctx, container, words), out: new(strings.Builder)}
	p.Stdout, p.Stderr = p.out, p.out
	testutil.NoError(l, p.Cmd.Start())
	p.stop = sync.OnceValue(func() error {
		cancel()
		return p.Wait()
	})
	l.Cleanup(func() { _ = p.stop() })
	return p
}

// pair runs a program of two ends in n1/c1, where it listens at port, and in client.
func (l verbsLab) pair(client string, port int, words ...string) (served, said string, err error) {
	l.Helper()
	server := l.start("n1/c1", words...)
	l.awaitListener(port)
	ctx, cancel := context.WithTimeout(l.Context(), testutil.WaitTimeout)
	defer cancel()
	answer, err := l.exec(ctx, client, append(slices.Clip(words), l.addr("n1/c1"))).CombinedOutput()
	if err == nil {
		err = server.Wait()
	} else {
		_ = server.stop() // it may wait for a client for ever
	}
	return server.out.String(), string(answer), err
}

func (l verbsLab) mustPair(client string, port int, words ...string) {
	l.Helper()
	if served, said, err := l.pair(client, port, words...); err != nil {
		l.Errorf("%s between n1/c1 and %s: %v\n--- n1/c1\n%s\n--- %s\n%s", strings.Join(words, " "), client, err, served, client, said)
	}
}

// rdma gives what a node says of queue pairs and devices.
func (l verbsLab) rdma(node string) (api.RDMA, error) {
	out, err := l.heddle(l.Context(), "rdma", "--node", node, "--output", "json").Output()
	if err != nil {
		return api.RDMA{}, err
	}
	var list []api.RDMA
	if err := json.Unmarshal(out, &list); err != nil || len(list) != 1 {
		return api.RDMA{}, fmt.Errorf("heddle rdma: %s: %w", out, err)
	}
	return list[0], nil
}

// tells waits until nodes have told of connections for RDMA between n1/c1 and client what is wanted:
// which end saw which event, or which event came about by which policy, whichever end saw it.
func (l verbsLab) tells(client string, want ...string) {
	l.Helper()
	testutil.Eventually(l, "flows "+strings.Join(want, ", "), func() (bool, string) {
		out, err := l.heddle(l.Context(), "observe", "--json", "--port", "4791", "--last", "1000").Output()
		testutil.NoError(l, err)
		told := make(map[string]bool)
		for line := range strings.Lines(string(out)) {
			var f flow.Flow
			testutil.NoError(l, json.Unmarshal([]byte(line), &f))
			ends := []string{f.From.Endpoint, f.To.Endpoint}
			if f.Protocol == flow.RDMA && slices.Contains(ends, "n1/c1") && slices.Contains(ends, client) {
				told[fmt.Sprintf("%s %s", f.SeenBy, f.Event)] = true
				told[fmt.Sprintf("%s by %s", f.Event, f.Policy)] = true
			}
		}
		return !slices.ContainsFunc(want, func(w string) bool { return !told[w] }), string(out)
	})
}

// noVerbs forbids the connections of queue pairs, and no others.
const noVerbs = `apiVersion: heddle.dev/v1
kind: Policy
name: no-verbs
subject: {}
ingress:
  rules:
  - {action: deny, ports: [tcp/4791]}
`

// policy runs `heddle policy` by n1's agent.
func (l verbsLab) policy(args ...string) {
	l.Helper()
	if out, err := l.heddle(l.Context(), append([]string{"policy"}, append(args, "--node", "n1")...)...).CombinedOutput(); err != nil {
		l.Fatalf("heddle policy %v: %v\n%s", args, err, out)
	}
}

// policyHolds wants a live pair of endpoints to fail as soon as policy forbids it, and none to come
// about then, on one node, too.
func (l verbsLab) policyHolds(client string, path api.RDMAPath) {
	l.Helper()
	file := filepath.Join(l.TempDir(), "policy.yaml")
	testutil.NoError(l, os.WriteFile(file, []byte(noVerbs), 0o600))
	words := []string{"ib_write_bw", "-x", "0", "-D", "60"}
	server := l.start("n1/c1", words...)
	l.awaitListener(pingpongPort)
	live := l.start(client, append(words, l.addr("n1/c1"))...)
	testutil.Eventually(l, "bytes to move by "+string(path), func() (bool, string) {
		state, err := l.rdma("n1")
		return err == nil && slices.ContainsFunc(state.QueuePairs, func(q api.QueuePair) bool {
			return q.Endpoint == "n1/c1" && q.Path == path && q.BytesReceived > 1<<20 && q.PeerNumber > 0 && q.Peer.String() == l.addr(client)
		}), fmt.Sprintf("%+v, %v", state.QueuePairs, err)
	})
	ended := make(chan error, 1)
	go func() { ended <- live.Wait() }()
	l.policy("apply", "-f", file)
	applied := time.Now()
	select {
	case err := <-ended:
		if err == nil || time.Since(applied) > time.Second {
			l.Errorf("%s: a forbidden pair ended after %v: %v\n%s", client, time.Since(applied), err, live.out)
		}
	case <-time.After(testutil.WaitTimeout):
		l.Errorf("%s: a forbidden pair lives\n%s", client, live.out)
	}
	// A server that ends before n1 has heard of the cut has nothing that could be cut any more.
	l.counted("verbs_link_cut")
	_ = server.stop()
	served, said, err := l.pair(client, pingpongPort, "timeout", testutil.Seconds(4*time.Second), "ibv_rc_pingpong", "-g", "0")
	if err == nil || strings.Contains(served+said, "usec/iter") {
		l.Errorf("queue pairs communicate that policy forbids: %v\n%s\n%s", err, served, said)
	}
	l.policy("delete", "no-verbs")
	l.counted("verbs_connect_refused")
}

// counted waits until a node has counted reasons: what it says of the router may be a moment old. Of
// a pair that is cut one end's node may count nothing: its program, told by the other one, was quicker
// than its router.
func (l verbsLab) counted(reasons ...string) {
	l.Helper()
	testutil.Eventually(l, strings.Join(reasons, " and ")+" to be counted", func() (bool, string) {
		out, err := l.heddle(l.Context(), "status", "--output", "json").Output()
		var status []struct{ Counters []api.Counter }
		if err = errors.Join(err, json.Unmarshal(out, &status)); err != nil {
			return false, err.Error()
		}
		counted := make(map[string]bool)
		for _, s := range status {
			for _, c := range s.Counters {
				counted[c.Name] = counted[c.Name] || c.Value > 0
			}
		}
		return !slices.ContainsFunc(reasons, func(r string) bool { return !counted[r] }), string(out)
	})
}

// limitsHold wants a device to have no more than its endpoint may, and packets between nodes to
// have its endpoint's mark and speed.
func (l verbsLab) limitsHold() {
	l.Helper()
	limit := func(args ...string) {
		l.Helper()
		if out, err := l.heddle(l.Context(), append([]string{"limit"}, args...)...).CombinedOutput(); err != nil {
			l.Fatalf("heddle limit %v: %v\n%s", args, err, out)
		}
	}
	limit("set", "n1/c2", "--verbs-qps", "2", "--dscp", "46", "--egress", "100mbit")
	if _, said, err := l.pair("n1/c2", pingpongPort, "ib_send_bw", "-x", "0", "-q", "3"); err == nil || !strings.Contains(said, "QP") {
		l.Errorf("three queue pairs where two may be: %v\n%s", err, said)
	}
	l.counted("verbs_quota_objects")

	words := []string{"ib_write_bw", "-x", "0", "-D", "3", "--report_gbits"}
	l.leaves(words)
	limit("set", "n1/c2", "--egress", "none", "--connection-egress", "100mbit")
	l.leaves(words)
	limit("set", "n1/c2", "--egress", "100mbit", "--connection-egress", "none")

	// What is copied on one node has the same cap, by the router.
	_, copied, err := l.pair("n1/c2", pingpongPort, words...)
	testutil.NoError(l, err)
	l.capped(copied)
	l.counted("verbs_rate_bytes")
	limit("clear", "n1/c2")
}

// leaves has n1/c2 send to n2/c1, capped and marked.
func (l verbsLab) leaves(words []string) {
	l.Helper()
	server := l.start("n2/c1", words...)
	marked := exec.CommandContext(l.Context(), "nsenter", "--net="+netns.Path(l.name+"-n1"), "timeout", testutil.Seconds(20*time.Second), "tcpdump", "-i", "eth0", "-Q", "out", "-c", "20", "-nn",
		l.marked+" and tcp portrange 17408-17471 and greater 1000")
	var seen strings.Builder
	marked.Stdout, marked.Stderr = &seen, &seen
	testutil.NoError(l, marked.Start())
	var said []byte
	var err error
	testutil.Eventually(l, "ib_write_bw from n1/c2", func() (bool, string) {
		said, err = l.exec(l.Context(), "n1/c2", append(slices.Clip(words), l.addr("n2/c1"))).CombinedOutput()
		return err == nil, string(said)
	})
	if err := marked.Wait(); err != nil {
		l.Errorf("no packets with the mark: %v\n%s", err, seen.String())
	}
	testutil.NoError(l, server.Wait())
	l.capped(string(said))
}

// capped wants what ib_write_bw said to be of a sender with a cap of 0.1 Gb/s.
func (l verbsLab) capped(said string) {
	l.Helper()
	for line := range strings.Lines(said) {
		// Bytes, iterations, peak, average and messages.
		f := strings.Fields(line)
		if len(f) != 5 || f[0] != "65536" {
			continue
		}
		if average, err := strconv.ParseFloat(f[3], 64); err != nil || average < 0.05 || average > 0.11 {
			l.Errorf("%s Gb/s with a cap of 0.1", f[3])
		}
		return
	}
	l.Errorf("ib_write_bw gave no result:\n%s", said)
}

// router gives the state of n1's router.
func (l verbsLab) router() (api.Router, error) {
	out, err := l.heddle(l.Context(), "status", "--node", "n1", "--output", "json").Output()
	if err != nil {
		return api.Router{}, err
	}
	var status []struct{ Router *api.Router }
	if err := json.Unmarshal(out, &status); err != nil || len(status) != 1 || status[0].Router == nil {
		return api.Router{}, fmt.Errorf("status %s: %w", out, err)
	}
	return *status[0].Router, nil
}

// mpi runs the job of TestOpenMPI over UCX with verbs: a process in n1/c1, one in client.
func (l verbsLab) mpi(client string) {
	l.Helper()
	dir := mpiDir(l.T)
	for _, pipe := range []string{"asked", "ended"} {
		testutil.NoError(l, unix.Mkfifo(filepath.Join(dir, pipe), 0o666))
	}
	env := []string{"env", "--chdir", dir, "TMPDIR=" + dir, "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"}
	beside := l.start("n1/c1", append(slices.Clip(env), "./beside.sh")...)
	job := l.start(client, append(env, "mpirun", "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", filepath.Join(dir, "launch.sh"), "--mca", "oob", "tcp",
		"--mca", "pml", "ucx", "--mca", "btl", "self", "-x", "UCX_TLS=rc,self", "-x", "UCX_NET_DEVICES=heddle0:1",
		"-np", "2", "--host", l.addr(client)+","+l.addr("n1/c1"), "./ring")...)
	if err := job.Wait(); err != nil || !strings.Contains(job.out.String(), "ring of 2: 1048576 bytes\n") {
		_ = beside.stop()
		l.Errorf("Open MPI between %s and n1/c1: %v\n%s\nbeside it:\n%s", client, err, job.out, beside.out)
	}
}

// programs runs Debian's own between n1/c1 and client, until policy forbids it.
func (l verbsLab) programs(client string, path api.RDMAPath) {
	l.Helper()
	l.mustPair(client, pingpongPort, "ibv_rc_pingpong", "-g", "0")
	l.tells(client, "from open", "to open", "from end", "to end")
	l.mustPair(client, pingpongPort, "ib_send_bw", "-x", "0", "-n", "200")
	l.mustPair(client, pingpongPort, "ib_write_bw", "-x", "0", "-n", "200")
	l.mustPair(client, pingpongPort, "ib_send_lat", "-x", "0", "-n", "200")
	for _, transport := range []string{"rc", "ud_verbs"} {
		l.mustPair(client, ucxPort, "env", "UCX_TLS="+transport, "UCX_NET_DEVICES=heddle0:1", "ucx_perftest", "-n", "200", "-w", "10", "-t", "tag_lat")
	}
	l.mpi(client)
	l.policyHolds(client, path)
	l.tells(client, "cut by no-verbs", "deny by no-verbs")
}

// TestVerbs: Debian's own programs, as they are, on one node and between two, held to policy and
// limits, and after the ends of agent and router.
func TestVerbs(t *testing.T) {
	l := newVerbsLab(t)
	for client, path := range map[string]api.RDMAPath{"n1/c2": api.RDMAMemory, "n2/c1": api.RDMATCP} {
		l.programs(client, path)
	}
	l.limitsHold()
	before, err := l.router()
	if err != nil || before.State != api.RouterRuns || before.Endpoints != 2 {
		t.Fatalf("router %+v, %v", before, err)
	}

	testutil.NoError(t, lab.KillAgent(l.agentPID(), syscall.SIGKILL))
	l.up()
	testutil.Eventually(t, "the next agent to have the router", func() (bool, string) {
		now, err := l.router()
		return err == nil && now.PID == before.PID, fmt.Sprintf("%+v, %v; before %+v", now, err, before)
	})
	l.mustPair("n1/c2", pingpongPort, "ibv_rc_pingpong", "-g", "0")

	l.routerDies(before)
}

// TestVerbsUnderlay6: the same between nodes with IPv6 addresses only, by GIDs of both families, and
// with RDMA-CM.
func TestVerbsUnderlay6(t *testing.T) {
	l := verbsLab{newOwnLab(t, "v6", "--verbs", "--underlay", "ipv6"), "ip6[0:2] & 0x0fc0 == 0x0b80"}
	for _, gid := range []string{"0", "1"} { // of IPv4, of IPv6
		l.mustPair("n2/c1", pingpongPort, "ibv_uc_pingpong", "-g", gid)
	}
	for _, p := range cmPrograms {
		l.mustConnect("n2/c1", p)
	}
	l.multicast()
	l.programs("n2/c1", api.RDMATCP)
	l.limitsHold()
}
