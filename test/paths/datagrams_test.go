package paths

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

//go:embed testdata/datagrams.py
var datagramsScript string

// datagrams adds the functions of datagrams.py to a peer.
func datagrams(p *lab.Peer) *lab.Peer {
	p.T.Helper()
	p.Must("%s", datagramsScript)
	return p
}

// datagramPlaces are where the two ends of an exchange are. The modes of a pair differ in nothing
// but interception; of a server that is no container, in nothing at all.
func datagramPlaces() []lab.Place {
	own := lab.Place{Name: "own address", Client: "n1/c1", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: lab.SameModes}
	local := lab.Place{Name: "loopback", Client: "n1/c1", Server: "n1/c1", Target: func(testing.TB) string { return "127.0.0.1" }, Modes: lab.SameModes}
	out := []lab.Place{own, local}
	for _, pl := range lab.Places {
		if slices.Contains([]string{"same node", "other node", "own node gateway", "own node underlay", "other node underlay", "outside", "from own node", "from other node"}, pl.Name) {
			out = append(out, pl)
		}
	}
	return out
}

// A datagramStep is what a client does with a server that echoes at $port; nobody has $closed.
// Answers that match want are the same everywhere; without want they only have to be the same in
// all modes.
type datagramStep struct{ name, step, want string }

var datagramSteps = []datagramStep{
	{"small", `echo("$target", $port, 40)`, `^\[\[34, "\w+"\], true, `},
	{"connected", `echo("$target", $port, 40, True)`, `^\[\[34, "\w+"\], true, `},
	{"at the MTU", `echo("$target", $port, 1422)`, `^\[\[1416, `},
	{"fragmented", `echo("$target", $port, 20000)`, `^\[\[19994, `},
	{"the largest", `echo("$target", $port, 65507)`, `^\[\[65501, `},
	{"too large", `outcome(echo, "$target", $port, 65508)`, `^"EMSGSIZE"$`},
	{"connected, port unreachable", `refused("$target", $closed)`, `^\["ECONNREFUSED", `},
	{"ancillary data", `ancillary("$target", $port)`, `^\[0, "`},
	{"segments", `segments("$target", $port)`, `^10000$`},
	{"path MTU", `path_mtu("$target", $port)`, `^\[\d+, \d+, "EMSGSIZE", \d+\]$`},
	{"raw ICMP", `icmp("$target", socket.SOCK_RAW)`, `^\["\S+", 0, 0, "0007", \[56, `},
	{"raw ICMP, fragmented", `icmp("$target", socket.SOCK_RAW, 9000)`, `, \[9000, `},
	{"ping socket", `icmp("$target", socket.SOCK_DGRAM)`, `^\["\S+", 0, 0, "0007", \[56, `},
	{"ping socket of a user", `forked(as_user, 1000, icmp, "$target", socket.SOCK_DGRAM)`, `^\["\S+", 0, 0, `},
}

// datagramSteps6 are datagramSteps for IPv6.
var datagramSteps6 = []datagramStep{
	{"small", `echo("$target", $port, 40)`, `^\[\[22, "\w+"\], true, `},
	{"connected", `echo("$target", $port, 40, True)`, `^\[\[22, "\w+"\], true, `},
	{"at the MTU", `echo("$target", $port, 1402)`, `^\[\[1384, `},
	{"fragmented", `echo("$target", $port, 20000)`, `^\[\[19982, `},
	{"the largest", `echo("$target", $port, 65507)`, `^\[\[65489, `},
	{"too large", `outcome(echo, "$target", $port, 65528)`, `^"EMSGSIZE"$`},
	{"connected, port unreachable", `refused("$target", $closed)`, `^\["ECONNREFUSED", `},
	{"ancillary data", `ancillary("$target", $port)`, `^\[0, "`},
	{"path MTU", `path_mtu("$target", $port)`, `^\[\d+, \d+, "EMSGSIZE", \d+\]$`},
	{"raw ICMP", `icmp("$target", socket.SOCK_RAW)`, `^\["\S+", 129, 0, "0007", \[56, `},
	{"raw ICMP, fragmented", `icmp("$target", socket.SOCK_RAW, 9000)`, `, \[9000, `},
	{"ping socket", `icmp("$target", socket.SOCK_DGRAM)`, `^\["\S+", 129, 0, "0007", \[56, `},
}

