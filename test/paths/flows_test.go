package paths

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// observe gives what `heddle observe` says of connections to a port.
func observe(t *testing.T, port int, args ...string) (list []flow.Flow) {
	t.Helper()
	out := lab.Heddle(t, append([]string{"observe", "--json", "--port", fmt.Sprint(port)}, args...)...)
	for line := range strings.Lines(out) {
		var f flow.Flow
		if err := json.Unmarshal([]byte(line), &f); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		list = append(list, f)
	}
	return list
}

// flowText is what a test compares of a flow: where it was seen and what it says.
func flowText(f flow.Flow) string {
	s := fmt.Sprintf("%s %s %s %s>%s %s", f.Node, f.SeenBy, f.Event, f.From.Endpoint, f.To.Endpoint, f.Path)
	if f.Event == flow.End {
		s += fmt.Sprintf(" %d/%d", f.BytesSent, f.BytesReceived)
	}
	for _, more := range []string{f.Reason, f.Error, f.Rule} {
		if more != "" {
			s += " " + more
		}
	}
	return strings.Join(strings.Fields(s), " ")
}

// expectFlows waits until both nodes tell of connections to a port what is wanted, in any order.
func expectFlows(t *testing.T, port int, want ...string) []flow.Flow {
	t.Helper()
	slices.Sort(want)
	var list []flow.Flow
	testutil.Eventually(t, "flows "+strings.Join(want, ", "), func() (bool, string) {
		list = observe(t, port)
		got := make([]string, len(list))
		for i, f := range list {
			got[i] = flowText(f)
		}
		slices.Sort(got)
		return slices.Equal(got, want), strings.Join(got, ", ")
	})
	return list
}

// observed are a client on n1 and a server on n2 that listens at a port of its own.
type observed struct {
	client, server *lab.Peer
	target         string
	port           int
}

func startObserved(t *testing.T) observed {
	o := observed{lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.Address(t, "heddle", "n2/c1"), lab.FreePort()}
	o.server.Must(`l = listen(4, "0.0.0.0", %d)`, o.port)
	return o
}

// open opens a connection as s and c, and sends 1000 bytes there and 300 back.
func (o observed) open(connect string) {
	o.client.Must(`s = `+connect, o.target, o.port)
	o.server.Must(`c, who = l.accept()`)
	o.client.Must(`s.sendall(bytes(1000))`)
	o.server.Must(`receive(c, 1000)`)
	o.server.Must(`c.sendall(bytes(300))`)
	o.client.Must(`receive(s, 300)`)
}

// TestFlows: both nodes tell of a connection's opening and end, with names, path and bytes; of those
// that fail and fall back why; nothing is told twice.
func TestFlows(t *testing.T) {
	lab.AwaitPath(t, "n1", model.PeerProven)
	t.Run("direct", func(t *testing.T) {
		o := startObserved(t)
		o.open(`connect(4, %q, %d)`)
		expectFlows(t, o.port, "n1 from open n1/c1>n2/c1 direct", "n2 to open n1/c1>n2/c1 direct")
		o.client.Must(`s.close()`)
		o.server.Must(`c.close()`)
		list := expectFlows(t, o.port, "n1 from open n1/c1>n2/c1 direct", "n2 to open n1/c1>n2/c1 direct",
			"n1 from end n1/c1>n2/c1 direct 1000/300", "n2 to end n1/c1>n2/c1 direct 1000/300")
		if all := observe(t, o.port, "--all-nodes"); len(all) != len(list) {
			t.Errorf("by way of one agent %d flows of all nodes, want %d", len(all), len(list))
		}
		for _, f := range list {
			if f.From.Addr.String() != lab.Address(t, "heddle", "n1/c1") || f.To.Addr.String() != o.target || f.From.Port == 0 || f.From.Port != list[0].From.Port {
				t.Errorf("%s is from %v to %v", flowText(f), f.From, f.To)
			}
			if f.From.Node != "n1" || f.To.Node != "n2" || f.Protocol != "tcp" || f.Verdict != flow.Allowed {
				t.Errorf("%+v", f)
			}
			if f.Event == flow.End && (f.RTT <= 0 || f.Duration <= 0) {
				t.Errorf("%s has a round trip time of %v and took %v", flowText(f), f.RTT, f.Duration)
			}
		}
	})
	t.Run("overlay", func(t *testing.T) {
		o := startObserved(t)
		o.open(`connect(4, %q, %d, ("` + lab.Address(t, "heddle", "n1/c1") + `", 0))`)
		o.client.Must(`s.close()`)
		o.server.Must(`c.close()`)
		expectFlows(t, o.port, "n1 from fallback n1/c1>n2/c1 overlay fallback_bound", "n2 to open n1/c1>n2/c1 overlay",
			"n1 from end n1/c1>n2/c1 overlay 1000/300 fallback_bound", "n2 to end n1/c1>n2/c1 overlay 1000/300")
	})
	t.Run("refused by the peer", func(t *testing.T) {
		o := startObserved(t)
		o.server.Must(`l.close()`)
		o.client.Do(`connect(4, %q, %d)`, o.target, o.port)
		expectFlows(t, o.port, "n1 from fail n1/c1>n2/c1 direct ECONNREFUSED")
	})
	t.Run("loopback", func(t *testing.T) {
		o := startObserved(t)
		o.server.Must(`s = connect(4, "127.0.0.1", %d)`, o.port)
		o.server.Must(`s.close(); l.accept()[0].close()`)
		expectFlows(t, o.port, "n2 from open n2/c1>n2/c1 loopback", "n2 to open n2/c1>n2/c1 loopback",
			"n2 from end n2/c1>n2/c1 loopback 0/0", "n2 to end n2/c1>n2/c1 loopback 0/0")
	})
}

