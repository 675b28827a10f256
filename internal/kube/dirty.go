package kube

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Passes over what has changed.
const (
	retryFirst = 500 * time.Millisecond
	retryMost  = 30 * time.Second
	// everything is compared anew as often: it finds what somebody else changed.
	compareAll = 5 * time.Minute
)

// dirty is what has changed since it was last looked at.
type dirty struct {
	mu    sync.Mutex
	keys  map[string]bool
	whole bool
	wake  chan struct{} // has room for one
	// giveUp is how long passes may fail before drain returns; 0: for ever.
	giveUp time.Duration
}

func newDirty() *dirty { return &dirty{keys: make(map[string]bool), wake: make(chan struct{}, 1)} }

func (d *dirty) add(key string) {
	d.mu.Lock()
	d.keys[key] = true
	d.mu.Unlock()
	d.signal()
}

// all says that everything may have changed.
func (d *dirty) all() {
	d.mu.Lock()
	d.whole = true
	d.mu.Unlock()
	d.signal()
}

func (d *dirty) signal() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *dirty) take() (keys map[string]bool, all bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	keys, all = d.keys, d.whole
	d.keys, d.whole = make(map[string]bool), false
	return keys, all
}

func (d *dirty) putBack(keys map[string]bool, all bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k := range keys {
		d.keys[k] = true
	}
	d.whole = d.whole || all
}

// drain gives what has changed to pass, at once and, while that fails, ever more rarely, until ctx
// ends or it gives up.
func (d *dirty) drain(ctx context.Context, pass func(keys map[string]bool, all bool) error, log *slog.Logger) {
	tick := time.NewTicker(compareAll)
	defer tick.Stop()
	var failing time.Time // the begin of the first pass that failed since one did not
	for retry := retryFirst; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			d.all()
			continue
		case <-d.wake:
		}
		keys, all := d.take()
		begun := time.Now()
		err := pass(keys, all)
		if err == nil {
			retry, failing = retryFirst, time.Time{}
			continue
		}
		if ctx.Err() != nil {
			return
		}
		d.putBack(keys, all)
		if failing.IsZero() {
			failing = begun
		}
		if d.giveUp > 0 && time.Since(failing) >= d.giveUp {
			log.Warn("changes are not in force; gives up", "failing_for", time.Since(failing).Round(time.Second), "error", err)
			return
		}
		log.Warn("changes are not in force yet; they are tried again", "after", retry, "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(retry):
		}
		retry = min(2*retry, retryMost)
		d.signal()
	}
}
