package etcd

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// maxReloadPause bounds the time between attempts to read everything anew.
const maxReloadPause = 5 * time.Second

// verifyShare is the time between two looks, of any nodes of a network, whether its store is still
// the same one.
const verifyShare = 10 * time.Millisecond

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

	seen     history
	replaced int // how often another history took its place

	// next is the state on offer to the receiver. While it waits there, changes only set dirty, so
	// that a slow receiver costs nothing.
	next    store.State
	offered bool
	dirty   bool // view has changed since next was made
	nodes   int  // in the last state
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

// pageKeys is how many keys are read at once: a large network in one answer would take its size
// several times over, in etcd and here.
const pageKeys = 1000

// load reads the whole network, but for what is for writers only, at one revision.
func (w *watcher) load(ctx context.Context) error {
	keys := w.store.keys
	var fresh history
	for _, part := range [][2]string{{keys.Root(), keys.AllAddrs()}, {clientv3.GetPrefixRangeEnd(keys.AllAddrs()), clientv3.GetPrefixRangeEnd(keys.Root())}} {
		for from, more := part[0], true; more; {
			resp, err := w.store.get(ctx, from, clientv3.WithRange(part[1]), clientv3.WithLimit(pageKeys), clientv3.WithRev(fresh.revision))
			if err != nil {
				return err
			}
			if fresh.revision == 0 {
				fresh.revision, fresh.cluster = resp.Header.Revision, resp.Header.ClusterId
				// Nothing can be made of the view until it is whole again.
				w.view.Reset()
				w.dirty = false
			}
			for _, kv := range resp.Kvs {
				fresh.note(kv, keys.Network())
				w.view.Set(string(kv.Key), kv.Value, kv.CreateRevision)
				from = string(kv.Key) + "\x00"
			}
			more = resp.More
		}
	}
	if w.seen.cluster != 0 && !fresh.continues(w.seen) {
		w.replaced++
	}
	w.seen = fresh
	// A state on offer may come from a store that is no more: replace it.
	w.present()
	return nil
}

// present puts what the view has on offer.
func (w *watcher) present() {
	w.next, w.offered, w.dirty = w.view.State(w.seen.revision), true, false
	w.next.History, w.nodes = w.replaced, len(w.next.Nodes)
}

// follow applies changes after those that were seen until the watch breaks; it returns why.
func (w *watcher) follow(ctx context.Context) error {
	// Without a leader a member of a cluster would keep the watch and never hear of changes.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := w.store.client.Watch(ctx, w.store.keys.Root(), clientv3.WithPrefix(), clientv3.WithRev(w.seen.revision+1))
	timer := time.NewTimer(w.verifyPause())
	defer timer.Stop()
	back := make(chan struct{}, 1)
	w.store.watches.Go(func() { w.store.followConnection(ctx, back) })
	verified := make(chan error, 1)
	verifying := false
	verify := func() {
		if !verifying {
			verifying = true
			seen := w.seen
			go func() { verified <- w.store.verify(ctx, seen) }()
		}
	}
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
			if resp.Header.ClusterId != w.seen.cluster {
				return errReplaced
			}
			w.apply(resp.Events)
		case <-back:
			verify()
		case <-timer.C:
			verify()
		case err := <-verified:
			verifying = false
			if errors.Is(err, errReplaced) {
				w.replaced++
				w.seen.cluster = 0 // counted
				return err
			}
			// Any other error: etcd is away. Its client resumes the watch when it is back.
			timer.Reset(w.verifyPause())
		}
	}
}

// verifyPause gives the time between two looks whether the store is still the same one. All nodes
// of a large network together look a hundred times a second.
func (w *watcher) verifyPause() time.Duration {
	return max(w.store.options.verifyEvery, time.Duration(w.nodes)*verifyShare)
}

func (w *watcher) apply(events []*clientv3.Event) {
	for _, e := range events {
		if e.Type == clientv3.EventTypeDelete {
			if string(e.Kv.Key) == w.store.keys.Network() {
				w.seen.created = 0
			}
			w.view.Delete(string(e.Kv.Key))
		} else {
			w.seen.note(e.Kv, w.store.keys.Network())
			w.view.Set(string(e.Kv.Key), e.Kv.Value, e.Kv.CreateRevision)
		}
		w.seen.revision = e.Kv.ModRevision
		w.dirty = true
	}
	if w.dirty && !w.offered {
		w.present()
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
	w.next, w.offered = store.State{}, false
	if w.dirty {
		w.present()
	}
}

// pauseOffering waits for d, and lets the receiver have what is on offer. It is false if ctx ends
// first.
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
