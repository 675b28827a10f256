package sockets

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestManyConnections holds more connections between two nodes than one port's worth (28,000
// ephemeral ports): all from one container to one port of another.
func TestManyConnections(t *testing.T) {
	const processes, each = 4, 15500
	const total = processes * each
	many := filepath.Join(t.TempDir(), "many")
	if out, err := exec.Command("gcc", "-O1", "-Wall", "-o", many, "testdata/many.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	port := strconv.Itoa(lab.FreePort())
	server := lab.Start(t, "heddle", "n2/c1", many, "server", port, fmt.Sprint(processes))
	server.WaitFor("listening")
	client := lab.Start(t, "heddle", "n1/c1", many, lab.Address(t, "heddle", "n2/c1"), port, fmt.Sprint(processes), fmt.Sprint(each))
	began := time.Now()
	client.WaitFor(fmt.Sprintf("connected %d\n", total))
	t.Logf("%d connections in %s", total, time.Since(began).Round(time.Millisecond))

	for _, container := range []string{"n1/c1", "n2/c1"} {
		directPorts := map[uint16]int{}
		open := 0
		for _, c := range lab.Connections(t, container) {
			if c.State != "ESTABLISHED" || c.Path != names.PathDirect || strconv.Itoa(int(min(c.Local.Port(), c.Remote.Port()))) != port {
				continue
			}
			open++
			if container == "n1/c1" {
				directPorts[c.NodeRemote.Port()]++
			}
		}
		if open != total {
			t.Errorf("%s lists %d direct connections, want %d", container, open, total)
		}
		if r := model.DefaultDirectPorts; container == "n1/c1" && len(directPorts) != int(r.Last-r.First)+1 {
			t.Errorf("spread over %d direct ports, want %s", len(directPorts), r)
		}
	}
	if _, err := client.Stdin.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	client.WaitFor("echoed ")
	if n, err := strconv.Atoi(strings.TrimSpace(client.Output()[strings.Index(client.Output(), "echoed ")+7:])); err != nil || n < total/100 {
		t.Errorf("echoed over %d connections: %v", n, err)
	}
}

// TestSYNCookies: with SYN cookies always on, the kernel forgets the SYN and its option, and direct
// connections still get the right names.
func TestSYNCookies(t *testing.T) {
	lab.SetSysctl(t, "n2", "ipv4/tcp_syncookies", "2")
	for _, listen := range []string{`4, "0.0.0.0"`, `6, "::"`} {
		client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
		target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
		server.Must(`l = listen(%s, %d)`, listen, port)
		before := lab.KernelCounter(t, "n2", "SyncookiesRecv")
		const n = 50
		for range n {
			client.Must(`s = connect(4, %q, %d)`, target, port)
			server.Must(`c, who = l.accept()`)
			sport := client.PortOf("s")
			server.Expect(fmt.Sprintf(`[[%q, %d], [%q, %d], true]`, target, port, lab.Address(t, "heddle", "n1/c1"), sport),
				`[[x[0].replace("::ffff:", ""), x[1]] for x in (c.getsockname(), c.getpeername())] + [who == c.getpeername()]`)
			client.Must(`send(s, 5000)`)
			server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
		}
		if got := lab.KernelCounter(t, "n2", "SyncookiesRecv") - before; got < n {
			t.Errorf("%d of %d connections by SYN cookie", got, n)
		}
		c := lab.AwaitConnection(t, "n2/c1", uint16(port), client.PortOf("s"), 0, 5000)
		if c.Path != names.PathDirect {
			t.Errorf("path %s", c.Path)
		}
	}
}

// TestSYNPressure: more connects at once than a stalled listener's backlog holds. Once it accepts
// again, all get through, each under its own name.
func TestSYNPressure(t *testing.T) {
	for _, cookies := range []string{"0", "1", "2"} {
		t.Run("syncookies "+cookies, func(t *testing.T) {
			lab.SetSysctl(t, "n2", "ipv4/tcp_syncookies", cookies)
			client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
			target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
			const n = 60
			server.Must(`l = listen(4, "0.0.0.0", %d, backlog=4)`, port)
			dropped := lab.KernelCounter(t, "n2", "ListenDrops") + lab.KernelCounter(t, "n2", "ListenOverflows")
			client.Must(`many = [tcp() for _ in range(%d)]`, n)
			client.Must(`[s.setblocking(False) for s in many] and None`)
			client.Must(`[s.connect_ex((%q, %d)) for s in many] and None`, target, port)
			testutil.Eventually(t, "the backlog to overflow", func() (bool, string) {
				now := lab.KernelCounter(t, "n2", "ListenDrops") + lab.KernelCounter(t, "n2", "ListenOverflows")
				return now > dropped, fmt.Sprint(now)
			})
			// The stall ends: with a backlog that takes all of them, one retransmission is enough.
			server.Must(`l.listen(%d)`, n)
			server.Begin(fmt.Sprintf(`greeted(l, %d)`, n))
			client.Must(`greet(many)`)
			if got := server.Reply("greeted"); got != fmt.Sprintf("[%d, []]", n) {
				t.Errorf("connections with their own name, and others: %s, want %d", got, n)
			}
		})
	}
}

// nftDrop drops the first packet that matches on a node until the end of the test.
func nftDrop(t testing.TB, node, hook, match string) {
	t.Helper()
	nft := func(rules string) error {
		cmd := exec.Command("ip", "netns", "exec", lab.Name+"-"+node, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w\n%s", err, out)
		}
		return nil
	}
	// A SYN has 60 to 80 bytes: the second one is beyond the quota.
	err := nft(fmt.Sprintf("table inet heddletest {\nchain first {\ntype filter hook %s priority -400;\n%s quota until 100 bytes counter drop\n}\n}\n", hook, match))
	testutil.NoError(t, err)
	t.Cleanup(func() {
		if err := nft("delete table inet heddletest\n"); err != nil {
			t.Error(err)
		}
	})
}

// TestSYNRetransmission drops the first SYN of a connection, on its way out and on its way in.
func TestSYNRetransmission(t *testing.T) {
	direct := fmt.Sprintf("tcp dport %s tcp flags & (syn | ack) == syn", model.DefaultDirectPorts)
	for _, c := range []struct{ name, node, hook, match string }{
		{"SYN leaves", "n1", "output", direct},
		{"SYN arrives", "n2", "prerouting", direct},
		{"SYN-ACK arrives", "n1", "prerouting", fmt.Sprintf("tcp sport %s tcp flags & (syn | ack) == (syn | ack)", model.DefaultDirectPorts)},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
			target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
			server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
			client.Must(`s = tcp()`)
			nftDrop(t, c.node, c.hook, c.match)
			began := time.Now()
			client.Must(`s.connect((%q, %d))`, target, port)
			if took := time.Since(began); took < 800*time.Millisecond {
				t.Errorf("connect took %s, want about a second at least: one retransmission", took)
			}
			// One retransmission, or the listener's of its SYN-ACK: tcpi_total_retrans.
			client.Expect("true", `struct.unpack("I", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:])[0] <= 1`)
			server.Must(`c, who = l.accept()`)
			server.Expect(fmt.Sprintf(`[%q, %d]`, lab.Address(t, "heddle", "n1/c1"), client.PortOf("s")), `who`)
			client.Must(`send(s, 5000)`)
			server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
			if seen := lab.AwaitConnection(t, "n2/c1", uint16(port), client.PortOf("s"), 0, 5000); seen.Path != names.PathDirect {
				t.Errorf("path %s", seen.Path)
			}
		})
	}
}
