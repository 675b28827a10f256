package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"
)

// errReplaced says that the store's content was wiped or restored behind a watch's back.
var errReplaced = errors.New("the store's content was replaced")

// history is what a watch knows of the store that it follows, to tell it from another that has
// taken its place. A watch cannot tell by itself: after etcd lost its last revisions, one that
// waits for revision 1000 waits until there is a new 1000, and misses what came before.
type history struct {
	revision int64  // up to which everything is known
	cluster  uint64 // etcd's id of itself. A restored cluster has the old one if it was given the old addresses and token
	created  int64  // revision that made the network's key; 0: there is none
	last     *mvccpb.KeyValue
}

// note takes in a key that was read, or written just now. The one written last shows later whether
// the history goes on: no other history has the same value, lease and versions at the same
// revision.
func (h *history) note(kv *mvccpb.KeyValue, network string) {
	if string(kv.Key) == network {
		h.created = kv.CreateRevision
	}
	if h.last == nil || kv.ModRevision >= h.last.ModRevision {
		h.last = kv
	}
}

// continues reports whether h can be a later time of before. It does not ask the store, so it may
// take another history for the same one.
func (h *history) continues(before history) bool {
	return h.revision >= before.revision && h.cluster == before.cluster && h.created == before.created
}

// verify gives errReplaced if the store's history does not go on from what was seen.
func (s *Store) verify(ctx context.Context, seen history) error {
	resp, err := s.get(ctx, s.keys.Network(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	now := history{revision: resp.Header.Revision, cluster: resp.Header.ClusterId}
	if len(resp.Kvs) != 0 {
		now.created = resp.Kvs[0].CreateRevision
	}
	if !now.continues(seen) {
		return fmt.Errorf("%w: cluster %x at revision %d, network made at %d; was cluster %x at %d, made at %d", errReplaced,
			now.cluster, now.revision, now.created, seen.cluster, seen.revision, seen.created)
	}
	if seen.last == nil {
		return nil
	}
	// It may have been restored and have gone on beyond the revision that was seen.
	resp, err = s.get(ctx, string(seen.last.Key), clientv3.WithRev(seen.last.ModRevision))
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		return nil // long ago, and nobody can tell any more
	case errors.Is(err, rpctypes.ErrFutureRev):
		return fmt.Errorf("%w: it has no revision %d any more", errReplaced, seen.last.ModRevision)
	case err != nil:
		return err
	case len(resp.Kvs) != 1 || !sameKey(resp.Kvs[0], seen.last):
		return fmt.Errorf("%w: revision %d did not write %s", errReplaced, seen.last.ModRevision, seen.last.Key)
	}
	return nil
}

// sameKey reports whether a and b are one key at one time.
func sameKey(a, b *mvccpb.KeyValue) bool {
	return a.CreateRevision == b.CreateRevision && a.ModRevision == b.ModRevision && a.Version == b.Version && a.Lease == b.Lease &&
		bytes.Equal(a.Value, b.Value)
}

// followConnection tells of each time that etcd is reached again after no member was, until ctx
// ends. Who restores a store stops all of its members.
func (s *Store) followConnection(ctx context.Context, back chan<- struct{}) {
	conn := s.client.ActiveConnection()
	for now := conn.GetState(); conn.WaitForStateChange(ctx, now); {
		if now = conn.GetState(); now != connectivity.Ready {
			continue
		}
		select {
		case back <- struct{}{}:
		default: // it has been told
		}
	}
}
