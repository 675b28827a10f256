package histogram

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestBuckets checks that buckets follow each other without gap or overlap and are at most 1/32
// wide.
func TestBuckets(t *testing.T) {
	for i := range buckets - 1 {
		if at, next := index(upper(i)), index(upper(i)+1); at != i || next != i+1 {
			t.Fatalf("bucket %d ends at %d: that is in %d, the next in %d", i, upper(i), at, next)
		}
		if i > 0 {
			if width := upper(i) - upper(i-1); width > 1 && float64(width) > float64(upper(i))/subBuckets {
				t.Fatalf("bucket %d is %d wide at %d", i, width, upper(i))
			}
		}
	}
	if at := index(1<<62 - 1); at != buckets-1 {
		t.Errorf("the longest is in bucket %d, want %d", at, buckets-1)
	}
}

func TestQuantiles(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var h, second Histogram
	var all []time.Duration
	for i := range 20000 {
		d := time.Duration(r.ExpFloat64() * 1e5)
		all = append(all, d)
		if i%2 == 0 {
			h.Add(d)
		} else {
			second.Add(d)
		}
	}
	h.Merge(&second)
	slices.Sort(all)
	if h.Count() != 20000 || h.Quantile(1) != all[len(all)-1] {
		t.Errorf("%d counted, largest %s, want 20000 and %s", h.Count(), h.Quantile(1), all[len(all)-1])
	}
	for _, q := range []float64{0.01, 0.5, 0.99, 0.999} {
		got, want := float64(h.Quantile(q)), float64(all[int(q*float64(len(all)))-1])
		if got < want || got > want*1.04+1 {
			t.Errorf("quantile %v is %v, want %v to 3 %% more", q, got, want)
		}
	}
	var sum time.Duration
	for _, d := range all {
		sum += d
	}
	if h.Mean() != sum/20000 {
		t.Errorf("mean %s, want %s", h.Mean(), sum/20000)
	}
}

func TestJSON(t *testing.T) {
	var h, read Histogram
	for _, d := range []time.Duration{0, 1, 31, 32, 1000, time.Second, time.Second, 3 * time.Hour} {
		h.Add(d)
	}
	b, err := json.Marshal(&h)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &read); err != nil || read != h {
		t.Errorf("%s: read back as something else, %v", b, err)
	}
	points := read.Distribution()
	if len(points) != 7 || points[6].Share != 1 || points[5].Share != 7./8 {
		t.Errorf("distribution %v", points)
	}
	for _, bad := range []string{`{"buckets":[[99999,1]]}`, `{"buckets":[[2,1],[1,1]]}`, `{"sum_ns":-1}`, `[]`} {
		if err := json.Unmarshal([]byte(bad), &read); err == nil {
			t.Errorf("%s was read", bad)
		}
	}
}
