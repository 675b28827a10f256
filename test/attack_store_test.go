package test

import (
	"strings"
	"syscall"
	"testing"
)

const storePort = 2379

// TestStoreIsNotForContainers: no container of any node, intercepted or not, reaches the nodes' store, whatever
// address family its socket has; the nodes do.
func TestStoreIsNotForContainers(t *testing.T) {
	n1 := address(t, "host", "n1/c1")
	for _, node := range []string{"n1", "n2"} {
		for _, mode := range []string{"heddle", "overlay"} {
			t.Run(mode+" on "+node, func(t *testing.T) {
				p := startPeer(t, mode, node+"/c1")
				before := counters(t, node)["refuse_store"]
				p.expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, n1, storePort)
				p.expect(`{"error": "ECONNREFUSED"}`, `connect(6, "::ffff:%s", %d)`, n1, storePort)
				// Bound, it would leave from another address.
				p.must(`s = tcp(4)`)
				p.must(`s.bind(("0.0.0.0", 0))`)
				p.expect(`"ECONNREFUSED"`, `error_of(s.connect, (%q, %d))`, n1, storePort)
				if after := counters(t, node)["refuse_store"]; after < before+3 {
					t.Errorf("refuse_store of %s rose by %d, want 3", node, after-before)
				}
			})
		}
		t.Run(node+" itself", func(t *testing.T) {
			startPeer(t, "host", node+"/c1").must(`s = connect(4, %q, %d)`, n1, storePort)
		})
	}
}

// TestGuardsReturn: who takes the node's packet filter away does so until the agent starts again.
func TestGuardsReturn(t *testing.T) {
	n1 := address(t, "host", "n1/c1")
	p := startPeer(t, "heddle", "n2/c1")
	sh(t, labName+"-n2", "nft delete table inet heddle")
	p.must(`s = connect(4, %q, %d)`, n1, storePort) // without the guard it gets through: the test can fail
	endAgent(t, "n2", syscall.SIGTERM)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	p.expect(`{"error": "ECONNREFUSED"}`, `connect(4, %q, %d)`, n1, storePort)
	if out := sh(t, labName+"-n2", "nft list set inet heddle nodes"); !strings.Contains(out, n1) {
		t.Errorf("the overlay is not open to n1:\n%s", out)
	}
}
