package attack

import (
	"fmt"
	"os/exec"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"read another container's connections in its list", model.ProtectProcNet, "n1", readOthersConnections},
		attack{"read them by its open file", model.ProtectProcNet, "n1", readByPassedFile},
		attack{"read them in no network namespace of Heddle's", model.ProtectProcNet, "n1", readFromOutside},
	)
}

// victim has a listener and a connection in n1/c2, and gives the listener's port as /proc/net/tcp
// has it.
func victim(t *testing.T) (p *lab.Peer, port string) {
	p, n := lab.StartPeer(t, "heddle", "n1/c2"), lab.FreePort()
	p.Must(`l = listen(4, "0.0.0.0", %d)`, n)
	p.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n1/c2"), n)
	p.Expect("3", `sum(":%04X" in l for l in open("/proc/net/tcp"))`, n)
	return p, fmt.Sprintf(":%04X", n)
}

func readOthersConnections(t *testing.T) string {
	_, port := victim(t)
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must(`mine = listen(4, "127.0.0.1", 0)`)
	p.Expect("1", `len(shown(mine))`)
	return gained(t, "see another container's connections", p.Must(`sum(%q in l for l in open("/proc/net/tcp"))`, port), "0", "3")
}

// readByPassedFile reads what another container has opened.
func readByPassedFile(t *testing.T) string {
	owner, port := victim(t)
	p := lab.StartPeer(t, "heddle", "n1/c1")
	path := fmt.Sprintf("/tmp/%s-passed-file-%d", lab.Name, lab.FreePort())
	t.Cleanup(func() { _ = exec.Command("rm", "-f", path).Run() })
	p.Must(`u = taker(%q)`, path)
	p.Begin(`c, _ = u.accept()`)
	owner.Must(`f = open("/proc/net/tcp")`)
	owner.Must(`o = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)`)
	owner.Must(`o.connect(%q)`, path)
	owner.Must(`socket.send_fds(o, [b"x"], [f.fileno()]) and None`)
	p.Reply("accept")
	p.Must(`_, fds, _, _ = socket.recv_fds(c, 1, 1)`)
	return gained(t, "see another container's connections", p.Must(`sum(%q in l for l in os.fdopen(fds[0]))`, port), "0", "3")
}

// readFromOutside reads in a network namespace that is no endpoint's.
func readFromOutside(t *testing.T) string {
	_, port := victim(t)
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Must(lab.LeaveNetns)
	p.Expect(`0`, `libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)`)
	return gained(t, "see another container's connections", p.Must(`sum(%q in l for l in open("/proc/net/tcp"))`, port), "0", "3")
}
