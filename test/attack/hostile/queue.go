package main

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// needles are what the program must not be told.
type needles [][]byte

// search reports those that memory holds.
func (n needles) search(where string, memory []byte) {
	for _, needle := range n {
		if bytes.Contains(memory, needle) {
			say("found "+hex.EncodeToString(needle), where)
		}
	}
}

// readQueue PEER PORT NEEDLE... connects to PEER, which answers each byte, and searches for the
// needles what the kernel tells of the connection by ways that other programs of the suite do not
// try: several messages of the error queue at once, peeking at an offset, a connection under
// repair, and the options of the last packet.
func readQueue(args []string) {
	var look needles
	for _, a := range args[2:] {
		raw, err := hex.DecodeString(a)
		check(a, err)
		look = append(look, raw)
	}
	fd := newSocket(unix.AF_INET)
	const stamps = unix.SOF_TIMESTAMPING_TX_SOFTWARE | unix.SOF_TIMESTAMPING_TX_SCHED | unix.SOF_TIMESTAMPING_TX_ACK | unix.SOF_TIMESTAMPING_SOFTWARE |
		unix.SOF_TIMESTAMPING_OPT_CMSG
	check("SO_TIMESTAMPING", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, stamps))
	for _, name := range []int{unix.IP_RECVERR, unix.IP_PKTINFO, unix.IP_RECVTTL, unix.IP_RECVTOS, unix.IP_RECVORIGDSTADDR, unix.IP_RECVOPTS} {
		_ = unix.SetsockoptInt(fd, unix.SOL_IP, name, 1) // some are not for TCP
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 1)
	check("connect", errorOf(connect(fd, addressOf(parse(args[0]), number(args[1])))))
	for range 4 {
		_, err := unix.Write(fd, []byte("xy"))
		check("write", err)
	}
	look.message(fd, "peek", unix.MSG_PEEK)
	told := 0
	for range 100 {
		poll := []unix.PollFd{{Fd: int32(fd), Events: 0}}
		if n, _ := unix.Poll(poll, 20); n > 0 && poll[0].Revents&unix.POLLERR != 0 {
			told += look.errors(fd)
		} else if told > 0 {
			break
		}
	}
	say("messages of the error queue", fmt.Sprint(told > 0))
	for _, name := range []int{unix.IP_PKTOPTIONS, unix.IP_RECVORIGDSTADDR} {
		room, length := make([]byte, 512), uint32(512)
		_, _, _ = unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(name), uintptr(unsafe.Pointer(&room[0])), uintptr(unsafe.Pointer(&length)), 0)
		look.search(fmt.Sprint("IP option ", name), room)
	}
	for _, c := range []struct {
		name  string
		which int
		value int
	}{{"TCP_REPAIR", unix.TCP_REPAIR, 1}, {"TCP_REPAIR_QUEUE", unix.TCP_REPAIR_QUEUE, 1}, {"TCP_QUEUE_SEQ", unix.TCP_QUEUE_SEQ, 1},
		{"TCP_REPAIR_WINDOW", unix.TCP_REPAIR_WINDOW, 1}, {"TCP_TIMESTAMP", unix.TCP_TIMESTAMP, 1}, {"TCP_REPAIR_OPTIONS", unix.TCP_REPAIR_OPTIONS, 1}} {
		errno, _ := unix.SetsockoptInt(fd, unix.SOL_TCP, c.which, c.value).(unix.Errno)
		say(c.name, nameOf(errno))
	}
}

// message receives once.
func (n needles) message(fd int, where string, flags int) {
	data, control := make([]byte, 512), make([]byte, 512)
	if _, _, _, _, err := unix.Recvmsg(fd, data, control, flags); err == nil {
		n.search(where, data)
		n.search(where, control)
	}
}

// errors receives all that the error queue holds, by recvmmsg(), and gives how many messages that
// were.
func (n needles) errors(fd int) int {
	const batch, room = 16, 512
	type mmsghdr struct {
		hdr unix.Msghdr
		len uint32
		_   [4]byte
	}
	var messages [batch]mmsghdr
	memory := make([]byte, 3*batch*room)
	vectors := make([]unix.Iovec, batch)
	for i := range messages {
		m := memory[3*i*room:]
		vectors[i].Base, vectors[i].Len = &m[0], room
		messages[i].hdr = unix.Msghdr{Iov: &vectors[i], Iovlen: 1, Control: &m[room], Controllen: room, Name: &m[2*room], Namelen: room}
	}
	got, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&messages[0])), batch, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0
	}
	n.search("error queue", memory)
	return int(got)
}
