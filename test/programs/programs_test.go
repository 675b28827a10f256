package programs

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// ends are the two ends of a conversation: where they run, in which mode, and what they share.
type ends struct {
	server, client         string // containers
	serverMode, clientMode string
	addr                   string // the server's address, as the client dials it
	dir                    string // files for both; containers see it under the same path, and any user may read it
}

func (e ends) serverNode() string { return nodeOf(e.server) }

func (e ends) clientNode() string { return nodeOf(e.client) }

// nodeOf gives the node of container "n1/c1".
func nodeOf(container string) string {
	name, _, _ := strings.Cut(container, "/")
	return name
}

// scenario is a server and its clients, run in every mix of modes. What the two ends see must not
// depend on the mix.
type scenario struct {
	// serve starts the server and returns when it accepts connections.
	serve func(t testing.TB, e ends) *lab.Program
	// talk runs the clients to their end, stops the server if that is needed to read its logs, and
	// writes down what both ends saw.
	talk func(t testing.TB, e ends, server *lab.Program, saw *observation)
}

// placements are where the two ends run. Towards n1, which is the way back of the first, only both
// ends intercepted are compared with none.
var placements = []struct {
	name, server, client string
	mixes                bool // of an intercepted end with a plain one, too
}{
	{"n1 to n2", "n2/c1", "n1/c1", true},
	{"n2 to n1", "n1/c1", "n2/c1", false},
	{"same node", "n1/c1", "n1/c2", true},
}

// compareModes plays a scenario in each placement: first with both ends on the plain overlay, for
// reference, then in every mix of modes that has an intercepted end. dir is for files that both
// ends read; prepare, which may be nil, puts them there.
func compareModes(t *testing.T, s scenario, prepare func(t testing.TB, dir string)) {
	t.Helper()
	dir := lab.SharedDir(t)
	if prepare != nil {
		prepare(t, dir)
	}
	for _, at := range placements {
		t.Run(at.name, func(t *testing.T) {
			e := ends{server: at.server, client: at.client, addr: lab.Address(t, "overlay", at.server), dir: dir}
			want := play(t, s, e, "overlay", "overlay")
			// Clients of the plain overlay first. The two modes of a container share its address
			// but not its ports: packets for a plain client would go to a socket of the node that
			// waits in TIME_WAIT.
			for _, clientMode := range lab.Modes {
				for _, serverMode := range lab.Modes {
					if serverMode == "overlay" && clientMode == "overlay" || serverMode != clientMode && !at.mixes {
						continue
					}
					t.Run(fmt.Sprintf("server %s, client %s", serverMode, clientMode), func(t *testing.T) {
						play(t, s, e, serverMode, clientMode).mustEqual(t, want)
					})
				}
			}
		})
	}
}

// play runs a scenario once, checks which way its connections went, and gives what its ends saw.
func play(t testing.TB, s scenario, e ends, serverMode, clientMode string) *observation {
	t.Helper()
	e.serverMode, e.clientMode = serverMode, clientMode
	if got := lab.Address(t, serverMode, e.server); got != e.addr {
		t.Fatalf("address of %s is %s in mode %s, %s in mode overlay", e.server, got, serverMode, e.addr)
	}
	server := s.serve(t, e)
	defer server.Stop()
	before := countPair(t, e)
	saw := &observation{}
	s.talk(t, e, server, saw)
	server.Stop()
	checkPaths(t, e, countPair(t, e).since(before))
	if t.Failed() {
		t.Logf("server printed:\n%s", server.Output())
	}
	return saw
}

// pairCounts are the counters of the nodes of the two ends, which may be one node.
type pairCounts struct{ server, client map[string]uint64 }

func countPair(t testing.TB, e ends) pairCounts {
	t.Helper()
	return pairCounts{lab.Counters(t, e.serverNode()), lab.Counters(t, e.clientNode())}
}

// since gives what was counted after before; reasons that were not are left out.
func (c pairCounts) since(before pairCounts) pairCounts {
	diff := func(after, before map[string]uint64) map[string]uint64 {
		out := make(map[string]uint64)
		for reason, n := range after {
			if n != before[reason] {
				out[reason] = n - before[reason]
			}
		}
		return out
	}
	return pairCounts{diff(c.server, before.server), diff(c.client, before.client)}
}

// checkPaths checks what the nodes counted during a conversation: acceleration must not fall back
// in silence, and must not meddle where neither end is intercepted.
func checkPaths(t testing.TB, e ends, counted pairCounts) {
	t.Helper()
	wantServer, wantClient := expectedCounts(e)
	check := func(nodeName string, counted map[string]uint64, want []string) {
		t.Helper()
		for _, reason := range want {
			if counted[reason] == 0 {
				t.Errorf("%s (server %s, client %s) counted no %s: %v", nodeName, e.serverMode, e.clientMode, reason, counted)
			}
		}
		for reason := range counted {
			// What earlier tests left behind, a map that was busy, and probes of the direct path,
			// which come at any time.
			if reason == "time_wait_ended" || reason == "drop_not_remembered" || reason == "probe_listener" {
				continue
			}
			// How packets of the overlay went, and what is not told of its connections.
			if strings.HasPrefix(reason, "route_") || strings.HasPrefix(reason, "redirect_") || reason == "tunnel_device" || reason == "lost_packet_event" {
				continue
			}
			if !mayCount(e, reason) {
				t.Errorf("%s (server %s, client %s) counted %s: %v", nodeName, e.serverMode, e.clientMode, reason, counted)
			}
		}
	}
	check(e.serverNode(), counted.server, wantServer)
	check(e.clientNode(), counted.client, wantClient)
	// A SYN-ACK may be sent again. A client that gives up while it connects leaves one to its
	// container's own stack, and that stack's RST comes back by the veth.
	if accepted := counted.server["accept_local"]; e.serverMode == e.clientMode && counted.server["deliver_overlay"] > 2+accepted/50 {
		t.Errorf("packets between node sockets took the veth: %v", counted.server)
	}
	if accepted := counted.server["accept_local"]; counted.server["deliver_node"] > accepted+accepted/50 {
		t.Errorf("more packets than the SYN-ACKs took the veth between node sockets: %v", counted.server)
	}
}

