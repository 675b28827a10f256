package engines

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestNerdctl: containers of nerdctl on two nodes, which has CNI attach them by a hook, connect
// directly and have RDMA devices. HEDDLE_NERDCTL is the program: `make test-nerdctl` makes it, as
// Debian has none.
func TestNerdctl(t *testing.T) {
	program := os.Getenv("HEDDLE_NERDCTL")
	if program == "" {
		t.Skip("there is no nerdctl here, Debian has none: make test-nerdctl builds it, and runs this test")
	}
	lab.NeedPrograms(t, "containerd", "containerd", "ctr", "runc", "iptables")
	dirs, root := engineDirs(t, "n1", "n2"), verbsRoot(t)
	before, remove := map[string]string{}, map[string]func(){}
	in, addrs := map[string]func(...string) (string, string, error){}, map[string]string{}
	for _, node := range []string{"n1", "n2"} {
		dir := dirs[node]
		before[node] = nodeState(t, node)
		containerd(t, node, dir)
		c := engineCLI{t, node, []string{program, "--address", filepath.Join(dir, "containerd.sock"), "--data-root", filepath.Join(dir, "nerdctl"),
			"--cni-path", cniPlugins(t, dir), "--cni-netconfpath", filepath.Join(dir, "net"), "--cgroup-manager", "cgroupfs"}}
		run := func(name, network string) []string {
			return []string{"run", "-d", "--name", name, "--network", network, "--runtime", filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime"),
				"--cgroup-parent", "/" + engineCgroup(), "--annotation", "io.heddle.endpoint=" + model.EndpointByNetns, "--annotation", model.AnnotationVerbs + "=true",
				"--env", "PATH=/bin:/usr/bin", "--rootfs", unpackArchive(t, dir, root)}
		}
		c.mustRefuse("none of the container's networks is Heddle's", slices.Concat(run("without", "none"), stay)...)
		c.must(slices.Concat(run("verbs", engineNetwork()), stay)...)
		addrs[node] = c.must("inspect", "-f", "{{.NetworkSettings.IPAddress}}", "verbs")
		remove[node] = func() { c.must("rm", "-f", "verbs", "without") }
		in[node] = func(argv ...string) (string, string, error) {
			return c.try(slices.Concat([]string{"exec", "verbs"}, argv)...)
		}
	}
	pingpong(t, addrs["n2"], in["n2"], in["n1"])
	pingpong(t, addrs["n1"], in["n1"], in["n2"])
	for node, remove := range remove {
		remove()
		sameNode(t, node, before[node])
	}
}

// cniPlugins gives a folder with Heddle's plugin and the distribution's: nerdctl makes a network of
// its own with these, which nobody uses here.
func cniPlugins(t *testing.T, dir string) string {
	t.Helper()
	plugins := filepath.Join(dir, "plugins")
	testutil.NoError(t, os.MkdirAll(plugins, 0o755))
	all, err := filepath.Glob("/usr/lib/cni/*")
	testutil.NoError(t, err)
	for _, path := range append(all, filepath.Join(filepath.Dir(lab.Bin), "heddle-cni")) {
		testutil.NoError(t, os.Symlink(path, filepath.Join(plugins, filepath.Base(path))))
	}
	return plugins
}
