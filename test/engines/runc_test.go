package engines

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// runcContainer makes an endpoint and a bundle for it as docs/howto/runc.md has it, and runs it.
func runcContainer(t *testing.T, node, dir, name string, argv []string) (runtime engineCLI) {
	t.Helper()
	space := engineNetwork() + "-" + name
	testutil.NoError(t, netns.Create(space))
	t.Cleanup(func() {
		if err := netns.Delete(space); err != nil {
			t.Error(err)
		}
	})
	lab.Heddle(t, "endpoints", "add", name, "--intercepted", "--netns", netns.Path(space), "--node", node)
	return runBundle(t, node, dir, name, netns.Path(space), argv)
}

// runBundle makes a bundle in dir for endpoint name, whose network namespace is at space, and runs
// it.
func runBundle(t *testing.T, node, dir, name, space string, argv []string, edits ...func(*specs.Spec)) (runtime engineCLI) {
	t.Helper()
	runtime = engineCLI{t, node, []string{filepath.Join(filepath.Dir(lab.Bin), "heddle-runtime"), "--root", filepath.Join(dir, "runc")}}
	unpackRoot(t, dir)
	path := filepath.Join(dir, "config.json")
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a container that was here before
		t.Fatal(err)
	}
	runtime.must("spec", "--bundle", dir)
	raw, err := os.ReadFile(path)
	testutil.NoError(t, err)
	var spec specs.Spec
	testutil.NoError(t, json.Unmarshal(raw, &spec))
	spec.Process.Terminal, spec.Process.Args = false, argv
	spec.Process.Rlimits = nil
	spec.Annotations = map[string]string{"io.heddle.endpoint": name}
	spec.Linux.CgroupsPath = "/" + engineCgroup() + "/" + name
	for i := range spec.Linux.Namespaces {
		if spec.Linux.Namespaces[i].Type == specs.NetworkNamespace {
			spec.Linux.Namespaces[i].Path = space
		}
	}
	for _, edit := range edits {
		edit(&spec)
	}
	if raw, err = json.Marshal(spec); err != nil {
		t.Fatal(err)
	}
	lab.WriteFile(t, path, raw)
	runtime.must("run", "--detach", "--bundle", dir, name)
	return runtime
}

// TestRunc runs containers by runc alone, with endpoints made by hand.
func TestRunc(t *testing.T) {
	lab.NeedPrograms(t, "runc", "runc")
	dirs := engineDirs(t, "n1", "n2")
	before := map[string]string{"n1": nodeState(t, "n1"), "n2": nodeState(t, "n2")}
	server := runcContainer(t, "n2", dirs["n2"], "server", serveWeb)
	client := runcContainer(t, "n1", dirs["n1"], "client", stay)
	far := ""
	for _, e := range endpointsOn(t, "n2") {
		if e.Name == "server" {
			far = e.Addrs[0].String()
		}
	}
	lab.WriteFile(t, filepath.Join(dirs["n1"], "rootfs/etc/hosts"), []byte(far+" web\n"))
	direct(t, "n1", 2, func() {
		for _, host := range []string{far, "web"} {
			if got := client.must("exec", "client", "wget", "-qO-", "http://"+host+"/"); got != greeting {
				t.Errorf("fetched %q from %s", got, host)
			}
		}
	})
	client.must("delete", "-f", "client")
	server.must("delete", "-f", "server")
	lab.Heddle(t, "endpoints", "delete", "client", "--node", "n1")
	lab.Heddle(t, "endpoints", "delete", "server", "--node", "n2")
	for node := range dirs {
		sameNode(t, node, before[node])
	}
}
