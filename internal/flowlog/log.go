// Package flowlog keeps the latest flows of a node in memory and gives them to who follows. Whoever
// reports waits for nobody: who is too slow loses flows, which are counted.
package flowlog

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// Bounds of a log.
const (
	// Kept is how many flows are kept: some 8 MB.
	Kept = 16384
	// MaxFollowers is how many may follow at once.
	MaxFollowers = 64
	// backlog is how many flows wait for a follower.
	backlog = 4096
	// page is how many a Reader looks at while flows that come wait for it, and the most that it
	// gives at a time.
	page = 512
)

// ErrFull says that as many follow as may.
var ErrFull = errors.New("too many follow flows")

// Kind is what flows are counted by: a few dozen, whatever containers do.
type Kind struct {
	Event flow.Event
	Path  model.Path
}

// Log keeps flows. Any goroutine may call its methods; none waits for a follower.
type Log struct {
	mu        sync.Mutex  // guards what follows
	ring      []flow.Flow // the flow with number n is at n % size
	size      int         // of ring, when it is full
	added     uint64      // flows; the number of the next one
	counts    map[Kind]uint64
	followers map[*Follower]struct{}
	lost      uint64 // of followers that have ended
	queues    map[*Follower]struct{}
}

// New makes a log of size flows.
func New(size int) *Log {
	return &Log{size: size, counts: make(map[Kind]uint64), followers: make(map[*Follower]struct{}), queues: make(map[*Follower]struct{})}
}

// Add keeps a flow, in place of the oldest if there are as many as are kept, and gives it to who
// follows.
func (l *Log) Add(f flow.Flow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[Kind{f.Event, f.Path}]++
	if len(l.ring) < l.size {
		l.ring = append(l.ring, f)
	} else {
		l.ring[l.added%uint64(l.size)] = f
	}
	l.added++
	var shared *flow.Flow // of all that follow it; who gets it does not write to it
	for _, all := range []map[*Follower]struct{}{l.followers, l.queues} {
		for w := range all {
			if !w.filter.Match(&f) {
				continue
			}
			if shared == nil {
				c := f // on the heap only if somebody follows
				shared = &c
			}
			select {
			case w.flows <- shared:
			default:
				w.lost.Add(1)
			}
		}
	}
}

// Recent gives the kept flows that a filter chooses, the oldest first. An error is a
// *flow.FieldError.
func (l *Log) Recent(filter flow.Filter, now time.Time) (*Reader, error) {
	since, err := filter.Since.Start(now)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.recent(&filter, since), nil
}

// recent is called with mu held.
func (l *Log) recent(filter *flow.Filter, since time.Time) *Reader {
	r := &Reader{log: l, filter: filter, since: since, next: l.added - uint64(len(l.ring)), end: l.added}
	if filter.Last == 0 {
		return r
	}
	for found, n := 0, r.end; n > r.next; n-- {
		if r.chooses(l.at(n - 1)) {
			if found++; found == filter.Last {
				r.next = n - 1
				break
			}
		}
	}
	return r
}

// Since gives the time of the oldest kept flow, if earlier ones were pushed out; else zero.
func (l *Log) Since() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.added <= uint64(l.size) {
		return time.Time{}
	}
	return l.at(l.added - uint64(l.size)).Time
}

// at gives a kept flow by its number.
func (l *Log) at(n uint64) *flow.Flow { return &l.ring[n%uint64(l.size)] }

// Follow gives what Recent does, and every flow after that. The follower is to be closed.
func (l *Log) Follow(filter flow.Filter, now time.Time) (*Reader, *Follower, error) {
	since, err := filter.Since.Start(now)
	if err != nil {
		return nil, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.followers) >= MaxFollowers {
		return nil, nil, ErrFull
	}
	w := &Follower{log: l, filter: filter, flows: make(chan *flow.Flow, backlog)}
	l.followers[w] = struct{}{}
	return l.recent(&filter, since), w, nil
}

// Queue gives every flow from now on, of which size may wait. It is the agent's own, and no
// follower in what Stats says. It is to be closed.
func (l *Log) Queue(size int) *Follower {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := &Follower{log: l, flows: make(chan *flow.Flow, size)}
	l.queues[w] = struct{}{}
	return w
}

// Stats is what a log has done.
type Stats struct {
	Counts    map[Kind]uint64
	Kept      int
	Followers int
	// Lost counts flows that followers were too slow for.
	Lost uint64
}

// Stats gives the counts; they never fall.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Counts: make(map[Kind]uint64, len(l.counts)), Kept: len(l.ring), Followers: len(l.followers), Lost: l.lost}
	for k, n := range l.counts {
		s.Counts[k] = n
	}
	for w := range l.followers {
		s.Lost += w.lost.Load()
	}
	return s
}

// Follower hears of flows.
type Follower struct {
	log    *Log
	filter flow.Filter
	flows  chan *flow.Flow
	lost   atomic.Uint64 // all that it was too slow for
	told   uint64        // of these, those that Lost gave
}

// Flows gives them as they come. They are not to be written to.
func (w *Follower) Flows() <-chan *flow.Flow { return w.flows }

// Lost gives how many flows the follower was too slow for since it last asked. One goroutine at a
// time calls it.
func (w *Follower) Lost() uint64 {
	all := w.lost.Load()
	n := all - w.told
	w.told = all
	return n
}

// Close ends the following. It may be called once.
func (w *Follower) Close() {
	w.log.mu.Lock()
	defer w.log.mu.Unlock()
	if _, own := w.log.queues[w]; own {
		delete(w.log.queues, w)
		return
	}
	delete(w.log.followers, w)
	w.log.lost += w.lost.Load()
}
