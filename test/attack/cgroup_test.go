package attack

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// agentCommand is a node's agent as the lab started it, for a test that starts it again while
// containers go on.
func agentCommand(t *testing.T, node string) []string {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", lab.AgentPID(t, node)))
	testutil.NoError(t, err)
	return strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
}

// removeAgentCgroup ends a node's agent and fd keeper and removes the cgroup that they were in, as
// a service manager does with a service that was killed as a whole.
func removeAgentCgroup(t *testing.T, node string) {
	t.Helper()
	group := filepath.Join(lab.Cgroup2, "heddle-"+lab.Name, node)
	testutil.NoError(t, os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0))
	testutil.Eventually(t, "the cgroup to go", func() (bool, string) {
		err := os.Remove(group)
		return err == nil || errors.Is(err, os.ErrNotExist), fmt.Sprint(err)
	})
}

// startAgentAnew starts a node's agent by its command, without protections. The lab would make the
// containers anew whose listeners are lost.
func startAgentAnew(t *testing.T, node string, command []string, protections ...model.Protection) {
	t.Helper()
	program := filepath.Join(filepath.Dir(attackBin()), "heddled")
	args := append([]string{"--net=/run/netns/" + lab.Name + "-" + node, program}, command[1:]...)
	cmd := exec.Command("nsenter", args...)
	cmd.Env = append(os.Environ(), withoutEnv(protections...))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	testutil.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	testutil.Eventually(t, "the agent to answer", func() (bool, string) {
		select {
		case err := <-ended:
			t.Fatalf("the agent ended: %v", err)
		default:
		}
		out, err := exec.Command(lab.Bin, "status", "--lab", lab.Name, "--node", node).CombinedOutput()
		return err == nil, string(out)
	})
	lab.AwaitPath(t, node, model.PeerProven)
}

// TestCgroupMadeAnew: sockets that containers have keep their hooks when the agent comes back in
// another cgroup, however often; without the protection, they are the node's.
func TestCgroupMadeAnew(t *testing.T) {
	const rounds, each = 2, 4
	if _, err := os.Stat(attackBin()); err != nil {
		t.Fatalf("%v: run `make attack` first", err)
	}
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	command := agentCommand(t, "n1")
	container, far, host := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "host", "n1/c1")
	away := lab.StartPeer(t, "host", "n2/c1")
	underlay, own := lab.Address(t, "host", "n1/c1"), lab.Address(t, "heddle", "n1/c1")
	port, loopback, service := lab.FreePort(), lab.FreePort(), lab.FreePort()
	host.Must(`l = listen(4, "127.0.0.1", %d)`, loopback)
	container.Must(`l = listen(4, "0.0.0.0", %d)`, service)
	far.Must(`c = connect(4, %q, %d)`, own, service)
	container.Must(`a, who = l.accept()`)
	container.Must(`kept = [tcp(4) for _ in range(%d)]`, (rounds+1)*each)
	names := container.Must(`names(a)`)
	try := func(first int) (gained []string) {
		t.Helper()
		s := func(i int) string { return fmt.Sprintf("kept[%d]", first+i) }
		if got := container.Must(`error_of(%s.bind, (%q, %d))`, s(0), underlay, port); got != `"EADDRNOTAVAIL"` {
			gained = append(gained, "bind(underlay address): "+got)
		}
		container.Must(`%s.close()`, s(0))
		container.Must(`%s.bind(("0.0.0.0", %d)), %[1]s.listen()`, s(1), port)
		if got := away.Must(`error_of(connect, 4, %q, %d)`, underlay, port); got != `"ECONNREFUSED"` {
			gained = append(gained, "listen at the node: "+got)
		}
		container.Must(`%s.close()`, s(1))
		if got := container.Must(`error_of(%s.connect, ("127.0.0.1", %d))`, s(2), loopback); got != `"ECONNREFUSED"` {
			gained = append(gained, "connect to the node's loopback: "+got)
		}
		container.Must(`%s.listen()`, s(3))
		if got := away.Must(`error_of(connect, 4, %q, %s)`, underlay, container.Must(`%s.getsockname()[1]`, s(3))); got != `"ECONNREFUSED"` {
			gained = append(gained, "listen without bind: "+got)
		}
		return gained
	}
	goesOn := func() {
		t.Helper()
		container.Must(`send(a, 200000)`)
		far.Expect(`[200000, "16a7de9d66951288"]`, `receive(c, 200000)`)
		container.Expect(names, `names(a)`)
		far.Must(`d = connect(4, %q, %d)`, own, service)
		container.Must(`b, who = l.accept()`)
		container.Expect(fmt.Sprintf(`["%s", "%s"]`, own, lab.Address(t, "heddle", "n2/c1")), `[b.getsockname()[0], who[0]]`)
		far.Must(`d.close()`)
		container.Must(`b.close()`)
	}
	for round := range rounds {
		removeAgentCgroup(t, "n1")
		goesOn()
		startAgentAnew(t, "n1", command)
		goesOn()
		if gained := try(round * each); len(gained) > 0 {
			t.Errorf("round %d: sockets from before gained: %s", round, strings.Join(gained, "; "))
		}
	}
	if n := earlierPins(t, "n1"); n == 0 {
		t.Error("no hooks of earlier cgroups are pinned")
	}
	removeAgentCgroup(t, "n1")
	startAgentAnew(t, "n1", command, model.ProtectHooks)
	if gained := try(rounds * each); len(gained) < 3 {
		t.Errorf("without the protection sockets from before gained only: %s", strings.Join(gained, "; "))
	}
}

// earlierPins counts the links to cgroups that a node's agents had before.
func earlierPins(t *testing.T, node string) (n int) {
	t.Helper()
	for _, pin := range lab.Pins(t, node) {
		if name := filepath.Base(pin); strings.HasPrefix(name, "link_bind4_") {
			n++
		}
	}
	return n
}
