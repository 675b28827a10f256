package stacks

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// apply puts a profile for endpoints with the label stack=NAME in force, until the end of the test.
// rest is what follows of the document.
func apply(t testing.TB, name, rest string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "profile.yaml")
	lab.WriteFile(t, file, fmt.Appendf(nil, "apiVersion: heddle.dev/v1\nkind: StackProfile\nname: %s\nselector: {labels: {stack: %s}}\n%s", name, name, rest))
	first := !strings.Contains(lab.Heddle(t, "stack"), "\n"+name+" ")
	lab.Heddle(t, "stack", "apply", file)
	if first {
		t.Cleanup(func() { _ = lab.Command("stack", "delete", name) })
	}
}

// label gives endpoints a profile's label, until the end of the test.
func label(t testing.TB, name string, endpoints ...string) {
	t.Helper()
	for _, e := range endpoints {
		node, _, _ := strings.Cut(e, "/")
		lab.Heddle(t, "endpoints", "label", "--node", node, e, "stack="+name)
		t.Cleanup(func() { _ = lab.Command("endpoints", "label", "--node", node, e, "stack-") })
	}
}

const everySetting = `stack: kernel
settings:
  congestion: cubic
  initial_window: 33
  receive_buffer: 60000
  send_buffer: 50000
  pacing_rate: 8gbit
  keepalive: {idle: 61s, interval: 11s, count: 6}
  user_timeout: 31s
  notsent_lowat: 16384
  delayed_ack: 40ms
  mss: 1000
`

// shownSettings are the options by which a program reads them, as level, name and what it reads.
var shownSettings = [][3]int{{1, 8, 120000}, {1, 7, 100000}, {1, 47, 1e9}, {1, 9, 1}, {6, 4, 61}, {6, 5, 11}, {6, 6, 6}, {6, 18, 31000}, {6, 25, 16384}}

func hasSettings(p *lab.Peer, socket string) {
	p.T.Helper()
	p.Expect(`"cubic"`, `%s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`, socket)
	for _, o := range shownSettings {
		p.Expect(fmt.Sprint(o[2]), `%s.getsockopt(%d, %d)`, socket, o[0], o[1])
	}
}

// TestKernelSettings: both ends have what the profile says, on every path and in both families,
// though their sockets were made before it came; the program's own setsockopt() is taken and has no
// effect.
func TestKernelSettings(t *testing.T) {
	client := lab.StartPeer(t, "heddle", "n1/c1")
	client.Must(`early = tcp()`) // and pools are filled
	apply(t, "all", everySetting)
	label(t, "all", "n1/c1", "n1/c2", "n2/c1")
	outside := lab.OutsideTarget(t)
	for _, c := range []struct {
		name, server, mode, target string
		family                     int
	}{
		{"direct", "n2/c1", "heddle", lab.OverlayOf("n2/c1")(t), 4},
		{"direct, IPv6", "n2/c1", "heddle", lab.Overlay6Of("n2/c1")(t), 6},
		{"local", "n1/c2", "heddle", lab.OverlayOf("n1/c2")(t), 4},
		{"local, IPv6", "n1/c2", "heddle", lab.Overlay6Of("n1/c2")(t), 6},
		{"loopback", "n1/c1", "heddle", "127.0.0.1", 4},
		{"overlay", "n2/c2", "overlay", lab.OverlayOf("n2/c2")(t), 4},
		{"outside", "", "", outside, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, port := client.In(t), lab.FreePort()
			server := lab.StartOutside(t)
			if c.server != "" {
				server = lab.StartPeer(t, c.mode, c.server)
			}
			server.Must(`l = listen(%d, %q, %d)`, c.family, map[int]string{4: "0.0.0.0", 6: "::"}[c.family], port)
			client.Must(`s = tcp(%d); s.setsockopt(6, 18, 1234); s.setsockopt(6, 13, b"reno"); s.connect((%q, %d))`, c.family, c.target, port)
			server.Must(`c, _ = l.accept()`)
			hasSettings(client, "s")
			if c.mode == "heddle" {
				hasSettings(server, "c")
			}
			client.Expect(`true`, `s.getsockopt(6, 2) <= 1000`) // TCP_MAXSEG: less the timestamps
			client.Must(`send(s, 1 << 20)`)
			server.Expect(client.Must(`digest(pattern(1 << 20))`), `receive(c, 1 << 20)`)
			client.Must(`s.close()`)
		})
	}
	server, port := lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`early.connect((%q, %d))`, lab.OverlayOf("n2/c1")(t), port)
	hasSettings(client, "early")
	if n := lab.Counters(t, "n1")["refuse_stack_setting"]; n == 0 {
		t.Error("what programs set without effect is not counted")
	}
}