// TestDatagrams compares UDP and ICMP of intercepted and plain programs at every place.
func TestDatagrams(t *testing.T) {
	lab.UnlimitedICMP(t)
	for _, suffix := range []string{"n1-c1", "n1", "n2"} {
		lab.SetSysctl(t, suffix, "ipv4/ping_group_range", "0 65535")
	}
	compareDatagrams(t, datagramPlaces(), datagramSteps, "")
}

// TestDatagramsIPv6 is TestDatagrams for IPv6.
func TestDatagramsIPv6(t *testing.T) {
	for _, suffix := range []string{"n1", "n2", "n1-c1", "n1-c2", "n2-c1", "n2-c2", "outside"} {
		lab.SetSysctl(t, suffix, "ipv6/icmp/ratelimit", "0")
	}
	for _, suffix := range []string{"n1-c1", "n1-c2", "n1", "n2"} {
		lab.SetSysctl(t, suffix, "ipv4/ping_group_range", "0 65535") // of both families
	}
	outside := lab.Place{Name: "outside", Client: "n1/c1", Server: "outside", Target: func(t testing.TB) string { return lab.Outside6(t).String() }, Modes: lab.ToHostModes}
	// The outside learns the overlay's MTU by the first answer that is wider, which is lost.
	compareDatagrams(t, append(slices.Clone(places6), outside), datagramSteps6, `outcome(echo, "$target", $port, 1500, False, 0.5)`)
}

// compareDatagrams takes a client through the steps at every place, in every pair of modes. At the
// outside it begins with what goes first, whatever comes of it.
func compareDatagrams(t *testing.T, places []lab.Place, steps []datagramStep, first string) {
	for _, pl := range places {
		t.Run(pl.Name, func(t *testing.T) {
			target, traces := pl.Target(t), make([][]string, len(pl.Modes))
			for i, m := range pl.Modes {
				peers := startPeers(t, lab.Place{Client: pl.Client, Server: pl.Server, Modes: [][2]string{m}})
				client, server := datagrams(peers[pl.Client+m[0]]), datagrams(peers[pl.Server+m[1]])
				ports := strings.NewReplacer("$target", target, "$port", fmt.Sprint(lab.FreePort()), "$closed", fmt.Sprint(lab.FreePort()))
				server.Must("%s", ports.Replace(`serve_udp($port, version("$target"))`))
				if pl.Server == "outside" && first != "" {
					client.Do("%s", ports.Replace(first))
				}
				for _, s := range steps {
					got := client.Do("%s", ports.Replace(s.step))
					if !regexp.MustCompile(s.want).MatchString(got) {
						t.Errorf("%v: %s: %s, want %s", m, s.name, got, s.want)
					}
					traces[i] = append(traces[i], s.name+": "+got)
				}
			}
			for i := range traces {
				if !slices.Equal(traces[i], traces[0]) {
					t.Errorf("%v:\n%s\n%v:\n%s", pl.Modes[i], strings.Join(traces[i], "\n"), pl.Modes[0], strings.Join(traces[0], "\n"))
				}
			}
		})
	}
}

// TestPathMTU checks the numbers: a container's path is as wide as the overlay, whatever it sends.
func TestPathMTU(t *testing.T) {
	for _, mode := range lab.Modes {
		p, server := datagrams(lab.StartPeer(t, mode, "n1/c1")), datagrams(lab.StartPeer(t, mode, "n2/c1"))
		port := lab.FreePort()
		server.Must(`serve_udp(%d)`, port)
		p.Expect(`[1450, 1422, "EMSGSIZE", 1450]`, `path_mtu(%q, %d)`, lab.Address(t, mode, "n2/c1"), port)
		// TCP: plain sockets take the overlay's width, direct ones the underlay's. Timestamps take
		// 12 bytes.
		server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		want := map[string]string{"overlay": "1398", "heddle": "1448"}[mode]
		p.Expect(want, `segment_size(%q, %d)`, lab.Address(t, mode, "n2/c1"), port)
	}
}