// expectedCounts gives the reasons each end's node must have counted.
func expectedCounts(e ends) (server, client []string) {
	local := e.serverNode() == e.clientNode()
	switch [2]string{e.serverMode, e.clientMode} {
	case [2]string{"heddle", "heddle"}:
		if local {
			return []string{"accept_local"}, []string{"connect_local"}
		}
		return []string{"accept_direct"}, []string{"connect_direct"}
	case [2]string{"heddle", "overlay"}:
		return []string{"accept_local", "deliver_overlay"}, nil
	case [2]string{"overlay", "heddle"}:
		if local {
			return nil, []string{"fallback_local_plain"}
		}
		// The endpoint is intercepted, only this program of it is not.
		return []string{"relay_opened"}, []string{"connect_direct"}
	}
	return nil, nil
}

// mayCount reports whether reason may be counted in a conversation of e.
func mayCount(e ends, reason string) bool {
	heddle := e.serverMode == "heddle" || e.clientMode == "heddle"
	both := e.serverMode == "heddle" && e.clientMode == "heddle"
	local := e.serverNode() == e.clientNode()
	switch reason {
	case "connect_loopback": // a program may talk to itself
		return heddle
	case "connect_direct":
		return e.clientMode == "heddle" && !local
	case "accept_direct":
		return both && !local
	case "connect_local":
		return both && local
	case "deliver_node":
		// A listener cannot know yet that its peer is a node socket: its SYN-ACK takes the veth.
		return both && local
	case "accept_local":
		return e.serverMode == "heddle"
	case "relay_opened":
		return e.serverMode == "overlay" && e.clientMode == "heddle" && !local
	case "fallback_local_plain":
		return e.serverMode == "overlay" && e.clientMode == "heddle" && local
	case "deliver_overlay":
		return heddle && !both || both && local
	}
	return false
}

// observation is what the two ends of a conversation saw, in order.
type observation struct{ lines []string }

// add writes text down, line by line, each after what it is about.
func (o *observation) add(what, text string) {
	for line := range strings.Lines(text) {
		o.lines = append(o.lines, what+": "+strings.TrimRight(line, "\r\n"))
	}
	if text == "" {
		o.lines = append(o.lines, what+": (nothing)")
	}
}

// mustEqual fails the test with the first lines that differ.
func (o *observation) mustEqual(t testing.TB, want *observation) {
	t.Helper()
	const shown = 10
	if len(o.lines) != len(want.lines) {
		t.Errorf("saw %d lines, on the overlay %d", len(o.lines), len(want.lines))
	}
	for i, differ := 0, 0; i < max(len(o.lines), len(want.lines)) && differ < shown; i++ {
		got, ref := lineAt(o.lines, i), lineAt(want.lines, i)
		if got != ref {
			t.Errorf("line %d:\n  saw         %s\n  on overlay  %s", i+1, got, ref)
			differ++
		}
	}
}

func lineAt(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(no such line)"
}

// ephemeral are ports that the kernel chose (32768 and up), after an address.
var ephemeral = regexp.MustCompile(`(\d+\.\d+\.\d+\.\d+\]?(?:', |:|,? port ))(3[2-9]\d{3}|[456]\d{4})\b`)

// maskPorts replaces the ephemeral ports that follow addresses.
func maskPorts(s string) string { return ephemeral.ReplaceAllString(s, "${1}PORT") }

// copyPrograms copies files of testdata/programs to where containers see them.
func copyPrograms(t testing.TB, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		data, err := os.ReadFile("testdata/" + name)
		testutil.NoError(t, err)
		lab.WriteFile(t, dir+"/"+name, data)
	}
}

// pattern gives n bytes that repeat with no period a buffer or a segment could hide.
func pattern(n int) []byte {
	data := make([]byte, n)
	state := uint32(2463534242)
	for i := range data {
		state ^= state << 13
		state ^= state >> 17
		state ^= state << 5
		data[i] = byte(state)
	}
	return data
}

// waitServer waits until the server of e accepts connections on a port. It asks from the server's
// own container, so that no connection between the ends is counted.
func waitServer(t testing.TB, e ends, port string) {
	t.Helper()
	lab.WaitPort(t, e.serverMode, e.server, e.addr, port)
}

// TestMaskPorts checks that masking hides ports that differ by chance and nothing else.
func TestMaskPorts(t *testing.T) {
	for in, want := range map[string]string{
		"10.244.0.3:41234 -> 10.244.1.3:8080": "10.244.0.3:PORT -> 10.244.1.3:8080",
		"('10.244.0.3', 41234)":               "('10.244.0.3', PORT)",
		"[::ffff:10.244.0.3]:41234":           "[::ffff:10.244.0.3]:PORT",
		"10.244.0.3 port 41234 connected":     "10.244.0.3 port PORT connected",
		"read 41234 bytes":                    "read 41234 bytes",
	} {
		if got := maskPorts(in); got != want {
			t.Errorf("maskPorts(%q) is %q, want %q", in, got, want)
		}
	}
}
