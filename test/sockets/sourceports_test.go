package sockets

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// portsServer accepts at as many ports, from the first on, and keeps what it accepts.
const portsServer = `
import select, socket, sys
first, count = map(int, sys.argv[1:])
all = [socket.create_server(("", p)) for p in range(first, first + count)]
print("listening", flush=True)
kept = []
while True:
    for s in select.select(all, [], [])[0]: kept.append(s.accept()[0])
`

// portsClient connects to each, and says from which port; the connections live until its end. One
// that is not answered has a port that the other stack had just before, which comes about by chance
// in one run in twenty or so: it is tried again from the next one.
const portsClient = `
import socket, sys
first, count = map(int, sys.argv[2:])
spare = 3
def connect(p):
    global spare
    while True:
        try: return socket.create_connection((sys.argv[1], p), 5)
        except TimeoutError:
            spare -= 1
            if spare < 0: raise
all = [connect(p) for p in range(first, first + count)]
print(*(s.getsockname()[1] for s in all))
`

// TestSourcePorts: the two stacks of a container have one address and choose source ports by
// themselves. They seldom choose alike: to the same listener that is no new connection.
func TestSourcePorts(t *testing.T) {
	const first, count = 21000, 300
	words := []string{fmt.Sprint(first), fmt.Sprint(count)}
	server := lab.Start(t, "heddle", "n1/c2", append([]string{"python3", "-c", portsServer}, words...)...)
	server.WaitFor("listening")
	addr := strings.TrimSpace(lab.Heddle(t, "lab", "ip", "n1/c2"))
	// The kernel's random number is another one every 10 s.
	for range 3 {
		var ports [2][]int
		for i, mode := range []string{"heddle", "overlay"} {
			out := lab.MustRun(t, mode, "n1/c1", append([]string{"python3", "-c", portsClient, addr}, words...)...)
			for _, word := range strings.Fields(out) {
				var p int
				_, err := fmt.Sscan(word, &p)
				testutil.NoError(t, err)
				ports[i] = append(ports[i], p)
			}
			if len(ports[i]) != count {
				t.Fatalf("%d ports of %d: %s", len(ports[i]), count, out)
			}
		}
		alike := 0
		for i, p := range ports[0] {
			if d := ports[1][i] - p; -16 <= d && d <= 16 {
				alike++
			}
		}
		// By chance it is one in 700.
		if alike > count/50 {
			t.Errorf("%d of %d pairs of connections have nearly the same source port", alike, count)
		}
	}
}