// TestPathMTUIPv6 is TestPathMTU for datagrams over IPv6.
func TestPathMTUIPv6(t *testing.T) {
	for _, mode := range lab.Modes {
		p, server := datagrams(lab.StartPeer(t, mode, "n1/c1")), datagrams(lab.StartPeer(t, mode, "n2/c1"))
		port := lab.FreePort()
		server.Must(`serve_udp(%d, V6)`, port)
		p.Expect(`[1450, 1402, "EMSGSIZE", 1450]`, `path_mtu(%q, %d)`, lab.Overlay6(t, "n2/c1"), port)
	}
}

// TestMulticastAndBroadcast: within a container multicast works; between containers the overlay
// carries neither multicast nor broadcast, for intercepted programs as for plain ones.
func TestMulticastAndBroadcast(t *testing.T) {
	group := lab.FreePort()
	traces := map[string][]string{}
	for _, mode := range lab.Modes {
		sender := datagrams(lab.StartPeer(t, mode, "n1/c1"))
		members := map[string]*lab.Peer{}
		for _, c := range []string{"n1/c1", "n1/c2", "n2/c1"} {
			members[c] = datagrams(lab.StartPeer(t, mode, c))
			members[c].Expect("null", `join(%d)`, group)
		}
		do := func(format string, args ...any) string {
			got := sender.Do(format, args...)
			traces[mode] = append(traces[mode], got)
			return got
		}
		do(`multicast(%d, 8)`, group)
		members["n1/c1"].Expect(`"multicast"`, `heard()`)
		for _, c := range []string{"n1/c2", "n2/c1"} {
			members[c].Expect(`"timeout"`, `heard()`)
		}
		for _, addr := range []string{"255.255.255.255", strings.TrimSuffix(lab.GatewayOf("n1/c1")(t), "1") + "255"} {
			do(`broadcast(%q, %d, False)`, addr, group)
			do(`broadcast(%q, %d, True)`, addr, group)
			for _, c := range []string{"n1/c2", "n2/c1"} {
				members[c].Expect(`"timeout"`, `heard()`)
			}
		}
	}
	if !slices.Equal(traces["overlay"], traces["heddle"]) {
		t.Errorf("overlay %v\nheddle %v", traces["overlay"], traces["heddle"])
	}
}

var (
	milliseconds = regexp.MustCompile(`\d+(\.\d+)? ?ms`)
	pingSummary  = regexp.MustCompile(`rtt min.*`)
)

