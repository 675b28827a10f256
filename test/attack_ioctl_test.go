package test

import (
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"list the node's devices", model.ProtectIoctls, "n1", listDevices("names")},
		attack{"list the node's devices while the descriptor changes", model.ProtectIoctls, "n1", listDevices("race", "300")},
		attack{"read the node's addresses", model.ProtectIoctls, "n1", readAddresses},
	)
}

// listDevices asks sockets of all kinds for the names of devices, natively and as 32-bit programs do.
func listDevices(argv ...string) func(*testing.T) string {
	return func(t *testing.T) string {
		out := mustRun(t, "heddle", "n1/c1", append([]string{ioctlsProgram(t)}, argv...)...)
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
	p := startPeer(t, "heddle", "n1/c1")
	p.must(`import array`)
	p.must(`list_addresses = lambda s: (b := array.array("B", bytes(8192)), fcntl.ioctl(s, 0x8912, struct.pack("iL", 8192, b.buffer_info()[0])), [socket.inet_ntoa(bytes(b[i + 20:i + 24])) for i in range(0, 8192, 40) if b[i]])[2]`)
	own := `["127.0.0.1", "` + address(t, "heddle", "n1/c1") + `"]`
	p.expect(own, `list_addresses(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))`)
	var gained []string
	for _, family := range []int{4, 6} {
		if got := p.must(`list_addresses(tcp(%d))`, family); got != own {
			gained = append(gained, got)
		}
	}
	return strings.Join(gained, " ")
}
