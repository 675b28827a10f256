package attack

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"change the address while bind() looks at it", model.ProtectBind, "n1", raceBind},
		attack{"change the address while connect() looks at it", model.ProtectWildcard, "n1", raceConnect("connect")},
		attack{"change the address while sendto(MSG_FASTOPEN) looks at it", model.ProtectWildcard, "n1", raceConnect("fastopen")},
		attack{"change the address while io_uring looks at it", model.ProtectWildcard, "n1", raceConnect("ring")},
		attack{"change the value while setsockopt() looks at it", model.ProtectSocketOptions, "n1", raceOption},
		attack{"bind an address of the node with a socket that was connected", model.ProtectBind, "n1",
			undo("EADDRNOTAVAIL", "ok", "bind AF_INET", "bind AF_INET6")},
		attack{"connect to the node's wildcard with a socket that was connected", model.ProtectWildcard, "n1",
			undo("ECONNREFUSED", "node", "reconnect AF_INET", "reconnect AF_INET6", "reconnect with a long address AF_INET", "reconnect with a long address AF_INET6")},
		attack{"send data with the SYN to the node's wildcard", model.ProtectWildcard, "n1",
			undo("ECONNREFUSED", "node", "fast open AF_INET", "fast open AF_INET6", "fast open again AF_INET", "fast open again AF_INET6",
				"deferred AF_INET", "deferred AF_INET6")},
		attack{"bind an address of the node, by a thread of the kernel's", model.ProtectBind, "n1", ringPoll("bind", "EADDRNOTAVAIL", "ok")},
		attack{"connect to the node's wildcard, by a thread of the kernel's", model.ProtectWildcard, "n1", ringPoll("connect", "ECONNREFUSED", "node")},
		attack{"IP_OPTIONS, by a thread of the kernel's", model.ProtectSocketOptions, "n1", ringPoll("IP_OPTIONS", "EPERM", "ok")},
		attack{"find the underlay in several errors at once", model.ProtectSocketOptions, "n1", readQueue},
	)
}

// hostile gives the suite's program in Go.
func hostile(t testing.TB) string {
	t.Helper()
	return lab.Build(t, "hostile", func(path string) *exec.Cmd {
		cmd := exec.Command("go", "build", "-trimpath", "-o", path, "./hostile")
		cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
		return cmd
	})
}

// results reads what a hostile program printed, which must have come to its end.
func results(t testing.TB, out string) map[string]string {
	t.Helper()
	if !strings.HasSuffix(out, "done\n") {
		t.Fatalf("the program did not come to its end:\n%s", out)
	}
	results := map[string]string{}
	for line := range strings.Lines(out) {
		if what, result, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			results[what] = result
		}
	}
	return results
}

// runHostile runs the program in n1/c1 and gives its results.
func runHostile(t testing.TB, args ...string) map[string]string {
	t.Helper()
	return results(t, lab.MustRun(t, "heddle", "n1/c1", append([]string{hostile(t)}, args...)...))
}

// raced is what an attack gained that is a race between two values: nothing, if it came to the
// honest results only. All of those must have been seen, or it was no race.
func raced(t *testing.T, results map[string]string, success string, honest ...string) string {
	t.Helper()
	won := results[success]
	delete(results, success)
	for _, h := range honest {
		if won == "" && results[h] == "" {
			t.Errorf("never %q: there was no race", h)
		}
		delete(results, h)
	}
	if len(results) > 0 {
		t.Errorf("other results: %v", results)
	}
	if won == "" {
		return ""
	}
	return fmt.Sprintf("%s, %s times", success, won)
}

// raceBind binds an address that a thread changes between the container's and the node's, and looks
// at the sockets on the node, too.
func raceBind(t *testing.T) string {
	own, node := lab.Address(t, "heddle", "n1/c1"), lab.Address(t, "host", "n1/c1")
	p := lab.Start(t, "heddle", "n1/c1", hostile(t), "race-bind", own, node)
	p.WaitFor("listening\n")
	out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "ss", "-tlneH").CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "fwmark:0x4864") && strings.HasPrefix(strings.Fields(line)[3], node+":") {
			return "a listener of the container at " + strings.Fields(line)[3]
		}
	}
	found := results(t, p.Output()+"done\n")
	return raced(t, found, "0.0.0.0", own, "EADDRNOTAVAIL") // an address that Heddle did not give a socket is not shown
}

