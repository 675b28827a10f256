package paths

import (
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/test/lab"
)

var places6 = []lab.Place{
	{Name: "other node", Client: "n1/c1", Server: "n2/c1", Target: lab.Overlay6Of("n2/c1"), Modes: lab.ContainerModes, IPv6: true},
	{Name: "same node", Client: "n1/c1", Server: "n1/c2", Target: lab.Overlay6Of("n1/c2"), Modes: lab.ContainerModes, IPv6: true},
	{Name: "own address", Client: "n1/c1", Server: "n1/c1", Target: lab.Overlay6Of("n1/c1"), Modes: lab.SameModes, IPv6: true},
	{Name: "loopback", Client: "n1/c1", Server: "n1/c1", Target: func(testing.TB) string { return "::1" }, Modes: lab.SameModes, IPv6: true},
	{Name: "from own node", Client: "n1/c2", Server: "n1/c1", Target: lab.Overlay6Of("n1/c1"), Modes: lab.FromHostModes, IPv6: true},
	{Name: "from other node", Client: "n2/c1", Server: "n1/c1", Target: lab.Overlay6Of("n1/c1"), Modes: lab.FromHostModes, IPv6: true},
	{Name: "own node gateway", Client: "n1/c1", Server: "n1/c2", Target: lab.Gateway6Of("n1/c1"), Modes: lab.ToHostModes, IPv6: true},
	{Name: "other node gateway", Client: "n1/c1", Server: "n2/c1", Target: lab.Gateway6Of("n2/c1"), Modes: lab.ToHostModes, IPv6: true},
}

var scripts6 = append([]script{
	{name: "dual-stack listener", text: `
server: l = listen(6, "::", $port)
server: l.getsockname()
client: s = connect(6, "$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "V6ONLY listener beside an ipv4 one", text: `
server: l4 = listen(4, "0.0.0.0", $port)
server: l = listen(6, "::", $port, v6only=1)
server: l.getsockname()
client: s = connect(6, "$target", $port)
server: c, who = l.accept()` + exchange + `
server: l4.close()`},
	{name: "listener at a given address", text: `
server: l = listen(6, "$target", $port)
server: l.getsockname()
client: s = connect(6, "$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "bound to its own address", bound: true, skip: []string{"loopback", "from own node", "from other node"}, text: `
server: l = listen(6, "::", $port)
client: s = connect(6, "$target", $port, ("$client", 0))
server: c, who = l.accept()` + exchange},
	{name: "bound to its own address and a port", bound: true, skip: []string{"loopback", "from own node", "from other node"}, text: `
server: l = listen(6, "::", $port)
client: s = connect(6, "$target", $port, ("$client", $source))
server: c, who = l.accept()` + exchange},
	{name: "V6ONLY client socket", text: `
server: l = listen(6, "::", $port)
client: s = tcp(6)
client: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
client: s.connect(("$target", $port))
server: c, who = l.accept()` + exchange},
	{name: "ipv4 listener only", fails: true, text: `
server: l = listen(4, "0.0.0.0", $port)
client: connect(6, "$target", $port)`},
}, inFamily("6", "::", "")...)

// lookIPv6 is look for IPv6: path, and both ends' addresses as programs see them.
func (r pathRun) lookIPv6(t *testing.T, sport uint16) {
	t.Helper()
	if r.clientMode == "heddle" {
		c := lab.AwaitConnection(t, r.place.Client, sport, uint16(r.port), 300000, 70001)
		want := map[string]model.Path{
			"other node": names.PathDirect, "same node": names.PathLocal, "own address": names.PathLocal, "loopback": names.PathLoopback,
			"own node gateway": names.PathNode, "other node gateway": names.PathOverlay,
		}[r.place.Name]
		if r.place.Name == "other node" && r.script.bound || r.place.Name == "same node" && r.serverMode == "overlay" {
			want = names.PathOverlay
		}
		if c.Path != want || c.Remote.Addr() != netip.MustParseAddr(r.target) || !c.Local.Addr().Is6() {
			t.Errorf("client: path %s from %s to %s, want %s to %s", c.Path, c.Local, c.Remote, want, r.target)
		}
	}
	if r.serverMode == "heddle" {
		c := lab.AwaitConnection(t, r.place.Server, uint16(r.port), sport, 70001, 300000)
		want := map[string]model.Path{
			"other node": names.PathDirect, "same node": names.PathLocal, "own address": names.PathLocal, "loopback": names.PathLoopback,
			"from own node": names.PathNode, "from other node": names.PathOverlay,
		}[r.place.Name]
		if r.place.Name == "other node" && (r.script.bound || r.clientMode != "heddle") || r.place.Name == "same node" && r.clientMode == "overlay" {
			want = names.PathOverlay
		}
		if c.Path != want || c.Local.Addr() != netip.MustParseAddr(r.target) || !c.Remote.Addr().Is6() {
			t.Errorf("server: path %s at %s from %s, want %s at %s", c.Path, c.Local, c.Remote, want, r.target)
		}
	}
}

// TestBoundLoopbackIPv6: a client reaches listeners on ::1 and [::] by ::1, whatever it is bound
// to.
func TestBoundLoopbackIPv6(t *testing.T) {
	var list []script
	for _, listener := range []string{`6, "::1", $port`, `6, "::", $port`, `6, "::", $port, v6only=1`} {
		for _, client := range []string{`"::", 0`, `"::", $source`, `"::1", 0`, `"$client", 0`} {
			for _, v6only := range []string{"0", "1"} {
				// The one pair that docs/differences.md has.
				if strings.Contains(listener, "v6only") && (strings.Contains(client, "::1") || strings.Contains(client, "::\"") && v6only == "0") {
					continue
				}
				list = append(list, script{name: listener + " from " + client + " v6only " + v6only, bound: true, text: `
server: l = listen(` + listener + `)
client: s = tcp(6)
client: s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
client: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, ` + v6only + `)
client: s.bind((` + client + `))
client: s.connect(("::1", $port))
server: c, who = l.accept()
server: who
client: names(s)
server: names(c)
client: send(s, 70001)
server: receive(c, 70001)
server: c.close()
client: s.recv(1)`})
			}
		}
	}
	compareAt(t, places6[3], list...)
}
