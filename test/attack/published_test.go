package attack

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"send to a port of 127.0.0.1 from beyond the node", model.ProtectPublished, "n1", reachPublishedLoopback},
		attack{"go on by a port that was withdrawn", model.ProtectPublished, "n1", goOnByPort},
	)
}

// receiver takes datagrams in n1/c1, and remembers them.
const receiver = `
got = []
d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
d.bind(("0.0.0.0", %d))
def take():
    while True:
        got.append(d.recv(100).decode())
threading.Thread(target=take, daemon=True).start()`

func startReceiver(t *testing.T) (p *lab.Peer, port int) {
	p, port = lab.StartPeer(t, "overlay", "n1/c1"), lab.FreePort()
	p.Must(receiver, port)
	return p, port
}

// publish has ports of n1 lead to n1/c1; without any, none does.
func publish(t *testing.T, ports ...string) {
	t.Helper()
	args := append([]string{"endpoints", "publish", "--lab", lab.Name, "--node", "n1", "n1/c1"}, ports...)
	if out, err := exec.Command(lab.Bin, args...).CombinedOutput(); err != nil {
		t.Errorf("publish %v: %v\n%s", ports, err, out)
	}
}

// reachPublishedLoopback sends a frame for 127.0.0.1 from the node's network, and after it one that
// may come.
func reachPublishedLoopback(t *testing.T) string {
	server, port := startReceiver(t)
	alone, all := lab.FreePort(), lab.FreePort()
	publish(t, fmt.Sprintf("127.0.0.1:%d:%d/udp", alone, port), fmt.Sprintf("%d:%d/udp", all, port))
	defer publish(t)
	node := lab.Address(t, "host", "n1/c1")
	outside := lab.Forger(t, lab.StartOutside(t))
	mac := strings.Fields(lab.InNode(t, "n1", "ip", "-br", "link", "show", "dev", "eth0"))[2]
	route := strings.Fields(outside.Must(`subprocess.run(["ip", "route", "get", %q], capture_output=True, text=True).stdout`, node)) // to dev DEVICE src ADDRESS
	device, from := route[2], route[4]
	for _, c := range []struct {
		dst  string
		port int
		text string
	}{{"127.0.0.1", alone, "hostile"}, {node, all, "allowed"}} {
		outside.Must(`forge_frame(udp(%q, 40000, %q, %d, b%q), %q, %q)`, from, c.dst, c.port, c.text, device, mac)
	}
	var got string
	testutil.Eventually(t, "what is published for all to come", func() (bool, string) {
		got = server.Do("got")
		return strings.Contains(got, "allowed"), got
	})
	return gained(t, "came", got, `["allowed"]`, `["hostile", "allowed"]`)
}

// goOnByPort sends datagrams by a port, and once more when it leads nowhere: whoever has the
// container's address then would get them.
func goOnByPort(t *testing.T) (reached string) {
	server, port := startReceiver(t)
	at := lab.FreePort()
	publish(t, fmt.Sprintf("%d:%d/udp", at, port))
	client := lab.StartPeer(t, "host", "n2/c1")
	client.Must(`s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	client.Must(`s.connect((%q, %d))`, lab.Address(t, "host", "n1/c1"), at)
	client.Must(`s.setblocking(False)`)
	client.Must(`s.send(b"open")`)
	testutil.Eventually(t, "the port to lead to the container", func() (bool, string) {
		got := server.Do("got")
		return strings.Contains(got, "open"), got
	})
	publish(t)
	client.Must(`s.send(b"late")`)
	testutil.Eventually(t, "the node to refuse the datagram, or the container to get it", func() (bool, string) {
		refused, got := client.Do(`error_of(s.recv, 1)`), server.Do("got")
		if strings.Contains(got, "late") {
			reached = "the container got " + got
		}
		return reached != "" || refused == `"ECONNREFUSED"`, refused + got
	})
	return reached
}
