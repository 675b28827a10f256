package etcd

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// holdAgain is how long an owner of a name that lost its lease waits before it asks for another.
const holdAgain = time.Second

// HoldName implements store.Store.
func (s *Store) HoldName(ctx context.Context, h store.NameLease, takeOver bool) error {
	lease, err := s.takeName(ctx, h, takeOver)
	if err != nil {
		return err
	}
	s.holding.Lock()
	defer s.holding.Unlock()
	if s.release != nil {
		return errors.New("hold node name: this store holds one already")
	}
	keep, stop := context.WithCancel(s.ctx)
	done := make(chan struct{})
	s.release = func() { stop(); <-done }
	s.watches.Go(func() {
		defer close(done)
		s.keepName(keep, h, lease)
	})
	return nil
}

// ReleaseName implements store.Store.
func (s *Store) ReleaseName(ctx context.Context, h store.NameLease) error {
	s.holding.Lock()
	release := s.release
	s.release = nil
	s.holding.Unlock()
	if release == nil {
		return nil
	}
	release()
	key := s.keys.NameLease(h.Node)
	return s.update(ctx, "release node name "+h.Node, []read{{key: key}}, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[0]) == 0 {
			return nil, nil
		}
		if have, err := store.ParseNameLease(h.Node, got[0][0].Value); err != nil || have.Instance != h.Instance {
			return nil, nil // somebody else's by now
		}
		return []clientv3.Op{clientv3.OpDelete(key)}, nil
	})
}

// takeName stores h under a new lease.
func (s *Store) takeName(ctx context.Context, h store.NameLease, takeOver bool) (clientv3.LeaseID, error) {
	value, err := store.EncodeNameLease(h)
	if err != nil {
		return 0, err
	}
	op, key := "hold node name "+h.Node, s.keys.NameLease(h.Node)
	call, cancel := s.bound(ctx)
	defer cancel()
	var lease *clientv3.LeaseGrantResponse
	err = s.try(call, func(ctx context.Context) (err error) {
		lease, err = s.client.Grant(ctx, int64(store.HoldTime/time.Second))
		return err
	})
	if err != nil {
		return 0, s.explain(ctx, op, err)
	}
	err = s.update(ctx, op, []read{{key: key}}, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[0]) != 0 {
			// What nobody could have written holds nothing.
			if have, err := store.ParseNameLease(h.Node, got[0][0].Value); err == nil {
				if err := store.CheckNameLease(have, h, takeOver); err != nil {
					return nil, err
				}
			}
		}
		return []clientv3.Op{clientv3.OpPut(key, string(value), clientv3.WithLease(lease.ID)), clientv3.OpDelete(s.keys.Offline(h.Node))}, nil
	})
	if err != nil {
		_, revoked := s.client.Revoke(call, lease.ID)
		return 0, errors.Join(err, revoked)
	}
	return lease.ID, nil
}

// keepName keeps a lease alive until ctx ends. When it was lost, because the store was away for too
// long or has lost everything, it asks for the name again. Somebody else may have it by then, of
// which the watch tells the agent; or somebody of old has it in a store that was restored, until
// that lease ends.
func (s *Store) keepName(ctx context.Context, h store.NameLease, lease clientv3.LeaseID) {
	for {
		if answers, err := s.client.KeepAlive(ctx, lease); err == nil {
			for range answers { // each says that the lease lives
			}
		}
		for refused := false; ; {
			if !pause(ctx, holdAgain) {
				return
			}
			var err error
			if lease, err = s.takeName(ctx, h, false); err == nil {
				s.options.log.Warn("store: node name held again", "node", h.Node)
				break
			}
			var held *store.NameHeldError
			if errors.As(err, &held) && !refused {
				refused = true
				s.options.log.Error("store: node name is lost; will ask for it again", "err", err)
			}
		}
	}
}
