package programs

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestStacksRules: what the operator says of an endpoint holds, too, if a module runs its TCP.
func TestStacksRules(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "python3")
	withEachStack(t, func(t *testing.T, l stacksLab) {
		copyPrograms(t, l.dir, "stack_serve.py", "stack_dial.py")
		t.Run("flows", l.testFlows)
		t.Run("policy", l.testPolicy)
		t.Run("caps", l.testCaps)
	})
}

// rulePorts are those of one server: rules do not speak of the first.
type rulePorts struct{ open, reject, drop int }

func portsFrom(first int) rulePorts { return rulePorts{first, first + 1, first + 2} }

func (p rulePorts) words() []string {
	return []string{strconv.Itoa(p.open), strconv.Itoa(p.reject), strconv.Itoa(p.drop)}
}

// serveAt echoes at the ports.
func (l stacksLab) serveAt(where string, p rulePorts) *lab.Program {
	l.Helper()
	return l.start(where, strconv.Itoa(p.drop), append([]string{"python3", filepath.Join(l.dir, "stack_serve.py")}, p.words()...)...)
}

func (l stacksLab) dial(where, what, to string, p rulePorts) []string {
	l.Helper()
	return append([]string{"python3", filepath.Join(l.dir, "stack_dial.py"), what, l.address(to)}, p.words()...)
}

// try reports what becomes of connections to all ports.
func (l stacksLab) try(where, to string, p rulePorts, want string) {
	l.Helper()
	want = strings.NewReplacer("open", strconv.Itoa(p.open), "reject", strconv.Itoa(p.reject), "drop", strconv.Itoa(p.drop)).Replace(want)
	if got := strings.TrimSpace(l.must(where, l.dial(where, "try", to, p)...)); got != want {
		l.Errorf("%s to %s: %s, want %s", where, to, got, want)
	}
}

// liveRule is a program with connections to a server's ports.
type liveRule struct {
	client, server *lab.Program // nil: it is none of an endpoint's, and not cut
	peers          int          // that have connections to the server
	ports          rulePorts
}

// hold has connections from one place to another that say nothing.
func (l stacksLab) hold(where, to string, server *lab.Program, p rulePorts) liveRule {
	l.Helper()
	c := lab.StartCommand(l, where+" to "+to, l.in(context.WithoutCancel(l.Context()), where, l.dial(where, "hold", to, p)...))
	c.WaitFor("held")
	live := liveRule{c, server, 1, p}
	if where == "node" {
		live.client = nil
	}
	if to == "node" || to == "outside" {
		live.server = nil
	}
	return live
}

// cut waits until the ends know that the connections to the forbidden ports have ended; the others
// have to live on.
func (l stacksLab) cut(all []liveRule) {
	l.Helper()
	for _, live := range all {
		for end, times := range map[*lab.Program]int{live.client: 1, live.server: live.peers} {
			if end == nil {
				continue
			}
			for _, port := range []int{live.ports.reject, live.ports.drop} {
				testutil.Eventually(l, fmt.Sprintf("%s: connections to port %d are cut", end.Name, port), func() (bool, string) {
					out, n := end.Output(), 0
					for _, how := range []string{"ECONNRESET", "ECONNABORTED", "EPIPE"} {
						n += strings.Count(out, fmt.Sprintf("ended %d %s", port, how))
					}
					return n == times, out
				})
			}
			if out := end.Output(); strings.Contains(out, fmt.Sprintf("ended %d ", live.ports.open)) && end == live.client {
				l.Errorf("%s: what is allowed has ended:\n%s", end.Name, out)
			}
		}
	}
}