// TestPingAndTraceroute runs the programs in both modes: what they print must not differ but in
// times.
func TestPingAndTraceroute(t *testing.T) {
	lab.UnlimitedICMP(t)
	port := fmt.Sprint(lab.FreePort())
	for name, target := range map[string]string{
		"same node": lab.Address(t, "heddle", "n1/c2"), "other node": lab.Address(t, "heddle", "n2/c1"),
		"gateway": lab.GatewayOf("n1/c1")(t), "outside": lab.OutsideTarget(t),
	} {
		for _, argv := range [][]string{
			{"ping", "-n", "-c", "2", "-i", "0.01", "-W", "5", target},
			{"ping", "-n", "-c", "1", "-W", "5", "-s", "9000", target},
			{"ping", "-n", "-c", "1", "-W", "5", "-M", "do", "-s", "1422", target},
			{"ping", "-n", "-c", "1", "-W", "5", "-M", "do", "-s", "1423", target},
			{"traceroute", "-n", "-q", "1", "-w", "2", "-m", "6", "-I", target},
			{"traceroute", "-n", "-q", "1", "-w", "2", "-m", "6", "-U", "-p", port, target},
			{"traceroute", "-n", "-q", "1", "-w", "2", "-m", "6", target},
			{"traceroute", "-n", "-q", "1", "-w", "2", "-m", "6", "-T", "-p", port, target},
		} {
			t.Run(name+" "+strings.Join(argv[:len(argv)-1], " "), func(t *testing.T) {
				seen := map[string]string{}
				for _, mode := range lab.Modes {
					r := lab.Run(t, mode, "n1/c1", nil, argv...)
					out := pingSummary.ReplaceAllString(milliseconds.ReplaceAllString(r.Stdout+r.Stderr, "T"), "")
					seen[mode] = fmt.Sprintf("%s\nexit code %d", out, r.Code)
				}
				if seen["overlay"] != seen["heddle"] {
					t.Errorf("overlay:\n%s\nheddle:\n%s", seen["overlay"], seen["heddle"])
				}
				if !strings.Contains(seen["heddle"], target) || argv[0] == "traceroute" && !strings.Contains(seen["heddle"], target+"  T") {
					t.Errorf("%s was not reached:\n%s", target, seen["heddle"])
				}
			})
		}
	}
}

// TestTracerouteToListener traces by TCP to a port on which an intercepted program listens.
func TestTracerouteToListener(t *testing.T) {
	for _, server := range []string{"n1/c2", "n2/c1"} {
		port := lab.FreePort()
		l := lab.StartPeer(t, "heddle", server)
		l.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		target := lab.Address(t, "heddle", server)
		for _, mode := range lab.Modes {
			out := lab.MustRun(t, mode, "n1/c1", "traceroute", "-n", "-q", "1", "-w", "2", "-m", "6", "-T", "-O", "info", "-p", fmt.Sprint(port), target)
			if !strings.Contains(out, target+" <syn,ack") {
				t.Errorf("%s to %s:\n%s", mode, server, out)
			}
		}
	}
}

// setUnderlayMTU makes the underlay of both nodes narrower until the end of the test.
func setUnderlayMTU(t testing.TB, mtu string) {
	t.Helper()
	for _, node := range []string{"n1", "n2"} {
		was := strings.Fields(strings.SplitN(lab.InNode(t, node, "ip", "-o", "link", "show", "eth0"), " mtu ", 2)[1])[0]
		lab.InNode(t, node, "ip", "link", "set", "eth0", "mtu", mtu)
		t.Cleanup(func() { lab.InNode(t, node, "ip", "link", "set", "eth0", "mtu", was) })
	}
}

// TestNarrowUnderlay makes the underlay narrower than it was when the overlay's devices were made.
// Direct connections follow at once; what the overlay carries is fragmented outside, so that
// nothing is lost.
func TestNarrowUnderlay(t *testing.T) {
	setUnderlayMTU(t, "1400")
	for _, mode := range lab.Modes {
		client, server := datagrams(lab.StartPeer(t, mode, "n1/c1")), datagrams(lab.StartPeer(t, mode, "n2/c1"))
		port, target := lab.FreePort(), lab.Address(t, mode, "n2/c1")
		server.Must(`serve_udp(%d)`, port)
		server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Expect(`[1450, 1422, "EMSGSIZE", 1450]`, `path_mtu(%q, %d)`, target, port)
		client.Must(`echo(%q, %d, 60000)`, target, port)
		client.Must(`s = connect(4, %q, %d)`, target, port)
		server.Must(`c, who = l.accept()`)
		want := map[string]string{"overlay": "1398", "heddle": "1348"}[mode]
		client.Expect(want, `s.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)`)
		client.Must(`send(s, 3000000)`)
		if got := server.Must(`receive(c, 3000000)[0]`); got != "3000000" {
			t.Errorf("%s: received %s bytes", mode, got)
		}
		client.Must(`drained()`)
		// A bound socket goes over the overlay.
		client.Must(`b = tcp(4)`)
		client.Must(`b.bind(("0.0.0.0", 0))`)
		client.Must(`b.connect((%q, %d))`, target, port)
		server.Must(`c, who = l.accept()`)
		client.Must(`send(b, 300000)`)
		if got := server.Must(`receive(c, 300000)[0]`); got != "300000" {
			t.Errorf("%s, bound: received %s bytes", mode, got)
		}
		client.Must(`drained()`)
	}
}

