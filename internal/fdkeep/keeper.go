package fdkeep

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// entry is what the keeper keeps under one key.
type entry struct {
	meta     []byte
	fd, page int
	calls    CallPage // page, once it was needed; else nil
}

func (e entry) close() {
	e.calls.unmap()
	closeAll([]int{e.fd, e.page})
}

// keeper keeps listeners. Its map and the descriptors in it are guarded by mu, which is held across
// system calls that cannot block only (close, dup, epoll_ctl).
type keeper struct {
	epoll int

	mu      sync.Mutex
	entries map[string]entry
	byFD    map[int32]string // listener descriptor -> key
	away    away
}

// Run holds listeners for the clients of socketPath until ctx is done or a client says stop. It
// fails if another keeper serves the path already. A socket that is removed is made again.
func Run(ctx context.Context, socketPath string) error {
	d, err := open(socketPath)
	if err != nil {
		return err
	}
	h := &keeper{entries: map[string]entry{}, byFD: map[int32]string{}}
	if h.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		d.close()
		return fmt.Errorf("epoll: %w", err)
	}
	// An eventfd ends watch: closing an epoll descriptor does not wake who waits on it.
	stopFD, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(h.epoll, unix.EPOLL_CTL_ADD, stopFD, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(stopFD)})
	}
	if err != nil {
		d.close()
		closeAll([]int{h.epoll})
		return fmt.Errorf("watch: %w", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { h.watch(int32(stopFD)) })
	err = h.serveAll(ctx, socketPath, d)
	_, _ = unix.Write(stopFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // cannot fail: the counter is 0
	wg.Wait()
	h.closeAll()
	closeAll([]int{h.epoll, stopFD})
	return err
}

// serve answers clients until the listener closes, then waits for those it is answering.
func (h *keeper) serve(ctx context.Context, stop context.CancelFunc, d *listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := d.socket.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
				time.Sleep(10 * time.Millisecond) // the client waits; a closing filter frees descriptors
				continue
			}
			return fmt.Errorf("accept on fd keeper socket: %w", err)
		}
		wg.Go(func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(exchangeTimeout)) // fails on a closed connection; so will the next call
			h.answer(ctx, c, stop)
		})
	}
}

// answer handles one client's request.
func (h *keeper) answer(ctx context.Context, c *net.UnixConn, stop context.CancelFunc) {
	msg, fds, err := receive(c)
	if errors.Is(err, io.EOF) {
		return // a client that only asks whether anyone is there
	}
	var r request
	if err == nil {
		r, err = parseRequest(msg, len(fds))
	}
	switch {
	case err != nil:
		closeAll(fds)
	case r.Op == opPut:
		err = h.put(r.Key, entry{meta: r.Meta, fd: fds[0], page: fds[1]})
	case r.Op == opDrop:
		h.drop(r.Key)
	case r.Op == opTake:
		if !r.Look {
			h.endAway() // an agent from before there was opServe
		}
		err = h.sendAll(c, r.Key)
	case r.Op == opServe:
		h.served(ctx, c)
		return // the answer came at the beginning
	case r.Op == opWatch:
		await(ctx, c)
		return // hanging up is the answer
	case r.Op == opStop:
		defer stop()
	}
	last := reply{Last: true}
	if err != nil {
		last.Error = err.Error()
	}
	_ = send(c, last) // the client may have hung up: nobody else to tell
}

// await returns when the client hangs up or ctx is done.
func await(ctx context.Context, c *net.UnixConn) {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	_ = c.SetDeadline(time.Time{}) // fails on a closed connection; so will the read
	_, _ = c.Read(make([]byte, 1))
}

// put keeps e under key. It owns e's descriptors from here on.
func (h *keeper) put(key string, e entry) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, replaces := h.entries[key]; !replaces && len(h.entries) >= MaxKept {
		e.close()
		return fmt.Errorf("%d listeners are kept: that is the limit", MaxKept)
	}
	// No event is asked for: the hang-up is always reported.
	if err := unix.EpollCtl(h.epoll, unix.EPOLL_CTL_ADD, e.fd, &unix.EpollEvent{Fd: int32(e.fd)}); err != nil {
		e.close()
		return fmt.Errorf("watch listener: %w", err)
	}
	h.dropLocked(key)
	h.entries[key], h.byFD[int32(e.fd)] = e, key
	if h.away.answers {
		h.beginFor(key)
	}
	return nil
}

func (h *keeper) drop(key string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dropLocked(key)
}

func (h *keeper) dropLocked(key string) {
	e, ok := h.entries[key]
	if !ok {
		return
	}
	delete(h.entries, key)
	delete(h.byFD, int32(e.fd))
	// Closing alone would not do: the agent has the same open file, and epoll goes by that.
	_ = unix.EpollCtl(h.epoll, unix.EPOLL_CTL_DEL, e.fd, nil) // it was added by put
	e.close()
}

func (h *keeper) closeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key := range h.entries {
		h.dropLocked(key)
	}
}

// sendAll sends every entry whose key begins with prefix, with duplicates of its descriptors. It
// copies one entry at a time under the lock and sends without it, so it needs two spare descriptors
// however much is kept.
func (h *keeper) sendAll(c *net.UnixConn, prefix string) error {
	for _, key := range h.keys() {
		if !strings.HasPrefix(key, prefix) {
			continue
		}
		meta, fds, err := h.copyOf(key)
		if err != nil {
			return err
		}
		if fds == nil {
			continue // gone since
		}
		// Each message has its time, and the last one that follows them.
		_ = c.SetDeadline(time.Now().Add(exchangeTimeout)) // fails on a closed connection; so will send
		err = send(c, reply{Key: key, Meta: meta}, fds...)
		closeAll(fds)
		if err != nil {
			return err
		}
	}
	return nil
}

func (h *keeper) keys() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := make([]string, 0, len(h.entries))
	for key := range h.entries {
		keys = append(keys, key)
	}
	return keys
}

// copyOf duplicates an entry; no descriptors if there is none.
func (h *keeper) copyOf(key string) (meta []byte, fds []int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.entries[key]
	if !ok {
		return nil, nil, nil
	}
	fds, err = dup(e.fd, e.page)
	return e.meta, fds, err
}

// watch drops listeners whose filters have no users left, and has the calls of others continue
// while no agent runs, until stopFD becomes readable.
func (h *keeper) watch(stopFD int32) {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(h.epoll, events, -1)
		if err != nil && err != unix.EINTR {
			return // only for a bad descriptor or buffer, and we own both
		}
		for _, ev := range events[:max(n, 0)] {
			if ev.Fd == stopFD {
				return
			}
			if ev.Events&unix.EPOLLIN != 0 {
				h.called(ev.Fd)
			}
			if ev.Events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
				h.hungUp(ev.Fd)
			}
		}
	}
}

// hungUp drops the listener behind fd. It asks again under the lock, because fd may have been
// dropped and its number used for another listener since the event.
func (h *keeper) hungUp(fd int32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key, ok := h.byFD[fd]
	if !ok {
		return
	}
	p := []unix.PollFd{{Fd: fd}}
	if n, err := unix.Poll(p, 0); err == nil && n == 1 && p[0].Revents&(unix.POLLHUP|unix.POLLNVAL) != 0 {
		h.dropLocked(key)
	}
}
