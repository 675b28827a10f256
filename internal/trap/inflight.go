package trap

import (
	"slices"
	"unsafe"

	"heddle.dev/heddle/internal/fdkeep"
)

// inflightCall is a call that was received and is not yet answered. It lies at the beginning of a
// call page, which agents of different versions share: members are only ever added at the end, and
// zero must mean what it meant before there was the member.
type inflightCall struct {
	call notification
	// inode is that of the socket the caller is being given; 0 before that. A caller that has it
	// among its descriptors needs only to be told.
	inode uint64
}

// A call page is the memory a kept listener keeps the in-flight calls in: one for each reader, at
// multiples of fdkeep.PlaceBytes, and behind them those that were deferred. An agent from before
// there were several readers, or deferred calls, knows the first only.
var (
	_ [fdkeep.CallBytes - unsafe.Sizeof(inflightCall{})]byte
	_ [unsafe.Sizeof(inflightCall{}) - fdkeep.CallBytes]byte
)

// mapInflight places the in-flight calls in the shared memory behind fd, with what it holds.
func (l *Listener) mapInflight(fd int) error {
	page, err := fdkeep.MapCallPage(fd)
	if err != nil {
		return err
	}
	l.page = page
	for i := range l.inflight {
		l.inflight[i] = (*inflightCall)(unsafe.Pointer(&page[i*fdkeep.PlaceBytes]))
	}
	for at := maxReaders * fdkeep.PlaceBytes; at < fdkeep.PageBytes; at += fdkeep.PlaceBytes {
		l.deferred.places = append(l.deferred.places, (*inflightCall)(unsafe.Pointer(&page[at])))
	}
	return nil
}

// anyLeft reports whether an earlier agent left the listener calls, before the first reader begins.
func (l *Listener) anyLeft() bool {
	waits := func(c *inflightCall) bool { return c.call.ID != 0 }
	return slices.ContainsFunc(l.inflight[:], waits) || slices.ContainsFunc(l.deferred.places, waits)
}

// undelivered is a descriptor that a thread has and was not told of: a signal took it out of its
// call in between. That cannot happen under a filter with WAIT_KILLABLE_RECV.
type undelivered struct {
	by     *handling // who gave it
	inode  uint64
	number int
	key    uint64 // what was asked for
	note   int
}

// undeliveredByThread has a listener's, by thread. When a thread comes again with the same call, as
// it does if the kernel or the program restarts it, it gets the one it has.
type undeliveredByThread map[uint32]undelivered

// maxUndelivered bounds the threads remembered: those that never come again stay.
const maxUndelivered = 64

func (m *undeliveredByThread) add(tid uint32, s undelivered) {
	if *m == nil {
		*m = make(undeliveredByThread)
	}
	for old := range *m {
		if len(*m) < maxUndelivered {
			break
		}
		delete(*m, old)
	}
	(*m)[tid] = s
}

// addUndelivered remembers a descriptor that thread tid got and was not told of.
func (l *Listener) addUndelivered(tid uint32, s undelivered) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.undelivered.add(tid, s)
}

// takeUndelivered gives what addUndelivered remembers of thread tid, if that is the handler's, and
// forgets it.
func (l *Listener) takeUndelivered(tid uint32, by *handling) (s undelivered, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok = l.undelivered[tid]; !ok || s.by != by {
		return undelivered{}, false
	}
	delete(l.undelivered, tid)
	return s, true
}
