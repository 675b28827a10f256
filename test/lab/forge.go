package lab

import (
	_ "embed"
	"testing"
)

// WaitForDatagrams is a peer in n2/c1 that waits for datagrams at a port of its own stack.
func WaitForDatagrams(t *testing.T) (p *Peer, port int) {
	p, port = StartPeer(t, "overlay", "n2/c1"), FreePort()
	p.Must(`d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	p.Must(`d.bind(("0.0.0.0", %d))`, port)
	p.Must(`d.setblocking(False)`)
	p.Must(`def came():
    try: return d.recv(1000)[:6].decode()
    except OSError: return ""`)
	return p, port
}

//go:embed testdata/forge.py
var forgeScript string

// Forger is a peer that can make packets of its own.
func Forger(t testing.TB, p *Peer) *Peer {
	t.Helper()
	p.Must("%s", forgeScript)
	return p
}

// Network has the numbers of the lab's network: its id, and the VXLAN network identifier of its
// overlay.
type Network struct{ ID, VNI int }

// Numbers gives those of this lab.
func Numbers(t testing.TB) Network {
	t.Helper()
	var status []struct{ Network Network }
	Query(t, &status, "status", "--node", "n1")
	return status[0].Network
}
