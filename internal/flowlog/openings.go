package flowlog

import (
	"time"

	"heddle.dev/heddle/internal/flow"
)

// Opening is what is remembered of a connection until it ends: by then an endpoint may be gone, or
// its address another's.
type Opening struct {
	At       time.Time
	From, To flow.Peer
}

// Openings remembers connections by the cookie of their socket: the latest ones, at least half as
// many as it may have. The end of an event that was lost never comes. One goroutine at a time calls
// its methods.
type Openings struct {
	most      int // of each of both
	now, past map[uint64]Opening
}

// NewOpenings makes one of at most so many.
func NewOpenings(most int) *Openings {
	return &Openings{most: max(most/2, 1), now: make(map[uint64]Opening)}
}

// Note remembers an opening.
func (o *Openings) Note(socket uint64, opening Opening) {
	if len(o.now) >= o.most {
		o.now, o.past = make(map[uint64]Opening), o.now
	}
	o.now[socket] = opening
}

// Take gives an opening and forgets it.
func (o *Openings) Take(socket uint64) (Opening, bool) {
	for _, m := range []map[uint64]Opening{o.now, o.past} {
		if opening, ok := m[socket]; ok {
			delete(m, socket)
			return opening, true
		}
	}
	return Opening{}, false
}

// Len is how many are remembered.
func (o *Openings) Len() int { return len(o.now) + len(o.past) }
