package paths

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// trace gives what `heddle trace` says, and whether it succeeded.
func trace(t *testing.T, source, destination string) (tr api.Trace, ok bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), lab.Bin, "trace", "--lab", lab.Name, "--output", "json", source, destination)
	out, err := cmd.Output()
	if jsonErr := json.Unmarshal(out, &tr); jsonErr != nil {
		t.Fatalf("trace %s %s: %v, %v: %s", source, destination, err, jsonErr, out)
	}
	return tr, err == nil
}

// TestTrace: a trace says what programs would meet with, by which rule and path.
func TestTrace(t *testing.T) {
	o := startObserved(t)
	closed := lab.FreePort()
	rule := lab.DenyRule("drop", closed)
	rule["name"] = "nobody"
	lab.ApplyPolicy(t, "closed", []map[string]any{rule}, nil)
	const by = "n2/c1: drop by rule 0 (nobody) of policy closed"
	for _, c := range []struct {
		source, destination string
		connected           bool
		verdict, way, flow  string
	}{
		{"n1/c1", fmt.Sprintf("n2/c1:%d", o.port), true, "allow", "direct", "n1 from open n1/c1>n2/c1 direct"},
		{"n2/c2", fmt.Sprintf("%s:%d", o.target, o.port), true, "allow", "local", "n2 from open n2/c2>n2/c1 local"},
		{"n1/c1", fmt.Sprintf("n2/c2:%d", o.port), false, "allow", "direct", "n1 from fail n1/c1>n2/c2 direct ECONNREFUSED"},
		{"n2/c1", fmt.Sprintf("n2/c2:%d", o.port), false, "allow", "overlay fallback_local_plain", "n2 from fail n2/c1>n2/c2 overlay fallback_local_plain ECONNREFUSED"},
		{"n1/c1", fmt.Sprintf("n2/c1:%d", closed), false, "drop", "", "n1 from deny n1/c1>n2/c1 refuse_policy_dropped " + by},
	} {
		tr, ok := trace(t, c.source, c.destination)
		if ok != c.connected || tr.Connected != c.connected || tr.Policy.Verdict != c.verdict || tr.Flow == nil || flowText(*tr.Flow) != c.flow {
			t.Errorf("%s to %s: success %v, %+v, flow %+v", c.source, c.destination, ok, tr, tr.Flow)
		}
		if tr.Way == nil || strings.TrimSpace(string(tr.Way.Path)+" "+tr.Way.Reason) != c.way || tr.Way.Why == "" {
			t.Errorf("%s to %s: the way was to be %q, and is %+v", c.source, c.destination, c.way, tr.Way)
		}
		if connect := tr.Steps[1]; connect.Name != "connect" || connect.Took <= 0 || (connect.Error == "") != c.connected {
			t.Errorf("%s to %s: steps %+v", c.source, c.destination, tr.Steps)
		}
	}
	out, err := exec.CommandContext(t.Context(), lab.Bin, "trace", "--lab", lab.Name, "n1/c1", "nobody:80").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "nobody") {
		t.Errorf("trace to nobody: %v: %s", err, out)
	}
}

// TestPing: connections that are tried again and again are real ones, and what becomes of them is
// added up.
func TestPing(t *testing.T) {
	o := startObserved(t)
	ping := func(destination string, args ...string) (out string, err error) {
		cmd := exec.CommandContext(t.Context(), lab.Bin, append([]string{"ping", "--lab", lab.Name, "n1/c1", destination}, args...)...)
		raw, err := cmd.CombinedOutput()
		return string(raw), err
	}
	out, err := ping(fmt.Sprintf("n2/c1:%d", o.port), "--count", "3", "--interval", "200ms")
	if err != nil || !strings.Contains(out, "would go direct") || !strings.Contains(out, "3 tried, 3 connected, 0 % lost") || strings.Count(out, "connected after") != 3 || !strings.Contains(out, "round trip min/median/max") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = ping(fmt.Sprintf("n2/c1:%d", lab.FreePort()), "--count", "2", "--interval", "200ms")
	if err == nil || !strings.Contains(out, "2 tried, 0 connected, 100 % lost") || !strings.Contains(out, "connection refused") {
		t.Errorf("to nobody: %v: %s", err, out)
	}
}

// TestTop: what goes over a connection is in the rows of it, of its ends and of their nodes.
func TestTop(t *testing.T) {
	o := startObserved(t)
	o.open(`connect(4, %q, %d)`)
	o.client.Must("def sends():\n while True:\n  s.sendall(bytes(2000)); time.sleep(.05)")
	o.server.Must("def reads():\n while c.recv(65536): pass")
	o.server.Must(`threading.Thread(target=reads, daemon=True).start()`)
	o.client.Must(`threading.Thread(target=sends, daemon=True).start()`)
	testutil.Eventually(t, "it to be in all rows", func() (bool, string) {
		var load struct {
			Connections []struct{ Name, Peer, Local, Remote, Path string }
			Containers  []struct {
				Name          string
				BytesSent     uint64 `json:"bytes_sent"`
				BytesReceived uint64 `json:"bytes_received"`
			}
			Nodes []struct {
				Node      string
				BytesSent uint64 `json:"bytes_sent"`
			}
		}
		lab.Query(t, &load, "top", "--interval", "500ms")
		seen := 0
		for _, c := range load.Connections {
			if port := fmt.Sprintf(":%d", o.port); strings.HasSuffix(c.Remote, port) || strings.HasSuffix(c.Local, port) {
				seen++
			}
		}
		sent, received, node := false, false, false
		for _, c := range load.Containers {
			sent, received = sent || c.Name == "n1/c1" && c.BytesSent > 0, received || c.Name == "n2/c1" && c.BytesReceived > 0
		}
		for _, n := range load.Nodes {
			node = node || n.Node == "n1" && n.BytesSent > 0
		}
		return seen == 1 && sent && received && node, fmt.Sprintf("%+v", load)
	})
}
