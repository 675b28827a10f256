package test

import (
	"strings"
	"testing"
)

// echoServer accepts any number of connections on all addresses and echoes one message on each; the client
// closes first, so that TIME_WAIT is on its side.
const echoServer = `
import socket, sys
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("", int(sys.argv[1]))); s.listen(64); print("listening", flush=True)
while True:
    c, _ = s.accept(); c.settimeout(5)
    try:
        c.sendall(c.recv(64)); c.recv(64)
    except OSError: pass
    c.close()
`

// echoClient connects to ADDR PORT from the source ports given behind (0: any), echoes, closes first and
// prints the ports it used.
const echoClient = `
import socket, sys
ports = []
for p in map(int, sys.argv[3:]):
    c = socket.socket(); c.settimeout(5); c.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if p: c.bind(("", p))
    c.connect((sys.argv[1], int(sys.argv[2]))); c.sendall(b"x" * 64)
    got = b""
    while len(got) < 64:
        more = c.recv(64)
        if not more: sys.exit("server closed early on port %d" % c.getsockname()[1])
        got += more
    ports.append(c.getsockname()[1]); c.close()
print(*ports)
`

// TestTimeWaitIsNotInTheWay checks that node sockets in TIME_WAIT do not swallow the packets of new
// connections between the containers' own stacks that have the same addresses and ports, on one node and
// on two, whichever end is intercepted.
func TestTimeWaitIsNotInTheWay(t *testing.T) {
	const connections = 20
	any := strings.Fields(strings.Repeat("0 ", connections))
	for _, tc := range []struct{ name, server, client string }{
		{"same node", "n1/c2", "n1/c1"},
		{"other node", "n2/c1", "n1/c1"},
	} {
		for port, second := range map[string]string{"7961": "overlay", "7962": "heddle"} {
			t.Run(tc.name+", server "+second, func(t *testing.T) {
				addr := address(t, "heddle", tc.server)
				client := func(mode string, ports []string) []string {
					return strings.Fields(mustRun(t, mode, tc.client, append([]string{"python3", "-c", echoClient, addr, port}, ports...)...))
				}
				first := start(t, "heddle", tc.server, "python3", "-c", echoServer, port)
				first.waitFor("listening")
				used := client("heddle", any)
				if len(used) != connections {
					t.Fatalf("client used ports %v, want %d", used, connections)
				}
				if second == "overlay" {
					first.stop()
					start(t, "overlay", tc.server, "python3", "-c", echoServer, port).waitFor("listening")
				}
				if again := client("overlay", used); strings.Join(again, " ") != strings.Join(used, " ") {
					t.Errorf("plain client used ports %v, want %v", again, used)
				}
			})
		}
	}
}
