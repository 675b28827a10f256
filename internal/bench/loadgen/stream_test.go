package loadgen

import (
	"bytes"
	"strings"
	"testing"
)

// startSink runs a sink in this process until the test ends.
func startSink(t *testing.T, address string, flags ...string) {
	t.Helper()
	startServing(t, append([]string{"sink", "-listen", address}, flags...)...)
}

// TestStream: several clients, one after the other, over TCP and AF_UNIX.
func TestStream(t *testing.T) {
	for name, flags := range map[string][]string{"TCP": nil, "reno": {"-congestion", "reno"}, "AF_UNIX": {"-unix"}} {
		t.Run(name, func(t *testing.T) {
			address := freePort(t, "tcp", "127.0.0.1:0")
			startSink(t, address, flags...)
			for _, size := range []string{"1024", "65536"} {
				var r Streamed
				runPeer(t, &r, append([]string{"stream", "-to", address, "-duration", "50ms", "-warm-up", "20ms", "-size", size}, flags...)...)
				if r.Bytes <= 0 || r.ElapsedS < 0.05 || r.BusyCPUS < 0 {
					t.Errorf("%s bytes a write: %+v", size, r)
				}
			}
			echo := freePort(t, "tcp", "127.0.0.1:0")
			startEcho(t, echo, flags...)
			var trips RoundTrips
			runPeer(t, &trips, append([]string{"rr", "-to", echo, "-duration", "20ms"}, flags...)...)
			if trips.Transactions == 0 {
				t.Errorf("rr: %+v", trips)
			}
		})
	}
}

func TestStreamRefused(t *testing.T) {
	address := freePort(t, "tcp", "127.0.0.1:0")
	for name, args := range map[string][]string{
		"nobody listens":            {"stream", "-to", address},
		"nobody at the name":        {"stream", "-to", address, "-unix"},
		"no such congestion":        {"stream", "-to", address, "-congestion", "nobody's"},
		"no address":                {"sink", "-listen", "here"},
		"another machine's address": {"sink", "-listen", "192.0.2.1:1"},
	} {
		var out bytes.Buffer
		if err := Main(t.Context(), args, Streams{In: strings.NewReader(""), Out: &out, Err: t.Output()}); err == nil {
			t.Errorf("%s: printed %q", name, &out)
		}
	}
}
