package stacks

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// congestionOf gives the congestion control that the kernel of n1 has for the connection of a
// socket of p: what programs read may be another (decision 0037).
func congestionOf(t testing.TB, p *lab.Peer, socket string) string {
	t.Helper()
	out := socketOf(t, "n1", p.PortOf(socket))
	for _, name := range []string{"bbr", "reno", "cubic"} {
		if strings.Contains(out, " "+name+" ") {
			return name
		}
	}
	t.Fatalf("no congestion control in %q", out)
	return ""
}

// TestHeldByOtherOptions: options that undo what a profile holds are held with it.
func TestHeldByOtherOptions(t *testing.T) {
	apply(t, "held", "stack: kernel\nsettings: {receive_buffer: 60000, send_buffer: 50000, delayed_ack: 40ms}\n")
	label(t, "held", "n1/c1")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n2/c1")(t), port)
	server.Must(`c, _ = l.accept()`)
	const bufLock, delackMax = 72, 46
	client.Must(`s.setsockopt(1, %d, 0)`, bufLock)
	client.Expect(`3`, `s.getsockopt(1, %d)`, bufLock)
	if client.Must(`error_of(s.getsockopt, 6, %d)`, delackMax) != `"ENOPROTOOPT"` { // Linux 6.15
		client.Must(`s.setsockopt(6, %d, 1000)`, delackMax)
		client.Expect(`40000`, `s.getsockopt(6, %d)`, delackMax)
	}
	server.Begin(`send(c, 1 << 24)`)
	client.Must(`receive(s, 1 << 24)`)
	client.Expect(`[120000, 100000]`, `[s.getsockopt(1, 8), s.getsockopt(1, 7)]`)
}

// TestOwnIsTakenBack: what a profile set in the place of the program's own goes with the profile.
func TestOwnIsTakenBack(t *testing.T) {
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	target := lab.OverlayOf("n2/c1")(t)
	client.Must(`s = connect(4, %q, %d); s.setsockopt(1, 47, 3000000); s.setsockopt(6, 18, 1234)`, target, port)
	label(t, "own", "n1/c1")
	apply(t, "own", "stack: kernel\nsettings: {pacing_rate: 8mbit, user_timeout: 31s}\n")
	client.Expect(`[1000000, 31000]`, `[s.getsockopt(1, 47), s.getsockopt(6, 18)]`)
	lab.Heddle(t, "stack", "delete", "own")
	client.Expect(`[true, 0]`, `[s.getsockopt(1, 47) in (-1, 0xffffffff), s.getsockopt(6, 18)]`)
}

// TestWithoutBBROnNode: a profile that goes leaves no BBR on a connection within the node, and one
// that is followed by another path holds there (decision 0037).
func TestWithoutBBROnNode(t *testing.T) {
	client, local, remote := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.StartPeer(t, "heddle", "n2/c1")
	if usual := client.Must(`tcp().getsockopt(6, 13, 16).rstrip(b"\0").decode()`); usual != `"bbr"` {
		t.Skipf("the node gives %s", usual)
	}
	near, far := lab.FreePort(), lab.FreePort()
	local.Must(`l = listen(4, "0.0.0.0", %d)`, near)
	remote.Must(`l = listen(4, "0.0.0.0", %d)`, far)
	client.Must(`s = connect(4, %q, %d); o = connect(4, %[1]q, %[2]d)`, lab.OverlayOf("n1/c2")(t), near)
	client.Must(`__import__("ctypes").CDLL(None).connect(o.fileno(), bytes(16), 16)`) // AF_UNSPEC
	label(t, "nobbr", "n1/c1")
	apply(t, "nobbr", "stack: kernel\nsettings: {congestion: reno}\n")
	client.Must(`o.connect((%q, %d))`, lab.OverlayOf("n2/c1")(t), far)
	if got := congestionOf(t, client, "o"); got != "reno" {
		t.Errorf("profile reno, and the connection to another node has %s", got)
	}
	apply(t, "nobbr", "stack: kernel\nsettings: {congestion: cubic}\n")
	if got := congestionOf(t, client, "s"); got != "cubic" {
		t.Errorf("profile cubic: %s", got)
	}
	for _, step := range []func(){
		func() { apply(t, "nobbr", "stack: kernel\nsettings: {congestion: bbr}\n") },
		func() { apply(t, "nobbr", "stack: kernel\nsettings: {congestion: cubic}\n") },
		func() { lab.Heddle(t, "stack", "delete", "nobbr") },
	} {
		step()
		want := "reno"
		if strings.Contains(lab.Heddle(t, "stack"), "cubic") {
			want = "cubic"
		}
		if got := congestionOf(t, client, "s"); got != want {
			t.Errorf("within the node: %s, want %s", got, want)
		}
	}
	client.Expect(`"bbr"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
}

// TestKilledHalfWay: an agent that is killed before live connections have followed is made up for by
// the next.
func TestKilledHalfWay(t *testing.T) {
	client, server, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	label(t, "half", "n2/c1")
	apply(t, "half", "stack: kernel\nsettings: {pacing_rate: 80mbit}\n")
	client.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n1/c1")(t), port)
	client.Expect(`10000000`, `s.getsockopt(1, 47)`)
	lab.EndAgent(t, "n2", 9)
	lab.Heddle(t, "stack", "delete", "--node", "n1", "half")
	forgetStacks(t)
	testutil.NoError(t, lab.Command("up"))
	client.Expect(`true`, `s.getsockopt(1, 47) in (-1, 0xffffffff)`)
}

// forgetStacks deletes what the programs of n2 have of profiles.
func forgetStacks(t testing.TB) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(lab.NodeFile("n2", "bpf/heddle/stack_by_endpoint"), nil)
	testutil.NoError(t, err)
	defer m.Close()
	var id uint32
	for m.NextKey(nil, &id) == nil {
		testutil.NoError(t, m.Delete(id))
	}
}
