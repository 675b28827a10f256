package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
)

// TestLatestFlows: of thousands of nodes no more flows are kept than are wanted, the latest, and
// what there is no room for is counted.
func TestLatestFlows(t *testing.T) {
	at := func(n int) flow.Flow { return flow.Flow{Time: time.Unix(int64(n), 0), Node: fmt.Sprint(n % 7)} }
	var few, all latestFlows
	for node := range 2500 {
		list := make([]flow.Flow, 100)
		for i := range list {
			list[i] = at(node + 2500*i)
		}
		few.add(list, 0, 100)
		all.add(list, 1, 0)
		if len(few.list) > 200 || len(all.list) > 2*maxFlows {
			t.Fatalf("%d and %d are kept", len(few.list), len(all.list))
		}
	}
	got := few.sorted(100)
	if len(got) != 100 || few.lost != 0 || !got[99].Time.Equal(at(249_999).Time) || !got[0].Time.Equal(at(249_900).Time) {
		t.Errorf("the latest 100: %d, from %v to %v, %d lost", len(got), got[0].Time, got[99].Time, few.lost)
	}
	if got = all.sorted(0); len(got) != maxFlows || all.lost != 2500+250_000-maxFlows || !got[0].Time.Equal(at(250_000-maxFlows).Time) {
		t.Errorf("all: %d, from %v, %d lost", len(got), got[0].Time, all.lost)
	}
}

// TestFollowTooMany: nobody follows thousands of nodes by as many connections.
func TestFollowTooMany(t *testing.T) {
	from := agents{clients: make([]*api.Client, maxFollowed+1)}
	if err := followFlows(t.Context(), from, flow.Filter{}, nil); err == nil || !strings.Contains(err.Error(), "--node") {
		t.Errorf("%v", err)
	}
}
