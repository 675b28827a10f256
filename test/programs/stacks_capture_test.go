package programs

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// testCapture: a capture of the container has both directions of a module's connection, each byte
// once.
func (l stacksLab) testCapture(t *testing.T) {
	l = l.with(t)
	l.start("n2/c1", "9004", "python3", filepath.Join(l.dir, "stack_echo.py"), "9004")
	file := filepath.Join(t.TempDir(), "pcap")
	c := lab.StartCommand(t, "heddle capture", l.heddle(context.WithoutCancel(t.Context()), "capture", "n1/c1", "-w", file, "--port", "9004"))
	c.WaitFor("capturing ")
	l.must("n1/c1", "python3", "-c", `import socket, sys
s = socket.create_connection((sys.argv[1], 9004))
s.sendall(b"captured")
s.shutdown(socket.SHUT_WR)
got = b"".join(iter(lambda: s.recv(99), b""))
assert got == b"captured", got`, l.address("n2/c1"))
	testutil.NoError(t, c.Cmd.Process.Signal(syscall.SIGINT))
	c.WaitEnd()
	f, err := os.Open(file)
	testutil.NoError(t, err)
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	testutil.NoError(t, err)
	type direction struct {
		syn, fin bool
		payload  string
	}
	seen := map[string]*direction{l.address("n1/c1"): {}, l.address("n2/c1"): {}}
	for {
		raw, _, err := r.ReadPacketData()
		if errors.Is(err, io.EOF) {
			break
		}
		testutil.NoError(t, err)
		p := gopacket.NewPacket(raw, layers.LayerTypeIPv4, gopacket.Default)
		tcp, ok := p.Layer(layers.LayerTypeTCP).(*layers.TCP)
		if !ok || seen[p.NetworkLayer().NetworkFlow().Src().String()] == nil {
			t.Fatalf("a packet of something else: %s", p)
		}
		d := seen[p.NetworkLayer().NetworkFlow().Src().String()]
		d.syn, d.fin, d.payload = d.syn || tcp.SYN, d.fin || tcp.FIN, d.payload+string(tcp.Payload)
	}
	for from, d := range seen {
		if !d.syn || !d.fin || d.payload != "captured" {
			t.Errorf("from %s: %+v\n%s", from, *d, c.Output())
		}
	}
}
