package intercept

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap/task"
)

// sharers are the pools of so many endpoints, which share max sockets.
func sharers(t *testing.T, n int, limit int64) (*prefiller, []*socketPool) {
	t.Helper()
	r := &prefiller{log: slog.Default(), maker: &testMaker{}, target: 8, max: limit, pools: map[*socketPool]bool{}}
	all := make([]*socketPool, n)
	for i := range all {
		e := testPools(model.EndpointID(i + 1))
		t.Cleanup(func() { r.drop(e) })
		all[i] = &e.v4
	}
	return r, all
}

// fill fills a pool and gives how many sockets it has then.
func fill(t *testing.T, r *prefiller, p *socketPool) int {
	t.Helper()
	if _, err := r.prefill(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	return len(p.ready)
}

// use takes a socket, and has the pool filled long after the last time.
func use(t *testing.T, r *prefiller, p *socketPool) int {
	t.Helper()
	if _, _, _, err := take(t, r, p, socketOptions{own: task.Self()}); err != nil {
		t.Fatal(err)
	}
	p.asked = time.Time{}
	return fill(t, r, p)
}

// Whoever comes later has a share of what the first ones have, as soon as these are not busy.
func TestSocketsAheadAreShared(t *testing.T) {
	r, p := sharers(t, 3, 12)
	if n := fill(t, r, p[0]); n != firstReady {
		t.Errorf("a pool that nobody uses has %d sockets", n)
	}
	if n := use(t, r, p[0]); n != r.target {
		t.Errorf("one that is used has %d, alone", n)
	}
	// Both asked a moment ago.
	if n := fill(t, r, p[1]); n != 4 || r.total.Load() != 12 {
		t.Errorf("the second one has %d of what is left, %d in all", n, r.total.Load())
	}
	if n := fill(t, r, p[2]); n != 0 {
		t.Errorf("the third one has %d, at the cost of busy ones", n)
	}
	p[0].asked = time.Time{}
	if n := fill(t, r, p[2]); n != 4 || len(p[0].ready) != 4 || len(p[1].ready) != 4 || r.total.Load() != 12 {
		t.Errorf("the third one has %d, the others %d and %d, %d in all", n, len(p[0].ready), len(p[1].ready), r.total.Load())
	}
}

// A busy one has as many as one may have, at the cost of all that are not, which keep one.
func TestBusyPoolHasMore(t *testing.T) {
	r, p := sharers(t, 4, 12)
	for _, q := range p {
		fill(t, r, q)
		use(t, r, q)
		q.asked = time.Time{}
	}
	busy := p[3]
	busy.asked = time.Now()
	if n := fill(t, r, busy); n != r.target || r.total.Load() > r.max {
		t.Errorf("a busy one has %d, %d in all", n, r.total.Load())
	}
	for _, q := range p[:3] {
		if n := len(q.ready); n < 1 {
			t.Errorf("an idle one has %d", n)
		}
	}
}

// Many that take turns do not take from each other.
func TestTurnsDoNotTakeBack(t *testing.T) {
	r, p := sharers(t, 20, 10)
	for _, q := range p {
		fill(t, r, q)
		q.asked = time.Time{}
	}
	m := r.maker.(*testMaker)
	for range 3 {
		made := m.calls.Load()
		for _, q := range p {
			use(t, r, q)
			q.asked = time.Time{}
		}
		// One for each call, and one more for each pool that had none ready.
		if n := m.calls.Load() - made; n > int64(2*len(p)) {
			t.Errorf("%d sockets made for %d calls", n, len(p))
		}
	}
}

// A busy one among more pools than there are sockets has some, too.
func TestBusyPoolAmongTooMany(t *testing.T) {
	r, p := sharers(t, 13, 12)
	for _, q := range p[:12] {
		fill(t, r, q)
		q.asked = time.Time{}
	}
	busy := p[12]
	if n := use(t, r, busy); n != 0 {
		t.Errorf("one that is not busy has %d, at others' cost", n)
	}
	if n := fill(t, r, busy); n != r.target || r.total.Load() != r.max {
		t.Errorf("a busy one has %d, %d in all", n, r.total.Load())
	}
}

// A closed pool has no share.
func TestClosedPoolHasNoShare(t *testing.T) {
	r, p := sharers(t, 1, 12)
	fill(t, r, p[0])
	e := testPools(99)
	fill(t, r, e.of(unix.AF_INET))
	r.drop(e)
	fill(t, r, e.of(unix.AF_INET))
	if r.share() != r.target || len(r.pools) != 1 {
		t.Errorf("share %d of %d pools", r.share(), len(r.pools))
	}
}
