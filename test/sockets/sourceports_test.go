package sockets

import (
	"fmt"
	"strconv"
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

// portsClient connects to each, and says from which port; the connections live until its end.
const portsClient = `
import socket, sys
first, count = map(int, sys.argv[2:])
all = [socket.create_connection((sys.argv[1], p), 5) for p in range(first, first + count)]
print(*(s.getsockname()[1] for s in all))
`

// TestSourcePorts: the two stacks of a container have one address and choose source ports by
// themselves. They never choose alike: to the same listener that would be no new connection.
func TestSourcePorts(t *testing.T) {
	const first, count = 21000, 300
	words := []string{fmt.Sprint(first), fmt.Sprint(count)}
	server := lab.Start(t, "heddle", "n1/c2", append([]string{"python3", "-c", portsServer}, words...)...)
	server.WaitFor("listening")
	addr := strings.TrimSpace(lab.Heddle(t, "lab", "ip", "n1/c2"))
	of := map[int]string{}
	for _, mode := range []string{"heddle", "overlay"} {
		out := lab.MustRun(t, mode, "n1/c1", append([]string{"python3", "-c", portsClient, addr}, words...)...)
		ports := strings.Fields(out)
		if len(ports) != count {
			t.Fatalf("%d ports of %d: %s", len(ports), count, out)
		}
		for _, word := range ports {
			p, err := strconv.Atoi(word)
			testutil.NoError(t, err)
			if have := of[p]; have != "" && have != mode {
				t.Errorf("port %d is chosen by both stacks", p)
			}
			of[p] = mode
		}
	}
	// All that the one has are below all of the other's.
	for p, mode := range of {
		if (p >= 57469) != (mode == "overlay") {
			t.Errorf("%s: port %d", mode, p)
		}
	}
}
