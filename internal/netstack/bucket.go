package netstack

import (
	"math"
	"sync"
	"time"
)

// bucket hands out so many units a second, and no more than a fortieth of a second's at once, nor
// less than what refill brings: who took a few bytes as they come would do nothing else. A rate of
// 0 is no limit.
type bucket struct {
	mu    sync.Mutex
	rate  float64
	burst float64
	level float64 // below 0 after more was taken than there was
	at    time.Time
}

func (b *bucket) set(rate uint64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if float64(rate) == b.rate {
		return
	}
	b.rate = float64(rate)
	b.burst = max(b.rate/40, 1)
	b.level, b.at = b.burst, now
}

// available gives what may be taken now.
func (b *bucket) available(now time.Time) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.refilled(now)
}

// reserve takes what there is, most at most: connections of a tenant move bytes side by side, and
// what one has seen is not for another. What is not used is to be given back.
func (b *bucket) reserve(now time.Time, most int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	units := min(most, b.refilled(now))
	if b.rate != 0 {
		b.level -= float64(units)
	}
	return units
}

// refilled is available's. The caller holds mu.
func (b *bucket) refilled(now time.Time) int {
	if b.rate == 0 {
		return math.MaxInt
	}
	b.level = min(b.burst, b.level+b.rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.level < max(b.rate*refill.Seconds(), 1) {
		return 0
	}
	return int(b.level)
}

// take takes units; less than 0 of them are given back.
func (b *bucket) take(units int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rate != 0 {
		b.level -= float64(units)
	}
}
