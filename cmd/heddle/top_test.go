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
	sampled := func(at time.Duration, containers map[string]topRow, list ...model.Connection) sample {
		s := sample{at: time.Unix(0, 0).Add(at), names: map[netip.Addr]string{remote.Addr(): "web"}, connections: make(map[[2]netip.AddrPort]topConnection),
			containers: containers, nodes: map[string]topRow{"n1": {Node: "n1"}}}
		for _, c := range list {
			s.addConnection("n1", c)
		}
		return s
	}
	client := func(sent, received uint64) model.Connection {
		return model.Connection{Name: "c1", Local: local, Remote: remote, BytesSent: sent, BytesReceived: received, Path: "direct"}
	}
	server := func(sent, received uint64) model.Connection {
		return model.Connection{Name: "web", Local: remote, Remote: local, BytesSent: sent, BytesReceived: received, Path: "direct"}
	}
	before := sampled(0, map[string]topRow{"n1 c1": {Node: "n1", Name: "c1", BytesSent: 900, Opened: 5}}, server(50, 1000))
	now := sampled(2*time.Second, map[string]topRow{"n1 c1": {Node: "n1", Name: "c1", BytesSent: 300, Opened: 9}},
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
