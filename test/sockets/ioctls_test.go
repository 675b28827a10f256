package sockets

import (
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/test/lab"
)

// TestIoctls makes every ioctl of the trapped ranges on sockets and other files, in both modes:
// programs must see the same, memory included. With CAP_NET_ADMIN they also change what they see,
// so that both need namespaces of their own.
func TestIoctls(t *testing.T) {
	program := lab.IoctlsProgram(t)
	t.Run("default capabilities", func(t *testing.T) {
		compareIoctls(t, lab.MustRun(t, "overlay", "n1/c1", program), lab.MustRun(t, "heddle", "n1/c1", program))
	})
	t.Run("CAP_NET_ADMIN", func(t *testing.T) {
		out := map[string]string{}
		for _, mode := range lab.Modes {
			name := "n1/admin" + mode
			out[mode] = lab.RunContainer(t, mode, name, netAdmin, program)
			for _, e := range endpointAddrs(t, name) {
				out[mode] = strings.ReplaceAll(out[mode], " "+e+"\n", " OWN\n")
			}
		}
		compareIoctls(t, out["overlay"], out["heddle"])
	})
}

// netAdmin gives a container the capability to change its devices.
func netAdmin(spec *specs.Spec) {
	c := spec.Process.Capabilities
	for _, set := range []*[]string{&c.Bounding, &c.Effective, &c.Permitted} {
		*set = append(*set, "CAP_NET_ADMIN")
	}
}

func compareIoctls(t *testing.T, want, got string) {
	t.Helper()
	w, g := ioctlLines(want), ioctlLines(got)
	if len(w) < 2000 || w[len(w)-1] != "end" {
		t.Fatalf("the program ended early:\n%s", want)
	}
	bad := 0
	for i := range max(len(w), len(g)) {
		if i >= len(w) || i >= len(g) || w[i] != g[i] {
			if bad++; bad <= 20 {
				t.Errorf("got  %s\nwant %s", ioctlLine(g, i), ioctlLine(w, i))
			}
		}
	}
	if bad > 0 {
		t.Errorf("%d lines differ", bad)
	}
}

// ioctlLines gives the program's lines without the one request that differs for a reason:
// docs/differences.md.
func ioctlLines(out string) (lines []string) {
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n")
		if !strings.HasPrefix(line, "mptcp zero 0x8905") && !strings.HasPrefix(line, "mptcp: ") {
			lines = append(lines, line)
		}
	}
	return lines
}

func ioctlLine(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(nothing)"
}
