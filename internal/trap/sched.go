package trap

import (
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// setBatchPolicy makes the calling thread, which must be locked, one that does not preempt others
// when it wakes (SCHED_BATCH). ADDFD wakes the caller and then, when the caller has taken its
// socket, the answering thread: without this the answering thread pushes the caller aside for what
// is left to do, and the caller waits for it with its answer in hand. Measured in
// docs/benchmarks/log.md.
func setBatchPolicy() error { return schedule(unix.SCHED_BATCH, 0) }

// Background makes the calling thread, which must be locked, give way to every thread that has
// something to do. Not SCHED_IDLE: a pool's lock may be held when the thread is pushed aside, and
// it must get enough of a busy processor to let go of it.
func Background() error {
	ownSlack()
	return schedule(unix.SCHED_BATCH, 19)
}

func schedule(policy uint32, nice int32) error {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: policy, Nice: nice}
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		return fmt.Errorf("sched_setattr: %w", err)
	}
	return nil
}

// hurry has the calling thread, which must be locked, run as soon as it may, whoever else wants a
// processor, until undo.
func hurry() (undo func(), err error) {
	before, err := unix.SchedGetAttr(0, 0)
	if err == nil {
		err = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
	}
	if err != nil {
		return nil, err
	}
	return func() { _ = unix.SchedSetAttr(0, before, 0) }, nil // of what it was before
}

// Yielder lets Go reschedule a goroutine that is locked to its thread and makes one system call
// after the other, at moments that suit it. Go's monitor thread asks a goroutine that ran for 10 ms
// to make room, which happens at the next function call, with a caller waiting; and while such a
// goroutine is in a system call the monitor takes its processor (P) away, and looks again every 20
// us for as long as it finds any to take: thousands of wake-ups a second. docs/decisions/0041.
type Yielder struct {
	since time.Time
	calls int
}

const (
	// yieldEvery is less than the 10 ms of runtime.forcePreemptNS, so that the monitor always finds
	// that it happened.
	yieldEvery = 8 * time.Millisecond
	// yieldCalls is how many calls in that time are so few that Go may do as it likes.
	yieldCalls = 4
)

// Yield is called by the goroutine after each call, when nobody waits for it. It calls before
// before it makes room.
func (y *Yielder) Yield(before func()) {
	if y.due(time.Now()) {
		before()
		runtime.Gosched()
	}
}

// due reports whether it is time to make room.
func (y *Yielder) due(now time.Time) bool {
	y.calls++
	if now.Sub(y.since) < yieldEvery {
		return false
	}
	many := y.calls >= yieldCalls
	y.since, y.calls = now, 0
	return many
}

// affinity keeps a reader on the processor from which a lone thread makes many calls. The kernel
// wakes a reader there (SYNC_WAKE_UP), but when the thread has taken its socket it wakes the reader
// once more, in the middle of ADDFD, and then on an idle processor if there is one: two interrupts
// between processors before the call returns, where there need be none. docs/decisions/0041. The
// reader's goroutine owns it.
type affinity struct {
	cpu   int       // where calls were received
	calls int       // in a row; since the reader stays there, all
	after int       // so many, before the reader stays
	since time.Time // when the first of them came
	bound bool
	slow  int // answers in a row that took long

	before, home unix.CPUSet // where the thread could run when it last went to stay, and what is set for it to run there again
}

const (
	// bindAfter is how many calls in a row must have come from one processor before a reader stays
	// there.
	bindAfter = 8
	// bindAfterMost bounds how many it must have been after reader and thread have parted again and
	// again because of slow answers.
	bindAfterMost = 64
	// boundCalls is how many calls a reader stays for. Then it is woken where the thread is, if
	// that has moved: not every answer's time is noted, and not everywhere would it tell.
	boundCalls = 256
	// boundGap is how far apart calls may be on average. A thread that calls more rarely does
	// something else in between, as others do on its processor, and its reader had better be free
	// to run on another one.
	boundGap = 500 * time.Microsecond
	// boundTimeout is how long a reader stays where it is when no call comes. A timer that ends
	// before the next tick of the kernel (4 ms at 250 Hz) would have to be programmed into the
	// processor for each call, 2 us on a virtual machine.
	boundTimeout = 10 * time.Millisecond
	// slowAnswer is how long ADDFD takes when reader and caller are not on the same processor, on
	// machines where that matters.
	slowAnswer = 30 * time.Microsecond
	verySlow   = 200 * time.Microsecond
	// slowAnswers is how many answers in a row must have been slow before the reader may run
	// anywhere again.
	slowAnswers = 3
)

// received notes that the calling thread received a call, now, of a thread that makes all calls.
func (a *affinity) received(now time.Time) {
	if a.calls++; a.calls == 1 {
		a.since = now
	}
	often := now.Sub(a.since) <= time.Duration(a.calls)*boundGap
	if a.bound {
		if a.calls >= boundCalls || !often {
			a.relax()
		}
		return
	}
	if cpu := currentCPU(); cpu != a.cpu || cpu < 0 || !often {
		a.cpu, a.calls = cpu, 0
		return
	}
	if a.calls >= max(a.after, bindAfter) {
		a.bind()
	}
}

// bind binds the calling thread to the processor, if it could run on others. An operator may have
// said where.
func (a *affinity) bind() {
	a.calls, a.slow = 0, 0
	var now, only unix.CPUSet
	if err := unix.SchedGetaffinity(0, &now); err != nil || now.Count() < 2 {
		return // EINVAL: more processors than a CPUSet has places
	}
	if now != a.before {
		a.before, a.home = now, homeOf(now)
	}
	only.Set(a.cpu)
	a.bound = unix.SchedSetaffinity(0, &only) == nil // else it is where the kernel wants it, as ever
}

// homeOf gives what has to be set for the calling thread to run where it may run now: all
// processors if it may run on all of its control group's, so that it follows when those change.
func homeOf(now unix.CPUSet) unix.CPUSet {
	var all, got unix.CPUSet
	all.Fill() // the kernel takes those of the control group
	if unix.SchedSetaffinity(0, &all) == nil && unix.SchedGetaffinity(0, &got) == nil && got == now {
		return all
	}
	_ = unix.SchedSetaffinity(0, &now) // fails only if the control group has none of them any more: then all is right
	return now
}

// yieldToCaller lets a thread that has just been told its socket run before what is not needed for
// that: the reader is on its processor, and what it wakes would be, too, and may be chosen first.
func (a *affinity) yieldToCaller() {
	if a.bound {
		_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // never fails
	}
}

// answered notes how long the caller took to take its socket. The thread may have moved, or the
// processor may be others'.
func (a *affinity) answered(took time.Duration) {
	if took < slowAnswer {
		a.slow = 0
		return
	}
	if !a.bound {
		a.calls = 0 // an idle processor may have pulled the reader away from the caller before it could tell where it was woken
		return
	}
	if a.slow++; a.slow >= slowAnswers || took >= verySlow {
		a.unbind()
		a.after = min(2*max(a.after, bindAfter), bindAfterMost)
	}
}

// relax lets the reader run anywhere, because no call came for boundTimeout, or all was well for
// boundCalls.
func (a *affinity) relax() {
	a.unbind()
	a.after = bindAfter
}

// unbind lets the reader run again where it could before.
func (a *affinity) unbind() {
	a.calls = 0
	if a.bound {
		a.bound = unix.SchedSetaffinity(0, &a.home) != nil
	}
}

// currentCPU is the processor that the calling thread runs on; -1 if it cannot be told.
func currentCPU() int {
	var cpu uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); errno != 0 {
		return -1
	}
	return int(cpu)
}
