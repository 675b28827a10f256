package paths

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestUnpaced: where BBR is what a node gives every socket, connections over lo have reno, while
// the program reads "bbr"; what it chose itself, and connections that leave the node, stay as they
// are.
func TestUnpaced(t *testing.T) {
	giveEverySocketBBR(t)
	for _, to := range []struct {
		name, server, target string
		family               int
		unpaced              bool
	}{
		{"same node", "n1/c2", lab.OverlayOf("n1/c2")(t), 4, true},
		{"same node, IPv6", "n1/c2", lab.Overlay6Of("n1/c2")(t), 6, true},
		{"loopback", "n1/c1", "127.0.0.1", 4, true},
		{"IPv6 loopback", "n1/c1", "::1", 6, true},
		{"other node", "n2/c1", lab.OverlayOf("n2/c1")(t), 4, false},
	} {
		t.Run(to.name, func(t *testing.T) {
			client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", to.server), lab.FreePort()
			server.Must(`l = listen(%d, %q, %d)`, to.family, map[int]string{4: "0.0.0.0", 6: "::"}[to.family], port)
			client.Must(`s = connect(%d, %q, %d)`, to.family, to.target, port)
			server.Must(`c, _ = l.accept()`)
			own := client.PortOf("s")
			want := map[bool]string{true: "reno", false: "bbr"}[to.unpaced]
			client.In(t).HasCongestion(t, "sport", own, want)
			if to.unpaced {
				server.In(t).HasCongestion(t, "dport", own, want)
			}
			for _, end := range []struct {
				*lab.Peer
				socket string
			}{{client, "s"}, {server, "c"}, {server, "l"}} {
				end.Expect(`"bbr"`, `%s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`, end.socket)
				end.Expect(`"bb"`, `%s.getsockopt(6, 13, 2).decode()`, end.socket)
			}
			client.Expect(`20`, `len(s.getsockopt(6, 26, 100))`) // TCP_CC_INFO
			client.Expect(`3`, `len(s.getsockopt(6, 26, 3))`)
			client.Must(`send(s, 1 << 20)`)
			server.Expect(client.Must(`digest(pattern(1 << 20))`), `receive(c, 1 << 20)`)
		})
	}
	t.Run("chosen", chosenCongestion)
	t.Run("disconnected", disconnectedCongestion)
}

// chosenCongestion: a program that asks for BBR has it, before and after connect.
func chosenCongestion(t *testing.T) {
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.FreePort()
	target := lab.OverlayOf("n1/c2")(t)
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = tcp()`)
	client.Must(`s.setsockopt(6, 13, b"bbr")`)
	client.Must(`s.connect((%q, %d))`, target, port)
	client.HasCongestion(t, "sport", client.PortOf("s"), "bbr")

	client.Must(`s = connect(4, %q, %d)`, target, port)
	own := client.PortOf("s")
	client.HasCongestion(t, "sport", own, "reno")
	client.Expect(`{"error": "ENOENT"}`, `s.setsockopt(6, 13, b"nobody's")`)
	client.Expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.Must(`s.setsockopt(6, 13, b"reno")`)
	client.Expect(`"reno"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.Must(`s.setsockopt(6, 13, b"bbr")`)
	client.HasCongestion(t, "sport", own, "bbr")
	client.Expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
}

// disconnectedCongestion: a socket that was connected over lo goes elsewhere as any other, and so
// does what it accepts when it listens.
func disconnectedCongestion(t *testing.T) {
	client, near, far, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	near.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	far.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n1/c2")(t), port)
	client.HasCongestion(t, "sport", client.PortOf("s"), "reno")
	client.Must(`import ctypes`)
	client.Expect(`0`, `ctypes.CDLL(None).connect(s.fileno(), bytes(16), 16)`) // AF_UNSPEC
	client.Must(`s.connect((%q, %d))`, lab.OverlayOf("n2/c1")(t), port)
	client.HasCongestion(t, "sport", client.PortOf("s"), "bbr")
	client.Expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)

	own, at := lab.OverlayOf("n1/c1")(t), lab.FreePort()
	client.Must(`b = bound(4, %q, %d)`, own, at)
	client.Must(`b.connect((%q, %d))`, lab.OverlayOf("n1/c2")(t), port)
	client.HasCongestion(t, "sport", uint16(at), "reno")
	client.Expect(`0`, `ctypes.CDLL(None).connect(b.fileno(), bytes(16), 16)`)
	client.Must(`b.listen()`)
	far.Must(`s = connect(4, %q, %d)`, own, at)
	client.Must(`c, _ = b.accept()`)
	client.HasCongestion(t, "dport", far.PortOf("s"), "bbr")
}

// giveEverySocketBBR makes BBR the nodes' default until the end of the test.
func giveEverySocketBBR(t *testing.T) {
	t.Helper()
	const file = "/proc/sys/net/ipv4/tcp_congestion_control"
	// Network namespaces may have what everybody may choose.
	if b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control"); err != nil || !slices.Contains(strings.Fields(string(b)), "bbr") {
		t.Skipf("the lab cannot have BBR, only %s, %v", b, err)
	}
	for _, node := range []string{"n1", "n2"} {
		before := lab.InNode(t, node, "cat", file)
		lab.InNode(t, node, "sh", "-c", "echo bbr >"+file)
		t.Cleanup(func() {
			restore := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-"+node, "sh", "-c", "echo "+strings.TrimSpace(before)+" >"+file)
			if out, err := restore.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
