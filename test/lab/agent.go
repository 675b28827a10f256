package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// Heddled is the agent under test.
func Heddled() string { return filepath.Join(filepath.Dir(Bin), "heddled") }

// APISocket is where a node's agent answers.
func APISocket(node string) string { return "/run/heddle/lab/" + Name + "/" + node + "/api.sock" }

// NodeFile is a file of a node's state.
func NodeFile(node, name string) string {
	return filepath.Join("/run/heddle/lab", Name, node, name)
}

// Listeners counts descriptors of seccomp listeners that a process has.
func Listeners(t testing.TB, pid int) (n int) {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	testutil.NoError(t, err)
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); to == "anon_inode:seccomp notify" {
			n++
		}
	}
	return n
}

// Counters gives a node's counts by reason.
func Counters(t testing.TB, node string) map[string]uint64 {
	t.Helper()
	var status []struct {
		Counters []struct {
			Name  string
			Value uint64
		}
	}
	Query(t, &status, "status", "--node", node)
	out := make(map[string]uint64)
	for _, c := range status[0].Counters {
		out[c.Name] = c.Value
	}
	return out
}

// AgentPID gives the process of a node's agent.
func AgentPID(t testing.TB, node string) int {
	t.Helper()
	var status []struct{ PID int }
	Query(t, &status, "status", "--node", node)
	if len(status) != 1 || status[0].PID < 2 {
		t.Fatalf("status: %+v", status)
	}
	return status[0].PID
}

// EndAgent ends a node's agent and waits until it is gone; the lab gets it back at the end of the
// test.
func EndAgent(t testing.TB, node string, sig syscall.Signal) {
	t.Helper()
	t.Cleanup(func() {
		if err := Command("up"); err != nil {
			t.Error(err)
		}
	})
	testutil.NoError(t, KillAgent(AgentPID(t, node), sig))
}

// SocketsWithoutAgent reports whether programs get sockets while no agent runs: before Linux 6.3,
// which has no IP_LOCAL_PORT_RANGE, socket() waits for the next one.
func SocketsWithoutAgent(t testing.TB) bool {
	t.Helper()
	const localPortRange = 51
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	defer syscall.Close(fd)
	_, err = syscall.GetsockoptInt(fd, syscall.SOL_IP, localPortRange)
	if err != nil && err != syscall.ENOPROTOOPT {
		t.Fatal(err)
	}
	return err == nil
}

// KillAgent ends the agent pid and waits until it is gone.
func KillAgent(pid int, sig syscall.Signal) error {
	if pid < 2 {
		return fmt.Errorf("end agent %d: no such process", pid)
	}
	if err := syscall.Kill(pid, sig); err != nil {
		return fmt.Errorf("end agent %d: %w", pid, err)
	}
	for deadline := time.Now().Add(testutil.WaitTimeout); ; time.Sleep(5 * time.Millisecond) {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(state), ") Z ") {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("agent %d did not end within %s:\n%s", pid, testutil.WaitTimeout, lastWords(pid))
		}
	}
}

// lastWords ends the agent pid and gives the end of its log, which says what it waits for.
func lastWords(pid int) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/2", pid))
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGQUIT)
	}
	var log []byte
	for deadline := time.Now().Add(testutil.WaitTimeout); err == nil && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if log, err = os.ReadFile(path); strings.Contains(string(log), "SIGQUIT") && syscall.Kill(pid, 0) != nil {
			break
		}
	}
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-64<<10):])
}

// Pins lists what is pinned for a node.
func Pins(t testing.TB, node string) []string {
	t.Helper()
	list, err := filepath.Glob("/run/heddle/lab/" + Name + "/" + node + "/bpf/heddle/*")
	if err != nil || len(list) == 0 {
		t.Fatalf("pins of %s: %v, %v", node, list, err)
	}
	return list
}
