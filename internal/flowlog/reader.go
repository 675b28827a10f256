package flowlog

import (
	"time"

	"heddle.dev/heddle/internal/flow"
)

// Reader gives kept flows page by page, so that who reads slowly has a page of them in memory and
// not all. One goroutine at a time uses it.
type Reader struct {
	log       *Log
	filter    *flow.Filter
	since     time.Time
	next, end uint64 // numbers of flows
	pages     []flow.Flow
}

// Next gives the next flows, which are there until it is called again, and how many were pushed out
// before they were looked at; more is false at the end. A page may be empty.
func (r *Reader) Next() (flows []flow.Flow, lost uint64, more bool) {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.next == r.end {
		return nil, 0, false
	}
	r.pages = r.pages[:0]
	if oldest := l.added - uint64(len(l.ring)); r.next < oldest {
		gone := min(oldest, r.end)
		r.next, lost = gone, gone-r.next
	}
	for n := min(r.end-r.next, page); n > 0; n-- {
		if f := l.at(r.next); r.chooses(f) {
			r.pages = append(r.pages, *f)
		}
		r.next++
	}
	return r.pages, lost, true
}

func (r *Reader) chooses(f *flow.Flow) bool {
	return !f.Time.Before(r.since) && r.filter.Match(f)
}
