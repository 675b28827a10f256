package lifecycle

import (
	"bytes"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestOrphanedEntries: what an agent that was killed has left in the maps of endpoints that are not
// there goes when the next one starts, out of each map by itself, and is counted.
func TestOrphanedEntries(t *testing.T) {
	endpoints := lab.Heddle(t, "endpoints", "--output", "json")
	before := lab.Counters(t, "n2")["mend_stray_entry"]
	lab.EndAgent(t, "n2", syscall.SIGKILL)
	owned := []string{"endpoint_by_id", "endpoint_by_addr", "endpoint_by_ifindex", "account_by_endpoint", "sockets_by_endpoint", "ports_by_endpoint", "node_ports_by_endpoint",
		"limit_by_endpoint", "slots_by_class", "claims_by_port"}
	orphans := map[string]*ebpf.Map{}
	key := func(m *ebpf.Map) []byte { return bytes.Repeat([]byte{0xee}, int(m.KeySize())) }
	for _, name := range owned {
		m, err := ebpf.LoadPinnedMap(lab.NodeFile("n2", "bpf/heddle/"+name), nil)
		testutil.NoError(t, err)
		t.Cleanup(func() { m.Close() })
		if err := m.Put(key(m), make([]byte, m.ValueSize())); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		orphans[name] = m
	}
	testutil.NoError(t, lab.Command("up"))
	for name, m := range orphans {
		if value, err := m.LookupBytes(key(m)); err != nil || value != nil {
			t.Errorf("%s has the orphaned entry still (%v)", name, err)
		}
	}
	if n := lab.Counters(t, "n2")["mend_stray_entry"] - before; n != uint64(len(owned)) {
		t.Errorf("%d entries counted, want %d", n, len(owned))
	}
	if now := lab.Heddle(t, "endpoints", "--output", "json"); now != endpoints {
		t.Errorf("endpoints\n%s\nwere\n%s", now, endpoints)
	}
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port)
}
