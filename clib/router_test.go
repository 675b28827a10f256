package clib_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of clib/verbs/protocol.h, sizes of its requests and replies, and offsets in them, told once more: a test with the same
// source as the library could not see a mistake in it.
const (
	hello         = 1
	allocPD       = 2
	createChannel = 4
	createCQ      = 6
	destroyCQ     = 7
	createQP      = 8
	modifyQP      = 9
	queryQP       = 10
	destroyQP     = 11
	createSRQ     = 12
	querySRQ      = 14
	createAH      = 16
	regMR         = 20
	deregMR       = 21
	lastCommand   = 24

	headSize  = 8
	replySize = 16
	slotSize  = 64
	slotsAt   = 384
)

var order = binary.NativeEndian

// router plays the router of the node for the library's tests: it answers on the control socket and moves messages between the queue
// pairs of the processes that come. It knows no errors but those of a queue pair that fails, no limits and no policy.
type router struct {
	t      *testing.T
	dir    string // has the socket
	listen int
	// answer may make up another reply to a command; nil: the right one.
	answer func(command uint32, reply []byte, fds []int) (other []byte, otherFDs []int, changed bool)

	mu       sync.Mutex
	closed   bool
	contexts []*tenant
	next     uint32 // number of the next object
	cqs      map[uint32]*cq
	qps      map[uint32]*qp
	srqs     map[uint32]*ring
	mrs      map[uint32]mr
	channels map[uint32]int
	seen     map[uint32]int // requests by command
	kicks    int            // doorbells rung
}

type tenant struct {
	fd, pid, kick, async int
	memory               []byte
	kept                 []int // the router's ends of sockets
}

type cq struct {
	memory  []byte
	ring    *ring
	channel int
	number  uint32
	user    uint64
}

type qp struct {
	context             *tenant
	number, kind, state uint32
	remote              uint32
	signalAll           bool
	send, receive       *ring
	sendCQ, receiveCQ   *cq
	attr                []byte
}

type mr struct {
	context              *tenant
	address, length, key uint64
	iova                 uint64
}

// ring is one side of a ring: the producer's of completions, the consumer's of requests.
type ring struct {
	memory   []byte
	capacity uint32
	own      uint32
}

func word(memory []byte, offset int) *uint32 { return (*uint32)(unsafe.Pointer(&memory[offset])) }

func newRing(memory []byte, capacity uint32) *ring {
	copy(memory, "HDLRING\x00")
	order.PutUint32(memory[8:], 1)
	order.PutUint32(memory[12:], slotSize)
	order.PutUint32(memory[16:], capacity)
	return &ring{memory: memory, capacity: capacity}
}

func (r *ring) slot(ahead uint32) []byte {
	at := slotsAt + int((r.own+ahead)%r.capacity)*slotSize
	return r.memory[at : at+slotSize]
}

// pop gives the request that begins at the next slot, all slots of it in a row; nil if there is none.
func (r *ring) pop(slotsAtByte int) []byte {
	have := atomic.LoadUint32(word(r.memory, 128)) - r.own
	if have == 0 {
		return nil
	}
	n := uint32(r.slot(0)[slotsAtByte])
	if n == 0 || n > have {
		panic(fmt.Sprintf("a request of %d slots where %d are shown", n, have))
	}
	var out []byte
	for i := range n {
		out = append(out, r.slot(i)...)
	}
	r.own += n
	atomic.StoreUint32(word(r.memory, 256), r.own)
	return out
}

func (r *ring) push(slot []byte) {
	copy(r.slot(0), slot)
	r.own++
	atomic.StoreUint32(word(r.memory, 128), r.own)
}

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

func startRouter(t *testing.T) *router {
	t.Helper()
	r := &router{t: t, dir: t.TempDir(), next: 0x11, cqs: map[uint32]*cq{}, qps: map[uint32]*qp{}, srqs: map[uint32]*ring{},
		mrs: map[uint32]mr{}, channels: map[uint32]int{}, seen: map[uint32]int{}}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(r.dir, "control")})
	}
	if err == nil {
		err = unix.Listen(fd, 16)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.listen = fd
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
	unix.Shutdown(r.listen, unix.SHUT_RDWR)
	for _, c := range r.contexts {
		r.drop(c)
	}
}

func (r *router) drop(c *tenant) {
	for _, fd := range append(c.kept, c.fd) {
		unix.Shutdown(fd, unix.SHUT_RDWR)
	}
	one := make([]byte, 8)
	order.PutUint64(one, 1)
	unix.Write(c.kick, one)
	for number, q := range r.qps {
		if q.context == c {
			delete(r.qps, number)
		}
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
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			panic(err)
		}
		kick, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			panic(err)
		}
		c := &tenant{fd: fd, pid: int(cred.Pid), kick: kick}
		r.mu.Lock()
		r.contexts = append(r.contexts, c)
		if r.closed {
			r.drop(c)
		}
		r.mu.Unlock()
		go r.serve(c)
	}
}

// serve answers one connection.
func (r *router) serve(c *tenant) {
	buffer := make([]byte, 8192)
	for {
		n, err := unix.Read(c.fd, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		r.mu.Lock()
		if err != nil || n <= 0 {
			r.drop(c)
			r.mu.Unlock()
			unix.Close(c.fd)
			return
		}
		request := append([]byte(nil), buffer[:n]...)
		reply, fds := r.reply(c, request)
		if r.answer != nil {
			if other, otherFDs, changed := r.answer(order.Uint32(request), reply, fds); changed {
				reply, fds = other, otherFDs
			}
		}
		r.mu.Unlock()
		if reply == nil {
			continue
		}
		var rights []byte
		if len(fds) > 0 {
			rights = unix.UnixRights(fds...)
		}
		unix.Sendmsg(c.fd, reply, rights, nil, unix.MSG_NOSIGNAL)
		for _, fd := range fds {
			if fd != c.kick {
				unix.Close(fd)
			}
		}
	}
}

// run moves messages whenever the context's doorbell is rung.
func (r *router) run(c *tenant) {
	asleep := word(c.memory, 0)
	for {
		r.mu.Lock()
		atomic.StoreUint32(asleep, 1)
		for r.moveAll() {
		}
		gone := r.closed
		r.mu.Unlock()
		if gone {
			return
		}
		if _, err := unix.Read(c.kick, make([]byte, 8)); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		r.mu.Lock()
		r.kicks++
		r.mu.Unlock()
	}
}

// pair gives the two ends of a socket of events, of which the router keeps one.
func (c *tenant) pair() (kept, passed int) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	c.kept = append(c.kept, ends[0])
	return ends[0], ends[1]
}
