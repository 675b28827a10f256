package loadgen

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// freePort gives a port of the loopback that was free a moment ago.
func freePort(t *testing.T, network, address string) string {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// startEcho runs a server in this process until the test ends, and gives its address.
func startEcho(t *testing.T, address string, flags ...string) {
	t.Helper()
	startServing(t, append([]string{"server", "-listen", address}, flags...)...)
}

// startServing runs a command that says when it is ready, until the test ends.
func startServing(t *testing.T, args ...string) {
	t.Helper()
	server := startMain(t, args...)
	server.awaitReady()
	t.Cleanup(func() { server.stop() })
}

// runPeer runs a command of the peer and reads its JSON into result.
func runPeer(t *testing.T, result any, args ...string) {
	t.Helper()
	var out bytes.Buffer
	if err := Main(t.Context(), args, Streams{In: strings.NewReader(""), Out: &out, Err: t.Output()}); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	if err := json.Unmarshal(out.Bytes(), result); err != nil {
		t.Fatalf("%v printed %q: %v", args, &out, err)
	}
}

func TestMeasurements(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		address = freePort(t, "tcp", address)
		t.Run(address, func(t *testing.T) {
			startEcho(t, address)
			var trips RoundTrips
			runPeer(t, &trips, "rr", "-to", address, "-duration", "100ms", "-size", "1000")
			if trips.Transactions < 10 || trips.ElapsedS < 0.1 || trips.RTTP50Us <= 0 || trips.RTTP99Us < trips.RTTP50Us {
				t.Errorf("rr: %+v", trips)
			}
			for _, callers := range []int{1, 8} {
				var c Connections
				runPeer(t, &c, "crr", "-to", address, "-duration", "100ms", "-callers", strconv.Itoa(callers))
				if c.Callers != callers || c.Connections < 10*callers || c.ElapsedS < 0.1 || c.SocketP50Us <= 0 ||
					c.SocketConnectP5Us <= 0 ||
					c.SocketConnectP50Us < max(c.SocketP50Us, c.SocketConnectP5Us) || c.SocketConnectP99Us < c.SocketConnectP50Us {
					t.Errorf("crr with %d callers: %+v", callers, c)
				}
			}
		})
	}
}

