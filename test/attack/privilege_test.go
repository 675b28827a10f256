package attack

import (
	"fmt"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/test/lab"
)

// ownConnections connects and counts the connections of the container's own stack to that port.
const ownConnections = `
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
port = ":%04X" % int(sys.argv[2])
print("own", sum(line.split()[2].endswith(port) for line in open("/proc/self/net/tcp").readlines()[1:]))
`

// TestPrivilegedContainer: a container with a capability of the node's root gets no socket of the
// node, only the overlay; in a user namespace of its own, or with less, it gets one.
func TestPrivilegedContainer(t *testing.T) {
	server, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	with := func(capability string) func(*specs.Spec) {
		return func(spec *specs.Spec) {
			c := spec.Process.Capabilities
			for _, set := range []*[]string{&c.Bounding, &c.Effective, &c.Permitted} {
				*set = append(*set, capability)
			}
		}
	}
	for name, c := range map[string]struct {
		change func(*specs.Spec)
		own    string
		says   string
	}{
		"privileged": {with("CAP_SYS_ADMIN"), "own 1", "capability_in_node"},
		"admin":      {with("CAP_NET_ADMIN"), "own 0", ""},
		"own-user": {func(spec *specs.Spec) {
			with("CAP_SYS_ADMIN")(spec)
			ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
			spec.Linux.UIDMappings, spec.Linux.GIDMappings = ids, ids
			spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		}, "own 0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			out := lab.RunContainer(t, "heddle", "n1/"+name, c.change, lab.Python, "-c", ownConnections, lab.Address(t, "heddle", "n2/c1"), fmt.Sprint(port))
			if !strings.Contains(out, c.own) || strings.Contains(out, "not intercepted") != (c.says != "") || !strings.Contains(out, c.says) {
				t.Errorf("%s: want %q and, on standard error, %q", out, c.own, c.says)
			}
			server.In(t).Must(`l.accept()`)
		})
	}
}
