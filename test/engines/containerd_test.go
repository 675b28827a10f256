package engines

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// containerd runs containerd on a node until the test ends and gives its command line.
func containerd(t *testing.T, node, dir string) engineCLI {
	t.Helper()
	networks, socket := writeNetwork(t, node, dir), filepath.Join(dir, "containerd.sock")
	config := filepath.Join(dir, "config.toml")
	lab.WriteFile(t, config, fmt.Appendf(nil, `version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = %q
[ttrpc]
  address = %q
[plugins."io.containerd.internal.v1.opt"]
  path = %q
`, filepath.Join(dir, "root"), filepath.Join(dir, "state"), socket, socket+".ttrpc", filepath.Join(dir, "opt")))
	startDaemon(t, "containerd on "+node, node, dir, "containerd", "--config", config)
	// ctr looks for networks and plugins at fixed places: it gets a view of its own of those.
	cache := filepath.Join(dir, "cache")
	testutil.NoError(t, os.MkdirAll(cache, 0o755))
	places := fmt.Sprintf(`mkdir -p /etc/cni/net.d /opt/cni/bin /var/lib/cni && mount --bind %s /etc/cni/net.d &&
		mount --bind %s /opt/cni/bin && mount --bind %s /var/lib/cni && exec "$@"`, networks, filepath.Dir(lab.Bin), cache)
	c := engineCLI{t, node, []string{"unshare", "-m", "sh", "-c", places, "sh", "ctr", "--address", socket}}
	testutil.Eventually(t, "containerd on "+node, func() (bool, string) {
		_, stderr, err := c.try("version")
		return err == nil, stderr
	})
	return c
}

