package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/plane/tcp/procnet"
)

// published gives a seccomp socket's path beside which an agent has put what containers need, with
// pins as it has them.
func published(t *testing.T) (socket string) {
	t.Helper()
	dir := t.TempDir()
	pin := func(name string) string { return filepath.Join(dir, "pin_"+name) }
	for _, name := range procnet.Names {
		if err := os.WriteFile(pin(name), nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // an agent, and the next one
		if err := procnet.Publish(filepath.Join(dir, procnet.Dir), pin); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "seccomp.sock")
}

// TestProcNet: which containers get a /proc/net of Heddle's, and what others are told.
func TestProcNet(t *testing.T) {
	const proc, dev = `{"destination":"/proc","type":"proc"}`, `{"destination":"/dev","type":"tmpfs"}`
	for _, c := range []struct {
		name, mounts, masked, label string
		unpublished                 bool
		want                        string // reason, "" if it gets one
	}{
		{"as engines make them", proc + "," + dev, `"/proc/kcore"`, "", false, ""},
		{"nothing masked", proc + "," + dev, ``, "", false, procUnmasked},
		{"/sys masked", proc + "," + dev, `"/sys/firmware"`, "", false, procUnmasked},
		{"SELinux", proc + "," + dev, `"/proc/kcore"`, "system_u:system_r:container_t:s0", false, procLabelled},
		{"the node's /dev", proc + `,{"destination":"/dev","type":"bind"}`, `"/proc/kcore"`, "", false, procNoDev},
		{"the node's /proc", `{"destination":"/proc","type":"bind"},` + dev, `"/proc/kcore"`, "", false, procNoProc},
		{"no agent", proc + "," + dev, `"/proc/kcore"`, "", true, procUnpublished},
	} {
		t.Run(c.name, func(t *testing.T) {
			socket := published(t)
			if c.unpublished {
				socket = filepath.Join(t.TempDir(), "seccomp.sock")
			}
			dir := bundle(t, fmt.Sprintf(`{"annotations":{"io.heddle.endpoint":"a"},"root":{"path":"rootfs"},"mounts":[%s],"process":{"selinuxLabel":%q},
				"linux":{"maskedPaths":[%s],"namespaces":[{"type":"network"}]}}`, c.mounts, c.label, c.masked))
			if changed, _, _, err := EditBundle(dir, socket, false, false); !changed || err != nil {
				t.Fatalf("EditBundle = %v, %v", changed, err)
			}
			text := read(t, dir)
			for _, part := range []string{
				`"destination": "/dev/heddle-proc"`, `"destination": "/dev/heddle-proc/net/tcp6"`, `"errnoRet": 93`, `"createRuntime"`, filepath.Join(dir, "rootfs"),
			} {
				if strings.Contains(text, part) != (c.want == "") {
					t.Errorf("%s in config.json, or not:\n%s", part, text)
				}
			}
			if c.want != "" && !strings.Contains(text, `"io.heddle.proc-net": "`+c.want+`"`) {
				t.Errorf("want reason %s:\n%s", c.want, text)
			}
		})
	}
}

// TestProcNetKeepsHooks: the hooks that an engine has in its bundles stay, and come first.
func TestProcNetKeepsHooks(t *testing.T) {
	dir := bundle(t, `{"annotations":{"io.heddle.endpoint":"a"},"root":{"path":"/r"},"mounts":[{"destination":"/proc","type":"proc"},{"destination":"/dev","type":"tmpfs"}],
		"hooks":{"createRuntime":[{"path":"/bin/first"}],"poststop":[{"path":"/bin/last"}]},"linux":{"maskedPaths":["/proc/keys"],"namespaces":[{"type":"network"}]}}`)
	if _, _, _, err := EditBundle(dir, published(t), false, false); err != nil {
		t.Fatal(err)
	}
	text := read(t, dir)
	first, ours := strings.Index(text, "/bin/first"), strings.Index(text, coverCommand)
	if first < 0 || ours < first || !strings.Contains(text, "/bin/last") {
		t.Errorf("hooks are:\n%s", text)
	}
}
