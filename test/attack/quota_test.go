package attack

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"hold more sockets than an endpoint may have", model.ProtectSocketQuota, "n1", holdSockets},
		attack{"ask as the agent what a process of the node is", model.ProtectAgentOption, "n1", askAsAgent},
		attack{"make a socket another endpoint's, as the agent does", model.ProtectAgentOption, "n1", tagAsAgent},
	)
}

// holdScript is Python that opens n sockets, or as many as it gets, and says why it got no more.
const holdScript = `
def hold(n):
    while len(held) < n:
        try:
            held.append(socket.socket())
        except OSError as e:
            return errno.errorcode[e.errno]
    return "ok"
held = []
`

// limitOf gives how many sockets the endpoints of a node may have.
func limitOf(t testing.TB, node string) uint64 {
	t.Helper()
	var status []struct {
		Interception struct {
			EndpointSockets uint64 `json:"endpoint_sockets"`
		}
	}
	lab.Query(t, &status, "status", "--node", node)
	if len(status) != 1 || status[0].Interception.EndpointSockets == 0 {
		t.Fatalf("status: %+v", status)
	}
	return status[0].Interception.EndpointSockets
}

// trafficOf gives what a node counts of an endpoint.
func trafficOf(t testing.TB, container string) model.Traffic {
	t.Helper()
	node, _, _ := strings.Cut(container, "/")
	var all []struct{ Traffic model.Traffic }
	lab.Query(t, &all, "endpoints", "--stats", "--node", node)
	for _, e := range all {
		if e.Traffic.Name == container {
			return e.Traffic
		}
	}
	t.Fatalf("no endpoint %s in %+v", container, all)
	return model.Traffic{}
}

// socketsOf gives how many sockets an endpoint has, as its node counts them.
func socketsOf(t testing.TB, container string) uint64 {
	t.Helper()
	return trafficOf(t, container).Sockets
}

// holdSockets opens sockets in several processes of one container, none of which could hold so
// many.
func holdSockets(t *testing.T) string {
	const each = 17000
	limit := limitOf(t, "n1")
	refused := false
	for held := uint64(0); held <= limit && !refused; held += each {
		p := lab.StartPeer(t, "heddle", "n1/c1")
		p.Must(holdScript)
		switch got := p.Must(`hold(%d)`, each); got {
		case `"ENFILE"`:
			refused = true
		case `"ok"`:
		default:
			t.Fatalf("socket() failed with %s", got)
		}
	}
	switch n := socketsOf(t, "n1/c1"); {
	case refused && n <= limit:
		return ""
	case refused:
		t.Errorf("%d sockets before one was refused, of %d", n, limit)
		return ""
	default:
		return fmt.Sprintf("%d sockets, of %d", n, limit)
	}
}

// askScript is Python that has a socket which is not counted, a connection that ended before
// accept(), and makes the request of it by which the agent has one counted, for the first thread of
// the machine.
const askScript = `
def ask():
    l = socket.create_server(("127.0.0.1", 0))
    c = socket.create_connection(l.getsockname())
    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    c.close()
    a, _ = l.accept()
    try:
        a.setsockopt(0x4864, 1, struct.pack("IIIII", 1, 1, 0, 0, 0))
    except OSError as e:
        return errno.errorcode[e.errno]
    return "ok"
`

// askAsAgent would learn whether there is a thread, and by more of it in which namespace and of
// whom.
func askAsAgent(t *testing.T) string {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must("import struct")
	p.Must(askScript)
	switch got := p.Must("ask()"); got {
	case `"ENOPROTOOPT"`:
		return ""
	default:
		return "the agent's request was answered: " + got
	}
}

// tagScript is Python that asks, as the agent does, for its socket to be the endpoint's with that
// number; a program knows no key but 0.
const tagScript = `
def tag(endpoint):
    s = socket.socket()
    try:
        s.setsockopt(0x4864, 2, struct.pack("QIIII", 0, endpoint, 0, 0, 0))
    except OSError as e:
        return errno.errorcode[e.errno]
    return "ok"
`

// tagAsAgent would go by another endpoint's name. That it is not the agent's process would not keep
// it from that: one may come to have its number when the agent has ended.
func tagAsAgent(t *testing.T) string {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must("import struct")
	p.Must(tagScript)
	if got := p.Must("tag(1)"); got != `"ENOPROTOOPT"` {
		return "the agent's request was granted: " + got
	}
	return ""
}

