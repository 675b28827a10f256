package tcp

import (
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// TestReportedNeverFalls: no count of an endpoint is less than what was said of it before; a new
// endpoint with an old id begins anew.
func TestReportedNeverFalls(t *testing.T) {
	var r reported
	at := time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC)
	say := func(created time.Time, bytes uint64) uint64 {
		list := []model.Traffic{{Endpoint: 1, BytesSent: bytes}}
		r.raise([]model.Endpoint{{ID: 1, Created: created}}, list)
		return list[0].BytesSent
	}
	for _, step := range []struct {
		created   time.Time
		now, want uint64
	}{{at, 100, 100}, {at, 90, 100}, {at, 120, 120}, {at.Add(1), 5, 5}, {at.Add(1), 4, 5}} {
		if got := say(step.created, step.now); got != step.want {
			t.Errorf("%d was reported as %d, want %d", step.now, got, step.want)
		}
	}
}
