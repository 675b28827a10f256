package policy

import (
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
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// Windows in which rates are measured: how long, and how many may miss before a test gives up. On a
// busy machine a program that got no processor for a while reads less, and then what has piled up.
const (
	limitWindow   = "1.2"
	limitAttempts = 8
)

// flood is TCP from one container to another, as fast as it goes.
type flood struct {
	name   string
	sink   *lab.Program
	source *lab.Program
	asked  int
}

// floodProgram is the program of both ends.
func floodProgram(t testing.TB) string {
	t.Helper()
	path, err := filepath.Abs("testdata/flood.py")
	testutil.NoError(t, err)
	return path
}

// startFlood sends over n connections. bound is the address to bind first, "-" for none. Options:
// "ipv6", and those of flood.py.
func startFlood(t testing.TB, fromMode, from, toMode, to string, n int, bound string, options ...string) *flood {
	t.Helper()
	port, prog := strconv.Itoa(lab.FreePort()), floodProgram(t)
	f := &flood{name: fmt.Sprintf("%s (%s) to %s (%s)", from, fromMode, to, toMode)}
	f.sink = lab.Start(t, toMode, to, "python3", prog, "sink", port, strconv.Itoa(n))
	f.sink.WaitFor("listening")
	addr := lab.Address(t, "heddle", to)
	if slices.Contains(options, "ipv6") {
		addr = lab.Address6(t, "heddle", to).String()
	}
	f.source = lab.Start(t, fromMode, from, append([]string{"python3", prog, "source", addr, port, strconv.Itoa(n), bound}, options...)...)
	f.source.WaitFor("connected")
	return f
}

// rates measures each connection in bits a second, over one window.
func (f *flood) rates(t testing.TB) (out []float64) {
	t.Helper()
	f.asked++
	tag := fmt.Sprintf("measured%d", f.asked)
	if _, err := io.WriteString(f.sink.Stdin, "measure "+limitWindow+" "+tag+"\n"); err != nil {
		t.Fatal(err)
	}
	var line string
	testutil.Eventually(t, "a measurement of "+f.name, func() (bool, string) {
		_, after, _ := strings.Cut(f.sink.Output(), tag)
		var ok bool
		line, _, ok = strings.Cut(after, " end")
		return ok, f.sink.Output() + f.source.Output()
	})
	for _, w := range strings.Fields(line) {
		r, err := strconv.ParseFloat(w, 64)
		testutil.NoError(t, err)
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

// TestLimitEgress: one cap holds what a container sends by all paths together, and another one that
// is smaller as soon as it is set; without any, nothing is left.
func TestLimitEgress(t *testing.T) {
	before := lab.Shaping(t, "n1")
	if strings.Contains(before, "heddle-sh0") || strings.Contains(before, "limit_") {
		t.Errorf("something of limits without any:\n%s", before)
	}
	lab.Limit(t, "n1/c1", "--egress", "100mbit")
	floods := []*flood{
		startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-"),                               // direct
		startFlood(t, "heddle", "n1/c1", "heddle", "n1/c2", 1, "-"),                               // local
		startFlood(t, "heddle", "n1/c1", "heddle", "n2/c2", 1, lab.Address(t, "heddle", "n1/c1")), // overlay
		startFlood(t, "heddle", "n1/c1", "overlay", "n1/c2", 1, "-"),                              // overlay, on the node
		startFlood(t, "heddle", "n1/c1", "overlay", "n2/c1", 1, "-"),                              // relay
		startFlood(t, "overlay", "n1/c1", "heddle", "n2/c1", 1, "-"),                              // the container's own stack
		startFlood(t, "overlay", "n1/c1", "overlay", "n1/c2", 1, "-"),                             // and on the node
		startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 1, "-", "hostile"),                    // one that would be faster
	}
	sum := func() (sum float64) {
		for _, r := range together(t, floods...) {
			sum += r
		}
		return sum
	}
	held(t, "sum of all paths", 100e6, sum)
	lab.Limit(t, "n1/c1", "--egress", "200mbit")
	held(t, "sum after the cap was raised", 200e6, sum)
	for _, f := range floods[1:] {
		f.source.Stop()
	}
	held(t, "direct alone", 200e6, func() float64 { return floods[0].rate(t) })
	lab.Heddle(t, "limit", "clear", "n1/c1")
	testutil.Eventually(t, "more than the cap when it is lifted", func() (bool, string) {
		r := floods[0].rate(t)
		return r > 300e6, fmt.Sprint(r)
	})
	if after := lab.Shaping(t, "n1"); after != before {
		t.Errorf("limits left behind:\n%s\nbefore:\n%s", after, before)
	}
	if out := floods[7].source.Output(); !strings.Contains(out, "tos 224\n") || !strings.Contains(out, fmt.Sprintf("priority %d\n", 0x48640000)) {
		t.Errorf("what a program set does not read back:\n%s", out)
	}
}

// TestLimitIngress: the same for what a container receives.
func TestLimitIngress(t *testing.T) {
	lab.Limit(t, "n1/c1", "--ingress", "100mbit")
	floods := []*flood{
		startFlood(t, "heddle", "n2/c1", "heddle", "n1/c1", 2, "-"),                               // direct
		startFlood(t, "heddle", "n1/c2", "heddle", "n1/c1", 1, "-"),                               // local
		startFlood(t, "heddle", "n2/c2", "heddle", "n1/c1", 1, lab.Address(t, "heddle", "n2/c2")), // overlay
		startFlood(t, "heddle", "n2/c1", "overlay", "n1/c1", 1, "-"),                              // relay
		startFlood(t, "overlay", "n1/c2", "heddle", "n1/c1", 1, "-"),                              // overlay, on the node
		startFlood(t, "overlay", "n2/c1", "overlay", "n1/c1", 1, "-"),                             // the container's own stack
	}
	held(t, "sum of all paths", 100e6, func() (sum float64) {
		for _, r := range together(t, floods...) {
			sum += r
		}
		return sum
	})
	for i, f := range floods {
		if i != 1 {
			f.source.Stop()
		}
	}
	lab.Heddle(t, "limit", "set", "n1/c1", "--ingress", "200mbit")
	held(t, "local alone, after the cap was raised", 200e6, func() float64 { return floods[1].rate(t) })
}

// TestLimitConnections: each connection has its cap, and all together theirs.
func TestLimitConnections(t *testing.T) {
	lab.Limit(t, "n1/c1", "--connection-egress", "20mbit", "--connection-ingress", "10mbit")
	out := startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 4, "-")
	in := startFlood(t, "heddle", "n2/c1", "heddle", "n1/c1", 4, "-")
	for i := range 4 {
		held(t, fmt.Sprintf("connection %d, sending", i), 20e6, func() float64 { return out.rates(t)[i] })
	}
	held(t, "four connections, receiving", 40e6, func() float64 { return in.rate(t) })
	lab.Heddle(t, "limit", "set", "n1/c1", "--egress", "50mbit")
	held(t, "all, with a common cap", 50e6, func() float64 { return out.rate(t) })
	var use []model.LimitUse
	lab.Query(t, &use, "limit", "list")
	if len(use) != 1 || use[0].Egress.Bytes < 1e6 || use[0].Ingress.Packets == 0 {
		t.Errorf("limit: %+v", use)
	}
}

// TestLimitRestart: limits hold while no agent runs and after the next one came, which can change
// them.
func TestLimitRestart(t *testing.T) {
	lab.Limit(t, "n1/c1", "--egress", "100mbit", "--connection-ingress", "10mbit")
	f := startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-")
	list := lab.LimitsOf(t)
	held(t, "before", 100e6, func() float64 { return f.rate(t) })
	lab.EndAgent(t, "n1", syscall.SIGKILL)
	held(t, "without agent", 100e6, func() float64 { return f.rate(t) })
	testutil.NoError(t, lab.Command("up"))
	if got := lab.LimitsOf(t); got != list {
		t.Errorf("limits with the next agent:\n%s\nbefore:\n%s", got, list)
	}
	held(t, "with the next agent", 100e6, func() float64 { return f.rate(t) })
	lab.Heddle(t, "limit", "set", "n1/c1", "--egress", "50mbit")
	held(t, "changed by it", 50e6, func() float64 { return f.rate(t) })
}

// TestLimitEndpointGoes: limits go with their endpoint, and the others' stay.
func TestLimitEndpointGoes(t *testing.T) {
	before := lab.Shaping(t, "n1")
	name := lab.Name + "-limit"
	testutil.NoError(t, netns.Create(name))
	t.Cleanup(func() {
		for _, args := range [][]string{{"endpoints", "delete", "limited", "--ignore-missing", "--lab", lab.Name, "--node", "n1"}} {
			if out, err := exec.Command(lab.Bin, args...).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		}
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	lab.Heddle(t, "endpoints", "add", "limited", "--netns", netns.Path(name), "--node", "n1")
	lab.Limit(t, "n1/c1", "--egress", "100mbit")
	one := lab.Shaping(t, "n1")
	lab.Heddle(t, "limit", "set", "limited", "--egress", "50mbit", "--connection-ingress", "10mbit")
	lab.Heddle(t, "endpoints", "delete", "limited", "--node", "n1")
	after := lab.Shaping(t, "n1")
	if strings.Count(after, "bfifo") != 1 || strings.Count(after, "limit_in") != strings.Count(one, "limit_in")-2 {
		t.Errorf("when one endpoint went:\n%s\nwith both:\n%s", after, one)
	}
	lab.Heddle(t, "limit", "clear", "n1/c1")
	if after := lab.Shaping(t, "n1"); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
	}
}

// sees reports whether packets that match the filter leave a node by its underlay.
func sees(t testing.TB, node, filter string) {
	t.Helper()
	testutil.Eventually(t, "packets: "+filter, func() (bool, string) {
		out, err := lab.TryInNode(t, node, "timeout", testutil.Seconds(5*time.Second), "tcpdump", "-i", "eth0", "-Q", "out", "-c", "3", "-nn", filter)
		return err == nil, out
	})
}

// TestLimitDSCP: the operator's mark is on the wire, on every packet, whatever a program sets; and
// gone when it is lifted.
func TestLimitDSCP(t *testing.T) {
	lab.Limit(t, "n1/c1", "--dscp", "46")
	startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 1, "-", "hostile")
	startFlood(t, "overlay", "n1/c1", "overlay", "n2/c1", 1, "-")
	sees(t, "n1", "ip[1] & 0xfc == 0xb8 and tcp portrange 17408-17471 and greater 1000")
	sees(t, "n1", "ip[1] & 0xfc == 0xb8 and udp port 4789 and greater 1000")
	out, err := lab.TryInNode(t, "n1", "timeout", testutil.Seconds(time.Second), "tcpdump", "-i", "eth0", "-Q", "out", "-c", "1", "-nn",
		"ip[1] & 0xfc != 0xb8 and tcp portrange 17408-17471 and greater 1000")
	if err == nil {
		t.Errorf("a packet without the mark:\n%s", out)
	}
	lab.Heddle(t, "limit", "clear", "n1/c1")
	sees(t, "n1", "ip[1] & 0xfc == 0xe0 and tcp portrange 17408-17471 and greater 1000") // what the program set
}

// TestLimitPriority: where packets wait for a device, those of the higher class go first.
func TestLimitPriority(t *testing.T) {
	// Connected first: once the device is full, nothing of the lower class leaves, a SYN no more
	// than anything else.
	one := startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-")
	two := startFlood(t, "heddle", "n1/c2", "heddle", "n2/c2", 2, "-")
	lab.Limit(t, "n1/c1", "--priority", "high")
	lab.Limit(t, "n1/c2", "--priority", "low")
	t.Cleanup(func() {
		if out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-n1", "tc", "qdisc", "del", "dev", "eth0", "root").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	out, err := lab.TryInNode(t, "n1", "sh", "-c", `tc qdisc add dev eth0 root handle 1: tbf rate 50mbit burst 100kb limit 1mb &&
		tc qdisc add dev eth0 parent 1:1 handle 2: pfifo_fast`)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	first := func(what string, one, two *flood) {
		t.Helper()
		testutil.Eventually(t, what+" goes first", func() (bool, string) {
			r := together(t, one, two)
			return r[0] > 35e6 && r[0] > 5*r[1], fmt.Sprint(r)
		})
	}
	first("n1/c1", one, two)
	lab.Heddle(t, "limit", "set", "n1/c1", "--priority", "low")
	lab.Heddle(t, "limit", "set", "n1/c2", "--priority", "high")
	first("n1/c2", two, one)
}

// TestLimitRefused: what cannot be is refused with its field, and what was set stays.
func TestLimitRefused(t *testing.T) {
	lab.Limit(t, "n1/c1", "--egress", "100mbit")
	before := lab.LimitsOf(t)
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
		out, err := exec.Command(lab.Bin, append([]string{"limit", "set", "--lab", lab.Name}, c.args...)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("limit set %v: %v, want %q in:\n%s", c.args, err, c.want, out)
		}
	}
	if after := lab.LimitsOf(t); after != before {
		t.Errorf("limits changed:\n%s\nwere:\n%s", after, before)
	}
}

// TestLimitBothEnds: packets between containers of one node, one of them not intercepted, meet both
// caps at one place. They count for both, so neither end has more than it may, whatever else it
// does.
func TestLimitBothEnds(t *testing.T) {
	caps := func(egress, ingress string) {
		lab.Limit(t, "n1/c1", "--egress", egress)
		lab.Limit(t, "n1/c2", "--ingress", ingress)
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
			f.source.Stop()
			f.sink.Stop()
		}
	}
	caps("100mbit", "60mbit")
	both("sent", startFlood(t, "heddle", "n1/c1", "overlay", "n1/c2", 2, "-"), startFlood(t, "heddle", "n1/c1", "heddle", "n2/c1", 2, "-"))
	caps("60mbit", "100mbit")
	both("received", startFlood(t, "overlay", "n1/c1", "heddle", "n1/c2", 2, "-"), startFlood(t, "heddle", "n2/c1", "heddle", "n1/c2", 2, "-"))
}

// TestLimitSlow: a slow cap is shared by many connections of one node, each of which gets on.
func TestLimitSlow(t *testing.T) {
	lab.Limit(t, "n1/c1", "--egress", "10mbit")
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
