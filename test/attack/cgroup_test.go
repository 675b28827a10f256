package test

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
)

// agentCommand is a node's agent as the lab started it, for a test that starts it again while containers go on.
func agentCommand(t *testing.T, node string) []string {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", agentPID(t, node)))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
}

// removeAgentCgroup ends a node's agent and holder and removes the cgroup that they were in, as a service manager does with a
// service that was killed as a whole.
func removeAgentCgroup(t *testing.T, node string) {
	t.Helper()
	group := filepath.Join(cgroupRoot(t), "heddle-"+labName, node)
	if err := os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the cgroup to go", func() (bool, string) {
		err := os.Remove(group)
		return err == nil || errors.Is(err, os.ErrNotExist), fmt.Sprint(err)
	})
}

// startAgentAnew starts a node's agent by its command, without protections. The lab would make the containers anew whose listeners are lost.
func startAgentAnew(t *testing.T, node string, command []string, protections ...model.Protection) {
	t.Helper()
	program := filepath.Join(filepath.Dir(attackBin()), "heddled")
	args := append([]string{"--net=/run/netns/" + labName + "-" + node, program}, command[1:]...)
	cmd := exec.Command("nsenter", args...)
	cmd.Env = append(os.Environ(), withoutEnv(protections...))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	eventually(t, "the agent to answer", func() (bool, string) {
		select {
		case err := <-ended:
			t.Fatalf("the agent ended: %v", err)
		default:
		}
		out, err := exec.Command(heddleBin, "status", "--lab", labName, "--node", node).CombinedOutput()
		return err == nil, string(out)
	})
	awaitPath(t, node, model.PeerProven)
}

// TestCgroupMadeAnew: sockets that containers have keep their hooks when the agent comes back in another cgroup, however
// often; without the protection, they are the node's.
func TestCgroupMadeAnew(t *testing.T) {
	const rounds, each = 2, 4
	if _, err := os.Stat(attackBin()); err != nil {
		t.Fatalf("%v: run `make attack` first", err)
	}
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(labCommand("down"), labCommand("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	command := agentCommand(t, "n1")
	container, far, host := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1"), startPeer(t, "host", "n1/c1")
	away := startPeer(t, "host", "n2/c1")
	underlay, own := address(t, "host", "n1/c1"), address(t, "heddle", "n1/c1")
	port, loopback, service := freePort(), freePort(), freePort()
	host.must(`l = listen(4, "127.0.0.1", %d)`, loopback)
	container.must(`l = listen(4, "0.0.0.0", %d)`, service)
	far.must(`c = connect(4, %q, %d)`, own, service)
	container.must(`a, who = l.accept()`)
	container.must(`kept = [tcp(4) for _ in range(%d)]`, (rounds+1)*each)
	names := container.must(`names(a)`)
	try := func(first int) (gained []string) {
		t.Helper()
		s := func(i int) string { return fmt.Sprintf("kept[%d]", first+i) }
		if got := container.must(`error_of(%s.bind, (%q, %d))`, s(0), underlay, port); got != `"EADDRNOTAVAIL"` {
			gained = append(gained, "bind(underlay address): "+got)
		}
		container.must(`%s.close()`, s(0))
		container.must(`%s.bind(("0.0.0.0", %d)), %[1]s.listen()`, s(1), port)
		if got := away.must(`error_of(connect, 4, %q, %d)`, underlay, port); got != `"ECONNREFUSED"` {
			gained = append(gained, "listen at the node: "+got)
		}
		container.must(`%s.close()`, s(1))
		if got := container.must(`error_of(%s.connect, ("127.0.0.1", %d))`, s(2), loopback); got != `"ECONNREFUSED"` {
			gained = append(gained, "connect to the node's loopback: "+got)
		}
		container.must(`%s.listen()`, s(3))
		if got := away.must(`error_of(connect, 4, %q, %s)`, underlay, container.must(`%s.getsockname()[1]`, s(3))); got != `"ECONNREFUSED"` {
			gained = append(gained, "listen without bind: "+got)
		}
		return gained
	}
	goesOn := func() {
		t.Helper()
		container.must(`send(a, 200000)`)
		far.expect(`[200000, "16a7de9d66951288"]`, `receive(c, 200000)`)
		container.expect(names, `names(a)`)
		far.must(`d = connect(4, %q, %d)`, own, service)
		container.must(`b, who = l.accept()`)
		container.expect(fmt.Sprintf(`["%s", "%s"]`, own, address(t, "heddle", "n2/c1")), `[b.getsockname()[0], who[0]]`)
		far.must(`d.close()`)
		container.must(`b.close()`)
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
	for _, pin := range pins(t, node) {
		if name := filepath.Base(pin); strings.HasPrefix(name, "link_bind4_") {
			n++
		}
	}
	return n
}
