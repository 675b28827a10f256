package attack

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"list the node's devices", model.ProtectIoctls, "n1", listDevices("names")},
		attack{"list the node's devices while the descriptor changes", model.ProtectIoctls, "n1", listDevices("race", "300")},
		attack{"read the node's addresses", model.ProtectIoctls, "n1", readAddresses},
		attack{"act on the node's devices by a socket passed to a container that is not intercepted", model.ProtectIoctls, "n1", takeOptedOut},
	)
}

// listDevices asks sockets of all kinds for the names of devices, natively and as 32-bit programs
// do.
func listDevices(argv ...string) func(*testing.T) string {
	return func(t *testing.T) string {
		out := lab.MustRun(t, "heddle", "n1/c1", append([]string{lab.IoctlsProgram(t)}, argv...)...)
		seen := map[string]bool{}
		for line := range strings.Lines(out) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "device "); ok {
				seen[name] = true
			}
		}
		if len(seen) == 0 {
			t.Fatalf("no device is seen, not even the container's:\n%s", out)
		}
		var foreign []string
		for name := range seen {
			if name != "lo" && name != "eth0" {
				foreign = append(foreign, name)
			}
		}
		slices.Sort(foreign)
		return strings.Join(foreign, " ")
	}
}

// readAddresses asks for the list of addresses, which Python programs do in this way.
func readAddresses(t *testing.T) string {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must(`import array`)
	p.Must(`list_addresses = lambda s: (b := array.array("B", bytes(8192)), fcntl.ioctl(s, 0x8912, struct.pack("iL", 8192, b.buffer_info()[0])), [socket.inet_ntoa(bytes(b[i + 20:i + 24])) for i in range(0, 8192, 40) if b[i]])[2]`)
	own := `["127.0.0.1", "` + lab.Address(t, "heddle", "n1/c1") + `"]`
	p.Expect(own, `list_addresses(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))`)
	var gained []string
	for _, family := range []int{4, 6} {
		if got := p.Must(`list_addresses(tcp(%d))`, family); got != own {
			gained = append(gained, got)
		}
	}
	return strings.Join(gained, " ")
}

// takerScript takes a socket at a path and does what CAP_NET_ADMIN would let it do with the node,
// were it the node's: it lists devices, opens the socket's network namespace and changes a device
// there.
const takerScript = `
import fcntl, os, socket, struct, sys
u = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
u.bind(sys.argv[1])
u.listen(1)
c, _ = u.accept()
_, fds, _, _ = socket.recv_fds(c, 1, 1)
c.send(b"x")
s, seen = socket.socket(fileno=fds[0]), []
for index in range(1, 100):
    try:
        name = fcntl.ioctl(s, 0x8910, struct.pack("16si20x", b"", index)) # SIOCGIFNAME
        seen.append(name[:16].rstrip(b"\0").decode())
    except OSError:
        pass
print("devices", *seen)
try:
    ns = fcntl.ioctl(s, 0x894c) # SIOCGSKNS
    print("namespace", "own" if os.fstat(ns).st_ino == os.stat("/proc/self/ns/net").st_ino else "the node's")
except OSError as e:
    print("namespace", e)
try:
    fcntl.ioctl(s, 0x8922, struct.pack("16si20x", b"heddle-vx0", 1300)) # SIOCSIFMTU
    print("changed a device")
except OSError as e:
    print("changed nothing:", e)
print("connects", s.connect_ex(("127.0.0.1", 1)) != 0)
`

// takeOptedOut passes a socket of an intercepted container to one that has opted out and has
// CAP_NET_ADMIN.
func takeOptedOut(t *testing.T) string {
	path := filepath.Join("/tmp", lab.Name+"-given")
	_ = os.Remove(path)
	defer os.Remove(path)
	giver := lab.StartPeer(t, "heddle", "n1/c1")
	giver.Begin(fmt.Sprintf(`give_late(%q, tcp())`, path))
	out := lab.RunContainer(t, "heddle", "n1/taker", func(spec *specs.Spec) {
		spec.Annotations["io.heddle.intercept"] = "false"
		c := spec.Process.Capabilities
		for _, set := range []*[]string{&c.Bounding, &c.Effective, &c.Permitted} {
			*set = append(*set, "CAP_NET_ADMIN")
		}
	}, lab.Python, "-c", takerScript, path)
	giver.Reply("give")
	if !strings.Contains(out, "devices lo") || !strings.Contains(out, "connects True") {
		t.Fatalf("the taker said\n%s", out)
	}
	var gained []string
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if strings.Contains(line, "heddle-") || line == "namespace the node's" || line == "changed a device" {
			gained = append(gained, line)
		}
	}
	return strings.Join(gained, "; ")
}
