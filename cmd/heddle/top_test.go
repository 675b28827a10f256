package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// TestTopLoad: what is compared is a second's; one connection is one row whichever end was seen, and
// a count that begins anew is no huge number.
func TestTopLoad(t *testing.T) {
	local, remote := netip.MustParseAddrPort("10.244.0.2:4000"), netip.MustParseAddrPort("10.244.1.3:80")
	quiet := netip.MustParseAddrPort("10.244.0.2:4001")
	sampled := func(before *sample, at time.Duration, containers map[string]topRow, list ...model.Connection) *sample {
		s := newSample()
		s.at, s.names[remote.Addr()], s.containers, s.nodes["n1"] = time.Unix(0, 0).Add(at), "web", containers, topRow{Node: "n1"}
		for i := range list {
			s.addConnection("n1", &list[i], before)
		}
		return s
	}
	client := func(sent, received uint64) model.Connection {
		return model.Connection{Name: "c1", Local: local, Remote: remote, BytesSent: sent, BytesReceived: received, Path: "direct"}
	}
	server := func(sent, received uint64) model.Connection {
		return model.Connection{Name: "web", Local: remote, Remote: local, BytesSent: sent, BytesReceived: received, Path: "direct"}
	}
	before := sampled(nil, 0, map[string]topRow{"n1 c1": {Node: "n1", Name: "c1", BytesSent: 900, Opened: 5}}, server(50, 1000))
	now := sampled(before, 2*time.Second, map[string]topRow{"n1 c1": {Node: "n1", Name: "c1", BytesSent: 300, Opened: 9}},
		model.Connection{Name: "c1", Local: quiet, Remote: remote, Path: "direct"}, client(5000, 250), server(250, 5000))
	l := now.since(before)
	if len(l.Connections) != 2 {
		t.Fatalf("connections %+v", l.Connections)
	}
	if c := l.Connections[0]; c.Local != local || c.BytesSent != 2000 || c.BytesReceived != 100 || c.Peer != "web" {
		t.Errorf("the busiest is %+v", c)
	}
	if c := l.Containers[0]; c.BytesSent != 0 || c.Opened != 2 {
		t.Errorf("container %+v", c)
	}
	var out strings.Builder
	if err := printLoad(&out, l, 1); err != nil || !strings.Contains(out.String(), "c1:4000     web:80  direct  2.0KiB/s  100B/s") || strings.Contains(out.String(), ":4001") {
		t.Errorf("it prints (%v)\n%s", err, out.String())
	}
}

// TestTopIsBounded: of more connections than are listed the busiest are, and what is remembered of
// all has a bound.
func TestTopIsBounded(t *testing.T) {
	server := netip.MustParseAddrPort("10.244.1.3:80")
	client := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 10, byte(i >> 8), byte(i)}), uint16(i>>16)+1)
	}
	const busiest = 7*maxTopListed - 1
	before, now := newSample(), newSample()
	before.at, now.at = time.Unix(0, 0), time.Unix(1, 0)
	for i := range 7 * maxTopListed {
		there, back := model.Connection{Local: client(i), Remote: server, BytesSent: uint64(i)}, model.Connection{Local: server, Remote: client(i), BytesReceived: uint64(i)}
		before.addConnection("n1", &model.Connection{Local: client(i), Remote: server}, nil)
		now.addConnection("n1", &there, before)
		now.addConnection("n2", &back, before)
	}
	l := now.since(before)
	if len(l.Connections) != maxTopListed || l.Connections[0].BytesSent != busiest || l.Connections[0].Local != client(busiest) || l.LeftOut != 0 {
		t.Fatalf("%d connections, %d left out, the busiest %+v", len(l.Connections), l.LeftOut, l.Connections[0])
	}
	last := l.Connections[maxTopListed-1]
	if last.BytesSent != busiest-maxTopListed+1 {
		t.Errorf("the last is %+v", last)
	}
	for i := len(now.carried); i <= maxTopCompared+2; i++ {
		now.addConnection("n1", &model.Connection{Local: netip.AddrPortFrom(server.Addr(), uint16(i)), Remote: client(i)}, before)
	}
	if len(now.carried) != maxTopCompared || now.leftOut != 3 {
		t.Errorf("%d are remembered, %d left out", len(now.carried), now.leftOut)
	}
}

func TestParseDestination(t *testing.T) {
	for s, want := range map[string]string{
		"web": "web 80", "n2/c1:8080": "n2/c1 8080", "10.244.0.2": "10.244.0.2 80", "10.244.0.2:81": "10.244.0.2 81",
		"[fd48::2]:443": "fd48::2 443", "fd48::2": "fd48::2 80", "[fd48::2]": "fd48::2 80",
	} {
		if to, port, err := parseDestination(s); err != nil || fmt.Sprint(to, " ", port) != want {
			t.Errorf("%s: %s %d, %v, want %s", s, to, port, err, want)
		}
	}
	for _, s := range []string{"web:", "web:0", "web:65536", "web:http", ":80", "10.244.0.2:0"} {
		if to, port, err := parseDestination(s); err == nil || !strings.Contains(err.Error(), s) {
			t.Errorf("%s: %s %d, %v", s, to, port, err)
		}
	}
}
