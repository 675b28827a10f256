package queues

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/queues/protocol"
)

// What a region of a program has.
const (
	regionSlots    = 256
	regionStreams  = 64
	regionCapacity = 1 << 20
	// largeRegions is how many regions of an endpoint have rings of regionCapacity; those beyond
	// have rings of smallCapacity. What a container does to its regions has memory of the
	// service's used for them, so that their sum is bounded: 2 GiB.
	largeRegions  = 16
	smallCapacity = 64 << 10
	// regionSockets is how many a guest with control may have.
	regionSockets = 1024
)

// region is the memory that a process of an endpoint shares with the service.
type region struct {
	id     uint64
	of     *endpoint
	memory int // a file of it
	flags  uint32
	// capacity is that of its rings, in bytes.
	capacity uint32
	// given has for each stream what ends the connection that has it, or had it last.
	given map[uint32]func()
}

// newID gives a region a number that no earlier agent has given.
func newID() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.NativeEndian.Uint64(b[:])>>(askBits+1) | 1
}

// take gives the capacity that one more region of the endpoint's has; 0: it may have no more. The
// caller holds the plane's mu, as for leave.
func (e *endpoint) take() (capacity uint32) {
	if e.regions >= maxRegions {
		return 0
	}
	e.regions++
	if e.large >= largeRegions {
		return smallCapacity
	}
	e.large++
	return regionCapacity
}

// leave takes back what take gave.
func (e *endpoint) leave(capacity uint32) {
	e.regions--
	if capacity == regionCapacity {
		e.large--
	}
}

// makeRegion has the service make a region, and gives the guest's end of its socket.
func (l *link) makeRegion(ctx context.Context, of *endpoint, flags, capacity uint32) (_ *region, guestEnd *os.File, err error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a region's socket: %w", err)
	}
	defer closeFD(ends[1])
	guestEnd = os.NewFile(uintptr(ends[0]), "queues")
	r := &region{id: newID(), of: of, flags: flags, capacity: capacity, given: map[uint32]func(){}}
	ask := protocol.Region{
		Head: protocol.Head{Type: protocol.TypeRegion, Region: r.id}, Flags: flags,
		Slots: regionSlots, Streams: regionStreams, Capacity: capacity, Sockets: regionSockets,
	}
	if l.owners {
		ask.Owner = of.number
	}
	_, r.memory, err = request[protocol.Region, protocol.Plain](ctx, l, &ask, &ask.Head, ends[1])
	if err == nil && r.memory < 0 {
		err = protocol.ErrMalformed
	}
	if err != nil {
		closeFD(r.memory)
		_ = guestEnd.Close()
		return nil, nil, fmt.Errorf("have a region made: %w", err)
	}
	return r, guestEnd, nil
}

// streamAt is where the words of a stream begin, by the header, which the guest may have written
// to: what is read and written there is the guest's own.
func (r *region) streamAt(number uint32) int64 {
	var at [8]byte
	if n, err := unix.Pread(r.memory, at[:], int64(unsafe.Offsetof(protocol.Header{}.Streams_at))); err != nil || n < len(at) {
		return -1
	}
	return int64(binary.NativeEndian.Uint64(at[:])) + int64(number)*int64(unsafe.Sizeof(protocol.Stream{}))
}

// shared gives what lies at an offset of the memory, by whose words both sides of a race are told:
// they are for sync/atomic. nil: nothing can lie there. done ends its use.
func shared[T protocol.Header | protocol.Stream](r *region, at int64) (t *T, done func()) {
	var file unix.Stat_t
	// Of a file that shrinks what is mapped would be a fault.
	seals, err := unix.FcntlInt(uintptr(r.memory), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 || unix.Fstat(r.memory, &file) != nil {
		return nil, nil
	}
	size := int64(unsafe.Sizeof(*t))
	if at < 0 || at%int64(unsafe.Alignof(*t)) != 0 || at > file.Size-size {
		return nil, nil
	}
	in := at % int64(unix.Getpagesize())
	mapped, err := unix.Mmap(r.memory, at-in, int(in+size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil
	}
	return (*T)(unsafe.Pointer(&mapped[in])), func() { _ = unix.Munmap(mapped) }
}

// giveUp writes into the header that the service has died. Whoever puts bytes into a ring looks
// there afterwards, so that they are seen by lost, or the program ends the connection itself.
func (r *region) giveUp() {
	if h, done := shared[protocol.Header](r, 0); h != nil {
		atomic.StoreUint32(&h.Ended, protocol.EndedDied)
		done()
	}
}

// lost reports whether a stream has bytes that the service that ended has not sent.
func (r *region) lost(number uint32) bool {
	s, done := shared[protocol.Stream](r, r.streamAt(number))
	if s == nil { // the guest has written another place into the header
		return false
	}
	defer done()
	return atomic.LoadUint64(&s.Out_produced) != atomic.LoadUint64(&s.Out_consumed)
}

// end writes into a stream that its connection is over, and wakes whoever waits for room there,
// which the service can no more.
func (r *region) end(number uint32) {
	s, done := shared[protocol.Stream](r, r.streamAt(number))
	if s == nil {
		return
	}
	defer done()
	atomic.StoreInt32(&s.Error, int32(unix.ECONNRESET))
	atomic.StoreUint32(&s.State, protocol.StreamUsed|protocol.StreamDead)
	atomic.StoreUint32(&s.Out_waiting, 0)
	_, _, _ = unix.Syscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&s.Out_waiting)), futexWake, math.MaxInt32)
}

// futexWake is FUTEX_WAKE.
const futexWake = 1
