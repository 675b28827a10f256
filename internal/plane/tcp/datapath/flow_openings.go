package datapath

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Passes that tell of openings come every passEvery, or so much later that they have one part in
// passShare of a processor at most: with 10,000 sockets one takes 2 to 4 ms. If one is passesLate,
// programs tell of openings themselves.
const (
	passEvery  = 500 * time.Millisecond
	passShare  = 100
	passesLate = 3 * time.Second
)

// openingPasses tell of connections that live and whose opening was left to be told with the end
// (bpf/sock/untold.h). The first finds those
// that were left when no agent ran.
type openingPasses struct {
	next  time.Time
	again bool // an opening may have come about while the last pass ended
}

// run makes a pass if it is time and there is something to tell. What fails is tried again: until
// then nothing is lost, and programs tell of openings at once.
func (p *openingPasses) run(d *Datapath, now time.Time) {
	if now.Before(p.next) {
		return
	}
	took, err := timed(func() error { return p.tell(d) })
	wait := max(passEvery, passShare*took)
	if err == nil {
		err = d.objs.PassesUntil.Set(uint64(time.Since(bootTime()) + wait + passesLate))
	}
	p.next, p.again = now.Add(wait), p.again || err != nil
}

// timed gives the processor time that f takes: on a busy machine it may wait for long.
func timed(f func() error) (time.Duration, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := threadTime()
	err := f()
	return threadTime() - before, err
}

func threadTime() time.Duration {
	var at unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &at) // fails for unknown clocks only
	return time.Duration(at.Nano())
}

// tell makes a pass, if programs or the last one say that it may find something.
func (p *openingPasses) tell(d *Datapath) error {
	var untold uint32
	if err := d.objs.Untold.Get(&untold); err != nil {
		return err
	}
	if untold == 0 && !p.again {
		return nil
	}
	p.again = untold != 0
	if err := d.objs.Untold.Set(uint32(0)); err != nil {
		return err
	}
	_, err := d.iterateUnlocked(d.objs.TellOpenings)
	return err
}