// greeter says who it is on every connection, and keeps the latest open.
const greeter = `
import collections, socket, sys
l = socket.create_server(("0.0.0.0", int(sys.argv[1])), backlog=100)
print("ready", flush=True)
held = collections.deque(maxlen=1000)
while True:
    held.append(l.accept()[0])
    held[-1].sendall(sys.argv[2].encode())
`

// greeters starts one in a container of the other node, "peer", and one of the node's own, "node",
// at the same port.
func greeters(t *testing.T) (port string) {
	t.Helper()
	port = strconv.Itoa(lab.FreePort())
	for _, g := range [][3]string{{"heddle", "n2/c1", "peer"}, {"host", "n1/c1", "node"}} {
		lab.Start(t, g[0], g[1], lab.Python, "-c", greeter, port, g[2]).WaitFor("ready")
	}
	return port
}

// raceConnect connects to an address that a thread changes between another container's and the own
// loopback, where only the node listens.
func raceConnect(how string) func(*testing.T) string {
	return func(t *testing.T) string {
		port := greeters(t)
		return raced(t, runHostile(t, "race-connect", how, lab.Address(t, "heddle", "n2/c1"), "127.0.0.1", port), "node", "peer", "ECONNREFUSED")
	}
}

// raceOption ties a socket to a device whose name a thread changes between the container's and the
// node's.
func raceOption(t *testing.T) string {
	return raced(t, runHostile(t, "race-option", "lo", "heddle-vx0"), "heddle-vx0", "lo", "ENODEV")
}

// undo has sockets connect, disconnect and try again: for what comes of the tries named.
func undo(refused, success string, tries ...string) func(*testing.T) string {
	return func(t *testing.T) string {
		port := greeters(t)
		found := runHostile(t, "undo", lab.Address(t, "heddle", "n2/c1"), lab.Address(t, "host", "n1/c1"), port)
		var won []string
		for _, try := range tries {
			if g := gained(t, try, found[try], refused, success); g != "" {
				won = append(won, g)
			}
		}
		if len(won) > 0 && len(won) < len(tries) {
			t.Errorf("only some succeed: %v, of %v", won, tries)
		}
		return strings.Join(won, "; ")
	}
}

// TestDescriptorRaces: threads that close sockets, put other files behind their numbers and
// meanwhile connect, listen and make ioctls by them gain nothing, and disturb nobody: the agent
// lives, no socket is left over, others get theirs.
func TestDescriptorRaces(t *testing.T) {
	agent, port := lab.AgentPID(t, "n1"), strconv.Itoa(lab.FreePort())
	if out := lab.MustRun(t, "heddle", "n1/c1", hostile(t), "race-fd", "1000", lab.Address(t, "heddle", "n2/c1"), port); out != "done\n" {
		t.Errorf("it printed\n%s", out)
	}
	if now := lab.AgentPID(t, "n1"); now != agent {
		t.Errorf("the agent was %d and is %d", agent, now)
	}
	lab.StartPeer(t, "heddle", "n1/c2").Must(`tcp(4)`)
	testutil.Eventually(t, "no socket to be left over", func() (bool, string) {
		n := socketsOf(t, "n1/c1")
		return n == 0, fmt.Sprint(n)
	})
}