// TestSocketQuota: an endpoint's sockets are counted exactly, however they come and go.
func TestSocketQuota(t *testing.T) {
	const limit = 40
	lab.EndAgent(t, "n1", syscall.SIGTERM) // brings its successor up in the end, with the limit it had
	testutil.NoError(t, lab.Command("up", "--agent-arg=--endpoint-sockets="+strconv.Itoa(limit)))
	limited := lab.AgentPID(t, "n1")
	t.Cleanup(func() {
		if err := lab.KillAgent(limited, syscall.SIGTERM); err != nil {
			t.Error(err)
		}
	})
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must(holdScript)
	count := func(what string, want uint64) {
		t.Helper()
		testutil.Eventually(t, fmt.Sprintf("%d sockets: %s", want, what), func() (bool, string) {
			n := socketsOf(t, "n1/c1")
			return n == want, fmt.Sprint(n)
		})
	}
	count("nothing yet", 0)
	t.Run("socket and close", func(t *testing.T) {
		p := p.In(t)
		p.Expect(`"ENFILE"`, `hold(1000)`)
		p.Expect(strconv.Itoa(limit), `len(held)`)
		count("all it may", limit)
		p.Must(`held[0].close()`)
		p.Expect(`"ENFILE"`, `hold(1000)`)
		p.Expect(`"ENFILE"`, `error_of(lambda: socket.socket(socket.AF_INET6))`)
		if neighbour := lab.StartPeer(t, "heddle", "n1/c2"); neighbour.Must(`error_of(tcp, 4)`) != `"ok"` {
			t.Error("another endpoint pays for it")
		}
		p.Must(`[s.close() for s in held]`)
		p.Must(`held.clear()`)
		count("all closed", 0)
	})
	t.Run("dup, fork and death", func(t *testing.T) {
		p := p.In(t)
		p.Must(`s = tcp(4)`)
		p.Must(`d = s.dup()`)
		p.Must(`s.close()`)
		count("the duplicate", 1)
		p.Must(`child = subprocess.Popen(["sleep", "1000"], pass_fds=[d.fileno()])`)
		p.Must(`d.close()`)
		count("the child's", 1)
		p.Must(`(child.kill(), child.wait())`)
		count("the child is dead", 0)
	})
	t.Run("accepted and not accepted", func(t *testing.T) {
		p, port := p.In(t), lab.FreePort()
		client := lab.StartPeer(t, "heddle", "n2/c1")
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Must(`c = [connect(4, %q, %d) for _ in range(5)]`, lab.Address(t, "heddle", "n1/c1"), port)
		count("the listener and five in its queue", 6)
		p.Must(`a = [l.accept()[0] for _ in range(2)]`)
		count("two of them accepted", 6)
		p.Must(`a.pop().close()`)
		count("one closed", 5)
		client.Must(`[s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER) for s in c]`)
		client.Must(`[s.close() for s in c]`)
		count("those in the queue are reset", 2)
		p.Must(`l.close()`)
		p.Must(`a.pop().close()`)
		count("all closed", 0)
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Must(`c = [connect(4, %q, %d) for _ in range(3)]`, lab.Address(t, "heddle", "n1/c1"), port)
		count("three in the queue", 4)
		p.Must(`l.close()`)
		count("they go with the listener", 0)
		client.Must(`[s.close() for s in c]`)
	})
	t.Run("connections reset before accept are counted once used", func(t *testing.T) {
		p, port := p.In(t), lab.FreePort()
		client, target := lab.StartPeer(t, "heddle", "n2/c1"), lab.Address(t, "heddle", "n2/c1")
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		client.Must(`c = [connect(4, %q, %d) for _ in range(3)]`, lab.Address(t, "heddle", "n1/c1"), port)
		count("the listener and three in its queue", 4)
		client.Must(`[s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER) for s in c]`)
		client.Must(`[s.close() for s in c]`)
		count("all three are reset", 1)
		p.Must(`a = [l.accept()[0] for _ in range(3)]`)
		p.Must(`import ctypes`)
		p.Expect(`[0, 0, 0]`, `[ctypes.CDLL(None).connect(s.fileno(), bytes(16), 16) for s in a]`) // AF_UNSPEC
		count("dead ones are not", 1)
		p.Must(`a[0].connect((%q, %d))`, target, port)
		count("one connects", 2)
		p.Must(`a[1].listen()`)
		count("one listens", 3)
		p.Expect(`"ENFILE"`, `hold(1000)`)
		p.Expect(`"ENFILE"`, `error_of(a[2].connect, (%q, %d))`, target, port)
		count("none above the limit", limit)
		p.Must(`held.pop().close()`)
		p.Must(`a[2].connect((%q, %d))`, target, port)
		count("in its place", limit)
		p.Must(`[s.close() for s in held + a + [l]]`)
		p.Must(`held.clear()`)
		count("all closed", 0)
	})
	t.Run("above the limit accepted connections end", func(t *testing.T) {
		p, port := p.In(t), lab.FreePort()
		client := lab.StartPeer(t, "heddle", "n2/c1")
		p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		p.Expect(`"ENFILE"`, `hold(1000)`)
		before := lab.Counters(t, "n1")
		client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n1/c1"), port)
		p.Must(`a = l.accept()[0]`)
		p.Expect(`"ETIMEDOUT"`, `error_of(a.recv, 1)`)
		p.Must(`a.close()`)
		after := lab.Counters(t, "n1")
		if after["cut_socket_quota"] != before["cut_socket_quota"]+1 {
			t.Errorf("cut_socket_quota rose by %d", after["cut_socket_quota"]-before["cut_socket_quota"])
		}
		if after["refuse_socket_quota"] == 0 {
			t.Error("refuse_socket_quota was not counted")
		}
		p.Must(`[s.close() for s in held]`)
		p.Must(`l.close()`)
		count("all closed", 0)
	})
}