// TestFlowsOfShortConnections: what ends at once is told of as what lives is, and what lives before
// its end, also if the agent comes and goes meanwhile.
func TestFlowsOfShortConnections(t *testing.T) {
	lab.AwaitPath(t, "n1", model.PeerProven)
	opened := []string{"n1 from open n1/c1>n2/c1 direct", "n2 to open n1/c1>n2/c1 direct"}
	ended := append(slices.Clone(opened), "n1 from end n1/c1>n2/c1 direct 1000/300", "n2 to end n1/c1>n2/c1 direct 1000/300")
	for _, version := range []int{4, 6} {
		t.Run(fmt.Sprintf("IPv%d", version), func(t *testing.T) {
			o := startObserved(t)
			if version == 6 {
				o.target = lab.Address6(t, "heddle", "n2/c1").String()
				o.server.Must(`l.close(); l = listen(6, "::", %d)`, o.port)
			}
			o.open(fmt.Sprintf(`connect(%d, %%q, %%d)`, version))
			o.client.Must(`s.close()`)
			o.server.Must(`c.close()`)
			at := make(map[string]flow.Flow)
			for _, f := range expectFlows(t, o.port, ended...) {
				at[f.Node+" "+string(f.Event)] = f
			}
			for _, node := range []string{"n1", "n2"} {
				begin, end := at[node+" open"], at[node+" end"]
				if took := end.Time.Sub(begin.Time); took <= 0 || took != end.Duration || begin.Socket != end.Socket || begin.BytesSent != 0 {
					t.Errorf("%s: %+v, then %+v", node, begin, end)
				}
			}
		})
	}
	t.Run("agents", func(t *testing.T) {
		o := startObserved(t)
		o.client.Must(`s = tcp()`)
		pid := lab.AgentPID(t, "n1")
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // if it is there yet
		testutil.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))      // so that none tells of it
		o.client.Must(`s.connect((%q, %d))`, o.target, o.port)
		o.server.Must(`c, who = l.accept()`)
		testutil.NoError(t, lab.KillAgent(pid, syscall.SIGKILL))
		testutil.NoError(t, lab.Command("up"))
		expectFlows(t, o.port, opened...)
		o.client.Must(`s.close()`)
		o.server.Must(`c.close()`)
		expectFlows(t, o.port, append(opened, "n1 from end n1/c1>n2/c1 direct 0/0", "n2 to end n1/c1>n2/c1 direct 0/0")...)
	})
}

