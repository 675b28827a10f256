package peer

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestCrowd has a crowd whose members are in the test's own network namespace do everything once.
func TestCrowd(t *testing.T) {
	c := startMain(t, "crowd")
	c.awaitReady()
	ask := func(command CrowdCommand) (r CrowdReply) {
		t.Helper()
		line, err := json.Marshal(command)
		if err != nil {
			t.Fatal(err)
		}
		c.tell(string(line) + "\n")
		c.read(&r)
		return r
	}
	do := func(c CrowdCommand) CrowdReply {
		t.Helper()
		r := ask(c)
		if r.Error != "" {
			t.Fatalf("%s: %s", c.Op, r.Error)
		}
		return r
	}
	do(CrowdCommand{Op: CrowdJoin, Join: make([]CrowdMember, 4)})
	served := do(CrowdCommand{Op: CrowdServe, Members: []int{0}})
	if len(served.Ports) != 1 || served.Ports[0] == 0 {
		t.Fatalf("%+v", served)
	}
	to := []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), served.Ports[0])}
	for range 2 { // what was dropped may be opened again
		for _, n := range []int{10, 11} {
			if r := do(CrowdCommand{Op: CrowdHold, Members: []int{1, 2, 3}, To: to, Count: n}); r.Count != n {
				t.Errorf("held %d, want %d", r.Count, n)
			}
		}
		r := do(CrowdCommand{Op: CrowdLatency, Members: []int{3, 1}, To: to, Count: 20})
		if r.Count != 20 || r.SocketP50Us <= 0 || r.ConnectP50Us < r.SocketP50Us || r.ConnectP99Us < r.ConnectP50Us {
			t.Errorf("%+v", r)
		}
		if r := do(CrowdCommand{Op: CrowdDrop}); r.Count != 21 {
			t.Errorf("dropped %d, want 21", r.Count)
		}
	}
	if r := do(CrowdCommand{Op: CrowdAccept, Members: []int{1, 2, 3}, To: to, Duration: 20 * time.Millisecond}); r.Count == 0 || r.ElapsedS < 0.02 {
		t.Errorf("%+v", r)
	}
	// Never more than were due.
	if r := do(CrowdCommand{Op: CrowdPace, Members: []int{1, 2}, Rate: 1000, Duration: 50 * time.Millisecond}); r.Count == 0 || r.Count > 50 || r.SocketP99Us <= 0 {
		t.Errorf("%+v", r)
	}
	for want, c := range map[string]CrowdCommand{
		"member 4":        {Op: CrowdLatency, Members: []int{4}, To: to, Count: 1},
		"no members":      {Op: CrowdLatency, To: to, Count: 1},
		"no addresses":    {Op: CrowdHold, Members: []int{1}, Count: 1},
		"no operation":    {Op: "dance", Members: []int{1}, To: to},
		"out of bounds":   {Op: CrowdPace, Members: []int{1}, Rate: -1},
		"/nonexistent":    {Op: CrowdJoin, Join: []CrowdMember{{Netns: "/nonexistent"}}},
		"connection 1 of": {Op: CrowdHold, Members: []int{1}, To: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}, Count: 1},
	} {
		if r := ask(c); !strings.Contains(r.Error, want) {
			t.Errorf("%s: %q, want %q", c.Op, r.Error, want)
		}
	}
	c.stop()
}