// testPolicy forbids some connections to and from a container whose TCP a module runs: those that
// live end, and there are no new ones.
func (l stacksLab) testPolicy(t *testing.T) {
	l = l.with(t)
	// The container's own stack has the same address, and is asked about as the module is.
	own, plain := portsFrom(9100), portsFrom(9180)
	server := l.serveAt("n1/c1", own)
	l.serveAt("n1/c1 overlay", plain)
	var live []liveRule
	ports := map[string]rulePorts{}
	out := map[string][]int{}
	for i, peer := range stackPeers {
		p := portsFrom(9110 + 10*i)
		ports[peer] = p
		out["reject"], out["drop"] = append(out["reject"], p.reject), append(out["drop"], p.drop)
		live = append(live, l.hold("n1/c1", peer, l.serveAt(peer, p), p))
		if peer != "outside" {
			to := l.hold(peer, "n1/c1", server, own)
			to.peers = len(stackPeers) - 1
			live = append(live, to)
		}
	}
	began := time.Now()
	l.applyRules([]map[string]any{lab.DenyRule("reject", own.reject, plain.reject), lab.DenyRule("drop", own.drop, plain.drop)},
		[]map[string]any{lab.DenyRule("reject", out["reject"]...), lab.DenyRule("drop", out["drop"]...)})
	l.cut(live)
	if took := time.Since(began); took > 2*time.Second { // 1 s on a machine that has nothing else to do
		t.Errorf("what is forbidden ended after %s", took)
	}
	// Of the others some are cut by their peer's agent before. With the node both ways, and outside.
	if n := l.counter("stacks_cut_policy"); n < 6 {
		t.Errorf("stacks_cut_policy is %d, want 6 at least", n)
	}
	const want = "open=echo reject=ECONNREFUSED drop=timeout"
	for _, peer := range stackPeers {
		l.try("n1/c1", peer, ports[peer], want)
		if peer != "outside" {
			l.try(peer, "n1/c1", own, want)
		}
	}
	for _, peer := range []string{"n1/c2", "n2/c1"} {
		l.try("n1/c1 overlay", peer, ports[peer], want)
		l.try(peer, "n1/c1", plain, want)
	}
	l.cut(live)
}

// testFlows: connections of a module are told of as those of sockets: as they open, end, fail and
// are cut, each once by an end, with what they carried.
func (l stacksLab) testFlows(t *testing.T) {
	l = l.with(t)
	in, out, nobody := portsFrom(9200), portsFrom(9210), portsFrom(9220)
	l.serveAt("n1/c1", in)
	l.serveAt("n2/c1", out)
	l.try("n2/c1", "n1/c1", in, "open=echo reject=echo drop=echo")
	l.try("n1/c1", "n2/c1", out, "open=echo reject=echo drop=echo")
	l.try("n1/c1", "n2/c1", nobody, "open=ECONNREFUSED reject=ECONNREFUSED drop=ECONNREFUSED")
	l.told(in.open, "to open stack 0/0", "to end stack 1/1")
	l.told(out.open, "from open stack 0/0", "from end stack 1/1")
	l.told(nobody.open, "from fail stack 0/0 ECONNREFUSED")
	cut := portsFrom(9230)
	l.hold("n1/c1", "n2/c1 overlay", l.serveAt("n2/c1 overlay", cut), cut)
	l.applyRules(nil, []map[string]any{lab.DenyRule("reject", cut.reject)})
	// The other node's agent ends its end, and may be before this one's.
	l.told(cut.reject, "from open stack 0/0", "from cut stack 1/1 stacks_cut_policy|from end stack 1/1 ECONNRESET")
}

