package verbs

import (
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestSpin: a node with few processors does not spin, an endpoint has its own number or the node's,
// and the router is told what it may do at most.
func TestSpin(t *testing.T) {
	for processors, want := range map[int]uint32{1: 0, 2: 0, 3: 0, 4: 20, 256: 20} {
		if got := DefaultSpinMicros(processors); got != want {
			t.Errorf("%d processors: %d us, want %d", processors, got, want)
		}
	}
	for micros, want := range map[uint32][]string{0: {"--sockets", "/s"}, 7: {"--sockets", "/s", "--spin-us", "7"}} {
		if got := (Config{SpinMicros: micros}).arguments("/s"); !slices.Equal(got, want) {
			t.Errorf("%d us: the router is started with %q, want %q", micros, got, want)
		}
	}
	var e model.Endpoint
	for own, want := range map[uint32]uint32{0: 7, 3: 3, 50: 50} {
		e.Planes.Verbs.SpinMicros = own
		if got := limitsOf(e, Config{SpinMicros: 7}).SpinUs; got != want {
			t.Errorf("%d us of its own: the router is told %d, want %d", own, got, want)
		}
	}
}
