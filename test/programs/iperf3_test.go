package programs

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestIperf3 checks transfers one way, the other, in parallel and both ways at once.
func TestIperf3(t *testing.T) {
	compareModes(t, scenario{
		serve: func(t testing.TB, e ends) *lab.Program {
			// Without --forceflush nothing of it arrives before it ends.
			server := lab.Start(t, e.serverMode, e.server, "iperf3", "--server", "--forceflush")
			server.WaitFor("listening on 5201")
			return server
		},
		talk: func(t testing.TB, e ends, server *lab.Program, saw *observation) {
			for _, flags := range [][]string{
				{"--bytes", "32M"},
				{"--bytes", "32M", "--reverse"},
				{"--bytes", "32M", "--parallel", "4"},
				{"--time", "1", "--bidir"},
			} {
				what := "iperf3 " + strings.Join(flags, " ")
				saw.add(what, iperf3(t, e, flags))
			}
			server.Stop()
			for line := range strings.Lines(server.Output()) {
				if strings.Contains(line, "Accepted connection") || strings.Contains(line, "error") {
					saw.add("server", maskPorts(line))
				}
			}
		},
	}, nil)
}

// iperf3Report is what of iperf3's report does not depend on speed.
type iperf3Report struct {
	Start struct {
		Connected []struct {
			LocalHost  string `json:"local_host"`
			RemoteHost string `json:"remote_host"`
			RemotePort int    `json:"remote_port"`
		}
		Accepted struct {
			Host string
		} `json:"connecting_to"`
	}
	End struct {
		Streams []struct {
			Sender, Receiver struct {
				Bytes  uint64
				Sender bool
			}
		}
	}
	Error string
}

// iperf3 runs the client and gives what does not depend on speed. Every stream must have carried
// bytes, and, where the amount is given, all of it must have arrived.
func iperf3(t testing.TB, e ends, flags []string) string {
	t.Helper()
	raw := lab.MustRun(t, e.clientMode, e.client, append([]string{"iperf3", "--client", e.addr, "--json"}, flags...)...)
	var report iperf3Report
	if err := json.Unmarshal([]byte(raw), &report); err != nil {
		t.Fatalf("iperf3 %v: %v\n%s", flags, err, raw)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "to %s, error %q\n", report.Start.Accepted.Host, report.Error)
	for _, c := range report.Start.Connected {
		fmt.Fprintf(&out, "stream %s -> %s:%d\n", c.LocalHost, c.RemoteHost, c.RemotePort)
	}
	for i, s := range report.End.Streams {
		if s.Sender.Bytes == 0 || s.Receiver.Bytes == 0 {
			t.Errorf("iperf3 %v: stream %d sent %d bytes, received %d", flags, i, s.Sender.Bytes, s.Receiver.Bytes)
		}
		fmt.Fprintf(&out, "stream %d: client sends: %v\n", i, s.Sender.Sender)
	}
	if len(report.End.Streams) == 0 {
		t.Errorf("iperf3 %v reported no stream:\n%s", flags, raw)
	}
	return out.String()
}
