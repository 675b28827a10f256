package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
)

// wait is how long an agent may take to find out that it cannot start.
const wait = 20 * time.Second

// bareNode is a network namespace with an underlay address and nothing of Heddle's: for agents that must
// not start.
type bareNode struct {
	name, underlay, dir string
}

// bareNodes makes two of them, joined.
func bareNodes(t *testing.T) (a, b bareNode) {
	t.Helper()
	a = bareNode{labName + "-bad-a", "192.0.2.1", t.TempDir()}
	b = bareNode{labName + "-bad-b", "192.0.2.2", t.TempDir()}
	for _, n := range []bareNode{a, b} {
		if err := netns.Delete(n.name); err != nil { // what a killed run left
			t.Fatal(err)
		}
		if err := netns.Create(n.name); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netns.Delete(n.name); err != nil {
				t.Error(err)
			}
		})
		bpf := filepath.Join(n.dir, "bpf")
		if err := os.Mkdir(bpf, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("bpf", bpf, "bpf", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(bpf, 0); err != nil {
				t.Errorf("unmount %s: %v", bpf, err)
			}
		})
		if err := os.MkdirAll(n.cgroup(), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = os.WriteFile(filepath.Join(n.cgroup(), "cgroup.kill"), []byte("1"), 0)
			eventually(noContext{t}, "cgroup to go", func() (bool, string) {
				err := os.Remove(n.cgroup())
				return err == nil || errors.Is(err, os.ErrNotExist), fmt.Sprint(err)
			})
		})
	}
	sh(t, a.name, "ip link add eth0 type veth peer name eth0 netns "+b.name)
	for _, n := range []bareNode{a, b} {
		sh(t, n.name, "echo 1 > /proc/sys/net/ipv6/conf/eth0/addr_gen_mode && ip addr add "+n.underlay+"/24 dev eth0 && ip link set eth0 up && ip link set lo up")
	}
	return a, b
}

// noContext is a test whose context has not ended: for cleanups.
type noContext struct{ testing.TB }

func (noContext) Context() context.Context { return context.Background() }

func (n bareNode) cgroup() string { return filepath.Join(cgroup2, "heddle-"+n.name) }

func (n bareNode) socket() string { return filepath.Join(n.dir, "api.sock") }

// cgroup2 is where the unified hierarchy is mounted.
var cgroup2 = func() string {
	raw, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1]
		}
	}
	return ""
}()

// sh runs a shell command in a network namespace and gives its output.
func sh(t testing.TB, ns, command string) string {
	t.Helper()
	cmd := exec.Command("sh", "-c", command)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := netns.Start(netns.Path(ns), cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, &out)
	}
	return out.String()
}

// args is the command line of an agent; what follows wins.
func (n bareNode) args(more ...string) []string {
	return append([]string{
		"--node", strings.TrimPrefix(n.name, labName+"-"), "--underlay", n.underlay, "--network-id", "9",
		"--state-dir", filepath.Join(n.dir, "state"), "--bpf-dir", filepath.Join(n.dir, "bpf", "heddle"),
		"--cgroup", n.cgroup(), "--api-socket", n.socket(), "--seccomp-socket", filepath.Join(n.dir, "seccomp.sock"),
		"--store-no-sync",
	}, more...)
}

func heddled() string { return filepath.Join(filepath.Dir(heddleBin), "heddled") }

// leftovers is everything an agent could leave behind in a node: namespaces, devices, rules, pins, cgroups
// and processes. IPv6 link-local addresses and routes are left out: they come a moment after a link.
func (n bareNode) leftovers(t testing.TB) string {
	t.Helper()
	var out strings.Builder
	out.WriteString(sh(t, n.name, "ls /run/netns | grep '^"+labName+"-' | sort; ip -o link 2>/dev/null | cut -d' ' -f2 ; ip -o addr | awk '{print $2, $4}' | grep -v fe80; ip rule; ip route show table all | grep -v 'ff00\\|fe80\\|cache'; nft -s list ruleset"))
	for _, dir := range []string{filepath.Join(n.dir, "bpf"), n.cgroup()} {
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && (dir != n.cgroup() || d.IsDir()) && path != filepath.Join(n.dir, "bpf", "heddle") {
				fmt.Fprintln(&out, path)
			}
			return nil
		})
	}
	procs, _ := os.ReadFile(filepath.Join(n.cgroup(), "cgroup.procs"))
	fmt.Fprintf(&out, "processes: %s\n", procs)
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range cmdlines {
		if raw, err := os.ReadFile(path); err == nil && bytes.Contains(raw, []byte(n.dir)) {
			fmt.Fprintf(&out, "%s\n", bytes.ReplaceAll(raw, []byte{0}, []byte(" ")))
		}
	}
	return out.String()
}

