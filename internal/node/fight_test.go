package node

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"heddle.dev/heddle/internal/api"
)

// TestFight: what another program takes away at once, whenever it is back, is put back ten times as
// soon as it can be, and from then on within a second. The log does not fill, and there is a fault
// until there is peace.
func TestFight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		h := &host{log: slog.New(slog.NewTextHandler(&log, nil))}
		m := newMender(h, nil)
		gone := api.Mended{What: api.MendedFirewall, Gone: "the table", By: "rival (process 4711)"}
		mend := func() (after time.Duration) {
			began := time.Now()
			m.pause(t.Context(), gone.What)
			if err := m.done(gone, nil); err != nil {
				t.Fatal(err)
			}
			after = time.Since(began)
			time.Sleep(fightPause) // as the kernel's messages are followed
			return after
		}
		for range fightTimes {
			if after := mend(); after > 0 || h.faults.Has(api.FaultFirewallFought) {
				t.Errorf("put back after %v, faults %+v", after, h.faults.List())
			}
		}
		before, began := h.mended.list()[0].Times, time.Now()
		for time.Since(began) < 2*time.Minute {
			if after := mend(); after > fightLonger {
				t.Errorf("put back after %v", after)
			}
		}
		if times := h.mended.list()[0].Times - before; times < 115 || times > 130 {
			t.Errorf("put back %d times in two minutes", times)
		}
		if lines := strings.Count(log.String(), "\n"); lines < fightTimes+2 || lines > fightTimes+3 {
			t.Errorf("%d lines in the log:\n%s", lines, log.String())
		}
		f := h.faults.List()
		if len(f) != 1 || f[0].Reason != api.FaultFirewallFought || !strings.Contains(f[0].Error, gone.By) || !strings.Contains(f[0].Error, "times since") {
			t.Errorf("faults %+v", f)
		}
		m.lasts(gone.What) // not for long
		if len(h.faults.List()) != 1 {
			t.Error("the fault is gone at once")
		}
		time.Sleep(fightPeace)
		if err := m.done(api.Mended{What: gone.What}, nil); err != nil || len(h.faults.List()) > 0 {
			t.Errorf("after a minute of peace: %v, faults %+v", err, h.faults.List())
		}
		if after := mend(); after > 0 || len(h.faults.List()) > 0 {
			t.Errorf("once more after peace: after %v, faults %+v", after, h.faults.List())
		}
	})
}

// TestNoFight: what is taken away now and then is no fight.
func TestNoFight(t *testing.T) {
	var f fight
	now := time.Now()
	for range 3 * fightTimes {
		if wait := f.wait(now); wait > 0 || !f.add(now) {
			t.Fatalf("waits %v, %+v", wait, f)
		}
		now = now.Add(fightSoon)
	}
}
