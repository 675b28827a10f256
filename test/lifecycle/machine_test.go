package lifecycle

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// machine is one with systemd for its init process, made of this one's files: systemd.sh.
type machine struct {
	t     testing.TB
	pid   int    // of its systemd, here
	share string // a directory of this machine's that it sees as /mnt/deb
}

// startMachine boots a machine until the end of the test.
func startMachine(t testing.TB) *machine {
	t.Helper()
	m := &machine{t: t, share: t.TempDir()}
	group := filepath.Join(lab.Cgroup2, "heddle-"+lab.Name+"-machine")
	testutil.NoError(t, os.MkdirAll(group, 0o755))
	_ = os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0) // what a killed test run left
	log := filepath.Join(t.TempDir(), "log")
	logFile, err := os.Create(log)
	testutil.NoError(t, err)
	defer logFile.Close()
	cmd := exec.Command("sh", "-c", `echo $$ >"$1/cgroup.procs" && shift && exec unshare --mount --pid --net --cgroup --ipc --uts --fork --kill-child "$@"`,
		"sh", group, "./systemd.sh", t.TempDir(), m.share)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	testutil.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0)
		<-ended
		// Deepest first; the dead may be counted for a moment.
		remove := fmt.Sprintf("for i in $(seq 300); do find %s -depth -type d -exec rmdir {} + 2>/dev/null; [ -d %[1]s ] || exit 0; sleep 0.1; done; exit 1", group)
		if out, err := exec.Command("sh", "-c", remove).CombinedOutput(); err != nil {
			t.Errorf("%s stays: %v\n%s", group, err, out)
		}
	})
	testutil.Eventually(t, "systemd to run", func() (bool, string) {
		raw, _ := os.ReadFile(log)
		select {
		case <-ended:
			t.Fatalf("the machine ended:\n%s", raw)
		default:
		}
		out, err := exec.Command("pgrep", "-P", strconv.Itoa(cmd.Process.Pid)).Output()
		if m.pid, _ = strconv.Atoi(strings.TrimSpace(string(out))); err != nil || m.pid < 2 {
			return false, string(raw)
		}
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", m.pid))
		if string(comm) != "systemd\n" {
			return false, string(raw)
		}
		said, _ := m.try("systemctl is-system-running")
		return said == "running\n", said + string(raw)
	})
	return m
}

// command is a shell's, in the machine.
func (m *machine) command(ctx context.Context, script string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", "-t", strconv.Itoa(m.pid), "-m", "-p", "-n", "-C", "-i", "-u", "--",
		"env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C",
		"sh", "-c", script)
}

// try runs a script and gives all it said.
func (m *machine) try(script string) (string, error) {
	ctx, cancel := context.WithTimeout(m.t.Context(), 2*testutil.WaitTimeout)
	defer cancel()
	out, err := m.command(ctx, script).CombinedOutput()
	return string(out), err
}

// sh runs a script that must succeed.
func (m *machine) sh(script string) string {
	m.t.Helper()
	out, err := m.try(script)
	if err != nil {
		journal, _ := m.try("systemctl status --no-pager --full heddled; journalctl --no-pager --unit heddled | tail -50")
		m.t.Fatalf("%s: %v\n%s\n--- journal\n%s", script, err, out, journal)
	}
	return out
}

// fails runs a script that must fail, and say each of wants.
func (m *machine) fails(script string, wants ...string) {
	m.t.Helper()
	out, err := m.try(script)
	if err == nil {
		m.t.Errorf("%s: no failure\n%s", script, out)
	}
	for _, want := range wants {
		if !strings.Contains(out, want) {
			m.t.Errorf("%s: without %q:\n%s", script, want, out)
		}
	}
}

// write puts a file where the machine sees it, as /mnt/deb/NAME.
func (m *machine) write(name, text string) {
	m.t.Helper()
	testutil.NoError(m.t, os.WriteFile(filepath.Join(m.share, name), []byte(text), 0o755))
}

// background runs a script beside the test; the function waits for its end and gives all it said.
func (m *machine) background(script string) (wait func() (string, error)) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*testutil.WaitTimeout)
	cmd := m.command(ctx, script)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, time.Second
	if err := cmd.Start(); err != nil {
		cancel()
		m.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	m.t.Cleanup(cancel)
	return func() (string, error) {
		err := <-done
		cancel()
		return out.String(), err
	}
}
