// Package underlay6_test tries a lab whose nodes have IPv6 addresses only: what goes direct on
// IPv4 does so there, nothing of IPv4 is on the network between them, and what is forged is
// dropped.
package underlay6_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func TestMain(m *testing.M) {
	lab.Flags = []string{"--underlay", "ipv6"}
	os.Exit(lab.Main(m, "under6"))
}

// inner gives the addresses by which sockets know the nodes.
func inner(t *testing.T) (n1, n2 string) {
	t.Helper()
	for node, to := range map[string]*string{"n1": &n1, "n2": &n2} {
		var status []struct {
			Node struct{ Underlay string }
		}
		lab.Query(t, &status, "status", "--node", node)
		*to = status[0].Node.Underlay
	}
	return n1, n2
}

// packets counts what passes between the nodes, by rules of nftables, until the end of the test.
func packets(t *testing.T, rules map[string]string) func(name string) int {
	t.Helper()
	fabric := lab.Name + "-fabric"
	table := "chain c { type filter hook forward priority 0\n"
	for name, match := range rules {
		table += fmt.Sprintf("%s counter comment %q\n", match, name)
	}
	lab.Shell(t, fabric, "nft 'table bridge under6 {\n"+table+"}\n}'")
	t.Cleanup(func() { lab.Shell(t, fabric, "nft delete table bridge under6") })
	return func(name string) int {
		for line := range strings.Lines(lab.Shell(t, fabric, "nft list table bridge under6")) {
			if _, rest, is := strings.Cut(line, "counter packets "); is && strings.Contains(line, fmt.Sprintf("%q", name)) {
				n, err := strconv.Atoi(strings.Fields(rest)[0])
				testutil.NoError(t, err)
				return n
			}
		}
		t.Fatalf("no counter %s", name)
		return 0
	}
}

// link gives a number that ip says of a device of a node, as jq would find it.
func link(t *testing.T, node, device string, at ...string) int {
	t.Helper()
	var links []map[string]any
	testutil.NoError(t, json.Unmarshal([]byte(lab.Shell(t, lab.Name+"-"+node, "ip -json -s link show "+device)), &links))
	said := any(links[0])
	for _, name := range at {
		said = said.(map[string]any)[name]
	}
	return int(said.(float64))
}

// TestConnections: sockets of both families go direct between intercepted ends, by the relay to a
// plain listener, and over the overlay from a plain client, with all bytes; and all of it is IPv6
// on the network.
func TestConnections(t *testing.T) {
	count := packets(t, map[string]string{"ipv4": "meta protocol { ip, arp }", "direct": "meta protocol ip6 tcp dport " + model.DefaultDirectPorts.String(), "overlay": "meta protocol ip6 udp dport 4789"})
	for _, c := range []struct {
		client, server string
		path           string // of the client, as heddle connections has it; "": it is not intercepted
		counter        string
	}{
		{"heddle", "heddle", "direct", "direct"}, {"heddle", "overlay", "direct", "direct"}, {"overlay", "heddle", "", "overlay"}, {"overlay", "overlay", "", "overlay"},
	} {
		for family, target := range map[int]string{4: lab.Address(t, "overlay", "n2/c1"), 6: lab.Overlay6(t, "n2/c1")} {
			t.Run(fmt.Sprintf("%s to %s, IPv%d", c.client, c.server, family), func(t *testing.T) {
				client, server, port := lab.StartPeer(t, c.client, "n1/c1"), lab.StartPeer(t, c.server, "n2/c1"), lab.FreePort()
				before := count(c.counter)
				server.Must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], port)
				client.Must(`s = connect(%d, %q, %d)`, family, target, port)
				server.Must(`c, who = l.accept()`)
				own := client.Addr("overlay", "n1/c1")
				if family == 6 {
					own = netip.MustParseAddr(lab.Overlay6(t, "n1/c1"))
				}
				server.Expect(fmt.Sprintf("%q", own), `who[0]`)
				for from, to := range map[*lab.Peer]*lab.Peer{client: server, server: client} {
					sent, got := map[*lab.Peer]string{client: "s", server: "c"}[from], map[*lab.Peer]string{client: "s", server: "c"}[to]
					from.Must(`send(%s, 3000000)`, sent)
					to.Expect(from.Must(`digest(pattern(3000000))`), `receive(%s, 3000000)`, got)
				}
				if c.path != "" {
					local := client.PortOf("s")
					for _, l := range lab.Connections(t, "n1/c1") {
						if l.Local.Port() == local && string(l.Path) != c.path {
							t.Errorf("path %s, want %s", l.Path, c.path)
						}
					}
				}
				if count(c.counter) == before {
					t.Errorf("no packet on the network between the nodes was of this path")
				}
			})
		}
	}
	if n := count("ipv4"); n != 0 {
		t.Errorf("%d packets of IPv4 on the network between the nodes", n)
	}
}

