package loadgen

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// freeDatagramPort gives a port of UDP that was free a moment ago.
func freeDatagramPort(t *testing.T, address string) string {
	t.Helper()
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.LocalAddr().String()
}

// TestDatagrams: round trips and flows, one after the other with one server, in both families.
func TestDatagrams(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		for _, segments := range []string{"-segments=false", "-segments"} {
			at := freeDatagramPort(t, address)
			startServing(t, "datagrams", "-listen", at, segments)
			var trips RoundTrips
			runPeer(t, &trips, "datagram-rr", "-to", at, "-duration", "50ms")
			if trips.Transactions < 1 || trips.RTTP50Us <= 0 || trips.RTTP99Us < trips.RTTP50Us {
				t.Errorf("round trips: %+v", trips)
			}
			for _, size := range []string{"64", "1200"} {
				var f Flow
				runPeer(t, &f, "flow", "-to", at, "-duration", "50ms", "-size", size, segments)
				if f.Datagrams < flowBatch || f.ElapsedS < 0.05 || f.Size == 0 {
					t.Errorf("flow of %s bytes, %s: %+v", size, segments, f)
				}
			}
		}
	}
}

// TestLostDatagrams: a flow whose datagrams are not answered gives them up and goes on, and says
// how many they were.
func TestLostDatagrams(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	fd, err := dialDatagrams(server.LocalAddr().(*net.UDPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	f := &sender{fd: fd, size: 64, batch: make([]byte, flowBatch*64)}
	for range flowWindow/flowBatch + 1 {
		if err := f.send(); err != nil {
			t.Fatal(err)
		}
	}
	if f.gone != 0 || f.missed != flowWindow || f.sent != flowWindow+flowBatch {
		t.Errorf("%d sent, %d have come, %d given up", f.sent, f.gone, f.missed)
	}
}

func TestQUIC(t *testing.T) {
	at := freeDatagramPort(t, "127.0.0.1:0")
	startServing(t, "quic-server", "-listen", at)
	var s Stream
	runPeer(t, &s, "quic", "-to", at, "-duration", "50ms")
	if s.Bytes <= 0 || s.ElapsedS < 0.05 {
		t.Errorf("stream: %+v", s)
	}
	var trips RoundTrips
	runPeer(t, &trips, "quic-rr", "-to", at, "-duration", "50ms")
	if trips.Transactions < 1 || trips.RTTP50Us <= 0 {
		t.Errorf("requests: %+v", trips)
	}
}

func TestDatagramsMisused(t *testing.T) {
	nobody := freeDatagramPort(t, "127.0.0.1:0")
	busy, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	for _, tt := range []struct{ args, want string }{
		{"datagrams -listen 80", "--listen"},
		{"datagrams -listen " + busy.LocalAddr().String(), "address already in use"},
		{"datagram-rr -to " + nobody + " -size 8", "--size 8"},
		{"datagram-rr -to " + nobody, "connection refused"},
		{"flow -to nowhere", "--to"},
		{"flow -size 1639 -to " + nobody, "--size 1639: want at most 1638"},
		{"flow -to " + nobody, "connection refused"},
		{"quic -to nowhere", "--to"},
		{"quic-server -listen 80", "--listen"},
		{"guard -provide gold -- true", `--provide "gold": want certificate, queries or zone`},
		{"guard -provide zone -listen nowhere -- true", "--listen"},
	} {
		err := Main(t.Context(), strings.Fields(tt.args), Streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.args, err, tt.want)
		}
	}
}

// TestProvided: a command finds its files in a folder of its own, which goes with it.
func TestProvided(t *testing.T) {
	for provide, file := range map[string]string{"certificate": keyFile, "zone": resolverFile, "queries": queriesFile} {
		r := startMain(t, "guard", "-provide", provide, "-listen", "127.0.0.1:5300", "--", "sh", "-c", `test -s "$1/$2" && dirname "$1/$2"`, "sh", "{}", file)
		folder := r.line()
		if rest := r.end(); rest != "" || folder == "" {
			t.Errorf("%s: printed %q and %q", provide, folder, rest)
		}
		if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: folder %s is left: %v", provide, folder, err)
		}
	}
}

// TestGuardWaitsForUDP: a server that says nothing is ready once it has its port.
func TestGuardWaitsForUDP(t *testing.T) {
	at := freeDatagramPort(t, "127.0.0.1:0")
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	r := startMain(t, "guard", "-until", "udp/"+port, "--", "sleep", "60")
	c, err := net.ListenPacket("udp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r.awaitReady()
	r.stop()
}
