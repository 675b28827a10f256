package trap

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/testutil"
)

// TestEndDoesNotLinger: a server that ends does not wait for the programs of its readers' sockets.
func TestEndDoesNotLinger(t *testing.T) {
	s := New()
	s.log, s.monitor = slog.Default(), &monitor{log: slog.Default()}
	l := newListener(s, -1, specs.ContainerProcessState{})
	s.listeners[l] = struct{}{}
	fd := testutil.Lingering(t)
	var closed atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := new(reader)
		r.becomeReaderOf(l, 1)
		if r.prepare(s) {
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