// TestDNS asks a name server in a container, over UDP and TCP, by dig and by the C library.
func TestDNS(t *testing.T) {
	seen := map[string][]string{}
	for _, mode := range lab.Modes {
		server := lab.Start(t, mode, "n2/c1", "dnsmasq", "--keep-in-foreground", "--log-facility=-", "--no-resolv", "--no-hosts", "--conf-file=/dev/null",
			"--user=root", "--pid-file=", "--address=/a.test/192.0.2.7", "--txt-record=long.test,"+strings.Repeat("x", 250)+","+strings.Repeat("y", 250)+","+strings.Repeat("z", 250))
		server.WaitFor("started")
		at := lab.Address(t, mode, "n2/c1")
		ask := func(argv ...string) {
			r := lab.Run(t, mode, "n1/c1", nil, argv...)
			if r.Code != 0 {
				t.Errorf("%s: %v: exit code %d\n%s%s\n%s", mode, argv, r.Code, r.Stdout, r.Stderr, server.Output())
			}
			seen[mode] = append(seen[mode], r.Stdout)
		}
		ask("dig", "+short", "+tries=1", "@"+at, "a.test")
		ask("dig", "+short", "+tries=1", "+tcp", "@"+at, "a.test")
		ask("dig", "+short", "+tries=1", "+bufsize=512", "@"+at, "long.test", "TXT") // truncated, asked again by TCP
		ask("host", "-W", "5", "-t", "A", "a.test", at)
		for _, options := range []string{"timeout:5", "timeout:5 use-vc"} {
			ask("sh", "-c", fmt.Sprintf(`cp -L /etc/resolv.conf /tmp/resolv.conf; trap "cp /tmp/resolv.conf /etc/resolv.conf" EXIT
				printf 'nameserver %s\noptions %s\n' >/etc/resolv.conf && getent ahostsv4 a.test`, at, options))
		}
		server.Stop()
	}
	if !slices.Equal(seen["overlay"], seen["heddle"]) {
		t.Errorf("overlay %q\nheddle %q", seen["overlay"], seen["heddle"])
	}
	for i, want := range []string{"192.0.2.7\n", "192.0.2.7\n", "zzz", "has address 192.0.2.7", "192.0.2.7", "192.0.2.7"} {
		if !strings.Contains(seen["heddle"][i], want) {
			t.Errorf("answer %d: %q, want %q", i, seen["heddle"][i], want)
		}
	}
}

// testProgram copies this test's own program to where containers see it.
func testProgram(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	testutil.NoError(t, err)
	raw, err := os.ReadFile(self)
	testutil.NoError(t, err)
	path := filepath.Join(t.TempDir(), "program")
	testutil.NoError(t, os.WriteFile(path, raw, 0o755))
	return path
}

// TestQUIC exchanges streams larger than any window over QUIC, which finds the path's MTU by
// itself.
func TestQUIC(t *testing.T) {
	program := testProgram(t)
	for _, m := range lab.ContainerModes {
		for _, server := range []string{"n1/c2", "n2/c1"} {
			at := fmt.Sprintf("%s:%d", lab.Address(t, m[1], server), lab.FreePort())
			s := lab.Start(t, m[1], server, program, quicServer, at)
			s.WaitFor("ready")
			out := lab.MustRun(t, m[0], "n1/c1", program, quicClient, at)
			if want := fmt.Sprintf("%d bytes came back\n", quicBytes); out != want {
				t.Errorf("%v to %s: %q, want %q\n%s", m, server, out, want, s.Output())
			}
			s.Stop()
		}
	}
}
