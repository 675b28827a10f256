package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operations and offsets of io_uring's interface (linux/io_uring.h).
const (
	opConnect  = 16
	opSocket   = 45
	opCommand  = 46
	entrySize  = 64 // struct io_uring_sqe
	answerSize = 16 // struct io_uring_cqe
	opBind     = 56
	getEvents  = 1 // IORING_ENTER_GETEVENTS
	wakeUp     = 2 // IORING_ENTER_SQ_WAKEUP
	setupPoll  = 2 // IORING_SETUP_SQPOLL: a thread of the kernel's does what is asked for
	mapAnswers = 0x8000000
	mapEntries = 0x10000000
)

// ring is an io_uring that does one operation at a time.
type ring struct {
	fd                     int
	enter                  uintptr // flags of io_uring_enter
	sq, cq, entries        []byte
	sqTail, sqMask         *uint32
	sqArray                []byte
	cqHead, cqTail, cqMask *uint32
	answers                []byte
}

// newRing makes a ring with flags of io_uring_setup.
func newRing(flags uint32) *ring {
	var p [120]byte // struct io_uring_params
	binary.NativeEndian.PutUint32(p[8:], flags)
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 8, uintptr(unsafe.Pointer(&p[0])), 0)
	check("io_uring_setup", errorOf(errno))
	u32 := func(at int) int { return int(binary.NativeEndian.Uint32(p[at:])) }
	const sqOff, cqOff = 40, 80
	mapped := func(size, what int) []byte {
		m, err := unix.Mmap(int(fd), int64(what), size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		check("mmap", err)
		return m
	}
	r := &ring{fd: int(fd), enter: getEvents}
	if flags&setupPoll != 0 {
		r.enter |= wakeUp
	}
	r.sq = mapped(u32(sqOff+24)+4*u32(0), 0)
	r.cq = mapped(u32(cqOff+20)+answerSize*u32(4), mapAnswers)
	r.entries = mapped(entrySize*u32(0), mapEntries)
	at := func(m []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&m[off])) }
	r.sqTail, r.sqMask, r.sqArray = at(r.sq, u32(sqOff+4)), at(r.sq, u32(sqOff+8)), r.sq[u32(sqOff+24):]
	r.cqHead, r.cqTail, r.cqMask = at(r.cq, u32(cqOff)), at(r.cq, u32(cqOff+4)), at(r.cq, u32(cqOff+8))
	r.answers = r.cq[u32(cqOff+20):]
	return r
}

// entry is what an operation needs of struct io_uring_sqe.
type entry struct {
	op, fd, length int
	offset, addr   uint64
	tail           [5]uint32 // from file_index on
}

// do carries one operation out and gives its result.
func (r *ring) do(e entry) int {
	tail := *r.sqTail
	i := tail & *r.sqMask
	raw := r.entries[entrySize*i : entrySize*(i+1)]
	clear(raw)
	raw[0] = byte(e.op)
	binary.NativeEndian.PutUint32(raw[4:], uint32(e.fd))
	binary.NativeEndian.PutUint64(raw[8:], e.offset)
	binary.NativeEndian.PutUint64(raw[16:], e.addr)
	binary.NativeEndian.PutUint32(raw[24:], uint32(e.length))
	for n, word := range e.tail {
		binary.NativeEndian.PutUint32(raw[44+4*n:], word)
	}
	binary.NativeEndian.PutUint32(r.sqArray[4*i:], i)
	atomic.StoreUint32(r.sqTail, tail+1)
	for head := atomic.LoadUint32(r.cqHead); head == atomic.LoadUint32(r.cqTail); {
		submit := 1
		if atomic.LoadUint32(r.sqTail) != tail+1 {
			submit = 0
		}
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(submit), 1, r.enter, 0, 0)
		if errno != 0 && errno != unix.EINTR {
			check("io_uring_enter", errno)
		}
	}
	answer := r.answers[answerSize*(*r.cqHead&*r.cqMask):]
	res := int32(binary.NativeEndian.Uint32(answer[8:]))
	atomic.AddUint32(r.cqHead, 1)
	return int(res)
}

