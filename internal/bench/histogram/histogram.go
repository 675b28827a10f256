// Package histogram counts latencies in buckets whose width grows with the value: any number of
// them in a few kilobytes, with every quantile known to 3 %.
package histogram

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"
)

// A power of two of nanoseconds has subBuckets buckets, and the first subBuckets nanoseconds one
// each.
const (
	subBits    = 5
	subBuckets = 1 << subBits
	// buckets reach up to 2^42 ns, more than an hour; what is longer counts as that.
	maxBits = 42
	buckets = (maxBits - subBits + 1) * subBuckets
)

// Histogram counts durations. The zero value is empty and ready. It is not safe for concurrent use.
type Histogram struct {
	counts [buckets]uint64
	total  uint64
	sum    time.Duration // of the exact values
	max    time.Duration
}

// Add counts one duration; a negative one counts as 0.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	h.counts[index(d)]++
	h.total++
	h.sum += d
	h.max = max(h.max, d)
}

// Merge adds what other has counted.
func (h *Histogram) Merge(other *Histogram) {
	for i, n := range other.counts {
		h.counts[i] += n
	}
	h.total += other.total
	h.sum += other.sum
	h.max = max(h.max, other.max)
}

// Count gives how many durations were counted.
func (h *Histogram) Count() uint64 { return h.total }

// Mean gives the mean, which is exact; 0 if nothing was counted.
func (h *Histogram) Mean() time.Duration {
	if h.total == 0 {
		return 0
	}
	return h.sum / time.Duration(h.total)
}

// Quantile gives the least duration that a share q (0..1) of all does not exceed, as the upper end
// of its bucket but at most the largest; 0 if nothing was counted.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.total == 0 {
		return 0
	}
	want, seen := max(uint64(q*float64(h.total)+0.5), 1), uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= want {
			return min(upper(i), h.max)
		}
	}
	return h.max
}

// Point is one of a cumulative distribution: Share (0..1] of all are at most At.
type Point struct {
	At    time.Duration
	Share float64
}

// Distribution gives the cumulative distribution, a point for each bucket that is not empty.
func (h *Histogram) Distribution() []Point {
	var points []Point
	var seen uint64
	for i, n := range h.counts {
		if n == 0 {
			continue
		}
		seen += n
		points = append(points, Point{min(upper(i), h.max), float64(seen) / float64(h.total)})
	}
	return points
}

// index gives the bucket of d.
func index(d time.Duration) int {
	n := min(uint64(d), 1<<maxBits-1)
	if n < subBuckets {
		return int(n)
	}
	shift := bits.Len64(n) - 1 - subBits
	return (shift+1)<<subBits + int(n>>shift) - subBuckets
}

// upper gives the largest duration of bucket i.
func upper(i int) time.Duration {
	if i < subBuckets {
		return time.Duration(i)
	}
	shift := i>>subBits - 1
	return time.Duration((i&(subBuckets-1)+subBuckets+1)<<shift - 1)
}

// wire is the JSON form: the buckets that are not empty, as pairs of index and count.
type wire struct {
	SumNs   int64       `json:"sum_ns"`
	MaxNs   int64       `json:"max_ns"`
	Buckets [][2]uint64 `json:"buckets"`
}

// MarshalJSON gives {"sum_ns","max_ns","buckets":[[index,count]...]}. Bucket i below 32 is i
// nanoseconds; from there on it ends before (i%32 + 33) * 2^(i/32 - 1) nanoseconds.
func (h *Histogram) MarshalJSON() ([]byte, error) {
	w := wire{SumNs: int64(h.sum), MaxNs: int64(h.max), Buckets: [][2]uint64{}}
	for i, n := range h.counts {
		if n > 0 {
			w.Buckets = append(w.Buckets, [2]uint64{uint64(i), n})
		}
	}
	return json.Marshal(w)
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (h *Histogram) UnmarshalJSON(b []byte) error {
	var w wire
	if err := json.Unmarshal(b, &w); err != nil {
		return fmt.Errorf("read histogram: %w", err)
	}
	if w.SumNs < 0 || w.MaxNs < 0 {
		return errors.New("read histogram: negative duration")
	}
	if !slices.IsSortedFunc(w.Buckets, func(a, b [2]uint64) int { return int(min(a[0], buckets)) - int(min(b[0], buckets)) }) {
		return errors.New("read histogram: buckets out of order")
	}
	read := Histogram{sum: time.Duration(w.SumNs), max: time.Duration(w.MaxNs)}
	for _, pair := range w.Buckets {
		if pair[0] >= buckets || pair[1] > 1<<48 {
			return fmt.Errorf("read histogram: bucket %d with %d", pair[0], pair[1])
		}
		read.counts[pair[0]] += pair[1]
		read.total += pair[1]
	}
	*h = read
	return nil
}