// TestSizes: what fits through the overlay and to inner addresses is what IPv6's longer header
// leaves.
func TestSizes(t *testing.T) {
	for device, want := range map[string]int{"heddle-vx0": 1430, "heddle-in0": 1480} {
		if got := link(t, "n1", device, "mtu"); got != want {
			t.Errorf("%s: MTU %d, want %d", device, got, want)
		}
	}
	port, target := lab.FreePort(), lab.Address(t, "heddle", "n2/c1")
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, target, port)
	client.Expect(`1428`, `s.getsockopt(6, 2)`) // TCP_MAXSEG: 1500 - 40 - 20, and 12 of timestamps
	n2 := lab.Overlay6(t, "n2/c1")
	if out := lab.MustRun(t, "overlay", "n1/c1", "ping", "-c", "1", "-W", "5", "-M", "do", "-s", "1382", n2); !strings.Contains(out, " 1 received") {
		t.Errorf("the largest packet does not pass: %s", out)
	}
}

// TestRefused: ports at which nothing listens refuse, and policy denies, at once as on IPv4.
func TestRefused(t *testing.T) {
	client, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	client.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server := lab.StartPeer(t, "heddle", "n2/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Must(`c, who = l.accept()`)
	lab.ApplyPolicy(t, "under6", []map[string]any{lab.DenyRule("reject", port)}, nil)
	client.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	testutil.Eventually(t, "the connection to be cut", func() (bool, string) {
		said := client.Do(`error_of(s.send, b"x")`)
		return strings.HasPrefix(said, `"E`), said
	})
}

// TestLimit: a cap holds for what is translated, too, and what it queues arrives.
func TestLimit(t *testing.T) {
	lab.Limit(t, "n1/c1", "--egress", "8mbit")
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Must(`c, who = l.accept()`)
	queued := func() int { return link(t, "n1", "heddle-sh0", "stats64", "tx", "bytes") }
	before := queued()
	client.Must(`send(s, 200000)`)
	server.Expect(client.Must(`digest(pattern(200000))`), `receive(c, 200000)`)
	// Once: not at the device of inner addresses and at that of the underlay.
	if n := queued() - before; n < 200000 || n > 300000 {
		t.Errorf("%d bytes passed the shaping device for 200000 sent", n)
	}
}

// TestAgentEnds: connections and new ones live without an agent, and with the next one.
func TestAgentEnds(t *testing.T) {
	client, server, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
	server.Must(`c, who = l.accept()`)
	device := link(t, "n2", "heddle-in0", "ifindex")
	talk := func() {
		t.Helper()
		client.Must(`send(s, 100000)`)
		server.Expect(client.Must(`digest(pattern(100000))`), `receive(c, 100000)`)
	}
	lab.EndAgent(t, "n2", 9)
	talk()
	testutil.NoError(t, lab.Command("up"))
	talk()
	if now := link(t, "n2", "heddle-in0", "ifindex"); now != device {
		t.Errorf("the device of inner addresses was made anew: %d, then %d", device, now)
	}
	lab.AwaitPath(t, "n1", model.PeerProven)
}

// TestBadUnderlay: a bad --underlay is refused with what to do.
func TestBadUnderlay(t *testing.T) {
	for underlay, want := range map[string]string{
		"fe80::1": "link-local", "::1": "want a unicast IPv6 address", "ff02::1": "want a unicast IPv6 address", "::ffff:192.0.2.1": "want a unicast IPv6 address",
		"2001:db8::77": "no device here has this address", "fe80::1%eth0": "without a zone",
	} {
		out, err := exec.Command("ip", "netns", "exec", lab.Name+"-n1", lab.Heddled(), "--node", "nx", "--underlay", underlay, "--state-dir", t.TempDir(),
			"--bpf-dir", "/sys/fs/bpf/under6-none", "--cgroup", "/sys/fs/cgroup/under6-none", "--api-socket", t.TempDir()+"/a", "--seccomp-socket", t.TempDir()+"/s").CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("--underlay %s: %v, want %q in:\n%s", underlay, err, want, out)
		}
	}
}
