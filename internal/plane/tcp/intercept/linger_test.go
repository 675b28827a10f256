package intercept

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// lingeringMaker makes sockets that a program got hold of in the moment they were made, as one does
// that asks for many.
type lingeringMaker struct {
	testMaker
	fd int
}

func (m *lingeringMaker) MakeSocket(model.EndpointID, int) (int, error) { return m.fd, nil }

// TestFillingDoesNotLinger: a program whose sockets linger keeps the prefiller from others for a
// moment, once.
func TestFillingDoesNotLinger(t *testing.T) {
	r, p, program, failures := testFilling(t, &testMaker{}, 3)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var err error
	if r.interrupts, err = newInterruptTimer(); err != nil {
		t.Fatal(err)
	}
	defer r.interrupts.delete()
	r.maker = &lingeringMaker{fd: testutil.Lingering(t)}
	if err := unix.Shutdown(program, unix.SHUT_RD); err != nil { // who sends to it has the socket for himself
		t.Fatal(err)
	}
	r.startFilling(p, true, nothing)
	began := time.Now()
	if !r.fillSome(t.Context()) {
		t.Error("nothing to fill")
	}
	if took := time.Since(began); took >= testutil.LongLinger/2 {
		t.Errorf("filling waited %v for a program", took)
	}
	if !p.pools.lingers.Load() || len(*failures) != 1 || !errors.Is((*failures)[0], errLingers) {
		t.Errorf("gets no more batches: %v; failures %v", p.pools.lingers.Load(), *failures)
	}
}
