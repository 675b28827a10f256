package clib_test

import (
	"encoding/binary"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of clib/verbs/protocol.h, sizes of its requests and replies, and offsets in them, told
// once more: a test with the same source as the library could not see a mistake in it.
const (
	hello         = 1
	allocPD       = 2
	createChannel = 4
	createCQ      = 6
	createQP      = 8
	modifyQP      = 9
	regMR         = 20

	headSize  = 8
	replySize = 16
	slotSize  = 64
	slotsAt   = 384
	produced  = 128
)

var order = binary.NativeEndian

// answerer may make up another reply to a command; nil: the right one.
type answerer func(command uint32, reply []byte, fds []int) (other []byte, otherFDs []int, changed bool)

// router plays the router of the node where heddle-rdma would not do what a test wants: it answers
// on the control socket, something else than it should if `answer` is set, and moves no messages.
type router struct {
	t      *testing.T
	dir    string // has the socket
	listen int
	answer answerer

	mu     sync.Mutex
	closed bool
	next   uint32   // number of the next object
	kept   []int    // its ends of sockets
	cqs    [][]byte // memory of completion queues
}

func startRouter(t *testing.T, answer answerer) *router {
	t.Helper()
	r := &router{t: t, dir: t.TempDir(), next: 1, answer: answer}
	r.listen = listenPacket(t, filepath.Join(r.dir, "control"))
	go r.accept()
	t.Cleanup(r.end)
	return r
}

// end is as if the router was killed.
func (r *router) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.closed = true
	for _, fd := range append(r.kept, r.listen) {
		unix.Shutdown(fd, unix.SHUT_RDWR)
	}
}

func (r *router) accept() {
	defer unix.Close(r.listen)
	for {
		fd, _, err := unix.Accept4(r.listen, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		r.keep(fd)
		go r.serve(fd)
	}
}

func (r *router) keep(fd int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept = append(r.kept, fd)
	if r.closed {
		unix.Shutdown(fd, unix.SHUT_RDWR)
	}
}

// serve answers one connection.
func (r *router) serve(fd int) {
	buffer := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		reply, fds := r.reply(buffer[:n])
		if r.answer != nil {
			if other, otherFDs, changed := r.answer(order.Uint32(buffer), reply, fds); changed {
				reply, fds = other, otherFDs
			}
		}
		if reply == nil {
			continue
		}
		var rights []byte
		if len(fds) > 0 {
			rights = unix.UnixRights(fds...)
		}
		unix.Sendmsg(fd, reply, rights, nil, unix.MSG_NOSIGNAL)
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
}

// reply makes the right reply.
func (r *router) reply(q []byte) (reply []byte, fds []int) {
	at := func(offset int) uint32 { return order.Uint32(q[offset:]) }
	r.mu.Lock()
	number := r.next
	r.next++
	r.mu.Unlock()
	switch at(0) {
	case hello:
		fd, _ := sealed(4096)
		bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			panic(err)
		}
		reply = replyOf(q, 160, 1, 4096)
		copy(reply[42:], "\xff\xff\x0a\x09\x00\x01")
		limits := []uint32{1, 1024, 8192, 8192, 32, 512, 1024, 65536, 8192, 1024, 1024, 256, 8192, 32, 16, 64, 0, 1 << 30, 5, 0}
		for i, n := range limits {
			order.PutUint32(reply[64+4*i:], n)
		}
		return reply, []int{fd, bell, r.socket()}
	case allocPD:
		return replyOf(q, 24, number), nil
	case createChannel:
		return replyOf(q, 24, number), []int{r.socket()}
	case createCQ:
		capacity := powerOfTwo(at(16))
		fd, memory := sealed(128 + ringSize(capacity))
		makeRing(memory[128:], capacity)
		r.mu.Lock()
		r.cqs = append(r.cqs, memory)
		r.mu.Unlock()
		return replyOf(q, 32, number, capacity, uint32(len(memory))), []int{fd}
	case createQP:
		sends, receives := powerOfTwo(9*at(40)), powerOfTwo(9*at(44))
		offset := (ringSize(sends) + 127) &^ 127
		fd, memory := sealed(offset + ringSize(receives))
		makeRing(memory, sends)
		makeRing(memory[offset:], receives)
		return replyOf(q, 64, number, sends, receives, uint32(offset), uint32(len(memory)), 0, at(40), at(44), at(48), at(52), 512), []int{fd}
	case modifyQP:
		return replyOf(q, 24, at(16)), nil
	case regMR:
		return replyOf(q, 32, number, number, number), nil
	}
	return replyOf(q, replySize), nil
}

// socket gives the library's end of a socket of events.
func (r *router) socket() int {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	r.keep(ends[0])
	return ends[1]
}

// refuse is a reply with an error.
func refuse(request []byte, errno unix.Errno) []byte {
	out := replyOf(request, replySize)
	order.PutUint32(out[8:], uint32(errno))
	return out
}

// replyOf is a reply that begins with these numbers after its head.
func replyOf(request []byte, size int, numbers ...uint32) []byte {
	out := make([]byte, size)
	copy(out, request[:headSize])
	for i, n := range numbers {
		order.PutUint32(out[replySize+4*i:], n)
	}
	return out
}

func powerOfTwo(n uint32) uint32 {
	p := uint32(1)
	for p < n {
		p *= 2
	}
	return p
}

func ringSize(capacity uint32) int { return slotsAt + int(capacity)*slotSize }

func makeRing(memory []byte, capacity uint32) {
	copy(memory, "HDLRING\x00")
	order.PutUint32(memory[8:], 1)
	order.PutUint32(memory[12:], slotSize)
	order.PutUint32(memory[16:], capacity)
}

func word(memory []byte, offset int) *uint32 { return (*uint32)(unsafe.Pointer(&memory[offset])) }

// sealed makes memory as the protocol wants it.
func sealed(size int) (fd int, memory []byte) {
	fd, err := unix.MemfdCreate("router", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, int64(size))
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		memory, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		panic(err)
	}
	return fd, memory
}