// TestStolenByPidfd has a process of one container take sockets out of one of another (pidfd_getfd)
// and use them: like those that were passed to it (TestPassedToAnotherContainer), they are still
// the first one's.
func TestStolenByPidfd(t *testing.T) {
	program, port := hostile(t), lab.FreePort()
	path := fmt.Sprintf("/tmp/%s-stolen-%d", lab.Name, port)
	t.Cleanup(func() { _ = exec.Command("rm", "-f", path).Run() })
	server := lab.StartPeer(t, "heddle", "n2/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	lab.Start(t, "heddle", "n1/c1", program, "lend", path).WaitFor("lends")
	thief := lab.Start(t, "heddle", "n1/c2", program, "steal", path, lab.Address(t, "heddle", "n1/c2"), lab.Address(t, "heddle", "n2/c1"), strconv.Itoa(port))
	thief.WaitFor("devices: ")
	found := results(t, thief.Output()+"done\n")
	giver := lab.Address(t, "heddle", "n1/c1")
	for what, want := range map[string]string{
		"bind the thief's address":             "EADDRNOTAVAIL",
		"bind":                                 "ok",
		"bind one of its own to the same port": "ok",
		"connect":                              "ok",
		"connected from":                       giver,
		"TCP_REPAIR":                           "EPERM",
		"devices":                              "lo eth0", // of its own namespace
	} {
		if found[what] != want {
			t.Errorf("%s: %s, want %s", what, found[what], want)
		}
	}
	server.Expect(fmt.Sprintf("%q", giver), `l.accept()[1][0]`)
	lab.StartPeer(t, "heddle", "n1/c1").Expect(`"EADDRINUSE"`, `error_of(tcp().bind, ("0.0.0.0", %d))`, port)
}

// TestRingMakesItsOwn: a socket made by io_uring is the container's own, in its namespace; and no
// command of io_uring's to one of the node writes anything else than setsockopt() and getsockopt()
// would.
func TestRingMakesItsOwn(t *testing.T) {
	port := lab.FreePort()
	p := lab.Start(t, "heddle", "n1/c1", hostile(t), "ring", lab.Address(t, "heddle", "n1/c1"), strconv.Itoa(port))
	p.WaitFor("tried\n")
	want := fmt.Sprintf("listens: 0.0.0.0:%d\nTCP_REPAIR: EPERM\nSO_MARK: ok\nSO_NETNS_COOKIE: 8 true\ntried\n", port)
	if got := p.Output(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if ours := nodeSockets(t, "n1", port); !strings.Contains(ours, "fwmark:0x4864") || strings.Contains(ours, "0x1234") {
		t.Errorf("the node's socket, which the container marked:\n%s", ours)
	}
	out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "ss", "-tlneH", "sport", "=", strconv.Itoa(port)).CombinedOutput()
	if err != nil || len(out) != 0 {
		t.Errorf("listeners of the node at the port: %v\n%s", err, out)
	}
}

// ringPoll has io_uring's own thread do things with sockets (IORING_SETUP_SQPOLL), and gives what
// came of one of them.
func ringPoll(what, refused, success string) func(*testing.T) string {
	return func(t *testing.T) string {
		port := lab.FreePort()
		lab.Start(t, "host", "n1/c1", lab.Python, "-c", greeter, strconv.Itoa(port), "node").WaitFor("ready")
		return gained(t, what, runHostile(t, "ring-poll", lab.Address(t, "host", "n1/c1"), strconv.Itoa(port))[what], refused, success)
	}
}

// readQueue searches what the kernel tells of a direct connection by seldom used calls for
// addresses of the underlay.
func readQueue(t *testing.T) string {
	port := strconv.Itoa(lab.FreePort())
	lab.Start(t, "heddle", "n2/c1", lab.Python, "-c", echoBytes, port).WaitFor("ready")
	n1, n2 := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	found := runHostile(t, "queue", lab.Address(t, "heddle", "n2/c1"), port, netip4(t, n1), netip4(t, n2))
	if found["messages of the error queue"] != "true" {
		t.Errorf("no errors came: what was looked for was not there: %v", found)
	}
	for _, option := range []string{"TCP_REPAIR", "TCP_REPAIR_QUEUE", "TCP_QUEUE_SEQ", "TCP_REPAIR_WINDOW", "TCP_TIMESTAMP", "TCP_REPAIR_OPTIONS"} {
		if found[option] == "ok" || found[option] == "" {
			t.Errorf("%s: %s", option, found[option])
		}
	}
	var out []string
	for what, where := range found {
		if strings.HasPrefix(what, "found ") {
			out = append(out, what+" in "+where)
		}
	}
	return strings.Join(out, "; ")
}
