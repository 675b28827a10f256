package attack

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"listen at the node's address with a connection that was undone", model.ProtectBind, "n1", listenUndone},
		attack{"pass for the node with a connection that was undone", model.ProtectNodeAddress, "n1", connectUndone(4, "")},
		attack{"pass for the node with a v4-mapped connection that was undone", model.ProtectNodeAddress, "n1", connectUndone(6, "::ffff:")},
	)
}

// undone gives a process of n1/c1 the socket s, which was an accepted direct connection until the
// process disconnected it (AF_UNSPEC): underneath, its address was the node's. prefix goes before
// IPv4 addresses.
func undone(t *testing.T, family int, prefix string) *lab.Peer {
	t.Helper()
	p, client, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	own := lab.Address(t, "heddle", "n1/c1")
	p.Must(`l = listen(%d, %q, %d)`, family, prefix+own, port) // not on a wildcard, which would leave the address free
	client.Must(`s = connect(4, %q, %d)`, own, port)
	p.Must(`s = l.accept()[0]`)
	p.Must(`import ctypes`)
	p.Expect(`0`, `ctypes.CDLL(None).connect(s.fileno(), bytes(16), 16)`)
	return p
}

// listenUndone listens with it, and has a process of the other node connect to that port of the
// node.
func listenUndone(t *testing.T) string {
	p, outsider, node := undone(t, 4, ""), lab.StartPeer(t, "host", "n2/c1"), lab.Address(t, "host", "n1/c1")
	p.Must(`s.listen()`)
	out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "ss", "-tlneH").CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		at := strings.Fields(line)[3]
		if !strings.Contains(line, "fwmark:0x4864") || !strings.HasPrefix(at, node) {
			continue
		}
		port := at[strings.LastIndexByte(at, ':')+1:]
		return gained(t, "a connect to the node at "+at, outsider.Do(`error_of(connect, 4, %q, %s)`, node, port), `"ECONNREFUSED"`, `"ok"`)
	}
	t.Errorf("no listener of a container at %s:\n%s", node, out)
	return ""
}

// connectUndone connects with it to another container, and sees who that one takes it for.
func connectUndone(family int, prefix string) func(*testing.T) string {
	return func(t *testing.T) string {
		p, victim, port := undone(t, family, prefix), lab.StartPeer(t, "heddle", "n1/c2"), lab.FreePort()
		victim.Must(`l = listen(4, "0.0.0.0", %d)`, port)
		p.Must(`s.connect((%q, %d))`, prefix+lab.Address(t, "heddle", "n1/c2"), port)
		return gained(t, "the other container saw", victim.Must(`l.accept()[1][0]`),
			fmt.Sprintf("%q", lab.Address(t, "heddle", "n1/c1")), fmt.Sprintf("%q", lab.Address(t, "host", "n1/c1")))
	}
}