func TestMisuse(t *testing.T) {
	nobody := freePort(t, "tcp", "127.0.0.1:0")
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	tests := []struct {
		args []string
		want string
	}{
		{nil, "want one of"},
		{[]string{"fly"}, "want one of"},
		{[]string{"rr", "-duration", "0s"}, "--duration"},
		{[]string{"rr", "-to", "nowhere"}, "--to"},
		{[]string{"rr", "-size", "0"}, "--size"},
		{[]string{"steps", "-connections", "-1"}, "--connections"},
		{[]string{"server", "-lifetime", "9h"}, "--lifetime"},
		{[]string{"server", "-listen", "80"}, "--listen"},
		{[]string{"server", "-listen", busy.Addr().String()}, "address already in use"},
		{[]string{"rr", "-to", nobody}, "connection refused"},
		{[]string{"crr", "-to", nobody}, "warm up: connect: connection refused"},
		{[]string{"crr", "-to", nobody, "-callers", "0"}, "--callers 0: want 1 or more"},
		{[]string{"rr", "-to", nobody, "-cpu", "1000"}, "--cpu 1000"},
		{[]string{"meter"}, "want a command"},
		{[]string{"meter", "--", "sh", "-c", "echo said why; exit 4"}, "said why"},
		{[]string{"meter", "-lifetime", "20ms", "--", "sleep", "60"}, "deadline exceeded"},
		{[]string{"guard", "--", "/nonexistent"}, "start /nonexistent"},
	}
	for _, tt := range tests {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			err := Main(t.Context(), tt.args, Streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestServerEndsWithItsLifetime(t *testing.T) {
	in, stop := io.Pipe()
	defer stop.Close()
	args := []string{"server", "-listen", "127.0.0.1:0", "-lifetime", "20ms"}
	if err := Main(t.Context(), args, Streams{In: in, Out: io.Discard, Err: io.Discard}); err != nil {
		t.Error(err)
	}
}

func TestMeter(t *testing.T) {
	var m Metered
	runPeer(t, &m, "meter", "--", "sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done")
	if m.Output != "done\n" || m.ElapsedS <= 0 || m.BusyCPUS <= 0 {
		t.Errorf("got %+v", m)
	}
}

func TestGuardEnds(t *testing.T) {
	run := func(in io.Reader, args ...string) (string, error) {
		var out bytes.Buffer
		err := Main(t.Context(), append([]string{"guard"}, args...), Streams{In: in, Out: &out, Err: io.Discard})
		return out.String(), err
	}
	open, stop := io.Pipe()
	defer stop.Close()
	if out, err := run(open, "--", "echo", "hello"); out != "hello\n" || err != nil {
		t.Errorf("program that ends by itself: %q, %v", out, err)
	}
	if _, err := run(strings.NewReader(""), "--", "sleep", "60"); err != nil {
		t.Errorf("end of input: %v", err)
	}
	if _, err := run(open, "-lifetime", "20ms", "--", "sleep", "60"); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("end of lifetime: %v", err)
	}
}

func TestPinMovesTheThread(t *testing.T) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	cpu := 0
	for !allowed.IsSet(cpu) {
		cpu++
	}
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			if err := pin(cpu); err != nil {
				return err
			}
			var now unix.CPUSet
			if err := unix.SchedGetaffinity(0, &now); err != nil {
				return err
			}
			if now.Count() != 1 || !now.IsSet(cpu) {
				return fmt.Errorf("thread may run on %d processors", now.Count())
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestPercentile(t *testing.T) {
	var samples []int64
	for i := range int64(1000) {
		samples = append(samples, (i+1)*1000)
	}
	slices.Sort(samples)
	for _, tt := range []struct {
		p    int
		want float64
	}{{0, 1}, {50, 501}, {99, 991}, {100, 1000}} {
		if got := percentileUs(samples, tt.p); got != tt.want {
			t.Errorf("p%d = %v, want %v", tt.p, got, tt.want)
		}
	}
	if got := percentileUs(samples[:1], 99); got != 1 {
		t.Errorf("p99 of one sample = %v, want it", got)
	}
}

func TestBusyTimeSeesALoop(t *testing.T) {
	before, err := ReadCPUTime()
	if err != nil {
		t.Fatal(err)
	}
	const loop = 300 * time.Millisecond
	for start := time.Now(); time.Since(start) < loop; {
	}
	after, err := ReadCPUTime()
	if err != nil {
		t.Fatal(err)
	}
	busy, most := after.BusySince(before), after.at.Sub(before.at)*time.Duration(after.cpus)
	// The loop itself may have been kept from running; a third of it is far above the resolution.
	if busy < loop/3 || busy > most {
		t.Errorf("busy %s in a loop of %s, at most %s is possible", busy, loop, most)
	}
}

const statText = `cpu  100 0 50 1000 20 0 5 7 0 0
cpu0 50 0 25 500 10 0 5 7 0 0
cpu1 50 0 25 500 10 0 0 0 0 0
intr 12345 0
cpufreq 1
`

func TestParseStat(t *testing.T) {
	read, err := parseStat([]byte(strings.TrimSuffix(statText, "cpufreq 1\n")))
	idle, cpus := read.idle, read.cpus
	if want := 10270 * time.Millisecond; err != nil || idle != want || cpus != 2 {
		t.Errorf("got %v, %d, %v, want %v, 2", idle, cpus, err, want)
	}
	for _, bad := range []string{"", "cpu 1 2\ncpu0 1 2\n", "cpu 1 2 3 x 5 6 7 8\ncpu0 1\n", "intr 5\n"} {
		if read, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("parseStat(%q) = %+v", bad, read)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte(statText))
	f.Fuzz(func(t *testing.T, b []byte) {
		if read, err := parseStat(b); err == nil && read.cpus < 1 {
			t.Errorf("parseStat(%q): no processors and no error", b)
		}
	})
}
