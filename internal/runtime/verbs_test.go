package runtime

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/folder"
	"heddle.dev/heddle/internal/testutil"
)

// verbsNode is a node with the endpoints "a", which has verbs, and "b", which has not, and an image
// of Debian's kind.
func verbsNode(t *testing.T) (socket, root, library string) {
	t.Helper()
	dir := t.TempDir()
	socket, root, library = filepath.Join(dir, "seccomp.sock"), filepath.Join(dir, "rootfs"), filepath.Join(dir, verbsFile)
	record, err := json.Marshal(map[string]any{"endpoints": []model.Endpoint{
		{ID: 7, Name: "a", Planes: model.EndpointPlanes{Verbs: model.VerbsRecord{VerbsEndpoint: model.VerbsEndpoint{Wanted: true}}}}, {ID: 8, Name: "b"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	libs := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	for _, err := range []error{
		os.WriteFile(filepath.Join(dir, endpointfile.Node), record, 0o600), os.WriteFile(library, nil, 0o644),
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

// injectVerbs injects what is declared for verbs, as into a container that is not intercepted.
func injectVerbs(config object, socket string, dirs []string) (added bool, lacks string, err error) {
	to, err := targetOf(config, "/", socket)
	if err != nil {
		return false, "", err
	}
	added, all, err := inject(config, injections, to, dirs)
	return added, strings.Join(all, "; "), err
}

func TestInjectVerbs(t *testing.T) {
	socket, root, library := verbsNode(t)
	config := verbsConfig(t, root, "a", "true", "tmpfs")
	dirs := []string{"/nowhere", filepath.Dir(library)}
	for range 2 { // a bundle that was edited gets nothing twice
		if added, lacks, err := injectVerbs(config, socket, dirs); err != nil || !added || lacks != "" {
			t.Fatalf("added %v, lacks %q, %v", added, lacks, err)
		}
	}
	got := map[string]string{}
	for _, e := range config["mounts"].([]any)[1:] {
		m := e.(object)
		options, _ := json.Marshal(m["options"])
		got[m["destination"].(string)] = m["source"].(string) + string(options)
	}
	want := map[string]string{
		"/usr/lib/x86_64-linux-gnu/libibverbs.so.1": library + `["bind","ro","private","nosuid","nodev"]`,
		"/dev/heddle-verbs":                         folder.Of(socket, 7) + `["bind","ro","private","nosuid","nodev","noexec"]`,
		"/dev/infiniband/uverbs0":                   `/dev/null["bind","private","nosuid","noexec"]`,
		"/dev/infiniband/rdma_cm":                   `/dev/null["bind","private","nosuid","noexec"]`,
	}
	if !maps.Equal(got, want) || len(config["mounts"].([]any)) != 5 {
		t.Errorf("mounts %v, want %v", got, want)
	}
}

// TestInjectVerbsAsks: an endpoint without verbs, or whose programs are to spin for another time, is
// given them by the agent.
func TestInjectVerbsAsks(t *testing.T) {
	socket, root, library := verbsNode(t)
	dir := filepath.Dir(library)
	for _, c := range []struct{ endpoint, spin, says, want string }{
		{"b", "", "", "endpoints verbs b --api " + dir + "/api.sock"},
		{"b", "20", "", "endpoints verbs b --api " + dir + "/api.sock --spin-us 20"},
		{"a", "20", "", "endpoints verbs a --api " + dir + "/api.sock --spin-us 20"},
		{"a", "", "", ""},
		{"a", "0", "", ""}, // as it is
		{"b", "", "no agent", "endpoints verbs b --api " + dir + "/api.sock"},
	} {
		asked := filepath.Join(t.TempDir(), "asked")
		script := "#!/bin/sh\necho \"$*\" >" + asked + "\nmkdir -p " + folder.Of(socket, 8) + "\n"
		if c.says != "" {
			script += "echo " + c.says + " >&2; exit 1\n"
		}
		if err := os.WriteFile(filepath.Join(dir, "heddle"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		config := verbsConfig(t, root, c.endpoint, "true", "tmpfs")
		if c.spin != "" {
			config["annotations"].(object)[model.AnnotationVerbsSpin] = c.spin
		}
		added, lacks, err := injectVerbs(config, socket, []string{dir})
		if c.says == "" && (!added || lacks != "" || err != nil) || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%+v: added %v, lacks %q, %v", c, added, lacks, err)
		}
		if raw, _ := os.ReadFile(asked); strings.TrimSpace(string(raw)) != c.want {
			t.Errorf("%+v: asked %q", c, raw)
		}
	}
}

// TestInjectVerbsAgentHangs: an agent that does not answer holds no container's start up for ever.
func TestInjectVerbsAgentHangs(t *testing.T) {
	socket, root, library := verbsNode(t)
	dir := filepath.Dir(library)
	before := agentTimeout
	agentTimeout = 100 * time.Millisecond
	t.Cleanup(func() { agentTimeout = before })
	err := os.WriteFile(filepath.Join(dir, "heddle"), []byte("#!/bin/sh\nexec sleep 600\n"), 0o755)
	testutil.NoError(t, err)
	_, _, err = injectVerbs(verbsConfig(t, root, "b", "true", "tmpfs"), socket, []string{dir})
	if err == nil || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("%v, want that the agent has not answered", err)
	}
}

// TestInjectVerbsLate: a container to which Docker has yet to give a network gets its endpoint's
// socket by a hook, once.
func TestInjectVerbsLate(t *testing.T) {
	socket, root, library := verbsNode(t)
	config := verbsConfig(t, root, model.EndpointByNetns, "true", "tmpfs")
	config["annotations"].(object)[model.AnnotationVerbsSpin] = "7"
	config["hooks"] = object{"prestart": []any{object{"path": "/usr/bin/dockerd", "args": []any{"libnetwork-setkey"}}}}
	for range 2 {
		if added, lacks, err := injectVerbs(config, socket, []string{filepath.Dir(library)}); err != nil || !added || lacks != "" {
			t.Fatalf("added %v, lacks %q, %v", added, lacks, err)
		}
	}
	hooks := config["hooks"].(object)["createRuntime"].([]any)
	if len(hooks) != 1 {
		t.Fatalf("hooks %v", hooks)
	}
	if got := hooks[0].(object)["args"].([]any)[1:]; !slices.Equal(got, []any{verbsCommand, root, socket, "7"}) {
		t.Errorf("arguments %v", got)
	}
	if kind, err := mountedAs(config, verbsInContainer); kind != "tmpfs" || err != nil {
		t.Errorf("%s is %q, %v", verbsInContainer, kind, err)
	}
	config["annotations"].(object)[model.AnnotationVerbsSpin] = "soon"
	if _, _, err := injectVerbs(config, socket, []string{filepath.Dir(library)}); err == nil || !strings.Contains(err.Error(), "want microseconds") {
		t.Errorf("spin that is no number: %v", err)
	}
}

// TestInjectVerbsAtStart: a container that gets its network between its creation and its start has a
// place for its endpoint's socket, if it is started by a command of its own.
func TestInjectVerbsAtStart(t *testing.T) {
	socket, root, library := verbsNode(t)
	config := verbsConfig(t, root, model.EndpointByNetns, "true", "tmpfs")
	to, err := targetOf(config, "/", socket)
	testutil.NoError(t, err)
	to.apart = true
	for range 2 {
		if added, lacks, err := inject(config, injections, to, []string{filepath.Dir(library)}); err != nil || !added || lacks != nil {
			t.Fatalf("added %v, lacks %q, %v", added, lacks, err)
		}
	}
	if config["hooks"] != nil {
		t.Errorf("hooks %v", config["hooks"])
	}
	var places []string
	for _, e := range config["mounts"].([]any) {
		if m := e.(object); m["destination"] == verbsInContainer {
			places = append(places, m["type"].(string)+" "+m["source"].(string))
		}
	}
	if !slices.Equal(places, []string{"tmpfs " + verbsAtStart}) || len(config["mounts"].([]any)) != 5 {
		t.Errorf("places %q, mounts %v", places, config["mounts"])
	}
}

// TestInjectVerbsWithoutGlibc: the container starts without the device, and it is said why.
func TestInjectVerbsWithoutGlibc(t *testing.T) {
	socket, _, library := verbsNode(t)
	config := verbsConfig(t, t.TempDir(), "a", "true", "tmpfs")
	added, lacks, err := injectVerbs(config, socket, []string{filepath.Dir(library)})
	if added || err != nil || !strings.Contains(lacks, "no glibc") || !strings.Contains(lacks, "use an image of Debian's or Red Hat's kind, or take the annotation io.heddle.verbs away") || len(config["mounts"].([]any)) != 1 {
		t.Errorf("added %v, lacks %q, %v", added, lacks, err)
	}
}

func TestInjectVerbsRefuses(t *testing.T) {
	socket, root, library := verbsNode(t)
	dir, bare := filepath.Dir(library), t.TempDir()
	if err := os.MkdirAll(filepath.Join(bare, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bare, "lib/libc.so.6"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	const spin = "annotations.io.heddle.verbs-spin-us: "
	for _, c := range []struct{ root, endpoint, wish, spin, dev, dir, want string }{
		{root, "a", "yes", "", "tmpfs", dir, `annotations.io.heddle.verbs: yes: want "true" or "false"`},
		{root, "a", "true", "-1", "tmpfs", dir, spin + "-1: want microseconds"},
		{root, "a", "true", "1000001", "tmpfs", dir, spin + "1000001: want microseconds"},
		{root, "a", "false", "some", "tmpfs", dir, spin + "some: want microseconds"},
		{root, "a", "true", "", "bind", dir, "no tmpfs"},
		{root, "a", "true", "", "tmpfs", "/nowhere", "is not installed"},
		{root, "b", "true", "", "tmpfs", dir, "heddle is not installed"},
		{root, "c", "true", "", "tmpfs", dir, "no endpoint at this node"},
		{root, model.EndpointByNetns, "true", "", "tmpfs", dir, "yet to be made"},
		{bare, "a", "true", "", "tmpfs", dir, "install it there"},
	} {
		config := verbsConfig(t, c.root, c.endpoint, c.wish, c.dev)
		if c.spin != "" {
			config["annotations"].(object)[model.AnnotationVerbsSpin] = c.spin
		}
		if _, _, err := injectVerbs(config, socket, []string{c.dir}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
		if len(config["mounts"].([]any)) != 1 {
			t.Errorf("%+v: mounts %v", c, config["mounts"])
		}
	}
	if added, _, err := injectVerbs(verbsConfig(t, root, "a", "false", "bind"), socket, nil); added || err != nil {
		t.Errorf("added %v, %v of a container that does not ask", added, err)
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
