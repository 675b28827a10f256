package queues

import "testing"

// TestRegionsAreBounded: whatever regions a container has made, and in whatever order they end, what
// their rings can hold stays below a bound.
func TestRegionsAreBounded(t *testing.T) {
	const most = 2 << 30
	var e endpoint
	var all []uint32
	fill := func() (bytes int) {
		for c := e.take(); c != 0; c = e.take() {
			all = append(all, c)
		}
		for _, c := range all {
			bytes += int(c) * regionStreams
		}
		return bytes
	}
	for range 3 {
		if bytes := fill(); bytes > most || len(all) != maxRegions {
			t.Errorf("%d regions of %d bytes, want %d of %d at most", len(all), bytes, maxRegions, most)
		}
		// The large ones end, and come again; then half of all.
		for range maxRegions / 2 {
			e.leave(all[0])
			all = all[1:]
		}
	}
	for _, c := range all {
		e.leave(c)
	}
	if c := e.take(); c != regionCapacity || e.regions != 1 || e.large != 1 {
		t.Errorf("the first again: %d bytes, %+v", c, e)
	}
}
