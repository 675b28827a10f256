package test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// TestUserNamespace runs cases of semantics.py in containers with a user namespace of their own, which owns their network
// namespace, with no_new_privs and a seccomp profile of their own: their root is nobody on the node, and still may what it may in a plain container.
func TestUserNamespace(t *testing.T) {
	script := filepath.Join(sharedDir(t), "semantics.py")
	raw, err := os.ReadFile("testdata/semantics.py")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(script, raw, 0o755); err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, mode := range modes {
		port := strconv.Itoa(freePort())
		start(t, mode, "n2/c1", python, script, "serve", port).waitFor("ready")
		name := "n1/user" + mode
		out[mode] = runInUserNamespace(t, mode, name, python, script, "run", address(t, mode, "n2/c1"), port, "127.0.0.1",
			"rights", "credentials", "devices", "descriptors", "congestion", "connect_twice")
		if !strings.Contains(out[mode], "== end") {
			t.Fatalf("%s: %s", mode, out[mode])
		}
		for _, e := range endpointAddrs(t, name) {
			out[mode] = strings.ReplaceAll(out[mode], e, "OWN")
		}
	}
	if out["heddle"] != out["overlay"] {
		t.Errorf("got:\n%s\nwant:\n%s", out["heddle"], out["overlay"])
	}
}

// runInUserNamespace is runContainer with a user namespace, no_new_privs and a seccomp profile.
func runInUserNamespace(t *testing.T, mode, name string, argv ...string) string {
	return runContainer(t, mode, name, func(spec *specs.Spec) {
		spec.Process.NoNewPrivileges = true
		eperm := uint(1)
		spec.Linux.Seccomp = &specs.LinuxSeccomp{
			DefaultAction: specs.ActAllow,
			Syscalls:      []specs.LinuxSyscall{{Names: []string{"ptrace", "add_key"}, Action: specs.ActErrno, ErrnoRet: &eperm}},
		}
		ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
		spec.Linux.UIDMappings, spec.Linux.GIDMappings = ids, ids
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	}, argv...)
}

// runContainer runs a program in a container made for it, with n1/c1's root file system, whose network namespace is
// attached as endpoint name by a hook, as a network plugin would. change may alter what the container is. It gives the
// program's output.
func runContainer(t *testing.T, mode, name string, change func(*specs.Spec), argv ...string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/run/heddle/lab", labName, "n1/c1", mode, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(raw, &spec); err != nil {
		t.Fatal(err)
	}
	bundle, id := t.TempDir(), labName+"-"+filepath.Base(name)
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
		heddleBin, name, labName, mode == "heddle")
	spec.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", add}}}}
	runtime := "runc"
	if mode == "heddle" {
		spec.Annotations["io.heddle.endpoint"] = name
		runtime = filepath.Join(filepath.Dir(heddleBin), "heddle-runtime")
	}
	if raw, err = json.Marshal(spec); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o644); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	t.Cleanup(func() {
		_ = exec.Command("runc", "--root", root, "delete", "--force", id).Run() // it may have ended
		_ = exec.Command(heddleBin, "endpoints", "delete", name, "--lab", labName, "--node", "n1").Run()
	})
	cmd := exec.CommandContext(t.Context(), runtime, "--root", root, "run", "--bundle", bundle, id)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", runtime, err, out)
	}
	return string(out)
}

// endpointAddrs gives the overlay addresses of an endpoint of n1.
func endpointAddrs(t *testing.T, name string) []string {
	t.Helper()
	var all []struct {
		Name  string
		Addrs []string
	}
	raw := heddle(t, "endpoints", "--lab", labName, "--node", "n1", "--output", "json")
	if err := json.Unmarshal([]byte(raw), &all); err != nil {
		t.Fatalf("endpoints: %v\n%s", err, raw)
	}
	for _, e := range all {
		if e.Name == name {
			return e.Addrs
		}
	}
	t.Fatalf("no endpoint %s in %s", name, raw)
	return nil
}
