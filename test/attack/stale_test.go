package attack

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// attackedElsewhere are the protections whose attack needs more than an agent without them, and its
// test.
var attackedElsewhere = map[model.Protection]string{
	model.ProtectIncarnation: "TestStaleEndpoint",
	model.ProtectHooks:       "TestCgroupMadeAnew",
}

// TestStaleEndpoint keeps sockets of an endpoint past its end, until another has its id: they must
// not become that one's. Without the protection they do.
func TestStaleEndpoint(t *testing.T) {
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	id := func() (id uint32) {
		var all []struct {
			Name string
			ID   uint32
		}
		lab.Query(t, &all, "endpoints", "--node", "n2")
		for _, e := range all {
			if e.Name == "n2/c2" {
				return e.ID
			}
		}
		t.Fatalf("no n2/c2 in\n%+v", all)
		return 0
	}
	server, attacker, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c2"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	attacker.Must(`kept = [tcp(4) for _ in range(4)]`)
	before := id()
	lab.Heddle(t, "endpoints", "delete", "--node", "n2", "n2/c2")
	weak := weaken(t, "n2")
	last, err := ebpf.LoadPinnedMap("/run/heddle/lab/"+lab.Name+"/n2/bpf/heddle/last_endpoint", nil)
	testutil.NoError(t, err)
	defer last.Close()
	// As if 16,383 endpoints had been made meanwhile.
	previous := before - 1
	if previous == 0 {
		previous = uint32(model.MaxEndpointID)
	}
	testutil.NoError(t, last.Put(uint32(0), previous))
	weak.without(t)
	if now := id(); now != before {
		t.Fatalf("the endpoint that was made anew has id %d, want %d", now, before)
	}
	target := lab.Address(t, "heddle", "n1/c1")
	attacker.Expect(`"ENETDOWN"`, `error_of(kept[0].connect, (%q, %d))`, target, port)
	attacker.Expect(`"ENETDOWN"`, `error_of(kept[1].bind, ("0.0.0.0", %d))`, port)
	// Nor do they change what the other one is charged.
	tenant := lab.StartPeer(t, "heddle", "n2/c2")
	tenant.Must(`own = [tcp(4) for _ in range(2)]`)
	attacker.Must(`[s.close() for s in kept[:2]]`)
	if n := socketsOf(t, "n2/c2"); n != 2 {
		t.Errorf("the endpoint has 2 sockets, and %d are counted", n)
	}
	weak.without(t, model.ProtectIncarnation)
	attacker.Expect(`"ok"`, `error_of(kept[2].connect, (%q, %d))`, target, port)
	attacker.Expect(`"ok"`, `error_of(kept[3].bind, ("0.0.0.0", %d))`, port)
	server.Expect(fmt.Sprintf(`"%s"`, lab.Address(t, "heddle", "n2/c2")), `l.accept()[1][0]`)
}
