package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// End ends the agent of a bare node. One that is killed cannot say anything to the store any more.
func (n BareNode) End(t *testing.T, sig syscall.Signal) {
	t.Helper()
	var status struct{ PID int }
	_, body := AskAgent(t, n.Socket(), "GET", "/v1/status", "")
	if err := json.Unmarshal([]byte(body), &status); err != nil || status.PID < 2 {
		t.Fatalf("%v: %s", err, body)
	}
	testutil.NoError(t, syscall.Kill(status.PID, sig))
	testutil.Eventually(t, "the agent to end", func() (bool, string) {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", status.PID))
		return err != nil || strings.Contains(string(state), ") Z "), string(state)
	})
}

// startTimeout is how long an agent may take to find out that it cannot start.
const startTimeout = 20 * time.Second

// BareNode is a network namespace with an underlay address and nothing of Heddle's: for agents that
// must not start.
type BareNode struct {
	Name, Underlay, Dir string
}

// BareNodes makes two of them, joined.
func BareNodes(t *testing.T) (a, b BareNode) {
	t.Helper()
	a = BareNode{Name + "-bad-a", "192.0.2.1", t.TempDir()}
	b = BareNode{Name + "-bad-b", "192.0.2.2", t.TempDir()}
	for _, n := range []BareNode{a, b} {
		if err := netns.Delete(n.Name); err != nil { // what a killed run left
			t.Fatal(err)
		}
		testutil.NoError(t, netns.Create(n.Name))
		t.Cleanup(func() {
			if err := netns.Delete(n.Name); err != nil {
				t.Error(err)
			}
		})
		bpf := filepath.Join(n.Dir, "bpf")
		testutil.NoError(t, os.Mkdir(bpf, 0o755))
		testutil.NoError(t, unix.Mount("bpf", bpf, "bpf", 0, ""))
		t.Cleanup(func() {
			if err := unix.Unmount(bpf, 0); err != nil {
				t.Errorf("unmount %s: %v", bpf, err)
			}
		})
		testutil.NoError(t, os.MkdirAll(n.cgroup(), 0o755))
		t.Cleanup(func() {
			_ = os.WriteFile(filepath.Join(n.cgroup(), "cgroup.kill"), []byte("1"), 0)
			testutil.Eventually(t, "cgroup to go", func() (bool, string) {
				err := os.Remove(n.cgroup())
				return err == nil || errors.Is(err, os.ErrNotExist), fmt.Sprint(err)
			})
		})
	}
	Shell(t, a.Name, "ip link add eth0 type veth peer name eth0 netns "+b.Name)
	for _, n := range []BareNode{a, b} {
		Shell(t, n.Name, "echo 1 > /proc/sys/net/ipv6/conf/eth0/addr_gen_mode && ip addr add "+n.Underlay+"/24 dev eth0 && ip link set eth0 up && ip link set lo up")
	}
	return a, b
}

func (n BareNode) cgroup() string { return filepath.Join(Cgroup2, "heddle-"+n.Name) }

// Socket is where its agent's API answers.
func (n BareNode) Socket() string { return filepath.Join(n.Dir, "api.sock") }

// Cgroup2 is where the unified hierarchy is mounted.
var Cgroup2 = func() string {
	raw, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1]
		}
	}
	return ""
}()

// Shell runs a shell command in a network namespace and gives its output.
func Shell(t testing.TB, ns, command string) string {
	t.Helper()
	cmd := exec.Command("sh", "-c", command)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	testutil.NoError(t, netns.Start(netns.Path(ns), cmd))
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, &out)
	}
	return out.String()
}

// Args is the command line of an agent; what follows wins.
func (n BareNode) Args(more ...string) []string {
	return append([]string{
		"--node", strings.TrimPrefix(n.Name, Name+"-"), "--underlay", n.Underlay, "--network-id", "9",
		"--state-dir", filepath.Join(n.Dir, "state"), "--bpf-dir", filepath.Join(n.Dir, "bpf", "heddle"),
		"--cgroup", n.cgroup(), "--api-socket", n.Socket(), "--seccomp-socket", filepath.Join(n.Dir, "seccomp.sock"),
		"--store-no-sync",
	}, more...)
}

