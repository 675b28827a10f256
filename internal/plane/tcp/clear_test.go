package tcp

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"
)

// TestClearWatch: connections in the clear are ended, or kept and named once for each change; what
// fails is said, and tried again.
func TestClearWatch(t *testing.T) {
	peer, broken := netip.MustParseAddr("192.0.2.2"), errors.New("broken")
	var log strings.Builder
	there, ended, fails := map[netip.Addr]int{peer: 2}, 0, error(nil)
	c := clearWatch{
		log:   slog.New(slog.NewTextHandler(&log, nil)),
		end:   func() (int, error) { ended++; return 1, fails },
		count: func() (map[netip.Addr]int, error) { return maps.Clone(there), fails },
	}
	said := func(keep bool, before map[netip.Addr]int) (string, map[netip.Addr]int) {
		log.Reset()
		c.keep = keep
		after := c.look(before)
		return log.String(), after
	}
	if got, _ := said(false, nil); ended != 1 || !strings.Contains(got, "ended") {
		t.Errorf("ended %d times; said %q", ended, got)
	}
	got, known := said(true, nil)
	if ended != 1 || !strings.Contains(got, "peer=192.0.2.2 connections=2") {
		t.Errorf("kept: ended %d times; said %q", ended, got)
	}
	if got, known = said(true, known); got != "" {
		t.Errorf("said once more: %q", got)
	}
	there[peer] = 1
	if got, _ = said(true, known); !strings.Contains(got, "connections=1") {
		t.Errorf("after a change: %q", got)
	}
	fails = broken
	for _, keep := range []bool{false, true} {
		if got, _ = said(keep, known); !strings.Contains(got, "broken") {
			t.Errorf("keep %v, when it fails: %q", keep, got)
		}
	}
}