// ctrRun runs a container until the test ends, or it is killed, and waits for its endpoint's
// address.
func ctrRun(t *testing.T, c engineCLI, dir, name string, argv []string) (addr string, ended <-chan struct{}) {
	t.Helper()
	args := []string{"run", "--rm", "--cni", "--annotation", "io.heddle.endpoint=@netns", "--cgroup", "/" + engineCgroup() + "/" + c.node,
		"--runc-binary", filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime"), "--env", "PATH=/bin", "--rootfs", unpackRoot(t, dir), name}
	over, _ := startDaemon(t, "ctr run "+name, c.node, dir, slices.Concat(c.command, args, argv)...)
	testutil.Eventually(t, "container "+name+" to run", func() (bool, string) {
		select {
		case <-over:
			t.Fatalf("container %s ended", name)
		default:
		}
		out, stderr, err := c.try("task", "ls")
		return err == nil && strings.Contains(out, name) && strings.Contains(out, "RUNNING"), out + stderr
	})
	return ctrAddress(t, c.node, name), over
}

// ctrAddress gives the address of the endpoint that a container has by ctr's own network.
func ctrAddress(t *testing.T, node, name string) string {
	t.Helper()
	for _, e := range endpointsOn(t, node) {
		if e.Name == engineNetwork()+"/default-"+name+"/eth0" {
			return e.Addrs[0].String()
		}
	}
	t.Fatalf("container %s has no endpoint", name)
	return ""
}

// ctrExec runs a command in a container and gives what it printed. ctr itself may lose that of a
// program that ends at once: it stops reading when the program has ended.
func ctrExec(t *testing.T, c engineCLI, dir, id, container, command string) string {
	t.Helper()
	c.must("task", "exec", "--exec-id", id, container, "busybox", "sh", "-c", command+" >/printed")
	out, err := os.ReadFile(filepath.Join(dir, "rootfs/printed"))
	testutil.NoError(t, err)
	return strings.TrimSpace(string(out))
}

// TestContainerd runs containerd on two nodes, with Heddle's CNI plugin.
func TestContainerd(t *testing.T) {
	lab.NeedPrograms(t, "containerd", "containerd", "ctr", "runc")
	dirs := engineDirs(t, "n1", "n2")
	n1, n2 := containerd(t, "n1", dirs["n1"]), containerd(t, "n2", dirs["n2"])
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
	far, serverOver := ctrRun(t, n2, dirs["n2"], "server", serveWeb)
	_, clientOver := ctrRun(t, n1, dirs["n1"], "client", stay)
	lab.WriteFile(t, filepath.Join(dirs["n1"], "rootfs/etc/hosts"), []byte(far+" web\n")) // ctr has no names of its own
	direct(t, "n1", 2, func() {
		for i, host := range []string{far, "web"} {
			if got := ctrExec(t, n1, dirs["n1"], fmt.Sprint("fetch", i), "client", "wget -qO- http://"+host+"/"); got != greeting {
				t.Errorf("fetched %q from %s", got, host)
			}
		}
	})
	listsServer(t, ctrExec(t, n2, dirs["n2"], "list", "server", "busybox netstat -tln"))
	n1.must("task", "kill", "-s", "KILL", "client")
	n2.must("task", "kill", "-s", "KILL", "server")
	for _, over := range []<-chan struct{}{clientOver, serverOver} {
		select {
		case <-over:
		case <-time.After(testutil.WaitTimeout):
			t.Fatal("a container that was killed does not end")
		}
	}
	for _, c := range []engineCLI{n1, n2} {
		if out := c.must("container", "ls", "-q"); out != "" {
			t.Errorf("containers left on %s: %s", c.node, out)
		}
		sameNode(t, c.node, before[c.node])
	}
}

// TestContainerdVerbs: containers of ctr have RDMA devices: on one node with an endpoint made by hand,
// on the other with ctr's own network, which comes when the container is there. Without either it is
// said what is wrong.
func TestContainerdVerbs(t *testing.T) {
	lab.NeedPrograms(t, "containerd", "containerd", "ctr", "runc")
	dirs, root := engineDirs(t, "n1", "n2"), verbsRoot(t)
	wanted := []string{"--annotation", model.AnnotationVerbs + "=true", "--runc-binary", filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime"), "--env", "PATH=/bin:/usr/bin"}
	var ends []func()
	in, addrs := map[string]func(...string) (string, string, error){}, map[string]string{}
	for _, node := range []string{"n1", "n2"} {
		c, name, unpacked := containerd(t, node, dirs[node]), "ctr-"+node, unpackArchive(t, dirs[node], root)
		before := nodeState(t, node)
		run := slices.Concat([]string{"run", "--rm", "--cgroup", "/" + engineCgroup() + "/" + node}, wanted)
		byNetns := []string{"--annotation", "io.heddle.endpoint=@netns"}
		c.mustRefuse("none of the container's networks is Heddle's", slices.Concat(run, byNetns, []string{"--rootfs", unpacked, "alone-" + node}, stay)...)
		// ctr leaves it if it has not ended yet when ctr deletes it.
		testutil.Eventually(t, "what did not start to be gone", func() (bool, string) {
			_, _, _ = c.try("task", "delete", "alone-"+node)
			_, _, _ = c.try("container", "delete", "alone-"+node)
			left := c.must("container", "ls", "-q")
			return left == "", left
		})
		network, forget := append(byNetns, "--cni"), func() {}
		if node == "n1" {
			space, addr := endpointByHand(t, node, name)
			network, addrs[node] = []string{"--with-ns", "network:" + space, "--annotation", "io.heddle.endpoint=" + name}, addr
			forget = func() { lab.Heddle(t, "endpoints", "delete", name, "--node", node) }
		}
		over, _ := startDaemon(t, "ctr run "+name, node, dirs[node], slices.Concat(c.command, run, network, []string{"--rootfs", unpacked, name}, stay)...)
		testutil.Eventually(t, "container "+name+" to run", func() (bool, string) {
			select {
			case <-over:
				t.Fatalf("container %s ended", name)
			default:
			}
			out, stderr, err := c.try("task", "ls")
			return err == nil && strings.Contains(out, "RUNNING"), out + stderr
		})
		if addrs[node] == "" {
			addrs[node] = ctrAddress(t, node, name)
		}
		execs := 0
		in[node] = func(argv ...string) (string, string, error) {
			execs++
			return c.try(slices.Concat([]string{"task", "exec", "--exec-id", fmt.Sprint("run", execs), name}, argv)...)
		}
		ends = append(ends, func() {
			c.must("task", "kill", "-s", "KILL", name)
			<-over
			forget()
			sameNode(t, node, before)
		})
	}
	pingpong(t, addrs["n2"], in["n2"], in["n1"])
	pingpong(t, addrs["n1"], in["n1"], in["n2"])
	for _, end := range ends {
		end()
	}
}
