package runtime

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// verbsNode is a node with the endpoints "a", which has verbs, and "b", which has not, and an image
// of Debian's kind.
func verbsNode(t *testing.T) (socket, root, library string) {
	t.Helper()
	dir := t.TempDir()
	socket, root, library = filepath.Join(dir, "seccomp.sock"), filepath.Join(dir, "rootfs"), filepath.Join(dir, verbsFile)
	record, err := json.Marshal(map[string]any{"endpoints": []model.Endpoint{
		{ID: 7, Name: "a", Planes: model.EndpointPlanes{Verbs: model.VerbsEndpoint{Wanted: true}}}, {ID: 8, Name: "b"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	libs := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	for _, err := range []error{
		os.WriteFile(filepath.Join(dir, recordFile), record, 0o600), os.WriteFile(library, nil, 0o644),
		os.MkdirAll(folder.Of(socket, 7), 0o755), os.MkdirAll(libs, 0o755), os.Symlink("usr/lib", filepath.Join(root, "lib")),
		os.WriteFile(filepath.Join(libs, "libibverbs.so.1.14"), nil, 0o644),
		os.Symlink("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14", filepath.Join(libs, ibverbs)), // absolute: of the image's root
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return socket, root, library
}

func verbsConfig(t *testing.T, root, endpoint, wish, dev string) object {
	t.Helper()
	config, err := decodeConfig("c", []byte(`{"root":{"path":"`+root+`"},"annotations":{"io.heddle.endpoint":"`+endpoint+`","io.heddle.verbs":"`+wish+`"},
		"mounts":[{"destination":"/dev","type":"`+dev+`"}],"linux":{"namespaces":[{"type":"network"}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestAddVerbs(t *testing.T) {
	socket, root, library := verbsNode(t)
	config := verbsConfig(t, root, "a", "true", "tmpfs")
	for _, want := range []bool{true, false} { // a bundle that was edited is left as it is
		if changed, err := addVerbs(config, "/", socket, []string{"/nowhere", library}); err != nil || changed != want {
			t.Fatalf("changed %v, %v; want %v", changed, err, want)
		}
	}
	var got []string
	for _, e := range config["mounts"].([]any)[1:] {
		m := e.(object)
		got = append(got, m["source"].(string)+" at "+m["destination"].(string))
	}
	want := []string{library + " at /usr/lib/x86_64-linux-gnu/libibverbs.so.1", folder.Of(socket, 7) + " at /dev/heddle-verbs", "/dev/null at /dev/infiniband/uverbs0"}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		t.Errorf("mounts %v, want %v", got, want)
	}
}

func TestAddVerbsRefuses(t *testing.T) {
	socket, root, library := verbsNode(t)
	for _, c := range []struct{ root, endpoint, wish, dev, library, want string }{
		{root, "a", "yes", "tmpfs", library, `want "true" or "false"`},
		{root, "a", "true", "bind", library, "no tmpfs"},
		{root, "a", "true", "tmpfs", "/nowhere", "is not installed"},
		{root, "b", "true", "tmpfs", library, "endpoint b has no verbs"},
		{root, "c", "true", "tmpfs", library, "no endpoint at this node"},
		{root, model.EndpointByNetns, "true", "tmpfs", library, "yet to be made"},
		{t.TempDir(), "a", "true", "tmpfs", library, "install it there"},
	} {
		config := verbsConfig(t, c.root, c.endpoint, c.wish, c.dev)
		if _, err := addVerbs(config, "/", socket, []string{c.library}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
		if len(config["mounts"].([]any)) != 1 {
			t.Errorf("%+v: mounts %v", c, config["mounts"])
		}
	}
	if changed, err := addVerbs(verbsConfig(t, root, "a", "false", "bind"), "/", socket, nil); changed || err != nil {
		t.Errorf("changed %v, %v of a container that does not ask", changed, err)
	}
}

func TestStatInStaysInside(t *testing.T) {
	root := t.TempDir()
	for name, target := range map[string]string{"out": "../../../../../../etc/passwd", "loop": "loop", "abs": "/etc/passwd"} {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
		if _, err := statIn(root, "/"+name); err == nil {
			t.Errorf("%s leads out of the image", target)
		}
	}
}
