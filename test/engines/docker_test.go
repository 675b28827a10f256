package engines

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// dockerEngine is a dockerd of the test's own.
type dockerEngine struct {
	engineCLI
	host   string // of its API
	driver string // the name of the agent's drivers
}

// startDockers runs a dockerd on each node, at the same time.
func startDockers(t *testing.T, nodes ...string) []dockerEngine {
	t.Helper()
	lab.NeedPrograms(t, "Docker", "dockerd", "docker", "containerd", "iptables")
	dirs := engineDirs(t, nodes...)
	testutil.NoError(t, os.MkdirAll(dockerPlugins, 0o755))
	out := make([]dockerEngine, len(nodes))
	waits := make([]func(), len(nodes))
	for i, node := range nodes {
		out[i], waits[i] = startDocker(t, node, dirs[node])
	}
	for _, wait := range waits {
		wait()
	}
	return out
}

func startDocker(t *testing.T, node, dir string) (d dockerEngine, wait func()) {
	t.Helper()
	d = dockerEngine{engineCLI{t: t, node: node}, "unix://" + filepath.Join(dir, "docker.sock"), lab.Name + "-" + node}
	d.command = []string{"docker", "-H", d.host}
	testutil.NoError(t, os.Symlink(agentFile(node, "docker.sock"), filepath.Join(dockerPlugins, d.driver+".sock")))
	ended, log := startDaemon(t, "dockerd on "+node, node, dir, "dockerd", "--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"),
		"--pidfile", filepath.Join(dir, "pid"), "-H", d.host, "--iptables=false", "--ip6tables=false", "--bridge=none",
		"--cgroup-parent", "/"+engineCgroup(), "--add-runtime", "heddle="+filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime"), "--add-runtime", "heddle-rdma="+rdmaRuntime(t, dir))
	return d, func() {
		t.Helper()
		testutil.Eventually(t, "dockerd on "+node, func() (bool, string) {
			select {
			case <-ended:
				raw, _ := os.ReadFile(log)
				t.Fatalf("dockerd on %s ended:\n%s", node, raw)
			default:
			}
			_, stderr, err := d.try("version")
			return err == nil, stderr
		})
	}
}

// rdmaRuntime makes the runtime of docs/howto/rdma.md for containers with RDMA, by an engine that
// gives them no annotations.
func rdmaRuntime(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "heddle-rdma-runtime")
	lab.WriteFile(t, path, fmt.Appendf(nil, "#!/bin/sh\nHEDDLE_ANNOTATIONS=io.heddle.verbs=true exec %s \"$@\"\n", filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime")))
	testutil.NoError(t, os.Chmod(path, 0o755))
	return path
}

// dockerVerbs runs containers with RDMA devices on two nodes: on a network of Heddle's driver, and
// in the network of another container.
func dockerVerbs(t *testing.T, n1, n2 dockerEngine) {
	root := filepath.Join(enginesRoot(), "verbs.tar")
	lab.WriteFile(t, root, verbsRoot(t))
	for _, d := range []dockerEngine{n1, n2} {
		d.must("import", "--change", "ENV PATH=/bin:/usr/bin", root, "verbs")
		d.must("run", "-d", "--runtime", "heddle-rdma", "--network", "net", "--name", "verbs", "verbs", "sleep", "1000")
	}
	n1.must("run", "-d", "--runtime", "heddle-rdma", "--network", "container:verbs", "--name", "joined", "verbs", "sleep", "1000")
	n1.mustRefuse("none of the container's networks is Heddle's", "run", "--rm", "--runtime", "heddle-rdma", "--network", "none", "verbs", "true")
	in := func(d dockerEngine, name string) func(...string) (string, string, error) {
		return func(argv ...string) (string, string, error) { return d.try(append([]string{"exec", name}, argv...)...) }
	}
	pingpong(t, n2.addr("verbs"), in(n2, "verbs"), in(n1, "verbs"))
	pingpong(t, n2.addr("verbs"), in(n2, "verbs"), in(n1, "joined"))
	n2.must("kill", "verbs")
	n2.must("start", "verbs")
	pingpong(t, n2.addr("verbs"), in(n2, "verbs"), in(n1, "verbs"))
	n1.must("rm", "-f", "joined", "verbs")
	n2.must("rm", "-f", "verbs")
}

// importRoot makes the image "small".
func (d dockerEngine) importRoot(root []byte) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.command[0], append(d.command[1:], "import", "-", "small")...)
	cmd.Stdin = bytes.NewReader(root)
	if out, err := cmd.CombinedOutput(); err != nil {
		d.t.Fatalf("docker import on %s: %v\n%s", d.node, err, out)
	}
}

// start runs a container of the network "net" in the background.
func (d dockerEngine) start(runtime, name string, argv []string, options ...string) {
	d.t.Helper()
	args := append([]string{"run", "-d", "--runtime", runtime, "--network", "net", "--name", name}, options...)
	d.must(append(append(args, "small"), argv...)...)
}

func (d dockerEngine) addr(name string) string {
	d.t.Helper()
	return d.must("inspect", "-f", "{{.NetworkSettings.Networks.net.IPAddress}}", name)
}

// dnsOverTCP asks for the address of name at Docker's DNS by TCP, as resolvers do for long answers,
// and prints the answer in hexadecimal: two bytes of length, then header, question and answer.
func dnsOverTCP(name string) string {
	question := `\022\064\001\000\000\001\000\000\000\000\000\000` + `\00` + string(rune('0'+len(name))) + name + `\000\000\001\000\001`
	size := 12 + 1 + len(name) + 1 + 4
	length := `\000\0` + string(rune('0'+size/8)) + string(rune('0'+size%8))
	return `printf "` + length + question + `" | nc -w 10 127.0.0.11 53 | hexdump -v -e '1/1 "%02x"'`
}

