package paths

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// traffic gives what `heddle endpoints --stats` says of a container.
func traffic(t *testing.T, container string) model.Traffic {
	t.Helper()
	var list []struct {
		Name    string
		Traffic model.Traffic
	}
	lab.Query(t, &list, "endpoints", "--stats")
	for _, e := range list {
		if e.Name == container {
			return e.Traffic
		}
	}
	t.Fatalf("no endpoint %s in %+v", container, list)
	return model.Traffic{}
}

// counts are the fields of model.Traffic that a test compares, as text.
func counts(now, before model.Traffic) string {
	return fmt.Sprintf("opened %d accepted %d refused %d timed_out %d failed %d closed %d broken %d sent %d received %d live %d",
		now.Opened-before.Opened, now.Accepted-before.Accepted, now.Refused-before.Refused, now.TimedOut-before.TimedOut,
		now.Failed-before.Failed, now.Closed-before.Closed, now.Broken-before.Broken, now.BytesSent-before.BytesSent,
		now.BytesReceived-before.BytesReceived, now.LiveTotal())
}

// expectTraffic waits until the container's counts differ from before by what is wanted: a
// connection closes a little after its program.
func expectTraffic(t *testing.T, container string, before model.Traffic, want string) {
	t.Helper()
	testutil.Eventually(t, "the account of "+container+" to be: "+want, func() (bool, string) {
		got := counts(traffic(t, container), before)
		return got == want, got
	})
}

// TestAccounts: an endpoint's account has each connection once, alive or closed, and its payload to
// the byte.
func TestAccounts(t *testing.T) {
	const client, server = "n1/c1", "n2/c1"
	for i, x := range []struct {
		transfer
		path         model.Path
		opens, takes string // what client and server count for it, once it has ended
	}{
		{transfer{name: "direct", client: client, server: server, listen: "0.0.0.0"}, names.PathDirect, "opened 1 accepted 0", "opened 0 accepted 1"},
		{transfer{name: "overlay", client: client, server: server, listen: "0.0.0.0", bind: "own"}, names.PathOverlay, "opened 1 accepted 0", "opened 0 accepted 1"},
		{transfer{name: "same node", client: client, server: "n1/c2", listen: "::"}, names.PathLocal, "opened 1 accepted 0", "opened 0 accepted 1"},
	} {
		t.Run(x.name, func(t *testing.T) {
			ours, theirs := traffic(t, x.client), traffic(t, x.server)
			port, bind := fmt.Sprint(23400+i), x.bind
			if bind == "own" {
				bind = lab.Address(t, "heddle", x.client)
			}
			s := lab.Start(t, "heddle", x.server, "python3", "-c", transferServer, x.listen, port, fmt.Sprint(transferAnswered))
			s.WaitFor("listening")
			c := lab.Start(t, "heddle", x.client, "python3", "-c", transferClient, bind, lab.Address(t, "heddle", x.server), port, fmt.Sprint(transferSent), "wait")
			c.WaitFor("names")
			rest := " refused 0 timed_out 0 failed 0 closed %d broken 0 sent %d received %d live %d"
			expectTraffic(t, x.client, ours, x.opens+fmt.Sprintf(rest, 0, 0, 0, 1))
			if live := traffic(t, x.client).Live; live[x.path] != 1 {
				t.Errorf("live connections by path: %v, want one %s", live, x.path)
			}
			if _, err := c.Stdin.Write([]byte("go\n")); err != nil {
				t.Fatal(err)
			}
			s.WaitFor("done")
			expectTraffic(t, x.client, ours, x.opens+fmt.Sprintf(rest, 1, transferSent, transferAnswered, 0))
			expectTraffic(t, x.server, theirs, x.takes+fmt.Sprintf(rest, 1, transferAnswered, transferSent, 0))
		})
	}
	t.Run("loopback", func(t *testing.T) {
		before := traffic(t, client)
		transfer{client: client, server: client, listen: "127.0.0.1", dial: "127.0.0.1", port: "23410"}.run(t)
		both := transferSent + transferAnswered
		expectTraffic(t, client, before, fmt.Sprintf("opened 1 accepted 1 refused 0 timed_out 0 failed 0 closed 2 broken 0 sent %d received %d live 0", both, both))
	})
}

