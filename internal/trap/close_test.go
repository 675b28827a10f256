package trap

import (
	"sync/atomic"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/testutil"
)

// TestEndDoesNotLinger: a server that ends does not wait for the programs of its readers' sockets.
func TestEndDoesNotLinger(t *testing.T) {
	s := &Server{listeners: make(map[*Listener]struct{})}
	l := newListener(s, -1, specs.ContainerProcessState{})
	s.listeners[l] = struct{}{}
	fd := testutil.Lingering(t)
	var closed atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := l.newReader(1)
		if r.prepare() {
			r.closeGiven(fd)
			closed.Store(true)
		}
	}()
	began := time.Now()
	s.interruptCloses(done)
	if took := time.Since(began); took >= testutil.LongLinger/2 {
		t.Errorf("the end waited %v for a program", took)
	}
	if !closed.Load() {
		t.Error("the reader did not close its socket")
	}
}
