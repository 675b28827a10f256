package policy

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// exchangeBytes answers every byte on one connection at a port of an address, or sends some, each
// after the answer to the one before.
const exchangeBytes = `
import socket, sys
role, addr, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "server":
    l = socket.create_server((addr, port), family=socket.AF_INET6 if ":" in addr else socket.AF_INET)
    print("listening", flush=True)
    s = l.accept()[0]
    while b := s.recv(1):
        s.sendall(b)
else:
    s = socket.create_connection((addr, port), timeout=20)
    for i in range(10):
        s.sendall(b"x")
        assert s.recv(1) == b"x"
    s.close()
    print("exchanged", flush=True)
`

// TestLimitTracking: what waits for a cap on its way over lo comes back as untracked as it was
// sent. The shaping device takes that from a packet; tracked from one side only, connections would
// be translated by the node's own rules, and dropped by those that drop what is invalid.
func TestLimitTracking(t *testing.T) {
	nft := func(text string) error {
		cmd := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w\n%s", err, out)
		}
		return nil
	}
	t.Cleanup(func() {
		if err := nft("add table inet operator\ndelete table inet operator\n"); err != nil {
			t.Error(err)
		}
	})
	lab.Limit(t, "n1/c1", "--egress", "100mbit")
	redirected, nobody := lab.FreePort(), lab.FreePort()
	for name, c := range map[string]struct {
		port  int
		rules string
	}{
		"invalid dropped": {lab.FreePort(), "chain arriving { type filter hook input priority 0; ct state invalid drop; iif lo accept; }"},
		"port redirected": {redirected, fmt.Sprintf("chain arriving { type nat hook prerouting priority dstnat; tcp dport %d redirect to :%d; }", redirected, nobody)},
	} {
		for _, addr := range []string{lab.Address(t, "heddle", "n1/c2"), lab.Address6(t, "heddle", "n1/c2").String()} {
			t.Run(name+" "+addr, func(t *testing.T) {
				testutil.NoError(t, nft("add table inet operator\ndelete table inet operator\ntable inet operator {\n"+c.rules+"\n}\n"))
				args := []string{addr, strconv.Itoa(c.port)}
				server := lab.Start(t, "heddle", "n1/c2", append([]string{"python3", "-c", exchangeBytes, "server"}, args...)...)
				server.WaitFor("listening")
				lab.Start(t, "heddle", "n1/c1", append([]string{"python3", "-c", exchangeBytes, "client"}, args...)...).WaitFor("exchanged")
				server.Stop()
			})
		}
	}
}
