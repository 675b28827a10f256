package engines

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// engineNetwork names the CNI network of the engines' containers.
func engineNetwork() string { return lab.Name + "-net" }

// writeNetwork writes a CNI network with Heddle's plugin as an engine reads it, and gives its
// directory.
func writeNetwork(t *testing.T, node, dir string) string {
	t.Helper()
	networks := filepath.Join(dir, "net")
	testutil.NoError(t, os.MkdirAll(networks, 0o755))
	list := fmt.Sprintf(`{"cniVersion":"1.0.0","name":%q,"plugins":[{"type":"heddle-cni","socket":%q,"capabilities":{"portMappings":true}}]}`, engineNetwork(), agentFile(node, "api.sock"))
	lab.WriteFile(t, filepath.Join(networks, "10-heddle.conflist"), []byte(list))
	return networks
}

// podman gives a Podman with storage of its own, an image and a network.
func podman(t *testing.T, node, dir string, root string) engineCLI {
	t.Helper()
	networks := writeNetwork(t, node, dir)
	conf := filepath.Join(dir, "containers.conf")
	lab.WriteFile(t, conf, fmt.Appendf(nil, `[network]
network_backend = "cni"
cni_plugin_dirs = [%q, "/usr/lib/cni"]
[engine]
lock_type = "file"
`, filepath.Dir(lab.Bin)))
	p := engineCLI{t, node, []string{"env", "CONTAINERS_CONF=" + conf, "podman", "--root", filepath.Join(dir, "root"), "--runroot", filepath.Join(dir, "run"),
		"--tmpdir", filepath.Join(dir, "tmp"), "--events-backend=file", "--cgroup-manager=cgroupfs", "--network-config-dir", networks,
		"--runtime", filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime")}}
	testutil.NoError(t, os.MkdirAll(filepath.Join(dir, "tmp"), 0o755))
	p.must("import", root, "small")
	return p
}

// podmanRun is `podman run` with what this kind of machine needs, and where the node's agent is:
// Podman does not hand its environment to the runtime.
func podmanRun(p engineCLI, options ...string) []string {
	return append([]string{"run", "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=32768:32768", "--cgroup-parent", "/" + engineCgroup(),
		"--annotation", "io.heddle.seccomp-socket=" + agentFile(p.node, "seccomp.sock")}, options...)
}

// TestPodman runs Podman on two nodes, with Heddle's CNI plugin.
func TestPodman(t *testing.T) {
	lab.NeedPrograms(t, "Podman", "podman", "conmon", "runc")
	dirs := engineDirs(t, "n1", "n2")
	root := filepath.Join(enginesRoot(), "root.tar")
	lab.WriteFile(t, root, smallRoot(t))
	n1, n2 := podman(t, "n1", dirs["n1"], root), podman(t, "n2", dirs["n2"], root)
	t.Cleanup(func() { // what still runs would hold a network namespace
		for _, p := range []engineCLI{n1, n2} {
			_, _, _ = p.try("rm", "-f", "-a", "-t", "0")
		}
	})
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}

	n2.must(append(podmanRun(n2, "-d", "--network", engineNetwork(), "--name", "server", "small"), serveWeb...)...)
	far := n2.must("inspect", "-f", "{{(index .NetworkSettings.Networks \""+engineNetwork()+"\").IPAddress}}", "server")
	n1.must(append(podmanRun(n1, "-d", "--network", engineNetwork(), "--add-host", "web:"+far, "--name", "client", "small"), stay...)...)
	direct(t, "n1", 3, func() {
		for what, argv := range map[string][]string{
			"by address":          {"exec", "client", "wget", "-qO-", "http://" + far + "/"},
			"by name":             {"exec", "client", "wget", "-qO-", "http://web/"},
			"in the same network": podmanRun(n1, "--rm", "--network", "container:client", "small", "wget", "-qO-", "http://"+far+"/"),
		} {
			if got := n1.must(argv...); got != greeting {
				t.Errorf("%s: fetched %q", what, got)
			}
		}
	})
	listsServer(t, n2.must("exec", "server", "busybox", "netstat", "-tln"))
	if got := n1.must("exec", "client", "ip", "-4", "addr", "show", "eth0"); !strings.Contains(got, "inet 10.") {
		t.Errorf("eth0 of the container: %s", got)
	}
	n1.must("stop", "-t", "0", "client")
	n1.must("start", "client")
	if got := n1.must("exec", "client", "wget", "-qO-", "http://web/"); got != greeting {
		t.Errorf("fetched %q after a restart", got)
	}
	t.Run("published ports", func(t *testing.T) {
		port := lab.FreePort()
		n1.must(append(podmanRun(n1, "-d", "--network", engineNetwork(), "-p", fmt.Sprintf("%d:80", port), "--name", "web", "small"), serveWeb...)...)
		reached(t, port)
		if got := n1.must("port", "web"); !strings.Contains(got, fmt.Sprintf("80/tcp -> 0.0.0.0:%d", port)) {
			t.Errorf("podman port shows %q", got)
		}
		n1.must("stop", "-t", "0", "web")
		unpublished(t, port)
		n1.must("start", "web")
		reached(t, port)
		n1.mustRefuse("leads to", append(podmanRun(n1, "--rm", "--network", engineNetwork(), "-p", fmt.Sprintf("%d:81", port), "small"), stay...)...)
		n1.must("rm", "-f", "-t", "0", "web")
		unpublished(t, port)
	})
	t.Run("verbs", func(t *testing.T) { podmanVerbs(t, n1, n2) })
	n1.must("rm", "-f", "-t", "0", "client")
	n2.must("rm", "-f", "-t", "0", "server")
	for _, p := range []engineCLI{n1, n2} {
		sameNode(t, p.node, before[p.node])
	}
}

// podmanVerbs runs containers with RDMA devices on two nodes.
func podmanVerbs(t *testing.T, n1, n2 engineCLI) {
	root := filepath.Join(enginesRoot(), "verbs.tar")
	lab.WriteFile(t, root, verbsRoot(t))
	for _, p := range []engineCLI{n1, n2} {
		p.must("import", "--change", "ENV PATH=/bin:/usr/bin", root, "verbs")
	}
	run := func(p engineCLI, annotation string, options ...string) []string {
		return podmanRun(p, append([]string{"--network", engineNetwork(), "--annotation", annotation}, options...)...)
	}
	const wanted = model.AnnotationVerbs + "=true"
	n1.mustRefuse(model.AnnotationVerbs+": yes", run(n1, model.AnnotationVerbs+"=yes", "--rm", "verbs", "true")...)
	n1.mustRefuse(model.AnnotationVerbsSpin+": long: want microseconds", run(n1, model.AnnotationVerbsSpin+"=long", "--rm", "verbs", "true")...)
	// An image without glibc starts, and does not have the device.
	if _, said, err := n1.try(run(n1, wanted, "--rm", "small", "sh", "-c", "test ! -e /dev/heddle-verbs")...); err != nil {
		t.Errorf("an image without glibc: %v\n%s", err, said)
	}
	n2.must(append(run(n2, wanted, "-d", "--annotation", model.AnnotationVerbsSpin+"=5", "--name", "verbs", "verbs"), stay...)...)
	n1.must(append(run(n1, wanted, "-d", "--name", "verbs", "verbs"), stay...)...)
	far := n2.must("inspect", "-f", "{{(index .NetworkSettings.Networks \""+engineNetwork()+"\").IPAddress}}", "verbs")
	for _, e := range endpointsOn(t, "n2") {
		if e.Addrs[0].String() == far && e.Planes.Verbs.VerbsEndpoint != (model.VerbsEndpoint{Wanted: true, SpinMicros: 5}) {
			t.Errorf("the endpoint has %+v", e.Planes.Verbs)
		}
	}
	in := func(p engineCLI) func(...string) (string, string, error) {
		return func(argv ...string) (string, string, error) {
			return p.try(append([]string{"exec", "verbs"}, argv...)...)
		}
	}
	pingpong(t, far, in(n2), in(n1))
	for _, p := range []engineCLI{n1, n2} {
		p.must("rm", "-f", "-t", "0", "verbs")
	}
}

// unpackRoot makes the small root a directory.
func unpackRoot(t *testing.T, dir string) string {
	t.Helper()
	return unpackArchive(t, dir, smallRoot(t))
}

// unpackArchive makes a root a directory, with what is there of it.
func unpackArchive(t *testing.T, dir string, archive []byte) string {
	t.Helper()
	root := filepath.Join(dir, "rootfs")
	testutil.NoError(t, os.MkdirAll(root, 0o755))
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "tar", "-C", root, "-x")
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("unpack: %v\n%s", err, out)
	}
	return root
}
