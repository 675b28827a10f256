package test

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestUnpaced: where BBR is what a node gives every socket, connections over lo have reno, while the program reads "bbr"; what it
// chose itself, and connections that leave the node, stay as they are.
func TestUnpaced(t *testing.T) {
	giveEverySocketBBR(t)
	for _, to := range []struct {
		name, server, target string
		family               int
		unpaced              bool
	}{
		{"same node", "n1/c2", overlayOf("n1/c2")(t), 4, true},
		{"same node, IPv6", "n1/c2", overlay6Of("n1/c2")(t), 6, true},
		{"loopback", "n1/c1", "127.0.0.1", 4, true},
		{"IPv6 loopback", "n1/c1", "::1", 6, true},
		{"other node", "n2/c1", overlayOf("n2/c1")(t), 4, false},
	} {
		t.Run(to.name, func(t *testing.T) {
			client, server, port := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", to.server), freePort()
			server.must(`l = listen(%d, %q, %d)`, to.family, map[int]string{4: "0.0.0.0", 6: "::"}[to.family], port)
			client.must(`s = connect(%d, %q, %d)`, to.family, to.target, port)
			server.must(`c, _ = l.accept()`)
			own := client.portOf("s")
			want := map[bool]string{true: "reno", false: "bbr"}[to.unpaced]
			client.in(t).hasCongestion(t, "sport", own, want)
			if to.unpaced {
				server.in(t).hasCongestion(t, "dport", own, want)
			}
			for _, end := range []struct {
				*peer
				socket string
			}{{client, "s"}, {server, "c"}, {server, "l"}} {
				end.expect(`"bbr"`, `%s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`, end.socket)
				end.expect(`"bb"`, `%s.getsockopt(6, 13, 2).decode()`, end.socket)
			}
			client.expect(`20`, `len(s.getsockopt(6, 26, 100))`) // TCP_CC_INFO
			client.expect(`3`, `len(s.getsockopt(6, 26, 3))`)
			client.must(`send(s, 1 << 20)`)
			server.expect(client.must(`digest(pattern(1 << 20))`), `receive(c, 1 << 20)`)
		})
	}
	t.Run("chosen", chosenCongestion)
	t.Run("disconnected", disconnectedCongestion)
}

// chosenCongestion: a program that asks for BBR has it, before and after connect.
func chosenCongestion(t *testing.T) {
	client, server, port := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n1/c2"), freePort()
	target := overlayOf("n1/c2")(t)
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`s = tcp()`)
	client.must(`s.setsockopt(6, 13, b"bbr")`)
	client.must(`s.connect((%q, %d))`, target, port)
	client.hasCongestion(t, "sport", client.portOf("s"), "bbr")

	client.must(`s = connect(4, %q, %d)`, target, port)
	own := client.portOf("s")
	client.hasCongestion(t, "sport", own, "reno")
	client.expect(`{"error": "ENOENT"}`, `s.setsockopt(6, 13, b"nobody's")`)
	client.expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.must(`s.setsockopt(6, 13, b"reno")`)
	client.expect(`"reno"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.must(`s.setsockopt(6, 13, b"bbr")`)
	client.hasCongestion(t, "sport", own, "bbr")
	client.expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
}

// disconnectedCongestion: a socket that was connected over lo goes elsewhere as any other, and so does what it accepts when it
// listens.
func disconnectedCongestion(t *testing.T) {
	client, near, far, port := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n1/c2"), startPeer(t, "heddle", "n2/c1"), freePort()
	near.must(`l = listen(4, "0.0.0.0", %d)`, port)
	far.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`s = connect(4, %q, %d)`, overlayOf("n1/c2")(t), port)
	client.hasCongestion(t, "sport", client.portOf("s"), "reno")
	client.must(`import ctypes`)
	client.expect(`0`, `ctypes.CDLL(None).connect(s.fileno(), bytes(16), 16)`) // AF_UNSPEC
	client.must(`s.connect((%q, %d))`, overlayOf("n2/c1")(t), port)
	client.hasCongestion(t, "sport", client.portOf("s"), "bbr")
	client.expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)

	own, at := overlayOf("n1/c1")(t), freePort()
	client.must(`b = bound(4, %q, %d)`, own, at)
	client.must(`b.connect((%q, %d))`, overlayOf("n1/c2")(t), port)
	client.hasCongestion(t, "sport", uint16(at), "reno")
	client.expect(`0`, `ctypes.CDLL(None).connect(b.fileno(), bytes(16), 16)`)
	client.must(`b.listen()`)
	far.must(`s = connect(4, %q, %d)`, own, at)
	client.must(`c, _ = b.accept()`)
	client.hasCongestion(t, "dport", far.portOf("s"), "bbr")
}

// hasCongestion checks the congestion control that the kernel of n1 has for the connection from (side "sport") or to ("dport") a port.
func (p *peer) hasCongestion(t *testing.T, side string, port uint16, want string) {
	t.Helper()
	out := inNode(t, "n1", "ss", "-tinH", "state", "established", side, "=", strconv.Itoa(int(port)))
	ends := 0
	for _, line := range strings.Split(out, "\n") {
		for _, word := range strings.Fields(line) {
			if word == "bbr" || word == "reno" || word == "cubic" {
				if ends++; word != want {
					t.Errorf("%s: %s, want %s", p.name, word, want)
				}
			}
		}
	}
	if ends == 0 {
		t.Errorf("%s: no connection of port %d:\n%s", p.name, port, out)
	}
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
		before := inNode(t, node, "cat", file)
		inNode(t, node, "sh", "-c", "echo bbr >"+file)
		t.Cleanup(func() {
			restore := exec.Command("nsenter", "--net=/run/netns/"+labName+"-"+node, "sh", "-c", "echo "+strings.TrimSpace(before)+" >"+file)
			if out, err := restore.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
