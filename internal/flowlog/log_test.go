package flowlog

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"heddle.dev/heddle/internal/flow"
)

var began = time.Date(2026, 11, 28, 21, 0, 0, 0, time.UTC)

// numbered is the flow with a number.
func numbered(n int) flow.Flow {
	return flow.Flow{Time: began.Add(time.Duration(n) * time.Second), Event: flow.Open, Path: "direct", Socket: uint64(n), To: flow.Peer{Port: uint16(n)}}
}

func numbers(list []flow.Flow) (out []uint64) {
	for _, f := range list {
		out = append(out, f.Socket)
	}
	return out
}

// read gives all that a reader has.
func read(r *Reader) (out []flow.Flow, lost uint64) {
	for {
		list, n, more := r.Next()
		if !more {
			return out, lost
		}
		out, lost = append(out, list...), lost+n
	}
}

func parse(t *testing.T, query string) flow.Filter {
	t.Helper()
	f, err := flow.ParseQuery(query)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestRecent(t *testing.T) {
	l := New(4)
	for i := range 7 {
		l.Add(numbered(i))
	}
	now := began.Add(10 * time.Second)
	for query, want := range map[string]string{
		"": "[3 4 5 6]", "last=2": "[5 6]", "last=9": "[3 4 5 6]", "port=4-5": "[4 5]", "since=5s": "[5 6]", "port=4-5&last=1": "[5]", "event=deny": "[]",
	} {
		r, err := l.Recent(parse(t, query), now)
		if err != nil {
			t.Fatal(err)
		}
		if got, lost := read(r); lost != 0 || fmt.Sprint(numbers(got)) != want {
			t.Errorf("%s: %v, %d lost, want %s", query, numbers(got), lost, want)
		}
	}
	if s := l.Stats(); s.Kept != 4 || s.Counts[Kind{flow.Open, "direct"}] != 7 {
		t.Errorf("stats %+v", s)
	}
	var fe *flow.FieldError
	if _, err := l.Recent(parse(t, "since=2026-11-28T21:00:11Z"), now); !errors.As(err, &fe) {
		t.Errorf("since a time to come: %v", err)
	}
}

// TestFlood: a flood takes no more memory than is set, waits for no follower, and what a follower
// that does not read loses is counted, to the flow; one that reads has all, each once.
func TestFlood(t *testing.T) {
	const flood = 200_000
	l := New(1000)
	l.Add(numbered(0))
	_, stuck, err := l.Follow(flow.Filter{}, began)
	if err != nil {
		t.Fatal(err)
	}
	recent, reading, err := l.Follow(flow.Filter{}, began)
	if err != nil {
		t.Fatal(err)
	}
	if list, _ := read(recent); len(list) != 1 {
		t.Fatal(list)
	}
	_, elsewhere, err := l.Follow(parse(t, "event=cut"), began)
	if err != nil {
		t.Fatal(err)
	}
	var got, lost uint64
	var wg sync.WaitGroup
	over := make(chan struct{})
	wg.Go(func() {
		next := uint64(1)
		for {
			select {
			case f := <-reading.Flows():
				if f.Socket < next {
					t.Errorf("flow %d after %d", f.Socket, next-1)
				}
				next = f.Socket + 1
				got++
			case <-over:
				if len(reading.Flows()) == 0 {
					return
				}
			}
			lost += reading.Lost()
		}
	})
	for i := range flood {
		l.Add(numbered(i + 1))
	}
	close(over)
	wg.Wait()
	if lost += reading.Lost(); got+lost != flood {
		t.Errorf("who reads got %d and was told of %d lost, of %d", got, lost, flood)
	}
	if n := stuck.Lost(); n != flood-backlog || len(stuck.Flows()) != backlog {
		t.Errorf("who does not read lost %d and has %d, want %d and %d", n, len(stuck.Flows()), flood-backlog, backlog)
	}
	if n := stuck.Lost(); n != 0 {
		t.Errorf("told twice of %d lost", n)
	}
	if len(elsewhere.Flows()) != 0 || elsewhere.Lost() != 0 {
		t.Error("a follower hears of what its filter does not choose")
	}
	if s := l.Stats(); s.Kept != 1000 || cap(l.ring) > 2000 || s.Lost != lost+flood-backlog || s.Followers != 3 {
		t.Errorf("stats %+v, room for %d", s, cap(l.ring))
	}
	stuck.Close()
	if s := l.Stats(); s.Lost != lost+flood-backlog || s.Followers != 2 {
		t.Errorf("after the end of a follower %+v", s)
	}
}

// TestReaderIsSlow: who reads slowly has no more than a page in memory, gets each flow once, and
// hears how many were pushed out before it came to them.
func TestReaderIsSlow(t *testing.T) {
	const kept = 4 * page
	l := New(kept)
	for i := range kept {
		l.Add(numbered(i))
	}
	r, err := l.Recent(flow.Filter{}, began)
	if err != nil {
		t.Fatal(err)
	}
	first, lost, more := r.Next()
	if len(first) != page || cap(first) > 2*page || lost != 0 || !more {
		t.Fatalf("%d flows, room for %d, %d lost, %v", len(first), cap(first), lost, more)
	}
	for i := range 2*page + 7 {
		l.Add(numbered(kept + i))
	}
	rest, lost := read(r)
	if lost != page+7 || len(rest) != 2*page-7 || rest[0].Socket != 2*page+7 || rest[len(rest)-1].Socket != kept-1 {
		t.Errorf("%d lost, %d flows", lost, len(rest))
	}
	if r, err = l.Recent(parse(t, "port=3"), began); err != nil {
		t.Fatal(err)
	}
	for i := range 3 * kept {
		l.Add(numbered(i))
	}
	if list, lost := read(r); len(list) != 0 || lost != kept {
		t.Errorf("of what is gone: %d flows, %d lost", len(list), lost)
	}
}

// TestQueue: what the agent itself has waits in a queue of its own size, and what finds no room
// there is nobody else's loss.
func TestQueue(t *testing.T) {
	l := New(10)
	l.Add(numbered(0))
	q := l.Queue(3)
	for i := range 5 {
		l.Add(numbered(i + 1))
	}
	for i := range uint64(3) {
		if f := <-q.Flows(); f.Socket != i+1 {
			t.Errorf("flow %d, want %d", f.Socket, i+1)
		}
	}
	if n := q.Lost(); n != 2 {
		t.Errorf("%d lost, want 2", n)
	}
	if s := l.Stats(); s.Followers != 0 || s.Lost != 0 {
		t.Errorf("it counts as a follower: %+v", s)
	}
	q.Close()
	l.Add(numbered(6))
	if len(q.Flows()) != 0 {
		t.Error("it hears after its end")
	}
}

func TestTooManyFollowers(t *testing.T) {
	l := New(10)
	var last *Follower
	for range MaxFollowers {
		_, w, err := l.Follow(flow.Filter{}, began)
		if err != nil {
			t.Fatal(err)
		}
		last = w
	}
	if _, _, err := l.Follow(flow.Filter{}, began); !errors.Is(err, ErrFull) {
		t.Errorf("one more: %v", err)
	}
	last.Close()
	if _, _, err := l.Follow(flow.Filter{}, began); err != nil {
		t.Errorf("after one has ended: %v", err)
	}
}

func TestOpenings(t *testing.T) {
	o := NewOpenings(10)
	for i := range uint64(1000) {
		o.Note(i, Opening{At: began.Add(time.Duration(i))})
		if o.Len() > 10 {
			t.Fatalf("%d remembered", o.Len())
		}
	}
	for i := uint64(995); i < 1000; i++ {
		if got, ok := o.Take(i); !ok || !got.At.Equal(began.Add(time.Duration(i))) {
			t.Errorf("%d: %v, %v", i, got, ok)
		}
		if _, again := o.Take(i); again {
			t.Errorf("%d is there twice", i)
		}
	}
	if _, ok := o.Take(1); ok {
		t.Error("what was pushed out is there")
	}
}
