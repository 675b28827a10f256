package fdkeep

import (
	"context"
	"net"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// away is what a keeper knows of agents, and has done while there was none. It is guarded by
// keeper.mu.
type away struct {
	agents  int  // that said opServe, and have not hung up
	answers bool // calls that may continue do, and questions are answered
	done    Settled
}

// served tells an agent that calls are its own, and waits for its end. It is told only when no call
// is being received: two that receive would wait for one call.
func (h *keeper) served(ctx context.Context, c *net.UnixConn) {
	h.mu.Lock()
	h.away.agents++
	h.endAwayLocked()
	rep := reply{Last: true, Settled: h.away.done}
	h.mu.Unlock()
	if send(c, rep) == nil {
		await(ctx, c)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.away.agents--; h.away.agents > 0 || ctx.Err() != nil {
		return
	}
	h.away.answers = true
	for key := range h.entries {
		h.beginFor(key)
	}
}

// endAway leaves all calls to an agent.
func (h *keeper) endAway() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endAwayLocked()
}

func (h *keeper) endAwayLocked() {
	if !h.away.answers {
		return
	}
	h.away.answers = false
	for _, e := range h.entries {
		if e.calls.hasAway() {
			h.ask(e, 0)
		}
	}
}

// beginFor settles the calls of an entry that may be, beginning with those that the agent had
// received. It is called with mu held.
func (h *keeper) beginFor(key string) {
	e := h.entries[key]
	if e.calls == nil {
		var err error
		if e.calls, err = MapCallPage(e.page); err != nil {
			return // it is no listener, and has no page
		}
		h.entries[key] = e
	}
	if !e.calls.hasAway() {
		return
	}
	for i := 0; ; i++ {
		place := e.calls.place(i)
		if place == nil {
			break
		}
		h.settle(e, place)
	}
	h.ask(e, unix.EPOLLIN)
}

// ask has watch hear of events of an entry's listener besides its end.
func (h *keeper) ask(e entry, events uint32) {
	// It was added by put.
	_ = unix.EpollCtl(h.epoll, unix.EPOLL_CTL_MOD, e.fd, &unix.EpollEvent{Events: events, Fd: int32(e.fd)})
}

// called receives one call and settles it, if it may; else it stays in its place for the next
// agent. When all places are taken, further calls wait in the kernel.
func (h *keeper) called(fd int32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key, ok := h.byFD[fd]
	if !ok || !h.away.answers {
		return
	}
	e := h.entries[key]
	// Receiving must not block: fd may be another listener's since the event, or the call's caller
	// gone.
	p := []unix.PollFd{{Fd: fd, Events: unix.POLLIN}}
	if n, err := unix.Poll(p, 0); err != nil || n != 1 || p[0].Revents&unix.POLLIN == 0 || !e.calls.hasAway() {
		return
	}
	place := e.freePlace()
	if place == nil {
		h.ask(e, 0)
		return
	}
	if ioctl(e.fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(place)) != 0 {
		*place = receivedCall{} // the caller has gone; or a signal came, and there is another event
		return
	}
	h.settle(e, place)
}

// settle has the kernel go on with the call in a place, if it may continue, in its caller's own
// namespaces, as if it had not been trapped; or tells who asks something that there is nobody to
// answer. It clears the place then.
func (h *keeper) settle(e entry, place *receivedCall) {
	switch {
	case e.calls.isQuestion(place):
		if answer(e.fd, response{id: place.ID, errno: -int32(unix.EAGAIN)}) {
			h.away.done.Questions++
		}
	case !e.calls.mayContinue(place):
		return // it waits for the next agent
	case answer(e.fd, response{id: place.ID, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}):
		h.away.done.Continued++
		atomic.AddUint32(e.calls.continued(), 1)
	}
	*place = receivedCall{}
}

// response is the kernel's struct seccomp_notif_resp.
type response struct {
	id    uint64
	value int64
	errno int32
	flags uint32
}

// answer answers a call, unless its caller has gone, or has had an answer.
func answer(listener int, r response) bool {
	errno := unix.EINTR
	for errno == unix.EINTR { // a signal of Go's own
		errno = ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
	}
	return errno == 0
}

// freePlace gives a place for a call, none of the readers' own, or nil. Callers that have gone lose
// theirs.
func (e entry) freePlace() *receivedCall {
	for _, look := range []bool{false, true} {
		for i := ReaderPlaces; ; i++ {
			place := e.calls.place(i)
			if place == nil {
				break
			}
			if look && place.ID != 0 && ioctl(e.fd, unix.SECCOMP_IOCTL_NOTIF_ID_VALID, unsafe.Pointer(&place.ID)) == unix.ENOENT {
				*place = receivedCall{}
			}
			if place.ID == 0 {
				return place
			}
		}
	}
	return nil
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	return errno
}
