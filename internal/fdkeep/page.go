package fdkeep

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The layout of a call page, which agents and keepers of different versions share: members are only
// ever added, and zero must mean what it meant before there was the member.
const (
	// PageBytes is a page's size.
	PageBytes = 4096
	// PlaceBytes is the size of a place for a call that was received and is not yet answered. The
	// page is full of them.
	PlaceBytes = 128
	// ReaderPlaces is how many of them, the first, are of the agent's readers. The others have
	// calls that wait for something else than their reader.
	ReaderPlaces = 4
	// CallBytes is the part of a place that has the call, and what the agent notes of it.
	CallBytes = unsafe.Sizeof(receivedCall{})

	// In the first place, behind its call.
	continuedAt = 112 // uint32: calls that a keeper has had continue, and no agent knows of yet
	awayAt      = 120 // uint64: the call that may continue: its number, and in the upper half its architecture

	// In the second place, behind its call.
	questionsAt = PlaceBytes + PlaceBytes - 8*Questions // uint64 each: a kind of question; 0: none
)

// Questions is how many kinds of questions a page has room for.
const Questions = 2

var (
	_ [continuedAt - CallBytes]byte
	_ [questionsAt - PlaceBytes - CallBytes]byte
)

// receivedCall is what is in a place: the kernel's struct seccomp_notif, and the inode of the
// socket that the agent is giving the caller; 0 before that. ID is 0 while there is no call.
type receivedCall struct {
	ID         uint64
	PID, Flags uint32
	Nr         int32
	Arch       uint32
	Pointer    uint64
	Args       [6]uint64
	Inode      uint64
}

// CallPage is a call page in this process's memory. Nil is none.
type CallPage []byte

// MapCallPage maps the page behind a memfd. Whoever maps it unmaps it, as a slice of bytes.
func MapCallPage(fd int) (CallPage, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("call page: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.New("call page: not a file")
	}
	if st.Size < PageBytes { // touching it would be a SIGBUS
		return nil, fmt.Errorf("call page of %d bytes, want %d", st.Size, PageBytes)
	}
	p, err := unix.Mmap(fd, 0, PageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map call page: %w", err)
	}
	return p, nil
}

func (p CallPage) unmap() {
	if p != nil {
		_ = unix.Munmap(p) // fails only for an address that is not mapped
	}
}

// SetAway says which call a keeper may have continue while no agent runs, by its number on an
// architecture (AUDIT_ARCH_*), which is not 0.
func (p CallPage) SetAway(nr int32, arch uint32) {
	atomic.StoreUint64(p.away(), uint64(arch)<<32|uint64(uint32(nr)))
}

// ClearAway says that all calls wait for the next agent.
func (p CallPage) ClearAway() { atomic.StoreUint64(p.away(), 0) }

// SetQuestions says which calls a keeper answers with EAGAIN while no agent runs, by their kinds:
// socket() with a kind as its fourth argument, and that inverted as its sixth. By these a library
// asks the agent something, which it does again later.
func (p CallPage) SetQuestions(kinds []uint64) {
	for i := range Questions {
		kind := uint64(0)
		if i < len(kinds) {
			kind = kinds[i]
		}
		atomic.StoreUint64(p.question(i), kind)
	}
}

// TakeContinued gives how many calls a keeper has had continue since it was asked last.
func (p CallPage) TakeContinued() uint32 { return atomic.SwapUint32(p.continued(), 0) }

func (p CallPage) away() *uint64      { return (*uint64)(unsafe.Pointer(&p[awayAt])) }
func (p CallPage) continued() *uint32 { return (*uint32)(unsafe.Pointer(&p[continuedAt])) }

func (p CallPage) question(i int) *uint64 {
	return (*uint64)(unsafe.Pointer(&p[questionsAt+8*i]))
}

// hasAway reports whether any call may continue, or is answered.
func (p CallPage) hasAway() bool {
	if p == nil {
		return false
	}
	set := atomic.LoadUint64(p.away())
	for i := range Questions {
		set |= atomic.LoadUint64(p.question(i))
	}
	return set != 0
}

// isQuestion reports whether a call is one that is answered with EAGAIN. Of one that the agent had
// received, the caller may have got a file that it is not told of.
func (p CallPage) isQuestion(c *receivedCall) bool {
	for i := range Questions {
		kind := atomic.LoadUint64(p.question(i))
		if kind != 0 && c.ID != 0 && c.Nr == unix.SYS_SOCKET && c.Args[3] == kind && c.Args[5] == ^kind {
			return true
		}
	}
	return false
}

// mayContinue reports whether a call may. Of one whose socket is on its way, the caller may have
// it.
func (p CallPage) mayContinue(c *receivedCall) bool {
	return c.ID != 0 && c.Inode == 0 && uint64(c.Arch)<<32|uint64(uint32(c.Nr)) == atomic.LoadUint64(p.away())
}

// place gives a place by its number, nil if there is none.
func (p CallPage) place(i int) *receivedCall {
	at := i * PlaceBytes
	if at >= PageBytes {
		return nil
	}
	return (*receivedCall)(unsafe.Pointer(&p[at]))
}