// TestBothEndsConnect has sockets connect to themselves, so that both ends of the connection send a
// SYN, by each kind of address: such a socket is one that connected, it is counted once, and gives
// its port back.
func TestBothEndsConnect(t *testing.T) {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	before := trafficOf(t, "n1/c1")
	addresses := []string{lab.Address(t, "heddle", "n1/c1"), "127.0.0.1"}
	for _, addr := range addresses {
		port := lab.FreePort()
		p.Must(`s = connect(4, %q, %d, (%[1]q, %[2]d))`, addr, port)
		p.Expect("true", `s.getsockname() == s.getpeername()`)
		p.Expect(`"echo"`, `(s.sendall(b"echo"), s.recv(10).decode())[1]`)
		p.Must(`s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER)`)
		p.Must(`s.close()`)
		p.Must(`bound(4, "0.0.0.0", %d).close()`, port)
	}
	after := trafficOf(t, "n1/c1")
	if after.Sockets != 0 || after.Opened-before.Opened != uint64(len(addresses)) || after.Accepted != before.Accepted {
		t.Errorf("before %+v, after %+v: want no sockets, %d connections more that were opened and none accepted", before, after, len(addresses))
	}
}

// latencyScript is Python that times socket() and close(), in microseconds: the median and the
// longest of n.
const latencyScript = `
def latency(n):
    took = []
    for _ in range(n):
        t = time.perf_counter()
        socket.socket().close()
        took.append(time.perf_counter() - t)
    took.sort()
    return [round(1e6 * took[n // 2]), round(1e6 * took[-1])]
`

// TestSocketFlood: while a container does nothing but make sockets, and ioctls, in more processes
// than there are processors, another one's socket() goes on. Each container has an answering thread
// of its own.
func TestSocketFlood(t *testing.T) {
	victim := lab.StartPeer(t, "heddle", "n1/c2")
	victim.Must(latencyScript)
	t.Logf("alone: median and longest of 500, in us: %s", victim.Must(`latency(500)`))
	for what, line := range map[string]string{"socket": "socket.socket().close()", "ioctl": "fcntl.ioctl(s, 0x8912, bytes(16))"} {
		flood := lab.Start(t, "heddle", "n1/c1", lab.Python, "-c", `
import fcntl, os, socket
s = socket.socket()
for _ in range(7):
    if os.fork() == 0:
        break
print("floods", flush=True)
while os.getppid() != 1:
    `+line)
		flood.WaitFor("floods")
		got := victim.Must(`latency(500)`)
		flood.Stop()
		t.Logf("beside 8 processes that call %s(): %s", what, got)
		var us [2]int
		testutil.NoError(t, json.Unmarshal([]byte(got), &us))
		if time.Duration(us[0])*time.Microsecond > time.Second {
			t.Errorf("%s: half of the calls took longer than %d us", what, us[0])
		}
	}
}
