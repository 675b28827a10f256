package underlays_test

import (
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestNAT has a router between the nodes that translates what one of them sends. Of TCP alone:
// connections from there go over the overlay, those of the other node direct. Of everything: the
// other node takes neither, because both say by their address which node they are from; and both
// ends name it.
func TestNAT(t *testing.T) {
	_, translate := lab.RouteNodes(t)
	reprobe(t, "n1")
	lab.AwaitPath(t, "n1", model.PeerProven)
	expectDirect(t, 4)

	undo := translate("meta l4proto tcp", "")
	before := lab.Counters(t, "n2")["drop_unknown_node"]
	expectOverlay(t, model.PeerBlocked)
	if now := lab.Counters(t, "n2")["drop_unknown_node"]; now == before {
		t.Error("n2 does not count drop_unknown_node")
	}
	if d := lab.DirectPaths(t, "n2"); d.Peers[model.PeerProven] != 1 {
		t.Errorf("the other direction is %+v", d)
	}
	undo()
	lab.AwaitPath(t, "n1", model.PeerProven)

	undo = translate("", "")
	before = lab.Counters(t, "n2")["drop_overlay_stranger"]
	client := lab.StartPeer(t, "heddle", "n1/c1")
	client.Must(`s = waits(tcp(4), 5)`) // nothing is to come
	client.Expect(`{"error": "EINPROGRESS"}`, `s.connect((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), lab.FreePort())
	testutil.Eventually(t, "both ends to name it", func() (bool, string) {
		out := lab.Heddle(t, "status", "--node", "n1")
		return strings.Contains(out, "SILENT for ") && lab.Counters(t, "n2")["drop_overlay_stranger"] > before, out
	})
	undo()
	testutil.Eventually(t, "n2 not to be silent any more", func() (bool, string) {
		d := lab.DirectPaths(t, "n1")
		return len(d.Silent) == 0, lab.Heddle(t, "status", "--node", "n1")
	})
	lab.AwaitPath(t, "n1", model.PeerProven)
	expectDirect(t, 4)
}
