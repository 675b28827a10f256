package process

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrGone is the error of requests to a program that has ended.
var ErrGone = errors.New("the program has ended")

// Requests is a connection by which any goroutine asks the program, and one receives.
type Requests struct {
	Conn

	// writing is held for a write, which waits for a program that does not read. Such a one may
	// wait for its answers to be read: who receives never takes it.
	writing sync.Mutex

	mu     sync.Mutex // guards what follows
	tag    uint32
	asked  map[uint32]asked
	closed bool
}

// Question is what is asked, and of whom of those that the program serves.
type Question struct {
	Type uint32
	Of   uint64
}

// Answer is what the program said to a request.
type Answer struct {
	Message []byte
	FD      int // that came with it, or -1
}

// asked is a request that has no answer yet. Answer{}: the program has ended.
type asked struct {
	Question
	got chan Answer
}

// Request sends a message, made with the tag that it gets, and waits for the answer.
func (r *Requests) Request(ctx context.Context, q Question, message func(tag uint32) []byte, fd int) (a Answer, err error) {
	got := make(chan Answer, 1)
	tag, ok := r.expect(asked{q, got})
	if !ok {
		return a, ErrGone
	}
	defer r.forget(tag, got)
	if err := r.Write(message(tag), fd); err != nil {
		return a, err
	}
	select {
	case <-ctx.Done():
		return a, ctx.Err()
	case a = <-got:
	}
	if a.Message == nil {
		return a, ErrGone
	}
	return a, nil
}

// expect gives a request its tag; false: the program has ended.
func (r *Requests) expect(a asked) (tag uint32, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, false
	}
	if r.asked == nil {
		r.asked = map[uint32]asked{}
	}
	for r.tag++; r.tag == 0 || r.asked[r.tag].got != nil; r.tag++ {
	}
	r.asked[r.tag] = a
	return r.tag, true
}

// forget says that nobody waits for an answer any more.
func (r *Requests) forget(tag uint32, got chan Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.asked, tag)
	select {
	case late := <-got:
		closeFD(late.FD)
	default:
	}
}

// Write sends a message. After an error whoever receives finds the connection closed.
func (r *Requests) Write(message []byte, fd int) error {
	r.writing.Lock()
	defer r.writing.Unlock()
	if err := r.Send(message, fd); err != nil {
		_ = r.Conn.Close()
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return nil
}

// Asks reports whether a question has this tag and no answer yet.
func (r *Requests) Asks(tag uint32, q Question) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.asked[tag]
	return a.got != nil && a.Question == q
}

// Answered hands an answer to who waits for it. One to another question than was asked under its
// tag is nobody's: what the program has others do, a process for each of those that it serves say,
// does not answer for others if somebody has taken it over.
func (r *Requests) Answered(tag uint32, q Question, a Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if was := r.asked[tag]; was.got != nil && was.Question == q {
		delete(r.asked, tag)
		was.got <- a
		return
	}
	closeFD(a.FD)
}

// Close ends the connection and all requests. Any goroutine may call it.
func (r *Requests) Close() {
	_ = r.Conn.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for tag, a := range r.asked {
		delete(r.asked, tag)
		a.got <- Answer{FD: -1}
	}
}
