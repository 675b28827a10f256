package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// maxReloadPause bounds the time between attempts to read everything anew.
const maxReloadPause = 5 * time.Second

// errReplaced says that the store's content was wiped or restored behind a watch's back.
var errReplaced = errors.New("the store's content was replaced")

// Watch implements store.Store.
func (s *Store) Watch(ctx context.Context) (<-chan store.State, error) {
	w := &watcher{
		store: s,
		view:  store.NewView(s.keys, s.options.log, func() { s.invalid.Add(1) }),
		out:   make(chan store.State),
	}
	if err := w.load(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stopped := context.AfterFunc(s.ctx, cancel) // Close ends the watch as well
	s.watches.Go(func() {
		defer cancel()
		defer stopped()
		w.run(ctx)
	})
	return w.out, nil
}

// watcher keeps one watch going. After load, the goroutine in run owns it.
type watcher struct {
	store *Store
	view  *store.View
	out   chan store.State

	revision int64 // up to which view is complete
	created  int64 // of the network's key, 0 without: tells a wiped store that was filled again

	// next is the state on offer to the receiver. While it waits there, changes only set dirty, so that a
	// slow receiver costs nothing.
	next    store.State
	offered bool
	dirty   bool // view has changed since next was made
}

// run follows the store until ctx ends, and starts over when it loses track.
func (w *watcher) run(ctx context.Context) {
	defer close(w.out)
	for {
		err := w.follow(ctx)
		wait := 50 * time.Millisecond
		for ; ctx.Err() == nil; wait = min(2*wait, maxReloadPause) {
			w.store.options.log.Warn("store: watch interrupted; reading everything anew", "network", w.store.id, "why", err)
			if !w.pauseOffering(ctx, wait/2+rand.N(wait/2)) {
				return
			}
			if err = w.load(ctx); err == nil {
				break
			}
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// load reads the whole network.
func (w *watcher) load(ctx context.Context) error {
	resp, err := w.store.get(ctx, w.store.keys.Root(), clientv3.WithPrefix())
	if err != nil {
		return err
	}
	w.view.Reset()
	w.created = 0
	for _, kv := range resp.Kvs {
		w.set(kv)
	}
	w.revision = resp.Header.Revision
	// A state on offer may come from a store that is no more: replace it.
	w.next, w.offered, w.dirty = w.view.State(w.revision), true, false
	return nil
}

func (w *watcher) set(kv *mvccpb.KeyValue) {
	if string(kv.Key) == w.store.keys.Network() {
		w.created = kv.CreateRevision
	}
	w.view.Set(string(kv.Key), kv.Value, kv.CreateRevision)
}

// follow applies changes after w.revision until the watch breaks; it returns why.
func (w *watcher) follow(ctx context.Context) error {
	// Without a leader a member of a cluster would keep the watch and never hear of changes.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := w.store.client.Watch(ctx, w.store.keys.Root(), clientv3.WithPrefix(), clientv3.WithRev(w.revision+1))
	ticker := time.NewTicker(w.store.options.verifyEvery)
	defer ticker.Stop()
	verified := make(chan error, 1)
	verifying := false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case w.offer() <- w.next:
			w.taken()
		case resp, ok := <-events:
			if !ok {
				return errors.New("etcd's client closed the watch")
			}
			if err := resp.Err(); err != nil {
				return err
			}
			w.apply(resp.Events)
		case <-ticker.C:
			if !verifying {
				verifying = true
				go w.store.verify(ctx, w.revision, w.created, verified)
			}
		case err := <-verified:
			verifying = false
			if errors.Is(err, errReplaced) {
				return err
			}
			// Any other error: etcd is away. Its client resumes the watch when it is back.
		}
	}
}

// verify sends errReplaced if the store's history does not continue the one that was seen. A watch cannot
// tell by itself: after etcd lost its data, one that waits for revision 1000 waits until there is a new 1000.
func (s *Store) verify(ctx context.Context, revision, created int64, result chan<- error) {
	resp, err := s.get(ctx, s.keys.Network(), clientv3.WithKeysOnly())
	if err == nil {
		var now int64
		if len(resp.Kvs) != 0 {
			now = resp.Kvs[0].CreateRevision
		}
		if resp.Header.Revision < revision || now != created {
			err = fmt.Errorf("%w: revision %d after %d, network made at %d, was %d",
				errReplaced, resp.Header.Revision, revision, now, created)
		}
	}
	result <- err
}

func (w *watcher) apply(events []*clientv3.Event) {
	for _, e := range events {
		if e.Type == clientv3.EventTypeDelete {
			if string(e.Kv.Key) == w.store.keys.Network() {
				w.created = 0
			}
			w.view.Delete(string(e.Kv.Key))
		} else {
			w.set(e.Kv)
		}
		w.revision = e.Kv.ModRevision
		w.dirty = true
	}
	if w.dirty && !w.offered {
		w.next, w.offered, w.dirty = w.view.State(w.revision), true, false
	}
}

// offer gives the channel to send next on, or nil while there is nothing to send.
func (w *watcher) offer() chan<- store.State {
	if w.offered {
		return w.out
	}
	return nil
}

// taken notes that the receiver has next.
func (w *watcher) taken() {
	w.next, w.offered = store.State{}, w.dirty
	if w.dirty {
		w.next, w.dirty = w.view.State(w.revision), false
	}
}

// pauseOffering waits for d, and lets the receiver have what is on offer. It is false if ctx ends first.
func (w *watcher) pauseOffering(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case w.offer() <- w.next:
			w.taken()
		case <-t.C:
			return true
		}
	}
}