// TestInitialWindow: so many segments leave before the first acknowledgement.
func TestInitialWindow(t *testing.T) {
	apply(t, "window", "stack: kernel\nsettings: {initial_window: 3}\n")
	label(t, "window", "n1/c1")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n2/c1")(t), port)
	if out := socketOf(t, "n1", client.PortOf("s")); !strings.Contains(out, " cwnd:3 ") {
		t.Errorf("want a window of 3: %s", out)
	}
}

// socketOf gives what the kernel of a node says of the connection from a port.
func socketOf(t testing.TB, node string, port uint16) string {
	t.Helper()
	return lab.InNode(t, node, "ss", "-tinmeOH", "sport", "=", fmt.Sprint(port))
}

// TestChangeable: what a profile lets programs change is theirs, before connect and after, and also
// when the profile changes; what they do not set is the profile's.
func TestChangeable(t *testing.T) {
	apply(t, "mine", "stack: kernel\nsettings: {congestion: cubic, user_timeout: 31s, notsent_lowat: 16384}\nchangeable: [congestion, user_timeout]\n")
	label(t, "mine", "n1/c1")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	target := lab.OverlayOf("n2/c1")(t)
	client.Must(`s = tcp(); s.setsockopt(6, 13, b"reno"); s.setsockopt(6, 25, 1); s.connect((%q, %d))`, target, port)
	client.Must(`o = connect(4, %q, %d); o.setsockopt(6, 18, 1234)`, target, port)
	check := func(when string) {
		t.Helper()
		client.Expect(`["reno", "cubic"]`, `[x.getsockopt(6, 13, 16).rstrip(b"\0").decode() for x in (s, o)]`)
		client.Expect(`[31000, 1234]`, `[x.getsockopt(6, 18) for x in (s, o)]`)
		client.Expect(`[16384, 16384]`, `[x.getsockopt(6, 25) for x in (s, o)]`)
	}
	check("connected")
	apply(t, "mine", "stack: kernel\nsettings: {congestion: cubic, user_timeout: 31s, notsent_lowat: 16384, mss: 1200}\nchangeable: [congestion, user_timeout]\n")
	check("after a change")
}