// TestDocker runs Docker on two nodes, with Heddle's network and IPAM drivers.
func TestDocker(t *testing.T) {
	root := smallRoot(t)
	docker := startDockers(t, "n1", "n2")
	n1, n2 := docker[0], docker[1]
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
	for _, d := range docker {
		d.importRoot(root)
		d.must("network", "create", "-d", d.driver, "--ipam-driver", d.driver, "net")
	}
	n1.mustRefuse("--ipam-driver", "network", "create", "-d", n1.driver, "wrong")

	n2.start("heddle", "server", serveWeb, "--network-alias", "web")
	n1.start("heddle", "client", stay)
	n1.start("heddle", "near", serveWeb, "--network-alias", "web")
	fetch := func(d dockerEngine, container, host string) string {
		t.Helper()
		return d.must("exec", container, "wget", "-qO-", "http://"+host+"/")
	}
	far := n2.addr("server")
	direct(t, "n1", 2, func() {
		for range 2 {
			if got := fetch(n1, "client", far); got != greeting {
				t.Errorf("fetched %q from another node", got)
			}
		}
	})

	listsServer(t, n2.must("exec", "server", "busybox", "netstat", "-tln"))

	t.Run("names", func(t *testing.T) {
		near := n1.addr("near")
		for _, name := range []string{"near", "web"} { // of the container, and its alias
			if got := fetch(n1, "client", name); got != greeting {
				t.Errorf("fetched %q from %s", got, name)
			}
			if got := n1.must("exec", "client", "nslookup", name); !strings.Contains(got, near) {
				t.Errorf("nslookup %s: want %s in\n%s", name, near, got)
			}
		}
		if got := n1.must("exec", "client", "sh", "-c", dnsOverTCP("near")); !strings.HasSuffix(got, inHex(near)) {
			t.Errorf("DNS over TCP: want the address %s (%s) at the end of %s", near, inHex(near), got)
		}
		n1.must("run", "--rm", "--runtime", "heddle", "--network", "net", "--add-host", "far:"+far, "small", "wget", "-qO-", "http://far/")
	})
	t.Run("plain", func(t *testing.T) { // another runtime on the same network
		if got := n1.must("run", "--rm", "--runtime", "runc", "--network", "net", "small", "wget", "-qO-", "http://"+far+"/"); got != greeting {
			t.Errorf("a container that is not intercepted fetched %q", got)
		}
	})
	t.Run("no endpoint", func(t *testing.T) { // its connections are its own stack's
		if got := n1.must("run", "--rm", "--runtime", "heddle", "--network", "none", "small", "busybox", "readlink", "/proc/net"); got != "self/net" {
			t.Errorf("/proc/net of a container without a network of Heddle's leads to %q", got)
		}
	})
	t.Run("labels", func(t *testing.T) {
		n1.must("run", "-d", "--runtime", "heddle", "--network", "name=net,driver-opt=io.heddle.label.app=shop", "--name", "labelled", "small", "sleep", "1000")
		if list := lab.Heddle(t, "endpoints", "--node", "n1"); !strings.Contains(list, "app=shop") {
			t.Errorf("no label app=shop in\n%s", list)
		}
		n1.must("rm", "-f", "labelled")
	})
	t.Run("published ports", func(t *testing.T) { dockerPublishes(t, n1) })
	t.Run("stop and start", func(t *testing.T) {
		n1.must("kill", "near")
		n1.must("start", "near")
		if got := fetch(n1, "client", "near"); got != greeting {
			t.Errorf("fetched %q after a restart", got)
		}
	})
	t.Run("verbs", func(t *testing.T) { dockerVerbs(t, n1, n2) })
	t.Run("compose", func(t *testing.T) { composeExample(t, n1) })

	n1.must("rm", "-f", "client", "near")
	n2.must("rm", "-f", "server")
	for _, d := range docker {
		d.must("network", "rm", "net")
		sameNode(t, d.node, before[d.node])
	}
}

// inHex gives an IPv4 address as four bytes in hexadecimal.
func inHex(addr string) string {
	b := netip.MustParseAddr(addr).As4()
	return hex.EncodeToString(b[:])
}

// composeExample runs the example of docs/howto/docker.md as it stands there, but for the name of
// the driver.
func composeExample(t *testing.T, d dockerEngine) {
	lab.NeedPrograms(t, "Docker Compose", "docker-compose")
	page, err := os.ReadFile("../../docs/howto/docker.md")
	testutil.NoError(t, err)
	_, rest, found := strings.Cut(string(page), "```yaml\n")
	file, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatal("docker.md has no example in YAML")
	}
	dir := filepath.Join(enginesRoot(), d.node, "shop")
	testutil.NoError(t, os.Mkdir(dir, 0o755))
	path := filepath.Join(dir, "docker-compose.yml")
	testutil.NoError(t, os.WriteFile(path, []byte(strings.ReplaceAll(file, "driver: heddle", "driver: "+d.driver)), 0o644))
	compose := engineCLI{t, d.node, []string{"docker-compose", "-H", d.host, "-f", path}}
	compose.must("up", "-d")
	if got := compose.must("exec", "-T", "front", "wget", "-qO-", "http://shop/"); got != greeting {
		t.Errorf("the service front fetched %q from the service shop", got)
	}
	compose.must("down", "-t", "0")
}