// told waits until n1 tells of connections to a port what is wanted, the oldest first. What may be
// told in two ways has both, with | between them.
func (l stacksLab) told(port int, want ...string) {
	l.Helper()
	testutil.Eventually(l, fmt.Sprintf("flows of port %d", port), func() (bool, string) {
		out, err := l.heddle(l.Context(), "observe", "--node", "n1", "--json", "--port", strconv.Itoa(port)).Output()
		testutil.NoError(l, err)
		var got []string
		for line := range strings.Lines(string(out)) {
			var f flow.Flow
			testutil.NoError(l, json.Unmarshal([]byte(line), &f))
			ended := f.Event == flow.End || f.Event == flow.Cut
			if f.From.Addr.IsLoopback() || f.To.Addr.IsLoopback() { // whoever waited for the server
				continue
			}
			if own := f.From.Endpoint == "n1/c1" && f.To.Endpoint == "n2/c1" || f.SeenBy == flow.SideTo && f.To.Endpoint == "n1/c1" && f.From.Endpoint == "n2/c1"; !own || ended && f.Duration == 0 {
				got = append(got, "between others, or without a beginning: ")
			}
			got = append(got, strings.TrimSpace(fmt.Sprintf("%s %s %s %d/%d %s", f.SeenBy, f.Event, f.Path, f.BytesSent, f.BytesReceived, strings.TrimSpace(f.Reason+" "+f.Error))))
		}
		is := func(got, want string) bool { return slices.Contains(strings.Split(want, "|"), got) }
		return slices.EqualFunc(got, want, is), strings.Join(got, ", ")
	})
}

// counter gives what n1's agent has counted for a reason.
func (l stacksLab) counter(reason string) (n uint64) {
	l.Helper()
	out, err := l.heddle(l.Context(), "status", "--node", "n1", "--output", "json").Output()
	testutil.NoError(l, err)
	var status []struct {
		Counters []struct {
			Name  string
			Value uint64
		}
	}
	testutil.NoError(l, json.Unmarshal(out, &status))
	for _, c := range status[0].Counters {
		if c.Name == reason {
			return c.Value
		}
	}
	l.Fatalf("nothing is counted as %s", reason)
	return 0
}

// applyRules puts rules about containers of modules in force until the end of the test.
func (l stacksLab) applyRules(ingress, egress []map[string]any) {
	l.Helper()
	doc := lab.EverybodyPolicy("modules", ingress, egress)
	doc["subject"] = map[string]any{"labels": map[string]string{"stack": "user-space"}}
	file := filepath.Join(l.TempDir(), "policy.json")
	testutil.NoError(l, os.WriteFile(file, []byte(lab.JSON(l, doc)), 0o600))
	l.Cleanup(func() {
		if out, err := l.heddle(context.WithoutCancel(l.Context()), "policy", "delete", "--all").CombinedOutput(); err != nil {
			l.Errorf("%v\n%s", err, out)
		}
	})
	if out, err := l.heddle(l.Context(), "policy", "apply", "-f", file).CombinedOutput(); err != nil {
		l.Fatalf("%v\n%s", err, out)
	}
}

// flood has one container send to another as fast as it goes, over n connections.
func (l stacksLab) flood(from, to string, port, n int) (sink *lab.Program) {
	l.Helper()
	program, err := filepath.Abs("../policy/testdata/flood.py")
	testutil.NoError(l, err)
	at, count := strconv.Itoa(port), strconv.Itoa(n)
	sink = lab.StartCommand(l, "sink of "+from, l.in(context.WithoutCancel(l.Context()), to, "python3", program, "sink", at, count))
	sink.WaitFor("listening")
	source := lab.StartCommand(l, "source "+from, l.in(context.WithoutCancel(l.Context()), from, "python3", program, "source", l.address(to), at, count))
	source.WaitFor("connected")
	return sink
}

// rate measures what sinks receive together, in bits a second.
func (l stacksLab) rate(tag string, sinks []*lab.Program) (sum float64) {
	l.Helper()
	for _, s := range sinks {
		if _, err := fmt.Fprintf(s.Stdin, "measure 1.2 %s\n", tag); err != nil {
			l.Fatal(err)
		}
	}
	for _, s := range sinks {
		var line string
		testutil.Eventually(l, "a measurement of "+s.Name, func() (ok bool, out string) {
			_, after, _ := strings.Cut(s.Output(), tag+" ")
			line, _, ok = strings.Cut(after, " end")
			return ok, s.Output()
		})
		for _, w := range strings.Fields(line) {
			r, err := strconv.ParseFloat(w, 64)
			testutil.NoError(l, err)
			sum += r
		}
	}
	return sum
}

