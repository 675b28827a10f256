package lab

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/testutil"
)

// builds are the programs that tests had built, by name; they go when all tests are done.
var builds struct {
	dir  string
	done map[string]string
}

// Build gives the program that the command makes at path, and makes it once in a run.
func Build(t testing.TB, name string, command func(path string) *exec.Cmd) string {
	t.Helper()
	if path := builds.done[name]; path != "" {
		return path
	}
	if builds.done == nil {
		dir, err := os.MkdirTemp("/tmp", "heddle-builds-")
		testutil.NoError(t, err)
		testutil.NoError(t, os.Chmod(dir, 0o755))
		builds.dir, builds.done = dir, map[string]string{}
	}
	path := filepath.Join(builds.dir, name)
	cmd := command(path)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
	builds.done[name] = path
	return path
}

// CompileC makes a static program of a C file, whose path is from the package of the test.
func CompileC(t testing.TB, source string) string {
	t.Helper()
	return Build(t, strings.TrimSuffix(filepath.Base(source), ".c"), func(path string) *exec.Cmd {
		return exec.Command("gcc", "-D_GNU_SOURCE=", "-static", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", path, source)
	})
}

// NeedPrograms skips a test whose programs are not installed, and says what is missing.
func NeedPrograms(t *testing.T, engine string, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%s cannot be started: %s is not installed (`make test-packages` does)", engine, p)
		}
	}
}

// IoctlsProgram builds testdata/ioctls.c where containers see it.
func IoctlsProgram(t *testing.T) string {
	t.Helper()
	return CompileC(t, "../lab/testdata/ioctls.c")
}

// SharedDir makes a directory that containers see and users other than root can enter. Everything
// in /tmp is the machine's own in each of them.
func SharedDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "heddle-programs-")
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	testutil.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

// WriteFile writes a file that every user of a container may read.
func WriteFile(t testing.TB, path string, data []byte) {
	t.Helper()
	testutil.NoError(t, os.WriteFile(path, data, 0o644))
}

// AsNobody gives argv as an unprivileged user runs it: without capabilities and other groups.
func AsNobody(argv ...string) []string {
	return append([]string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"}, argv...)
}

// RunContainer runs a program in a container made for it, with n1/c1's root file system, whose
// network namespace is attached as endpoint name by a hook, as a network plugin would. change may
// alter what the container is. It gives the program's output.
func RunContainer(t *testing.T, mode, name string, change func(*specs.Spec), argv ...string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/run/heddle/lab", Name, "n1/c1", mode, "config.json"))
	testutil.NoError(t, err)
	var spec specs.Spec
	testutil.NoError(t, json.Unmarshal(raw, &spec))
	bundle, id := t.TempDir(), Name+"-"+filepath.Base(name)
	spec.Process.Args, spec.Linux.CgroupsPath = argv, "/"+id
	spec.Linux.Namespaces, spec.Linux.Seccomp = nil, nil
	for _, kind := range []specs.LinuxNamespaceType{specs.MountNamespace, specs.NetworkNamespace, specs.PIDNamespace, specs.IPCNamespace, specs.UTSNamespace} {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind})
	}
	var mounts []specs.Mount
	for _, m := range spec.Mounts {
		if m.Destination != "/dev/shm" && m.Destination != "/dev/pts" { // theirs are root's on the node
			mounts = append(mounts, m)
		}
	}
	spec.Mounts = mounts
	change(&spec)
	add := fmt.Sprintf(`pid=$(sed 's/.*"pid": *\([0-9]*\).*/\1/') && exec %s endpoints add %s --lab %s --node n1 --netns /proc/$pid/ns/net --intercepted=%v`,
		Bin, name, Name, mode == "heddle")
	spec.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", add}}}}
	runtime := "runc"
	if mode == "heddle" {
		spec.Annotations["io.heddle.endpoint"] = name
		runtime = filepath.Join(filepath.Dir(Bin), "heddle-runtime")
	}
	if raw, err = json.Marshal(spec); err != nil {
		t.Fatal(err)
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o644))
	root := t.TempDir()
	t.Cleanup(func() {
		_ = exec.Command("runc", "--root", root, "delete", "--force", id).Run() // it may have ended
		_ = exec.Command(Bin, "endpoints", "delete", name, "--lab", Name, "--node", "n1").Run()
	})
	cmd := exec.CommandContext(t.Context(), runtime, "--root", root, "run", "--bundle", bundle, id)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", runtime, err, out)
	}
	return string(out)
}
