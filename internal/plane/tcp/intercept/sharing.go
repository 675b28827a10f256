package intercept

import (
	"time"
)

// The sockets made ahead are bounded for all pools together (Config.MaxReady), and shared: each
// pool may have as many as any other one, and one that is busy as many as a pool may have at all,
// at the cost of those that are not. So a container has them ready however many others there are,
// and whoever came first.

const (
	// firstReady is how many sockets a pool has from which none was taken yet. Many containers make
	// no connection at all.
	firstReady = 4
	// busyWithin is how soon after the last time a busy pool asks for more.
	busyWithin = 100 * time.Millisecond
	// victims is how many pools are looked at for one that can do with less.
	victims = 64
)

// share is how many sockets each pool may have. It is never none.
func (r *prefiller) share() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shareLocked()
}

// shareLocked is share for who holds mu.
func (r *prefiller) shareLocked() int {
	return min(r.target, max(1, int(r.max)/max(1, len(r.pools))))
}

// join counts p among the pools that share. A pool that is closed does not.
func (r *prefiller) join(p *socketPool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !p.isClosed() {
		r.pools[p] = true
	}
}

// leave forgets a closed pool.
func (r *prefiller) leave(p *socketPool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pools, p)
}

// limit is how many sockets p, which asks for some, may have now. It reports whether p is busy.
func (r *prefiller) limit(p *socketPool, now time.Time) (limit int, busy bool) {
	limit = r.share()
	busy = p.isUsed() && now.Sub(p.asked) < busyWithin
	p.asked = now
	switch {
	case busy:
		limit = r.target
	case !p.isUsed():
		limit = min(limit, firstReady)
	}
	return limit, busy
}

// room counts one more socket for a pool, if there may be one: others may have to give up some.
func (r *prefiller) room(busy bool, now time.Time) bool {
	for r.total.Add(1) > r.max {
		r.total.Add(-1)
		if !r.takeBack(busy, now) {
			return false
		}
	}
	return true
}

// takeBack closes sockets of a pool that has more than its share, or, for the sake of a busy one,
// more than one, if there are enough for all to have one. It reports false if it finds none.
func (r *prefiller) takeBack(forBusy bool, now time.Time) bool {
	given := r.surplus(forBusy, now)
	for _, s := range given {
		r.discard(s)
	}
	return len(given) > 0
}

// surplus takes what a pool that is not busy has beyond what it keeps: any pool, for a map is gone
// through from a random place.
func (r *prefiller) surplus(forBusy bool, now time.Time) []socket {
	r.mu.Lock()
	defer r.mu.Unlock()
	keeps := r.shareLocked()
	if forBusy {
		keeps = min(1, int(r.max)/max(1, len(r.pools))) // the asking one may have just been closed
	}
	looked := 0
	for q := range r.pools {
		if looked++; looked > victims {
			break
		}
		if now.Sub(q.asked) < busyWithin {
			continue
		}
		if given := q.giveUp(keeps); len(given) > 0 {
			return given
		}
	}
	return nil
}