func (r *ring) connect(fd int, sa []byte) unix.Errno { return r.address(opConnect, fd, sa) }
func (r *ring) bind(fd int, sa []byte) unix.Errno    { return r.address(opBind, fd, sa) }

// address carries out an operation on a socket and an address.
func (r *ring) address(op, fd int, sa []byte) unix.Errno {
	var pin runtime.Pinner
	pin.Pin(&sa[0])
	defer pin.Unpin()
	return resultOf(r.do(entry{op: op, fd: fd, addr: uint64(uintptr(unsafe.Pointer(&sa[0]))), offset: uint64(len(sa))}))
}

// command is one of the commands of a socket's file: a number, and for options level, name, value
// and length.
func (r *ring) command(fd, command int, level, name uint32, value []byte) int {
	e := entry{op: opCommand, fd: fd, offset: uint64(command), addr: uint64(level) | uint64(name)<<32}
	e.tail[0] = uint32(len(value)) // optlen
	if len(value) > 0 {
		var pin runtime.Pinner
		pin.Pin(&value[0])
		defer pin.Unpin()
		binary.NativeEndian.PutUint64((*[8]byte)(unsafe.Pointer(&e.tail[1]))[:], uint64(uintptr(unsafe.Pointer(&value[0]))))
	}
	return r.do(e)
}

func resultOf(result int) unix.Errno {
	if result < 0 {
		return unix.Errno(-result)
	}
	return 0
}

// Commands of sockets (enum io_uring_socket_op).
const (
	commandGetOption = 2
	commandSetOption = 3
	lastCommand      = 15
)

// ringCommands OWN PORT makes a socket by io_uring, which listens at PORT of OWN, and gives every
// command of sockets to one that socket() made.
func ringCommands(args []string) {
	r, port := newRing(0), number(args[1])
	made := r.do(entry{op: opSocket, fd: unix.AF_INET, offset: unix.SOCK_STREAM})
	check("socket by io_uring", errorOf(resultOf(made)))
	check("bind", errorOf(bind(made, addressOf(netip.IPv4Unspecified(), port))))
	check("listen", unix.Listen(made, 1))
	say("listens", localOf(made).String())
	fd := newSocket(unix.AF_INET)
	check("connect", errorOf(connect(fd, addressOf(parse(args[0]), port))))
	transparent, marked := []byte{1, 0, 0, 0}, []byte{0x34, 0x12, 0, 0}
	say("TCP_REPAIR", nameOf(resultOf(r.command(fd, commandSetOption, unix.SOL_TCP, unix.TCP_REPAIR, transparent))))
	say("SO_MARK", nameOf(resultOf(r.command(fd, commandSetOption, unix.SOL_SOCKET, unix.SO_MARK, marked))))
	own, err := unix.GetsockoptUint64(made, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	check("SO_NETNS_COOKIE", err)
	cookie := make([]byte, 8)
	answer := r.command(fd, commandGetOption, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE, cookie)
	say("SO_NETNS_COOKIE", fmt.Sprint(answer, " ", binary.NativeEndian.Uint64(cookie) == own))
	for c := range lastCommand {
		if c == commandGetOption || c == commandSetOption {
			continue
		}
		memory := make([]byte, 256)
		answer := r.command(fd, c, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE, memory)
		if bytes.Count(memory, []byte{0}) != len(memory) {
			say(fmt.Sprint("command ", c), fmt.Sprintf("%d, and wrote %x", answer, memory))
		}
	}
	fmt.Println("tried")
	waitForEnd()
}

// ringPoll NODE PORT has a thread of the kernel's bind the address NODE, connect to PORT of the own
// loopback and set IP options.
func ringPoll(args []string) {
	r := newRing(setupPoll)
	say("bind", nameOf(r.bind(newSocket(unix.AF_INET), addressOf(parse(args[0]), 0))))
	fd := newSocket(unix.AF_INET)
	say("connect", greeted(fd, r.connect(fd, addressOf(parse("127.0.0.1"), number(args[1])))))
	say("IP_OPTIONS", nameOf(resultOf(r.command(newSocket(unix.AF_INET), commandSetOption, unix.SOL_IP, unix.IP_OPTIONS, make([]byte, 4)))))
}
