package machine

import (
	"runtime"
	"time"
)

// copyTime is how long copies of one size are made.
const copyTime = 200 * time.Millisecond

// FarSpan is more than a processor's caches hold.
const FarSpan = 64 << 20

// CopyRate copies chunks between two buffers again and again, by one thread, and gives bytes a
// second. If span is a chunk's size, all of it stays in the caches, where it fits: as with one
// buffer at each end.
func CopyRate(size, span int) float64 {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	from, to := make([]byte, span), make([]byte, span)
	for i := range from {
		from[i] = byte(i)
	}
	const volume = 8 << 20 // between two looks at the clock
	copied, at := 0, 0
	copy(to, from)
	start := time.Now()
	for time.Since(start) < copyTime {
		for range max(volume/size, 1) {
			copied += copy(to[at:at+size], from[at:at+size])
			if at += size; at+size > span {
				at = 0
			}
		}
	}
	return float64(copied) / time.Since(start).Seconds()
}