// TestLiveConnections: a changed profile reaches live connections, and its end takes back what can
// be taken back.
func TestLiveConnections(t *testing.T) {
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	label(t, "live", "n1/c1", "n2/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n2/c1")(t), port)
	server.Must(`c, _ = l.accept()`)
	usual := client.Must(`s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	apply(t, "live", "stack: kernel\nsettings: {congestion: reno, pacing_rate: 80mbit, send_buffer: 40000, keepalive: {idle: 61s, interval: 11s, count: 6}}\n")
	for _, end := range []struct {
		*lab.Peer
		socket string
	}{{client, "s"}, {server, "c"}, {server, "l"}} {
		end.Expect(`"reno"`, `%s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`, end.socket)
		end.Expect(`[10000000, 80000, 1, 61]`, `[%[1]s.getsockopt(1, 47), %[1]s.getsockopt(1, 7), %[1]s.getsockopt(1, 9), %[1]s.getsockopt(6, 4)]`, end.socket)
	}
	lab.Heddle(t, "stack", "delete", "live")
	client.Expect(usual, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.Expect(`[true, 0]`, `[s.getsockopt(1, 47) in (-1, 0xffffffff), s.getsockopt(1, 9)]`)
	client.Must(`send(s, 1 << 20)`)
	server.Expect(client.Must(`digest(pattern(1 << 20))`), `receive(c, 1 << 20)`)
}

// TestManyLiveConnections: 10,000 of them follow their profile, which costs the agent no more than a
// second. That is processor time: what else the machine does is not in it.
func TestManyLiveConnections(t *testing.T) {
	const many = 10000
	apply(t, "many", "stack: kernel\nsettings: {congestion: cubic}\n")
	label(t, "many", "n1/c1")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.FreePort()
	for _, p := range []*lab.Peer{client, server} {
		p.Must(`__import__("resource").setrlimit(7, (20000, 20000))`)
	}
	server.Must(`l = listen(4, "0.0.0.0", %d, backlog=4096)`, port)
	target := lab.OverlayOf("n1/c2")(t)
	for range many / 1000 {
		client.Must(`held = globals().get("held", []) + [connect(4, %q, %d) for _ in range(1000)]; globals()["held"] = held`, target, port)
		server.Must(`got = globals().get("got", []) + [l.accept()[0] for _ in range(1000)]; globals()["got"] = got`)
	}
	agent := lab.AgentPID(t, "n1")
	before, err := machine.ProcessorTime(agent)
	testutil.NoError(t, err)
	began := time.Now()
	apply(t, "many", "stack: kernel\nsettings: {congestion: reno, pacing_rate: 80mbit}\n")
	took := time.Since(began)
	after, err := machine.ProcessorTime(agent)
	testutil.NoError(t, err)
	client.Expect(fmt.Sprintf("[%d, %[1]d]", many), `[sum(s.getsockopt(6, 13, 4) == b"reno" for s in held), sum(s.getsockopt(1, 47) == 10000000 for s in held)]`)
	t.Logf("%d connections followed their profile in %v, both agents and the command line included; %v of their agent", many, took, after-before)
	if after-before > time.Second {
		t.Errorf("it took %v of the agent's processor time", after-before)
	}
}

// TestRefused: where a profile says so, an endpoint whose profile the node cannot serve has no TCP
// sockets, and what it has makes no connection; with a fallback it has the rest of the profile.
func TestRefused(t *testing.T) {
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	own := lab.FreePort()
	client.Must(`early = tcp(); l = listen(4, "0.0.0.0", %d)`, own)
	label(t, "none", "n1/c1")
	apply(t, "none", "stack: kernel\nfallback: refuse\nsettings: {congestion: nosuch}\n")
	target := lab.OverlayOf("n2/c1")(t)
	client.Expect(`"EPROTONOSUPPORT"`, `error_of(tcp)`)
	client.Expect(`"ENETDOWN"`, `error_of(early.connect, (%q, %d))`, target, port)
	server.Must(`s = connect(4, %q, %d)`, lab.OverlayOf("n1/c1")(t), own)
	server.Must(`s.settimeout(20); s.send(b"x")`)
	server.Expect(`"ECONNRESET"`, `error_of(s.recv, 1)`)
	out := lab.Heddle(t, "stack")
	if !strings.Contains(out, "refused") || !strings.Contains(out, "none of that name, but reno") {
		t.Errorf("heddle stack: %s", out)
	}
	if status := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(status, "stack_not_served") {
		t.Errorf("heddle status: %s", status)
	}
	if n := lab.Counters(t, "n1"); n["refuse_stack"] == 0 || n["cut_stack"] == 0 {
		t.Errorf("refuse_stack %d, cut_stack %d", n["refuse_stack"], n["cut_stack"])
	}
	apply(t, "none", "stack: module/nosuch\nsettings: {user_timeout: 7s, memory: 1048576}\n")
	client.Must(`s = connect(4, %q, %d)`, target, port)
	client.Expect(`7000`, `s.getsockopt(6, 18)`)
}

// TestSurvivesAgents: the profile holds while no agent runs, and with the next.
func TestSurvivesAgents(t *testing.T) {
	apply(t, "stays", "stack: kernel\nsettings: {congestion: reno}\n")
	label(t, "stays", "n1/c1")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	client.Must(`s = tcp()`)
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	lab.EndAgent(t, "n1", 9)
	client.Must(`s.connect((%q, %d))`, lab.OverlayOf("n2/c1")(t), port)
	client.Expect(`"reno"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	testutil.NoError(t, lab.Command("up"))
	client.Expect(`"reno"`, `s.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
	client.Must(`o = connect(4, %q, %d)`, lab.OverlayOf("n2/c1")(t), port)
	client.Expect(`"reno"`, `o.getsockopt(6, 13, 16).rstrip(b"\0").decode()`)
}

// TestBadProfiles: what is malformed is refused whole, with its place.
func TestBadProfiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bad.yaml")
	lab.WriteFile(t, file, []byte("apiVersion: heddle.dev/v1\nkind: StackProfile\nname: good\nselector: {labels: {a: b}}\nstack: kernel\n---\n"+
		"apiVersion: heddle.dev/v1\nkind: StackProfile\nname: bad\nselector: {labels: {a: b}}\nstack: kernel\nsettings: {mss: 10}\n"))
	raw, err := exec.CommandContext(t.Context(), lab.Bin, "stack", "apply", "--lab", lab.Name, file).CombinedOutput()
	if out := string(raw); err == nil || !strings.Contains(out, "settings.mss") || !strings.Contains(out, ":12:") {
		t.Errorf("%v: %s", err, out)
	}
	if slices.Contains(strings.Fields(lab.Heddle(t, "stack")), "good") {
		t.Error("one of two profiles is in force")
	}
}