// held waits for a window in which what sinks receive is within the cap, and at least that part of
// it: smoltcp is slow to send again what a cap has dropped.
func (l stacksLab) held(what string, limit, part float64, sinks []*lab.Program) {
	l.Helper()
	var seen []string
	for i := range 8 {
		r := l.rate(fmt.Sprintf("%s-%d", what, i), sinks)
		if seen = append(seen, fmt.Sprintf("%.1f", r/1e6)); r >= part*limit && r <= 1.05*limit {
			l.Logf("%s: %v of %.1f Mbit/s", what, seen, limit/1e6)
			return
		}
	}
	l.Errorf("%s: Mbit/s %v, want %.1f", what, seen, limit/1e6)
}

// exceeds waits for a window in which sinks receive more than a cap would let pass.
func (l stacksLab) exceeds(what string, limit float64, sinks []*lab.Program) {
	l.Helper()
	n := 0
	testutil.Eventually(l, what+": more than with it", func() (bool, string) {
		n++
		r := l.rate(fmt.Sprintf("%s-%d", strings.ReplaceAll(what, " ", "-"), n), sinks)
		return r > 1.2*limit, fmt.Sprint(r)
	})
}

func (l stacksLab) limit(args ...string) {
	l.Helper()
	if out, err := l.heddle(l.Context(), append([]string{"limit"}, args...)...).CombinedOutput(); err != nil {
		l.Fatalf("heddle limit %v: %v\n%s", args, err, out)
	}
}

func (l stacksLab) traffic(container string) (out model.Traffic) {
	l.Helper()
	raw, err := l.heddle(l.Context(), "endpoints", "--stats", "--node", "n1", "--output", "json").Output()
	testutil.NoError(l, err)
	var list []struct {
		Name    string
		Traffic model.Traffic
	}
	testutil.NoError(l, json.Unmarshal(raw, &list))
	for _, e := range list {
		if e.Name == container {
			return e.Traffic
		}
	}
	l.Fatalf("no endpoint %s:\n%s", container, raw)
	return out
}

// testCaps: caps of an endpoint hold for a module's connections, over the paths together, and they
// are in its accounts, of this module and the one before.
func (l stacksLab) testCaps(t *testing.T) {
	l = l.with(t)
	var in, out []*lab.Program
	for i, peer := range []string{"n1/c2", "n1/c2 overlay", "n2/c1", "n2/c1 overlay"} {
		in = append(in, l.flood(peer, "n1/c1", 9200+i, 1))
		out = append(out, l.flood("n1/c1", peer, 9210+i, 1))
	}
	l.exceeds("receives, without a cap", 60e6, in)
	l.exceeds("sends, without a cap", 100e6, out)
	l.limit("set", "n1/c1", "--ingress", "60mbit", "--egress", "100mbit")
	l.held("receives", 60e6, 0.9, in)
	sends := map[string]float64{"smoltcp": 0.2, "netstack": 0.6}[l.kind]
	l.held("sends", 100e6, sends, out)
	before := l.traffic("n1/c1")
	if before.BytesSent < 5e6 || before.BytesReceived < 5e6 || before.Opened < 4 || before.Accepted < 4 || before.Live["stack"] < 8 {
		t.Errorf("accounts: %+v", before)
	}
	l.killModule()
	// The next module's devices come while caps are in force.
	testutil.EventuallyTrue(t, "the next module serves", func() bool {
		return l.in(t.Context(), "n1/c1", "python3", "-c", "import socket; socket.create_server(('', 9219))").Run() == nil
	})
	again := []*lab.Program{l.flood("n2/c1", "n1/c1", 9220, 2)}
	l.held("receives-again", 60e6, 0.9, again)
	if after := l.traffic("n1/c1"); after.BytesSent < before.BytesSent || after.BytesReceived <= before.BytesReceived || after.Accepted < before.Accepted+2 {
		t.Errorf("accounts with the next module: %+v, before: %+v", after, before)
	}
	l.limit("clear", "n1/c1")
	l.exceeds("receives, without a cap any more", 60e6, again)
}