// TestAccountsOfFailures: connects that come to nothing are counted by cause, and connections that
// are cut.
func TestAccountsOfFailures(t *testing.T) {
	const script = `
import socket, sys
host, nobody = sys.argv[1:]
def connect(host, port, timeout_ms=0, blocking=True):
    s = socket.socket()
    s.setblocking(blocking)
    if timeout_ms: s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    try: s.connect((host, port))
    except OSError as e: print(e.errno, end=" ")
    return s
connect(host, 9)                        # ECONNREFUSED
connect(nobody, 9, timeout_ms=300)      # ETIMEDOUT
connect(nobody, 9, blocking=False).close()
s = connect(host, 23420)
try: s.recv(1)
except OSError as e: print(e.errno)
`
	const resetting = `
import socket, struct
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind(("0.0.0.0", 23420)); l.listen(1)
print("listening", flush=True)
c, _ = l.accept()
c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
c.close()
`
	server := lab.Start(t, "heddle", "n2/c1", "python3", "-c", resetting)
	server.WaitFor("listening")
	before := traffic(t, "n1/c1")
	// An address of the nodes' own network that nobody has does not even answer ARP.
	nodes := lab.Address(t, "host", "n1/c1")
	nobody := nodes[:strings.LastIndex(nodes, ".")] + ".249"
	out := lab.MustRun(t, "heddle", "n1/c1", "python3", "-c", script, lab.Address(t, "heddle", "n2/c1"), nobody)
	if out != "111 110 115 104\n" {
		t.Errorf("the program saw errors %q, want refused, timed out, in progress, reset", out)
	}
	expectTraffic(t, "n1/c1", before, "opened 1 accepted 0 refused 1 timed_out 1 failed 1 closed 1 broken 1 sent 0 received 0 live 0")
}

// TestAccountsOutliveTheAgent: what ends while no agent runs is counted, and the next one goes on
// counting.
func TestAccountsOutliveTheAgent(t *testing.T) {
	before := traffic(t, "n1/c1")
	s := lab.Start(t, "heddle", "n2/c1", "python3", "-c", transferServer, "0.0.0.0", "23440", fmt.Sprint(transferAnswered))
	s.WaitFor("listening")
	c := lab.Start(t, "heddle", "n1/c1", "python3", "-c", transferClient, "", lab.Address(t, "heddle", "n2/c1"), "23440", fmt.Sprint(transferSent), "wait")
	c.WaitFor("names")
	lab.EndAgent(t, "n1", syscall.SIGKILL)
	if _, err := c.Stdin.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	s.WaitFor("done")
	testutil.NoError(t, lab.Command("up"))
	expectTraffic(t, "n1/c1", before, fmt.Sprintf("opened 1 accepted 0 refused 0 timed_out 0 failed 0 closed 1 broken 0 sent %d received %d live 0",
		transferSent, transferAnswered))
}

// TestAccountMetrics: each endpoint is a label.
func TestAccountMetrics(t *testing.T) {
	socket := "/run/heddle/lab/" + lab.Name + "/n1/api.sock"
	out, err := exec.CommandContext(t.Context(), "curl", "-sf", "--unix-socket", socket, "http://heddle/metrics").CombinedOutput()
	if err != nil {
		t.Fatalf("curl: %v\n%s", err, out)
	}
	for _, c := range []string{"n1/c1", "n1/c2"} {
		for _, name := range []string{"opened_total", "sent_bytes_total", "retransmits_total"} {
			if want := fmt.Sprintf("heddle_endpoint_%s{endpoint=%q} ", name, c); !strings.Contains(string(out), want) {
				t.Errorf("no metric %s", want)
			}
		}
	}
}

// TestContainerConnections: a container's listeners and connections as its programs see them.
func TestContainerConnections(t *testing.T) {
	const script = `
import socket, sys
def listen(family, host, port):
    s = socket.socket(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, port)); s.listen(7)
    return s
a = listen(socket.AF_INET, "0.0.0.0", 23430)
b = listen(socket.AF_INET6, "::", 23431)
c = listen(socket.AF_INET, "127.0.0.1", 23432)
d = listen(socket.AF_INET6, "::1", 23433)
x = socket.create_connection(("127.0.0.1", 23432)); x.sendall(b"unread")
print("up", flush=True)
sys.stdin.read()
`
	p := lab.Start(t, "heddle", "n1/c2", "python3", "-c", script)
	p.WaitFor("up")
	addr := lab.Address(t, "heddle", "n1/c2")
	list := strings.Fields(lab.Heddle(t, "connections", "--container", addr, "--listening"))
	got := strings.Join(list, " ")
	for _, want := range []string{"LISTEN 0 7 0.0.0.0:23430 0.0.0.0:* listen", "LISTEN 0 7 [::]:23431 [::]:* listen",
		"LISTEN 1 7 127.0.0.1:23432 0.0.0.0:* listen", "LISTEN 0 7 [::1]:23433 [::]:* listen"} {
		if !strings.Contains(got, want) {
			t.Errorf("no listener %q in\n%s", want, got)
		}
	}
	got = strings.Join(strings.Fields(lab.Heddle(t, "connections", "--container", "n1/c2", "--state", "established")), " ")
	if n := strings.Count(got, "ESTABLISHED"); n != 2 || !strings.Contains(got, "ESTABLISHED 6 0 127.0.0.1:23432 127.0.0.1:") {
		t.Errorf("%d connections, want the two ends of one, with 6 bytes unread\n%s", n, got)
	}
	if strings.Contains(got, "127.128.") {
		t.Errorf("a loopback alias is shown\n%s", got)
	}
}