// fails runs an agent that must not start, by way of wrap, if any, and gives what it says.
func (n bareNode) fails(t *testing.T, wrap []string, args []string) string {
	t.Helper()
	before := n.leftovers(t)
	file, err := os.Open(heddled())
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	// By its descriptor, the program can be run by a user who may not enter its directory.
	argv := append(append(wrap[:len(wrap):len(wrap)], "/proc/self/fd/3"), args...)
	cmd := exec.Command(argv[0], argv[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &out, &out, []*os.File{file}
	cmd.WaitDelay = time.Second
	if err := netns.Start(netns.Path(n.name), cmd); err != nil {
		t.Fatal(err)
	}
	tooLong := time.AfterFunc(wait, func() { _ = cmd.Process.Signal(syscall.SIGKILL) })
	err = cmd.Wait()
	if !tooLong.Stop() {
		t.Fatalf("the agent did not end within %s:\n%s", wait, &out)
	}
	if err == nil {
		t.Errorf("the agent ended well:\n%s", &out)
	}
	if strings.Contains(out.String(), "panic") || strings.Contains(out.String(), "goroutine ") {
		t.Errorf("the agent crashed:\n%s", &out)
	}
	if after := n.leftovers(t); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s\nit said:\n%s", after, before, &out)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	return lines[len(lines)-1]
}

// TestAgentRefuses: settings and surroundings an agent cannot work with.
func TestAgentRefuses(t *testing.T) {
	n, _ := bareNodes(t)
	plain := t.TempDir()
	for _, c := range []struct {
		name string
		args []string
		wrap []string
		// listen is an address that is in use.
		listen string
		says   []string
	}{
		{name: "no underlay", args: []string{"--underlay", ""}, says: []string{"--underlay", "address other nodes reach"}},
		{name: "malformed underlay", args: []string{"--underlay", "10.0.0"}, says: []string{"--underlay", "10.0.0"}},
		{name: "IPv6 underlay", args: []string{"--underlay", "2001:db8::1"}, says: []string{"underlay", "2001:db8::1", "IPv4"}},
		{name: "unknown underlay", args: []string{"--underlay", "192.0.2.77"}, says: []string{"underlay", "192.0.2.77"}},
		{name: "unknown underlay, other store", args: []string{"--underlay", "192.0.2.77", "--store", "http://192.0.2.1:2379"}, says: []string{"underlay", "192.0.2.77"}},
		{name: "node name", args: []string{"--node", "Bad_Name"}, says: []string{"node name", "Bad_Name", "a-z"}},
		{name: "prefix with host bits", args: []string{"--prefix", "10.244.3.1/24"}, says: []string{"--prefix", "10.244.3.1/24", "10.244.3.0/24"}},
		{name: "prefix outside the pool", args: []string{"--prefix", "10.99.0.0/24"}, says: []string{"10.99.0.0/24", "pool"}},
		{name: "IPv6 pool", args: []string{"--pool", "fd00::/48"}, says: []string{"pool", "fd00::/48", "IPv4", "prefix6"}},
		{name: "malformed prefix6", args: []string{"--prefix6", "auto"}, says: []string{"--prefix6", "auto", "prefix"}},
		{name: "prefix6 of another length", args: []string{"--prefix6", "fd00::/64"}, says: []string{"--prefix6", "fd00::/64", "96 bits"}},
		{name: "malformed pool", args: []string{"--pool", "10.244.0.0"}, says: []string{"--pool", "10.244.0.0", "prefix"}},
		{name: "pool with host bits", args: []string{"--pool", "10.244.1.0/16"}, says: []string{"--pool", "10.244.0.0/16"}},
		{name: "pool without room", args: []string{"--pool", "10.9.0.0/30"}, says: []string{"pool", "10.9.0.0/30"}},
		{name: "pool of multicast", args: []string{"--pool", "239.0.0.0/16"}, says: []string{"pool", "239.0.0.0/16"}},
		{name: "pool holds the underlay", args: []string{"--pool", "192.0.0.0/16"}, says: []string{"192.0.2.1"}},
		{name: "network id 0", args: []string{"--network-id", "0"}, says: []string{"network id", "1..4095"}},
		{name: "network id too large", args: []string{"--network-id", "4096"}, says: []string{"network id", "1..4095"}},
		{name: "network id no number", args: []string{"--network-id", "x"}, says: []string{"network-id"}},
		{name: "vni too large", args: []string{"--vni", "16777216"}, says: []string{"vni"}},
		{name: "direct ports reversed", args: []string{"--direct-ports", "9-3"}, says: []string{"direct-ports", "FIRST"}},
		{name: "direct ports malformed", args: []string{"--direct-ports", "a-b"}, says: []string{"direct-ports", "FIRST-LAST"}},
		{name: "direct ports too large", args: []string{"--direct-ports", "65535-65536"}, says: []string{"direct-ports"}},
		{name: "direct ports in use", listen: "192.0.2.1:17410", says: []string{"direct ports", "17410", "--direct-ports"}},
		{name: "direct ports in use on the wildcard", listen: "[::]:17471", says: []string{"direct ports", "17471", "--direct-ports"}},
		{name: "store port in use", listen: "192.0.2.1:2379", says: []string{"store", "2379", "in use"}},
		{name: "store down", args: []string{"--store", "http://192.0.2.1:9"}, says: []string{"store", "192.0.2.1:9"}},
		{name: "store unreachable", args: []string{"--store", "http://192.0.2.200:2379"}, says: []string{"store", "192.0.2.200:2379"}},
		{name: "store malformed", args: []string{"--store", "ftp://x y"}, says: []string{"store", "ftp://x y"}},
		{name: "no store", args: []string{"--store", ""}, says: []string{"store", "embedded"}},
		{name: "no join file", args: []string{"--join-file", filepath.Join(plain, "none.pem")}, says: []string{"join file", "none.pem", "first node"}},
		{name: "join file of something else", args: []string{"--join-file", "/etc/passwd"}, says: []string{"join file", "/etc/passwd", "anew"}},
		{name: "join file for the embedded store", args: []string{"--join-file", "x", "--store", "embedded"}, says: []string{"--store embedded", "--join-file"}},
		{name: "join file and certificates", args: []string{"--join-file", "x", "--store-cert", "y"}, says: []string{"--join-file", "--store-cert"}},
		{name: "no CA file", args: []string{"--store", "https://192.0.2.1:9", "--store-ca", filepath.Join(plain, "none.pem")}, says: []string{"--store-ca", "none.pem", "PEM"}},
		{name: "CA file of something else", args: []string{"--store", "https://192.0.2.1:9", "--store-ca", "/etc/passwd"}, says: []string{"--store-ca", "/etc/passwd", "PEM"}},
		{name: "certificate without key", args: []string{"--store", "https://192.0.2.1:9", "--store-cert", "y"}, says: []string{"--store-cert", "--store-key", "both"}},
		{name: "certificates without TLS", args: []string{"--store", "http://192.0.2.1:9", "--join-file", "x"}, says: []string{"join file", "x"}},
		{name: "user without password", args: []string{"--store", "https://192.0.2.1:9", "--store-user", "u"}, says: []string{"--store-user", "--store-password-file"}},
		{name: "not root", wrap: []string{"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"}, says: []string{"root"}},
		{name: "no BPF file system", args: []string{"--bpf-dir", plain}, says: []string{plain, "BPF file system", "mount -t bpf"}},
		{name: "relative BPF directory", args: []string{"--bpf-dir", "bpf"}, says: []string{"BPF directory", "absolute"}},
		{name: "cgroup not version 2", args: []string{"--cgroup", filepath.Join(plain, "group")}, says: []string{"cgroup", "cgroup2", "mount"}},
		{name: "relative API socket", args: []string{"--api-socket", "api"}, says: []string{"API socket", "absolute"}},
		{name: "log level", args: []string{"--log-level", "loud"}, says: []string{"--log-level", "debug, info"}},
		{name: "unknown flag", args: []string{"--undrelay", "x"}, says: []string{"undrelay"}},
		{name: "argument", args: []string{"start"}, says: []string{"start"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.listen != "" {
				err := netns.Do(netns.Path(n.name), func() error {
					l, err := net.Listen("tcp", c.listen)
					if err == nil {
						t.Cleanup(func() { l.Close() })
					}
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			said := n.fails(t, c.wrap, n.args(c.args...))
			for _, want := range c.says {
				if !strings.Contains(said, want) {
					t.Errorf("it said: %s\nwithout %q", said, want)
				}
			}
			_ = os.RemoveAll(filepath.Join(n.dir, "state")) // the store of one case is not the next one's
		})
	}
}
