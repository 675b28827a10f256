package paths

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

//go:embed testdata/datagrams6.py
var datagrams6Script string

// datagrams6 adds the functions of datagrams6.py to a peer.
func datagrams6(p *lab.Peer) *lab.Peer {
	datagrams(p).Must("%s", datagrams6Script)
	return p
}

// datagramSteps6 are datagramSteps for IPv6.
var datagramSteps6 = []struct{ name, step, want string }{
	{"small", `echo6("$target", $port, 40)`, `^\[\[22, "\w+"\], true, `},
	{"connected", `echo6("$target", $port, 40, True)`, `^\[\[22, "\w+"\], true, `},
	{"at the MTU", `echo6("$target", $port, 1402)`, `^\[\[1384, `},
	{"fragmented", `echo6("$target", $port, 20000)`, `^\[\[19982, `},
	{"the largest", `echo6("$target", $port, 65507)`, `^\[\[65489, `},
	{"too large", `outcome(echo6, "$target", $port, 65528)`, `^"EMSGSIZE"$`},
	{"connected, port unreachable", `refused6("$target", $closed)`, `^\["ECONNREFUSED", `},
	{"ancillary data", `ancillary6("$target", $port)`, `^\[0, "`},
	{"path MTU", `path_mtu6("$target", $port)`, `^\[\d+, \d+, "EMSGSIZE", \d+\]$`},
	{"raw ICMP", `icmp6("$target", socket.SOCK_RAW)`, `^\["\S+", 129, 0, "0007", \[56, `},
	{"raw ICMP, fragmented", `icmp6("$target", socket.SOCK_RAW, 9000)`, `, \[9000, `},
	{"ping socket", `icmp6("$target", socket.SOCK_DGRAM)`, `^\["\S+", 129, 0, "0007", \[56, `},
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
	for _, pl := range append(slices.Clone(places6), outside) {
		t.Run(pl.Name, func(t *testing.T) {
			target, traces := pl.Target(t), make([][]string, len(pl.Modes))
			for i, m := range pl.Modes {
				peers := startPeers(t, lab.Place{Client: pl.Client, Server: pl.Server, Modes: [][2]string{m}})
				client, server := datagrams6(peers[pl.Client+m[0]]), datagrams6(peers[pl.Server+m[1]])
				ports := strings.NewReplacer("$target", target, "$port", fmt.Sprint(lab.FreePort()), "$closed", fmt.Sprint(lab.FreePort()))
				server.Must("%s", ports.Replace("serve_udp6($port)"))
				if pl.Server == "outside" { // it learns the overlay's MTU by the first answer that is wider, which is lost
					client.Do("%s", ports.Replace(`outcome(echo6, "$target", $port, 1500, False, 0.5)`))
				}
				for _, s := range datagramSteps6 {
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

// TestPathMTUIPv6 checks the numbers: a container's path is as wide as the overlay, whatever it sends.
func TestPathMTUIPv6(t *testing.T) {
	for _, mode := range lab.Modes {
		p, server := datagrams6(lab.StartPeer(t, mode, "n1/c1")), datagrams6(lab.StartPeer(t, mode, "n2/c1"))
		port := lab.FreePort()
		server.Must(`serve_udp6(%d)`, port)
		p.Expect(`[1450, 1402, "EMSGSIZE", 1450]`, `path_mtu6(%q, %d)`, lab.Overlay6(t, "n2/c1"), port)
	}
}
