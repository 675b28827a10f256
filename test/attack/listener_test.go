package attack

import (
	"fmt"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"have a SYN sent again when its listener, on loopback, has made way for the node's wildcard", model.ProtectWildcard, "n1",
			outlive("n1/c1", "127.0.0.1", "backlog=0", fillQueue)},
		// The kernel does not answer for an IPv4 address that is not local to the process of the
		// node.
		attack{"have one sent again to another container of the node", model.ProtectWildcard, "n1",
			outlive("n1/c2", "own6", "backlog=0", fillQueue)},
		attack{"have one sent again whose answer the client did not want to see", model.ProtectWildcard, "n1",
			outlive("n1/c1", "127.0.0.1", "backlog=64", missAnswer)},
	)
}

// How a connect is made to wait for its listener: c is the socket of a client, to addr and port.
const (
	fillQueue = `f = connect(%[1]d, %[2]q, %[3]d); c = pending(%[1]d, %[2]q, %[3]d)`
	// IP_MINTTL: what comes from one hop away is not taken.
	missAnswer = `c = pending(%[1]d, %[2]q, %[3]d, ((socket.IPPROTO_IP, 21, 255),))`
)

// outlive connects from c1 of n1 to a listener of the container, beside which a process of the node
// listens on all addresses; the connect waits until the listener has closed.
func outlive(container, listens, how, wait string) func(t *testing.T) string {
	return func(t *testing.T) string {
		node, server, client := lab.StartPeer(t, "host", "n1/c1"), lab.StartPeer(t, "heddle", container), lab.StartPeer(t, "heddle", "n1/c1")
		family, addr, wildcard, port := 4, listens, "0.0.0.0", lab.FreePort()
		if listens == "own6" {
			family, addr, wildcard = 6, lab.Overlay6(t, container), "::"
		}
		server.Must(`l = listen(%d, %q, %d, None, True, %s)`, family, addr, port, how)
		node.Must(`l = listen(%d, %q, %d, None, True)`, family, wildcard, port)
		client.Must(wait, family, addr, port)
		client.Expect(`[[], 0]`, `told(c, 300)`)
		server.Must(`l.close()`)
		client.Must(`c.setsockopt(socket.IPPROTO_IP, 21, 0)`)
		events := client.Do(`told(c)`)
		return gained(t, fmt.Sprintf("a connect to %s that waited", addr), events, `[[28], "ECONNREFUSED"]`, `[[4], 0]`)
	}
}
