package sockets

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestUserNamespace runs cases of semantics.py in containers with a user namespace of their own,
// which owns their network namespace, with no_new_privs and a seccomp profile of their own: their
// root is nobody on the node, and still may what it may in a plain container.
func TestUserNamespace(t *testing.T) {
	script := filepath.Join(lab.SharedDir(t), "semantics.py")
	raw, err := os.ReadFile("testdata/semantics.py")
	testutil.NoError(t, err)
	testutil.NoError(t, os.WriteFile(script, raw, 0o755))
	out := map[string]string{}
	for _, mode := range lab.Modes {
		port := strconv.Itoa(lab.FreePort())
		lab.Start(t, mode, "n2/c1", lab.Python, script, "serve", port).WaitFor("ready")
		name := "n1/user" + mode
		out[mode] = runInUserNamespace(t, mode, name, lab.Python, script, "run", lab.Address(t, mode, "n2/c1"), port, "127.0.0.1",
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

// runInUserNamespace is RunContainer with a user namespace, no_new_privs and a seccomp profile.
func runInUserNamespace(t *testing.T, mode, name string, argv ...string) string {
	return lab.RunContainer(t, mode, name, func(spec *specs.Spec) {
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

// endpointAddrs gives the overlay addresses of an endpoint of n1.
func endpointAddrs(t *testing.T, name string) []string {
	t.Helper()
	var all []struct {
		Name  string
		Addrs []string
	}
	lab.Query(t, &all, "endpoints", "--node", "n1")
	for _, e := range all {
		if e.Name == name {
			return e.Addrs
		}
	}
	t.Fatalf("no endpoint %s in %+v", name, all)
	return nil
}