// TestFlowsOfPolicy: what policy denies, and what it ends when it changes, is told with the rule.
func TestFlowsOfPolicy(t *testing.T) {
	lab.AwaitPath(t, "n1", model.PeerProven)
	o, untouched := startObserved(t), startObserved(t)
	o.open(`connect(4, %q, %d)`)
	untouched.open(`connect(4, %q, %d)`)
	rule := lab.DenyRule("reject", o.port)
	rule["name"] = "nobody"
	lab.ApplyPolicy(t, "closed", []map[string]any{rule}, nil)
	const by = " n2/c1: reject by rule 0 (nobody) of policy closed"
	opened := []string{"n1 from open n1/c1>n2/c1 direct", "n2 to open n1/c1>n2/c1 direct"}
	cut := append(slices.Clone(opened), "n1 from cut n1/c1>n2/c1 direct cut_policy ECONNABORTED"+by, "n2 to cut n1/c1>n2/c1 direct cut_policy ECONNABORTED"+by)
	var list []flow.Flow
	testutil.Eventually(t, "both ends to be cut, or one and the other reset by it", func() (bool, string) {
		list = observe(t, o.port, "--verdict", "cut")
		return len(list) > 0 && len(observe(t, o.port)) == len(cut), fmt.Sprintf("%+v", observe(t, o.port))
	})
	for _, f := range list {
		if !slices.Contains(cut, flowText(f)) || f.Policy != "closed" || f.BytesSent != 1000 || f.BytesReceived != 300 {
			t.Errorf("cut: %s, %+v", flowText(f), f)
		}
	}
	if refused := o.client.Do(`connect(4, %q, %d)`, o.target, o.port); !strings.Contains(refused, "ECONNREFUSED") {
		t.Fatalf("connect gave %s", refused)
	}
	testutil.Eventually(t, "a denial", func() (bool, string) {
		list = observe(t, o.port, "--verdict", "denied")
		return len(list) == 1, fmt.Sprintf("%+v", list)
	})
	if want := "n1 from deny n1/c1>n2/c1 refuse_policy_rejected" + by; flowText(list[0]) != want {
		t.Errorf("%s, want %s", flowText(list[0]), want)
	}
	expectFlows(t, untouched.port, opened...)
}

// TestObserveFollows: who follows is told of what comes, and of nothing that its filter does not
// choose.
func TestObserveFollows(t *testing.T) {
	lab.AwaitPath(t, "n1", model.PeerProven)
	o, other := startObserved(t), startObserved(t)
	p := lab.StartCommand(t, "observe", exec.Command(lab.Bin, "observe", "--follow", "--lab", lab.Name, "--node", "n1", "--to", "n2/*", "--port", fmt.Sprint(o.port)))
	both := lab.StartCommand(t, "observe all nodes", exec.Command(lab.Bin, "observe", "--follow", "--lab", lab.Name, "--all-nodes", "--event", "open", "--port", fmt.Sprint(o.port)))
	p.WaitFor("WHY")
	both.WaitFor("WHY")
	other.open(`connect(4, %q, %d)`)
	o.open(`connect(4, %q, %d)`)
	p.WaitFor("open")
	testutil.EventuallyTrue(t, "both nodes to tell of it", func() bool {
		out := both.Output()
		return strings.Contains(out, "  n1  ") && strings.Contains(out, "  n2  ")
	})
	o.client.Must(`s.close()`)
	o.server.Must(`c.close()`)
	p.WaitFor("end")
	if out := p.Output(); strings.Contains(out, fmt.Sprint(other.port)) || strings.Count(out, fmt.Sprint(o.port)) != 2 {
		t.Errorf("it shows\n%s", out)
	}
}

// TestFlowFlood: while the agent reads nothing, connections go on; what the ring has no room for is
// lost and counted, and afterwards all is told again.
func TestFlowFlood(t *testing.T) {
	const many = 12000 // connections, of which both ends tell: more than the ring has room for
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	p.Must(`import ctypes; libc = ctypes.CDLL(None)`)
	p.Must(`l = listen(4, "127.0.0.1", %d); s = tcp()`, port)
	p.Must("def talk():\n s.connect((\"127.0.0.1\", %d)); l.accept()[0].close()\n libc.connect(s.fileno(), struct.pack(\"=H14x\", socket.AF_UNSPEC), 16)", port)
	p.Must(`talk()`)
	lost := lab.Counters(t, "n1")["lost_flow_event"]
	agent := lab.AgentPID(t, "n1")
	testutil.NoError(t, syscall.Kill(agent, syscall.SIGSTOP))
	defer func() { _ = syscall.Kill(agent, syscall.SIGCONT) }()
	p.Must(`for _ in range(%d): talk()`, many)
	testutil.NoError(t, syscall.Kill(agent, syscall.SIGCONT))
	testutil.Eventually(t, "lost events to be counted", func() (bool, string) {
		n := lab.Counters(t, "n1")["lost_flow_event"] - lost
		return n > 0 && n < 4*many, fmt.Sprint(n)
	})
	o := startObserved(t)
	o.open(`connect(4, %q, %d)`)
	testutil.Eventually(t, "the next connection to be told of", func() (bool, string) {
		list := observe(t, o.port, "--node", "n1")
		return len(list) == 1, fmt.Sprintf("%+v", list)
	})
	if kept := len(observe(t, port, "--node", "n1", "--last", "100000")); kept == 0 || kept > 16384 {
		t.Errorf("%d flows are kept", kept)
	}
}