// Leftovers is everything an agent could leave behind in a node: namespaces, devices, rules, pins,
// cgroups and processes. IPv6 link-local addresses and routes are left out: they come a moment
// after a link.
func (n BareNode) Leftovers(t testing.TB) string {
	t.Helper()
	var out strings.Builder
	out.WriteString(Shell(t, n.Name, "ls /run/netns | grep '^"+Name+"-' | sort; ip -o link 2>/dev/null | cut -d' ' -f2 ; ip -o addr | awk '{print $2, $4}' | grep -v fe80; ip rule; ip route show table all | grep -v 'ff00\\|fe80\\|cache'; nft -s list ruleset"))
	for _, dir := range []string{filepath.Join(n.Dir, "bpf"), n.cgroup()} {
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && (dir != n.cgroup() || d.IsDir()) && path != filepath.Join(n.Dir, "bpf", "heddle") {
				fmt.Fprintln(&out, path)
			}
			return nil
		})
	}
	procs, _ := os.ReadFile(filepath.Join(n.cgroup(), "cgroup.procs"))
	fmt.Fprintf(&out, "processes: %s\n", procs)
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range cmdlines {
		if raw, err := os.ReadFile(path); err == nil && bytes.Contains(raw, []byte(n.Dir)) {
			fmt.Fprintf(&out, "%s\n", bytes.ReplaceAll(raw, []byte{0}, []byte(" ")))
		}
	}
	return out.String()
}

// Fails runs an agent that must not start, by way of wrap, if any, and gives what it says.
func (n BareNode) Fails(t *testing.T, wrap []string, args []string) string {
	t.Helper()
	before := n.Leftovers(t)
	file, err := os.Open(Heddled())
	testutil.NoError(t, err)
	defer file.Close()
	// By its descriptor, the program can be run by a user who may not enter its directory.
	argv := append(append(wrap[:len(wrap):len(wrap)], "/proc/self/fd/3"), args...)
	cmd := exec.Command(argv[0], argv[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &out, &out, []*os.File{file}
	cmd.WaitDelay = time.Second
	testutil.NoError(t, netns.Start(netns.Path(n.Name), cmd))
	tooLong := time.AfterFunc(startTimeout, func() { _ = cmd.Process.Signal(syscall.SIGKILL) })
	err = cmd.Wait()
	if !tooLong.Stop() {
		t.Fatalf("the agent did not end within %s:\n%s", startTimeout, &out)
	}
	if err == nil {
		t.Errorf("the agent ended well:\n%s", &out)
	}
	if strings.Contains(out.String(), "panic") || strings.Contains(out.String(), "goroutine ") {
		t.Errorf("the agent crashed:\n%s", &out)
	}
	if after := n.Leftovers(t); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s\nit said:\n%s", after, before, &out)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	return lines[len(lines)-1]
}

// Start starts an agent that must come up, until the end of the test.
func (n BareNode) Start(t *testing.T, args []string) {
	t.Helper()
	cmd := exec.Command(Heddled(), args...)
	logPath := filepath.Join(n.Dir, "log")
	logFile, err := os.Create(logPath)
	testutil.NoError(t, err)
	defer logFile.Close()
	cmd.Stdout, cmd.Stderr = logFile, logFile
	testutil.NoError(t, netns.Start(netns.Path(n.Name), cmd))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		<-done
		out, err := exec.Command("ip", "netns", "exec", n.Name, Heddled(), "teardown", "--force",
			"--state-dir", filepath.Join(n.Dir, "state"), "--bpf-dir", filepath.Join(n.Dir, "bpf", "heddle")).CombinedOutput()
		if err != nil {
			t.Errorf("teardown: %v\n%s", err, out)
		}
	})
	testutil.Eventually(t, n.Name+" to answer", func() (bool, string) {
		select {
		case <-done:
			raw, _ := os.ReadFile(logPath)
			t.Fatalf("the agent ended:\n%s", raw)
		default:
		}
		code, body := AskAgent(t, n.Socket(), "GET", "/v1/status", "")
		return code == http.StatusOK, body
	})
}

// AskAgent sends a request to an agent's socket; code is 0 if nobody answers.
func AskAgent(t testing.TB, socket, method, path, body string) (code int, answer string) {
	t.Helper()
	client := http.Client{Timeout: testutil.WaitTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://agent"+path, strings.NewReader(body))
	testutil.NoError(t, err)
	resp, err := client.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	testutil.NoError(t, err)
	return resp.StatusCode, string(raw)
}
