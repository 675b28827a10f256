package netcfg

import (
	"regexp"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/testutil"
)

// TestShapes: limits come, change in place and go, and leave nothing behind.
func TestShapes(t *testing.T) {
	top, _ := whole(t)
	node := top.node[0]
	progs := Limiter{In: verdict(t, 0), Out: verdict(t, 0)}
	state := func() string {
		out := strings.Join(regexp.MustCompile(`(?m)^\d+: \S+`).FindAllString(run(t, node, "ip -o link"), -1), "\n")
		for _, dev := range []string{"lo", "hd1", "heddle-vx0", "heddle-hd0"} {
			out += run(t, node, "tc qdisc show dev "+dev+"\ntc filter show dev "+dev+" ingress\ntc filter show dev "+dev+" egress")
		}
		return out
	}
	before := state()
	set := func(shapes ...Shape) {
		t.Helper()
		in(t, node, func() error { _, err := SetShapes(shapes, progs); return err })
	}
	prune := func(shapes ...Shape) {
		t.Helper()
		in(t, node, func() error { return PruneShapes(shapes) })
	}
	prune() // nothing there: no error
	classes := func() string { return run(t, node, "tc class show dev "+netdev.Shape) }

	one := Shape{ID: 1, Egress: ShapedDirection{Rate: 10e6}}
	set(one)
	if got := classes(); !strings.Contains(got, "class htb 4864:1 root") || !strings.Contains(got, "ceil 10Mbit") {
		t.Errorf("classes:\n%s", got)
	}
	for _, dev := range []string{"lo", "hd1", "heddle-vx0", "heddle-hd0"} {
		for _, side := range []string{"ingress", "egress"} {
			if got := run(t, node, "tc filter show dev "+dev+" "+side); strings.Count(got, "handle 0x1 heddle:limit_") != 1 || !strings.Contains(got, netdev.Shape) {
				t.Errorf("%s of %s:\n%s", side, dev, got)
			}
		}
	}
	one.Egress.Rate = 20e6
	two := Shape{ID: 2, Ingress: ShapedDirection{Rate: 6e9, ConnectionRate: 5e6, Block: 1}}
	set(one, two)
	prune(one, two)
	if got := classes(); !strings.Contains(got, "ceil 20Mbit") || strings.Contains(got, "ceil 10Mbit") ||
		!strings.Contains(got, "rate 6Gbit ceil 6Gbit") || strings.Count(got, "class htb") != 1+ShapeBlock {
		t.Errorf("%d classes after a change:\n%.2000s", strings.Count(got, "class htb"), got)
	}
	if got := run(t, node, "tc qdisc show dev "+netdev.Shape); !strings.Contains(got, "limit 384Kb") {
		t.Errorf("queues:\n%.2000s", got)
	}
	prune(two)
	if got := classes(); strings.Contains(got, "class htb 4864:1 ") || strings.Count(got, "class htb") != ShapeBlock {
		t.Errorf("classes after one went:\n%.2000s", got)
	}
	two.Ingress.ConnectionRate = 0
	set(two)
	prune(two)
	if got := classes(); strings.Count(got, "class htb") != 1 {
		t.Errorf("classes without a cap a connection:\n%.2000s", got)
	}
	prune()
	if after := state(); after != before {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
	}
	set(one)
	in(t, node, teardown)
	if got := run(t, node, "ip -br link\ntc qdisc show dev lo"); strings.Contains(got, netdev.Shape) || strings.Contains(got, "clsact") {
		t.Errorf("after teardown:\n%s", got)
	}
}

// TestShapeDeviceOfOthers: a device of that name that is not Heddle's is left alone.
func TestShapeDeviceOfOthers(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces")
	ns := newNetns(t)
	run(t, ns, "ip link add "+netdev.Shape+" type ifb")
	var err error
	in(t, ns, func() error {
		_, err = SetShapes([]Shape{{ID: 1, Egress: ShapedDirection{Rate: 10e6}}}, Limiter{})
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "remove or rename it") {
		t.Errorf("error %v", err)
	}
}
