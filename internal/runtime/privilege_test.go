package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPrivilegedIsLeft: a container that could do as the node's root does is not intercepted, and
// says so; one that only could in a user namespace of its own is.
func TestPrivilegedIsLeft(t *testing.T) {
	const network, user = `{"type":"network"}`, `{"type":"user"}`
	node := `{"type":"network","path":"/proc/self/ns/net"}`
	for _, c := range []struct {
		name, set, caps string
		namespaces      []string
		want            string // reason, "" if it is intercepted
	}{
		{"Docker's default", "bounding", `"CAP_CHOWN","CAP_NET_RAW","CAP_NET_BIND_SERVICE"`, []string{network}, ""},
		{"none", "bounding", ``, []string{network}, ""},
		{"NET_ADMIN", "bounding", `"CAP_NET_ADMIN"`, []string{network}, ""},
		{"SYS_ADMIN", "bounding", `"CAP_CHOWN","CAP_SYS_ADMIN"`, []string{network}, leftCapability},
		{"SYS_MODULE", "effective", `"CAP_SYS_MODULE"`, []string{network}, leftCapability},
		{"SYS_RAWIO", "permitted", `"CAP_SYS_RAWIO"`, []string{network}, leftCapability},
		{"BPF", "inheritable", `"CAP_BPF"`, []string{network}, leftCapability},
		{"PERFMON", "ambient", `"CAP_PERFMON"`, []string{network}, leftCapability},
		{"other spelling", "bounding", `"cap_sys_admin"`, []string{network}, leftCapability},
		{"SYS_ADMIN in its own user namespace", "bounding", `"CAP_SYS_ADMIN"`, []string{network, user}, ""},
		{"SYS_ADMIN in the node's user namespace by its path", "bounding", `"CAP_SYS_ADMIN"`, []string{network, `{"type":"user","path":"/proc/self/ns/user"}`}, leftCapability},
		{"the node's network", "bounding", ``, []string{`{"type":"pid"}`}, leftNetwork},
		{"the node's network by its path", "bounding", ``, []string{node}, leftNetwork},
		{"the node's network, in a user namespace", "bounding", ``, []string{user}, leftNetwork},
		{"a network that is not there", "bounding", ``, []string{`{"type":"network","path":"/none"}`}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := bundle(t, fmt.Sprintf(`{"annotations":{"io.heddle.endpoint":"a"},"process":{"capabilities":{%q:[%s]}},"linux":{"namespaces":[%s]}}`,
				c.set, c.caps, strings.Join(c.namespaces, ",")))
			changed, kept, _, err := EditBundle(dir, "", false, false)
			if err != nil || !changed || !strings.HasPrefix(kept, c.want) || (kept == "") != (c.want == "") {
				t.Fatalf("EditBundle = %v, %q, %v; want %q", changed, kept, err, c.want)
			}
			text := read(t, dir)
			if got := strings.Contains(text, "listenerPath"); got != (c.want == "") {
				t.Errorf("intercepted: %v\n%s", got, text)
			}
			if c.want != "" && !strings.Contains(text, AnnotationLeft) {
				t.Errorf("it does not say why:\n%s", text)
			}
			if changed, again, _, err := EditBundle(dir, "", false, false); changed || again != kept || err != nil {
				t.Errorf("once more: %v, %q, %v", changed, again, err)
			}
		})
	}
}

// TestPrivilegedWithListener: a bundle that has Heddle's listener and must not is not started.
func TestPrivilegedWithListener(t *testing.T) {
	dir := bundle(t, `{"annotations":{"io.heddle.endpoint":"a"},"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}},
		"linux":{"namespaces":[{"type":"network"}],"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/run/heddle/seccomp.sock","listenerMetadata":"a"}}}`)
	if _, _, _, err := EditBundle(dir, "", false, false); err == nil || !strings.Contains(err.Error(), leftCapability) || !strings.Contains(err.Error(), "listenerPath") {
		t.Errorf("EditBundle: %v", err)
	}
}

// TestLeftIsLogged: the reason is where engines look for it.
func TestLeftIsLogged(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	if err := (commandLine{log: log, logFormat: "json"}).warn("not intercepted: " + leftNetwork); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(log)
	if err != nil || !strings.Contains(string(raw), `"level":"warning"`) || !strings.Contains(string(raw), leftNetwork) {
		t.Errorf("%s, %v", raw, err)
	}
}
