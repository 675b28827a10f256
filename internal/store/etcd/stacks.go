package etcd

import (
	"context"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// EditStacks implements store.Store.
func (s *Store) EditStacks(ctx context.Context, edit store.StackEdit) (outcomes []store.PolicyOutcome, err error) {
	reads := []read{{key: s.keys.Network()}, {key: s.keys.Stacks(), prefix: true}}
	if len(edit.PutObjects)+len(edit.DeleteObjects) > 0 { // objects are large
		reads = append(reads, read{key: s.keys.Congestion(), prefix: true})
	}
	err = s.update(ctx, "change stack profiles", reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if _, err := s.parseNetwork(got[0]); err != nil {
			return nil, err
		}
		objects := make(map[string][]byte)
		if len(got) > 2 {
			objects = byName(s.keys.Congestion(), got[2])
		}
		writes, made, err := store.PlanStackEdit(s.keys, edit, byName(s.keys.Stacks(), got[1]), objects)
		if err != nil {
			return nil, err
		}
		outcomes = made
		return operations(writes), nil
	})
	if err != nil {
		return nil, err
	}
	return outcomes, nil
}
