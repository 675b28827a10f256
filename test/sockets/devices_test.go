package sockets

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// deviceScript makes listeners and clients that are bound to devices, by name or by index; 99 is
// none's.
const deviceScript = `
DEVICES = (None, "lo", "eth0", 1, 99)

def on_device(s, device):
    if isinstance(device, int):
        s.setsockopt(socket.SOL_SOCKET, 62, device)
    elif device:
        s.setsockopt(socket.SOL_SOCKET, 25, device.encode())
    return s

def device_listeners(first, addresses):
    """A listener for each device and address, at ports of their own: their names, and what bind() said."""
    global held
    held, said = [], {}
    for n, (device, addr) in enumerate((d, a) for d in DEVICES for a in addresses):
        s = on_device(tcp(6 if ":" in addr else 4), device)
        said[f"{device} {addr}"] = [first + n, error_of(s.bind, (addr, first + n))]
        if said[f"{device} {addr}"][1] == "ok":
            s.listen(64)
            held.append(s)
    return said

def device_clients(listeners, devices, targets):
    """What connects say to each listener of a target's family, from sockets bound to each device."""
    said = {}

    def ask(name, port, device, target):
        s = on_device(tcp(6 if ":" in target else 4), device)
        s.setsockopt(socket.IPPROTO_TCP, 18, 900) # TCP_USER_TIMEOUT, in ms
        said[f"{device} to {target} of {name}"] = error_of(s.connect, (target, port))
        s.close()

    asking = [threading.Thread(target=ask, args=(name, port, device, target)) for name, (port, was) in listeners.items() if was == "ok"
              for device in devices for target in targets if (":" in target) == (":" in name)]
    for t in asking: t.start()
    for t in asking: t.join()
    return said
`

// devicePeer is a peer that knows deviceScript.
func devicePeer(t *testing.T, mode, container string) *lab.Peer {
	p := lab.StartPeer(t, mode, container)
	p.Must("%s", deviceScript)
	return p
}

// deviceAnswers is what p says of connects to the listeners, by which it was.
func deviceAnswers(t *testing.T, p *lab.Peer, listeners, devices string, targets ...string) map[string]string {
	t.Helper()
	list, err := json.Marshal(targets)
	testutil.NoError(t, err)
	p.Begin("device_clients(json.loads('" + listeners + "'), " + devices + ", " + string(list) + ")")
	said := map[string]string{}
	if raw := p.Reply("connects"); json.Unmarshal([]byte(raw), &said) != nil || len(said) == 0 {
		t.Fatalf("%s: %s", p.Name, raw)
	}
	return said
}

// TestBoundToDevices has listeners and clients that are bound to devices of the container, or to
// none: each listener is reached by what a plain container's is, from wherever and whoever, and
// each client reaches what a plain container's does.
func TestBoundToDevices(t *testing.T) {
	own4, own6 := lab.Address(t, "heddle", "n1/c1"), lab.Overlay6(t, "n1/c1")
	want := map[string]map[string]string{} // what plain clients say of a plain server, by client's container
	for _, serverMode := range lab.Modes {
		server := devicePeer(t, serverMode, "n1/c1")
		listeners := server.Must(`device_listeners(%d, ["0.0.0.0", "127.0.0.1", %q, "::", "::1", %q])`, lab.FreePort()+1000*len(want), own4, own6)
		for _, client := range []struct {
			container, mode, devices string
			targets                  []string
		}{
			{"n1/c1", "overlay", "[None]", []string{"127.0.0.1", "0.0.0.0", own4, "::1", "::", own6}},
			{"n1/c1", "heddle", "[None]", []string{"127.0.0.1", "0.0.0.0", own4, "::1", "::", own6}},
			{"n1/c1", serverMode, "DEVICES", []string{"127.0.0.1", "0.0.0.0", own4, "::1", "::", own6}},
			{"n1/c2", "overlay", "[None, 'lo', 'eth0', 99]", []string{own4, own6}},
			{"n1/c2", "heddle", "[None, 'lo', 'eth0', 99]", []string{own4, own6}},
			{"n2/c1", "overlay", "[None, 'lo', 'eth0', 99]", []string{own4, own6}},
			{"n2/c1", "heddle", "[None, 'lo', 'eth0', 99]", []string{own4, own6}},
			{"n1/c1", "host", "[None]", []string{own4, own6}},
		} {
			key := client.container + client.devices
			if client.mode == "host" {
				key += "host"
			}
			t.Run(serverMode+" server, "+client.mode+" client of "+client.container+" with "+client.devices, func(t *testing.T) {
				got := deviceAnswers(t, devicePeer(t, client.mode, client.container), listeners, client.devices, client.targets...)
				if want[key] == nil {
					want[key] = got
					return
				}
				for _, name := range slices.Sorted(maps.Keys(want[key])) {
					// The own stack's listeners are looked up without a device: differences.md.
					if serverMode == "overlay" && client.mode == "heddle" && client.container == "n1/c1" && !strings.Contains(name, "of None") {
						continue
					}
					if got[name] != want[key][name] {
						t.Errorf("%s: %s, want %s", name, got[name], want[key][name])
					}
				}
			})
		}
		server.Must(`[s.close() for s in held] and None`)
	}
	if n := lab.Counters(t, "n1")["refuse_device"]; n == 0 {
		t.Error("refuse_device is 0")
	}
}
