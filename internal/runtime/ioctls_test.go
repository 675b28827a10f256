package runtime

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
)

// TestTrapIoctls: where an agent listens, the ioctls of devices of every container are its to make,
// also of one that is not intercepted; but for those that could do as the node's root does, and
// those that only hold namespaces open. Where none listens, or the profile has a listener of its
// own, nothing is changed.
func TestTrapIoctls(t *testing.T) {
	config := func(network, more, profile string) string {
		return fmt.Sprintf(`{%s"linux":{"namespaces":[{"type":"network"%s}]%s}}`, more, network, profile)
	}
	const out = `"annotations":{"io.heddle.intercept":"false"},`
	forbids := func(call string) string {
		return `,"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["` + call + `"],"action":"SCMP_ACT_ERRNO"}]}`
	}
	for name, c := range map[string]struct {
		config  string
		guarded bool
	}{
		"no endpoint":          {config("", "", ""), true},
		"opted out":            {config("", out, ""), true},
		"with NET_ADMIN":       {config("", out+`"process":{"capabilities":{"bounding":["CAP_NET_ADMIN"]}},`, ""), true},
		"makes no ioctls":      {config("", out, forbids("ioctl")), false},
		"as the node's root":   {config("", out+`"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}},`, ""), false},
		"in the node's":        {config(`,"path":"/proc/self/ns/net"`, out, ""), false},
		"a pod's sandbox":      {config("", `"annotations":{"io.kubernetes.cri.container-type":"sandbox"},`, ""), false},
		"another's listener":   {config("", out, `,"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/run/other.sock"}`), false},
		"a profile unknown":    {config("", out, `,"seccomp":{"defaultAction":"SCMP_ACT_WHAT"}`), false},
		"no namespaces":        {`{` + out + `"linux":{}}`, false},
		"of no system we know": {`{` + out + `"linux":7}`, false},
	} {
		for _, listens := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, listens %v", name, listens), func(t *testing.T) {
				socket := filepath.Join(t.TempDir(), "s")
				l, err := net.Listen("unix", socket)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				if !listens {
					l.(*net.UnixListener).SetUnlinkOnClose(false)
					l.Close()
				}
				dir := bundle(t, c.config)
				changed, kept, _, err := EditBundle(dir, socket, false, false)
				if want := c.guarded && listens; err != nil || changed != want || kept != "" {
					t.Fatalf("EditBundle = %v, %q, %v; want %v", changed, kept, err, want)
				}
				text := read(t, dir)
				if !changed {
					if text != c.config {
						t.Errorf("%s became %s", c.config, text)
					}
					return
				}
				if !strings.Contains(text, `"listenerMetadata": "@none"`) || strings.Count(text, actNotify) != 1 || !strings.Contains(text, `"ioctl"`) {
					t.Errorf("want one rule for ioctls:\n%s", text)
				}
				if again, _, _, err := EditBundle(dir, socket, false, false); again || err != nil {
					t.Errorf("second edit: changed %v, %v", again, err)
				}
			})
		}
	}
}
