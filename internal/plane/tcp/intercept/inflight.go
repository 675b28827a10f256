package intercept

import (
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inflightCall is a call that was received and is not yet answered. It lies at the beginning of a call page, which
// agents of different versions share: members are only ever added at the end, and zero must mean what it
// meant before there was the member.
type inflightCall struct {
	call notification
	// inode is that of the socket the caller is being given; 0 before that. A caller that has it among its
	// descriptors needs only to be told.
	inode uint64
}

// A call page is the memory a kept listener keeps the in-flight calls in: one for each reader, at multiples of inflightBytes.
// An agent from before there were several readers knows the first only.
const (
	callPageBytes = 4096
	inflightBytes = 128
)

var (
	_ [inflightBytes - unsafe.Sizeof(inflightCall{})]byte
	_ [callPageBytes - maxReaders*inflightBytes]byte
)

// mapInflight places the in-flight calls in the shared memory behind fd, with what it holds.
func (l *listener) mapInflight(fd int) error {
	page, err := unix.Mmap(fd, 0, callPageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map call page: %w", err)
	}
	l.page = page
	for i := range l.inflight {
		l.inflight[i] = (*inflightCall)(unsafe.Pointer(&page[i*inflightBytes]))
	}
	return nil
}

// undelivered is a socket that a thread has and was not told of: a signal took it out of its call in between. That
// cannot happen under a filter with WAIT_KILLABLE_RECV.
type undelivered struct {
	inode   uint64
	number  int
	request request
	filled  int // sockets that were in it then, if it is a batch
}

// undeliveredByThread has a listener's, by thread. When a thread comes again with the same call, as it does if the kernel or
// the program restarts it, it gets the one it has.
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

// addUndelivered remembers a socket that thread tid got and was not told of.
func (l *listener) addUndelivered(tid uint32, s undelivered) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.undelivered.add(tid, s)
}

// takeUndelivered gives what addUndelivered remembers of thread tid, and forgets it.
func (l *listener) takeUndelivered(tid uint32) (s undelivered, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok = l.undelivered[tid]; ok {
		delete(l.undelivered, tid)
	}
	return s, ok
}

// redeliver answers a call with the socket that an interrupted one left behind, if there is one that fits.
func (r *reader) redeliver(n *notification, req request) (answered bool) {
	s, ok := r.takeUndelivered(n.PID)
	if !ok || s.request != req || !r.srv.proc.isSocket(n.PID, s.number, s.inode) {
		return false
	}
	r.inflight.inode = s.inode
	switch err := sendValue(r.fd, n.ID, s.number); {
	case err == nil && s.filled > 0:
		r.srv.counters.batches.Add(1)
		r.srv.counters.batchSockets.Add(uint64(s.filled))
	case err == nil:
		r.srv.counters.answered.Add(1)
		r.srv.counters.misses.Add(1)
	case gone(err):
		r.addUndelivered(n.PID, s) // interrupted again
		r.fail(failCallerGone, err)
	default:
		return false
	}
	return true
}

// isSocket reports whether descriptor number of thread tid is the socket with that inode.
func (p procDir) isSocket(tid uint32, number int, inode uint64) bool {
	buf := make([]byte, 64)
	path := strconv.FormatUint(uint64(tid), 10) + "/fd/" + strconv.Itoa(number)
	n, err := unix.Readlinkat(int(p), path, buf)
	return err == nil && string(buf[:n]) == "socket:["+strconv.FormatUint(inode, 10)+"]"
}

// findSocket looks for the socket with that inode among the descriptors of thread tid. A thread that is gone
// has none.
func (p procDir) findSocket(tid uint32, inode uint64) (number int, found bool, err error) {
	fd, err := unix.Openat(int(p), strconv.FormatUint(uint64(tid), 10)+"/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ESRCH {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("descriptors of thread %d: %w", tid, err)
	}
	dir := os.NewFile(uintptr(fd), "fd")
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		if number, cerr := strconv.Atoi(name); cerr == nil && p.isSocket(tid, number, inode) {
			return number, true, nil
		}
	}
	return 0, false, err
}
