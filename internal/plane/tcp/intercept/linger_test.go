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
// moment, and gets no more batches. A signal of the timer that comes just before close() ends that
// at once, so that it was not seen to wait, some three times in a thousand: then the next socket is.
func TestFillingDoesNotLinger(t *testing.T) {
	for try := 1; !fillingSeesLingering(t); try++ {
		if try == 5 {
			t.Fatalf("filled %d batches for a program whose sockets linger, and did not see it", try)
		}
	}
}

// fillingSeesLingering fills a batch for such a program.
func fillingSeesLingering(t *testing.T) bool {
	t.Helper()
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
	seen := p.pools.lingers.Load()
	if len(*failures) != 1 || errors.Is((*failures)[0], errLingers) != seen {
		t.Errorf("gets no more batches: %v; failures %v", seen, *failures)
	}
	return seen
}
