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
// ends.
func (d *dirty) drain(ctx context.Context, pass func(keys map[string]bool, all bool) error, log *slog.Logger) {
	tick := time.NewTicker(compareAll)
	defer tick.Stop()
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
		err := pass(keys, all)
		if err == nil {
			retry = retryFirst
			continue
		}
		if ctx.Err() != nil {
			return
		}
		log.Warn("changes are not in force yet; they are tried again", "after", retry, "error", err)
		d.putBack(keys, all)
		select {
		case <-ctx.Done():
			return
		case <-time.After(retry):
		}
		retry = min(2*retry, retryMost)
		d.signal()
	}
}
