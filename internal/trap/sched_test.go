package trap

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap/task"
)

// A reader stays on the processor it got some calls on, and leaves it when answers take long or
// none is wanted.
func TestAffinity(t *testing.T) {
	before := processors(t)
	if before < 2 {
		t.Skip("TestAffinity: this process may run on one processor only")
	}
	alone(func() {
		places := func() int {
			var now unix.CPUSet
			if err := unix.SchedGetaffinity(0, &now); err != nil {
				t.Error(err)
			}
			return now.Count()
		}
		var a affinity
		clock, gap := time.Now(), boundGap
		now := func() time.Time {
			clock = clock.Add(gap)
			return clock
		}
		stay := func(least int) {
			t.Helper()
			calls := 0
			for ; !a.bound; calls++ { // this thread may be moved meanwhile
				if calls > 1_000_000 {
					t.Error("the reader does not stay")
					return
				}
				a.received(now())
			}
			if calls < least || places() != 1 {
				t.Errorf("after %d calls, want at least %d, the thread may run on %d processors", calls, least, places())
			}
		}
		free := func(when string) {
			t.Helper()
			if a.bound || places() != before {
				t.Errorf("%s: bound %v, on %d processors, want %d", when, a.bound, places(), before)
			}
		}
		free("at first")
		for range 10 * bindAfter { // never so many in a row
			a.received(now())
			a.answered(slowAnswer)
		}
		free("after slow answers only")
		stay(bindAfter)
		for range 2 * slowAnswers { // never so many in a row
			a.answered(slowAnswer)
			a.answered(slowAnswer - 1)
		}
		if !a.bound {
			t.Error("the reader left because of single slow answers")
		}
		for range slowAnswers {
			a.answered(slowAnswer)
		}
		free("after slow answers")
		stay(2 * bindAfter)
		a.answered(verySlow)
		free("after one answer that took very long")
		stay(4 * bindAfter)
		a.relax()
		free("after a pause")
		stay(bindAfter)
		a.unbind()
		free("when others call")
		for range 20 {
			a.bound = true
			a.answered(verySlow)
		}
		if a.after != bindAfterMost {
			t.Errorf("%d calls are wanted after many partings, want %d", a.after, bindAfterMost)
		}
		a.relax()
		stay(bindAfter)
		for range boundCalls - 1 {
			a.received(now())
		}
		if !a.bound {
			t.Error("the reader left before its time")
		}
		a.received(now())
		free("after many calls")
		stay(bindAfter)
		gap = 2 * boundGap
		for range bindAfter {
			a.received(now())
		}
		free("when calls are rarer")
		for range 10 * bindAfter {
			a.received(now())
		}
		free("while calls are rare")
	})
}

// Where an operator lets the agent run, its readers do, after they stayed with somebody, too.
func TestAffinityGoesHome(t *testing.T) {
	alone(func() {
		var all, some unix.CPUSet
		if err := unix.SchedGetaffinity(0, &all); err != nil {
			t.Error(err)
			return
		}
		for cpu := 0; some.Count() < all.Count()-1; cpu++ {
			if all.IsSet(cpu) {
				some.Set(cpu)
			}
		}
		for _, allowed := range []unix.CPUSet{all, some} {
			if allowed.Count() == 0 {
				continue
			}
			if err := unix.SchedSetaffinity(0, &allowed); err != nil {
				t.Error(err)
				return
			}
			var a affinity
			for range 100 {
				a.cpu = currentCPU()
				a.bind()
				if a.bound != (allowed.Count() > 1) {
					t.Errorf("on %d processors: the reader stays on one: %v", allowed.Count(), a.bound)
				}
				a.unbind()
				var now unix.CPUSet
				if err := unix.SchedGetaffinity(0, &now); err != nil || now != allowed {
					t.Errorf("the reader may run on %d processors afterwards, want %d; %v", now.Count(), allowed.Count(), err)
				}
			}
		}
	})
}

// A thread that makes one call after the other yields before Go's monitor would make it; one that
// makes few never does.
func TestYielder(t *testing.T) {
	var b Yielder
	now := time.Now()
	yields := func(calls int, every time.Duration) (n int) {
		for range calls {
			now = now.Add(every)
			if b.due(now) {
				n++
			}
		}
		return n
	}
	const call = 100 * time.Microsecond
	perYield := int(yieldEvery / call)
	yields(1, call) // since for ever
	if n := yields(10*perYield, call); n != 10 {
		t.Errorf("%d yields in %d calls, want one in %d", n, 10*perYield, perYield)
	}
	if n := yields(100, yieldEvery/2); n != 0 {
		t.Errorf("%d yields in 100 calls that are rare, want none", n)
	}
}

// alone runs f on a thread that ends with it.
func alone(f func()) {
	ended := make(chan struct{})
	task.OnThread(func() {
		defer close(ended)
		f()
	})
	<-ended
}

// processors counts those that this process may run on.
func processors(t *testing.T) int {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(unix.Getpid(), &set); err != nil {
		t.Fatal(err)
	}
	return set.Count()
}
