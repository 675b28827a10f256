package loadgen

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestFleet has a fleet whose members are in the test's own network namespace do everything once.
func TestFleet(t *testing.T) {
	c := startMain(t, "fleet")
	c.awaitReady()
	ask := func(command FleetCommand) (r FleetReply) {
		t.Helper()
		line, err := json.Marshal(command)
		if err != nil {
			t.Fatal(err)
		}
		c.tell(string(line) + "\n")
		c.read(&r)
		return r
	}
	do := func(c FleetCommand) FleetReply {
		t.Helper()
		r := ask(c)
		if r.Error != "" {
			t.Fatalf("%s: %s", c.Op, r.Error)
		}
		return r
	}
	do(FleetCommand{Op: FleetJoin, Join: make([]FleetMember, 4)})
	served := do(FleetCommand{Op: FleetServe, Members: []int{0}})
	if len(served.Ports) != 1 || served.Ports[0] == 0 {
		t.Fatalf("%+v", served)
	}
	to := []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), served.Ports[0])}
	for range 2 { // what was dropped may be opened again
		for _, n := range []int{10, 11} {
			if r := do(FleetCommand{Op: FleetHold, Members: []int{1, 2, 3}, To: to, Count: n}); r.Count != n {
				t.Errorf("held %d, want %d", r.Count, n)
			}
		}
		r := do(FleetCommand{Op: FleetLatency, Members: []int{3, 1}, To: to, Count: 20})
		if r.Count != 20 || r.SocketP50Us <= 0 || r.ConnectP50Us < r.SocketP50Us || r.ConnectP99Us < r.ConnectP50Us {
			t.Errorf("%+v", r)
		}
		if r := do(FleetCommand{Op: FleetDrop}); r.Count != 21 {
			t.Errorf("dropped %d, want 21", r.Count)
		}
	}
	if r := do(FleetCommand{Op: FleetAccept, Members: []int{1, 2, 3}, To: to, Duration: 20 * time.Millisecond}); r.Count == 0 || r.ElapsedS < 0.02 {
		t.Errorf("%+v", r)
	}
	// Never more than were due.
	if r := do(FleetCommand{Op: FleetPace, Members: []int{1, 2}, Rate: 1000, Duration: 50 * time.Millisecond}); r.Count == 0 || r.Count > 50 || r.SocketP99Us <= 0 {
		t.Errorf("%+v", r)
	}
	for want, c := range map[string]FleetCommand{
		"member 4":        {Op: FleetLatency, Members: []int{4}, To: to, Count: 1},
		"no members":      {Op: FleetLatency, To: to, Count: 1},
		"no addresses":    {Op: FleetHold, Members: []int{1}, Count: 1},
		"no operation":    {Op: "dance", Members: []int{1}, To: to},
		"out of bounds":   {Op: FleetPace, Members: []int{1}, Rate: -1},
		"/nonexistent":    {Op: FleetJoin, Join: []FleetMember{{Netns: "/nonexistent"}}},
		"connection 1 of": {Op: FleetHold, Members: []int{1}, To: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}, Count: 1},
	} {
		if r := ask(c); !strings.Contains(r.Error, want) {
			t.Errorf("%s: %q, want %q", c.Op, r.Error, want)
		}
	}
	c.stop()
}
