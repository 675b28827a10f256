package test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
)

// Windows in which rates are measured: how long, and how many may miss before a test gives up. On a busy machine a
// program that got no processor for a while reads less, and then what has piled up.
const (
	limitWindow   = "1.2"
	limitAttempts = 8
)

// flood is TCP from one container to another, as fast as it goes.
type flood struct {
	name   string
	sink   *program
	source *program
	asked  int
}

// floodProgram is the program of both ends.
func floodProgram(t testing.TB) string {
	t.Helper()
	path, err := filepath.Abs("testdata/flood.py")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// startFlood sends over n connections. bound is the address to bind first, "-" for none. Options: "ipv6", and those of
// flood.py.
func startFlood(t testing.TB, fromMode, from, toMode, to string, n int, bound string, options ...string) *flood {
	t.Helper()
	port, prog := strconv.Itoa(freePort()), floodProgram(t)
	f := &flood{name: fmt.Sprintf("%s (%s) to %s (%s)", from, fromMode, to, toMode)}
	f.sink = start(t, toMode, to, "python3", prog, "sink", port, strconv.Itoa(n))
	f.sink.waitFor("listening")
	addr := address(t, "heddle", to)
	if slices.Contains(options, "ipv6") {
		addr = address6(t, "heddle", to).String()
	}
	f.source = start(t, fromMode, from, append([]string{"python3", prog, "source", addr, port, strconv.Itoa(n), bound}, options...)...)
	f.source.waitFor("connected")
	return f
}

// rates measures each connection in bits a second, over one window.
func (f *flood) rates(t testing.TB) (out []float64) {
	t.Helper()
	f.asked++
	tag := fmt.Sprintf("measured%d", f.asked)
	if _, err := io.WriteString(f.sink.stdin, "measure "+limitWindow+" "+tag+"\n"); err != nil {
		t.Fatal(err)
	}
	var line string
	eventually(t, "a measurement of "+f.name, func() (bool, string) {
		_, after, _ := strings.Cut(f.sink.output(), tag)
		var ok bool
		line, _, ok = strings.Cut(after, " end")
		return ok, f.sink.output() + f.source.output()
	})
	for _, w := range strings.Fields(line) {
		r, err := strconv.ParseFloat(w, 64)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

func (f *flood) rate(t testing.TB) float64 { return sumOf(f.rates(t)) }

// together measures several floods in one window.
func together(t testing.TB, floods ...*flood) []float64 {
	t.Helper()
	out := make([]float64, len(floods))
	var wg sync.WaitGroup
	for i, f := range floods {
		wg.Go(func() { out[i] = f.rate(t) })
	}
	wg.Wait()
	return out
}

// held waits for a window in which what measure gives is within 5 % of the cap.
func held(t testing.TB, what string, limit float64, measure func() float64) {
	t.Helper()
	var seen []string
	for range limitAttempts {
		r := measure()
		if r >= 0.95*limit && r <= 1.05*limit {
			t.Logf("%s: %.1f of %.1f Mbit/s", what, r/1e6, limit/1e6)
			return
		}
		seen = append(seen, fmt.Sprintf("%.1f", r/1e6))
	}
	t.Errorf("%s: Mbit/s %v, want %.1f within 5 %%", what, seen, limit/1e6)
}

// limit sets limits of a container until the end of the test.
func limit(t testing.TB, container string, flags ...string) {
	t.Helper()
	t.Cleanup(func() {
		// The test's own context has ended.
		if out, err := exec.Command(heddleBin, "limit", "clear", container, "--lab", labName).CombinedOutput(); err != nil {
			t.Errorf("heddle limit clear %s: %v\n%s", container, err, out)
		}
	})
	heddle(t, append([]string{"limit", "set", container, "--lab", labName}, flags...)...)
}

// limitsOf lists what is set, without what it did.
func limitsOf(t testing.TB) string {
	t.Helper()
	var list []model.LimitUse
	raw := heddle(t, "limit", "list", "--lab", labName, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &list); err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	var out strings.Builder
	for _, l := range list {
		fmt.Fprintf(&out, "%s %+v\n", l.Endpoint, l.Limits)
	}
	return out.String()
}

// onNode runs a command in a node's network namespace.
func onNode(t testing.TB, node string, argv ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=/run/netns/" + labName + "-" + node}, argv...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// shaping lists what limits may leave on a node: devices, qdiscs and filters.
func shaping(t testing.TB, node string) string {
	t.Helper()
	out, err := onNode(t, node, "sh", "-c", `for d in $(ip -o link | cut -d: -f2 | cut -d@ -f1); do echo $d
		tc qdisc show dev $d; tc filter show dev $d ingress; tc filter show dev $d egress; done`)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// TestLimitEgress: one cap holds what a container sends by all paths together, and another one that is smaller as
// soon as it is set; without any, nothing is left.
func TestLimitEgress(t *testing.T) {
	before := shaping(t, "n1")
	if strings.Contains(before, "heddle-sh0") || strings.Contains(before, "limit_") {
		t.Errorf("something of limits without any:\n%s", before)
	}
	limit(t, "n1/c1", "--egress", "100mbit")
	floods := []*flood{
		startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-"),                           // direct
		startFlood(t, "heddle", "n1/c1", "heddle", "n1/c2", 1, "-"),                           // local
		startFlood(t, "heddle", "n1/c1", "heddle", "n2/c2", 1, address(t, "heddle", "n1/c1")), // overlay
		startFlood(t, "heddle", "n1/c1", "overlay", "n1/c2", 1, "-"),                          // overlay, on the node
		startFlood(t, "heddle", "n1/c1", "overlay", "n2/c1", 1, "-"),                          // relay
		startFlood(t, "overlay", "n1/c1", "heddle", "n2/c1", 1, "-"),                          // the container's own stack
		startFlood(t, "overlay", "n1/c1", "overlay", "n1/c2", 1, "-"),                         // and on the node
		startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 1, "-", "hostile"),                // one that would be faster
	}
	sum := func() (sum float64) {
		for _, r := range together(t, floods...) {
			sum += r
		}
		return sum
	}
	held(t, "sum of all paths", 100e6, sum)
	limit(t, "n1/c1", "--egress", "200mbit")
	held(t, "sum after the cap was raised", 200e6, sum)
	for _, f := range floods[1:] {
		f.source.stop()
	}
	held(t, "direct alone", 200e6, func() float64 { return floods[0].rate(t) })
	heddle(t, "limit", "clear", "n1/c1", "--lab", labName)
	eventually(t, "more than the cap when it is lifted", func() (bool, string) {
		r := floods[0].rate(t)
		return r > 300e6, fmt.Sprint(r)
	})
	if after := shaping(t, "n1"); after != before {
		t.Errorf("limits left behind:\n%s\nbefore:\n%s", after, before)
	}
	if out := floods[7].source.output(); !strings.Contains(out, "tos 224\n") || !strings.Contains(out, fmt.Sprintf("priority %d\n", 0x48640000)) {
		t.Errorf("what a program set does not read back:\n%s", out)
	}
}

// TestLimitIngress: the same for what a container receives.
func TestLimitIngress(t *testing.T) {
	limit(t, "n1/c1", "--ingress", "100mbit")
	floods := []*flood{
		startFlood(t, "heddle", "n2/c1", "heddle", "n1/c1", 2, "-"),                           // direct
		startFlood(t, "heddle", "n1/c2", "heddle", "n1/c1", 1, "-"),                           // local
		startFlood(t, "heddle", "n2/c2", "heddle", "n1/c1", 1, address(t, "heddle", "n2/c2")), // overlay
		startFlood(t, "heddle", "n2/c1", "overlay", "n1/c1", 1, "-"),                          // relay
		startFlood(t, "overlay", "n1/c2", "heddle", "n1/c1", 1, "-"),                          // overlay, on the node
		startFlood(t, "overlay", "n2/c1", "overlay", "n1/c1", 1, "-"),                         // the container's own stack
	}
	held(t, "sum of all paths", 100e6, func() (sum float64) {
		for _, r := range together(t, floods...) {
			sum += r
		}
		return sum
	})
	for i, f := range floods {
		if i != 1 {
			f.source.stop()
		}
	}
	heddle(t, "limit", "set", "n1/c1", "--lab", labName, "--ingress", "200mbit")
	held(t, "local alone, after the cap was raised", 200e6, func() float64 { return floods[1].rate(t) })
}

// TestLimitConnections: each connection has its cap, and all together theirs.
func TestLimitConnections(t *testing.T) {
	limit(t, "n1/c1", "--connection-egress", "20mbit", "--connection-ingress", "10mbit")
	out := startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 4, "-")
	in := startFlood(t, "heddle", "n2/c1", "heddle", "n1/c1", 4, "-")
	for i := range 4 {
		held(t, fmt.Sprintf("connection %d, sending", i), 20e6, func() float64 { return out.rates(t)[i] })
	}
	held(t, "four connections, receiving", 40e6, func() float64 { return in.rate(t) })
	heddle(t, "limit", "set", "n1/c1", "--lab", labName, "--egress", "50mbit")
	held(t, "all, with a common cap", 50e6, func() float64 { return out.rate(t) })
	var use []model.LimitUse
	raw := heddle(t, "limit", "list", "--lab", labName, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &use); err != nil || len(use) != 1 || use[0].Egress.Bytes < 1e6 || use[0].Ingress.Packets == 0 {
		t.Errorf("limit list: %v\n%s", err, raw)
	}
}

// TestLimitRestart: limits hold while no agent runs and after the next one came, which can change them.
func TestLimitRestart(t *testing.T) {
	limit(t, "n1/c1", "--egress", "100mbit", "--connection-ingress", "10mbit")
	f := startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-")
	list := limitsOf(t)
	held(t, "before", 100e6, func() float64 { return f.rate(t) })
	endAgent(t, "n1", syscall.SIGKILL)
	held(t, "without agent", 100e6, func() float64 { return f.rate(t) })
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if got := limitsOf(t); got != list {
		t.Errorf("limits with the next agent:\n%s\nbefore:\n%s", got, list)
	}
	held(t, "with the next agent", 100e6, func() float64 { return f.rate(t) })
	heddle(t, "limit", "set", "n1/c1", "--lab", labName, "--egress", "50mbit")
	held(t, "changed by it", 50e6, func() float64 { return f.rate(t) })
}

// TestLimitEndpointGoes: limits go with their endpoint, and the others' stay.
func TestLimitEndpointGoes(t *testing.T) {
	before := shaping(t, "n1")
	name := labName + "-limit"
	if err := netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, args := range [][]string{{"endpoints", "delete", "limited", "--ignore-missing", "--lab", labName, "--node", "n1"}} {
			if out, err := exec.Command(heddleBin, args...).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		}
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	heddle(t, "endpoints", "add", "limited", "--netns", netns.Path(name), "--lab", labName, "--node", "n1")
	limit(t, "n1/c1", "--egress", "100mbit")
	one := shaping(t, "n1")
	heddle(t, "limit", "set", "limited", "--lab", labName, "--egress", "50mbit", "--connection-ingress", "10mbit")
	heddle(t, "endpoints", "delete", "limited", "--lab", labName, "--node", "n1")
	after := shaping(t, "n1")
	if strings.Count(after, "bfifo") != 1 || strings.Count(after, "limit_in") != strings.Count(one, "limit_in")-2 {
		t.Errorf("when one endpoint went:\n%s\nwith both:\n%s", after, one)
	}
	heddle(t, "limit", "clear", "n1/c1", "--lab", labName)
	if after := shaping(t, "n1"); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
	}
}

// sees reports whether packets that match the filter leave a node by its underlay.
func sees(t testing.TB, node, filter string) {
	t.Helper()
	eventually(t, "packets: "+filter, func() (bool, string) {
		out, err := onNode(t, node, "timeout", "5", "tcpdump", "-i", "eth0", "-Q", "out", "-c", "3", "-nn", filter)
		return err == nil, out
	})
}

// TestLimitDSCP: the operator's mark is on the wire, on every packet, whatever a program sets; and gone when it is
// lifted.
func TestLimitDSCP(t *testing.T) {
	limit(t, "n1/c1", "--dscp", "46")
	startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 1, "-", "hostile")
	startFlood(t, "overlay", "n1/c1", "overlay", "n2/c1", 1, "-")
	sees(t, "n1", "ip[1] & 0xfc == 0xb8 and tcp portrange 17408-17471 and greater 1000")
	sees(t, "n1", "ip[1] & 0xfc == 0xb8 and udp port 4789 and greater 1000")
	out, err := onNode(t, "n1", "timeout", "1", "tcpdump", "-i", "eth0", "-Q", "out", "-c", "1", "-nn",
		"ip[1] & 0xfc != 0xb8 and tcp portrange 17408-17471 and greater 1000")
	if err == nil {
		t.Errorf("a packet without the mark:\n%s", out)
	}
	heddle(t, "limit", "clear", "n1/c1", "--lab", labName)
	sees(t, "n1", "ip[1] & 0xfc == 0xe0 and tcp portrange 17408-17471 and greater 1000") // what the program set
}

// TestLimitPriority: where packets wait for a device, those of the higher class go first.
func TestLimitPriority(t *testing.T) {
	// Connected first: once the device is full, nothing of the lower class leaves, a SYN no more than anything else.
	one := startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-")
	two := startFlood(t, "heddle", "n1/c2", "heddle", "n2/c2", 2, "-")
	limit(t, "n1/c1", "--priority", "high")
	limit(t, "n1/c2", "--priority", "low")
	t.Cleanup(func() {
		if out, err := exec.Command("nsenter", "--net=/run/netns/"+labName+"-n1", "tc", "qdisc", "del", "dev", "eth0", "root").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	out, err := onNode(t, "n1", "sh", "-c", `tc qdisc add dev eth0 root handle 1: tbf rate 50mbit burst 100kb limit 1mb &&
		tc qdisc add dev eth0 parent 1:1 handle 2: pfifo_fast`)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	first := func(what string, one, two *flood) {
		t.Helper()
		eventually(t, what+" goes first", func() (bool, string) {
			r := together(t, one, two)
			return r[0] > 35e6 && r[0] > 5*r[1], fmt.Sprint(r)
		})
	}
	first("n1/c1", one, two)
	heddle(t, "limit", "set", "n1/c1", "--lab", labName, "--priority", "low")
	heddle(t, "limit", "set", "n1/c2", "--lab", labName, "--priority", "high")
	first("n1/c2", two, one)
}

// TestLimitRefused: what cannot be is refused with its field, and what was set stays.
func TestLimitRefused(t *testing.T) {
	limit(t, "n1/c1", "--egress", "100mbit")
	before := limitsOf(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"n1/c1"}, "nothing to set"},
		{[]string{"n1/c1", "--egress", "fast"}, "--egress"},
		{[]string{"n1/c1", "--ingress", "1kbit"}, "--ingress"},
		{[]string{"n1/c1", "--dscp", "64"}, "--dscp"},
		{[]string{"n1/c1", "--priority", "urgent"}, "priority"},
		{[]string{"n1/c9", "--egress", "1mbit"}, "heddle endpoints"},
	} {
		out, err := exec.Command(heddleBin, append([]string{"limit", "set", "--lab", labName}, c.args...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("limit set %v: %v, want %q in:\n%s", c.args, err, c.want, out)
		}
	}
	if after := limitsOf(t); after != before {
		t.Errorf("limits changed:\n%s\nwere:\n%s", after, before)
	}
}

// TestLimitBothEnds: packets between containers of one node, one of them not intercepted, meet both caps at one place. They
// count for both, so neither end has more than it may, whatever else it does.
func TestLimitBothEnds(t *testing.T) {
	caps := func(egress, ingress string) {
		limit(t, "n1/c1", "--egress", egress)
		limit(t, "n1/c2", "--ingress", ingress)
	}
	both := func(what string, pair, other *flood) {
		t.Helper()
		held(t, what, 100e6, func() float64 {
			r := together(t, pair, other)
			if r[0] > 60e6*1.05 {
				return r[0] // over its own cap: as wrong as can be
			}
			return r[0] + r[1]
		})
		for _, f := range []*flood{pair, other} {
			f.source.stop()
			f.sink.stop()
		}
	}
	caps("100mbit", "60mbit")
	both("sent", startFlood(t, "heddle", "n1/c1", "overlay", "n1/c2", 2, "-"), startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-"))
	caps("60mbit", "100mbit")
	both("received", startFlood(t, "overlay", "n1/c1", "heddle", "n1/c2", 2, "-"), startFlood(t, "heddle", "n2/c1", "heddle", "n1/c2", 2, "-"))
}

// TestLimitSlow: a slow cap is shared by many connections of one node, each of which gets on.
func TestLimitSlow(t *testing.T) {
	limit(t, "n1/c1", "--egress", "10mbit")
	f := startFlood(t, "heddle", "n1/c1", "heddle", "n1/c2", 8, "-")
	const share = 10e6 / 8
	held(t, "8 connections, each with a quarter of its share or more", 10e6, func() (sum float64) {
		rates := f.rates(t)
		t.Logf("%.0f", rates)
		if slices.Min(rates) < share/4 {
			return 0
		}
		return sumOf(rates)
	})
}

func sumOf(rates []float64) (sum float64) {
	for _, r := range rates {
		sum += r
	}
	return sum
}
