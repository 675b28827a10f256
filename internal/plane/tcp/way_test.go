package tcp

import (
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestWayBetween: a way says what connect() would, for each state that a node and its path can have.
func TestWayBetween(t *testing.T) {
	for _, c := range []struct {
		plain, direct bool
		state         model.PeerState
		want          string
	}{
		{false, true, model.PeerProven, "direct "},
		{true, true, model.PeerProven, "overlay fallback_peer_plain"},
		{false, false, model.PeerProven, "overlay fallback_node_overlay_only"},
		{false, true, model.PeerUnproven, "overlay fallback_unproven"},
		{false, true, model.PeerStripped, "overlay fallback_stripped"},
		{false, true, model.PeerBlocked, "overlay fallback_blocked"},
		{true, false, model.PeerBlocked, "overlay fallback_peer_plain"},
	} {
		w := wayBetween(c.plain, c.direct, c.state)
		if got := string(w.Path) + " " + w.Reason; got != c.want || w.Why == "" {
			t.Errorf("%+v: %s (%s)", c, got, w.Why)
		}
	}
	for _, reason := range []string{"fallback_own_plain", "fallback_local_plain"} {
		if overlayBecause(reason).Why == "" {
			t.Errorf("%s is no reason that is counted", reason)
		}
	}
}
