package main

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// stateName gives a TCP state. States that differ only in whether an acknowledgement has come have
// one name: it may be delayed.
func stateName(state byte) string {
	names := []string{"0", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT", "FIN_WAIT", "CLOSE", "CLOSE", "CLOSE_WAIT", "CLOSE", "LISTEN", "CLOSE"}
	if int(state) < len(names) {
		return names[state]
	}
	return fmt.Sprint(state)
}

// sample says what each open slot is ready for, how much there is to read and in which state it is;
// and gives the calls that ended since the last time.
func (w *worker) sample(q differ.Request) differ.Reply {
	reply := differ.Reply{Slots: map[int]string{}}
	if w.child != 0 {
		c := w.askChild(differ.Request{Kind: "sample"})
		reply.Child, reply.Done, reply.Moving, reply.Mistake = c.Slots, c.Done, c.Moving, c.Mistake
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	reply.Done = append(reply.Done, w.done...)
	w.done = nil
	var slots []int
	var fds []unix.PollFd
	for slot, fd := range w.slots {
		slots = append(slots, slot)
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN | unix.POLLPRI | unix.POLLOUT | unix.POLLRDHUP})
	}
	if len(fds) == 0 {
		return reply
	}
	if _, err := unix.Poll(fds, 0); err != nil {
		reply.Mistake = "poll: " + err.Error()
	}
	for i, slot := range slots {
		text, moving := describe(int(fds[i].Fd))
		reply.Slots[slot] = differ.PollEvents(int(fds[i].Revents)) + text
		reply.Moving = reply.Moving || moving
	}
	slices.SortFunc(reply.Done, func(a, b differ.Done) int { return a.Index - b.Index })
	return reply
}

// describe gives what there is to read and the TCP state. moving says that something is on its way
// out.
func describe(fd int) (text string, moving bool) {
	var info unix.TCPInfo
	size := int32(1)
	if _, err := sys(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_TCP, unix.TCP_INFO, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size))); err != nil {
		return "", false
	}
	if n, err := ioctlInt(fd, unix.SIOCINQ); err == nil {
		text = fmt.Sprintf(" %d to read", n)
	}
	if n, err := ioctlInt(fd, unix.SIOCOUTQ); err == nil && n > 0 {
		unsent, err := ioctlInt(fd, 0x894B) // SIOCOUTQNSD
		moving = err == nil && unsent > 0
	}
	const synSent, synRecv = 2, 3
	return text + " " + stateName(info.State), moving || info.State == synSent || info.State == synRecv
}

func ioctlInt(fd int, request uintptr) (int, error) {
	var n int32
	_, err := sys(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&n)))
	return int(n), err
}
