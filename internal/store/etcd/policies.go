package etcd

import (
	"context"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// EditPolicies implements store.Store.
func (s *Store) EditPolicies(ctx context.Context, edit store.PolicyEdit) (outcomes []store.PolicyOutcome, err error) {
	reads := []read{{key: s.keys.Network()}, {key: s.keys.Policies(), prefix: true}, {key: s.keys.Namespaces(), prefix: true}}
	err = s.update(ctx, "change policies", reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if _, err := s.parseNetwork(got[0]); err != nil {
			return nil, err
		}
		writes, made, err := store.PlanEdit(s.keys, edit, byName(s.keys.Policies(), got[1]), byName(s.keys.Namespaces(), got[2]))
		if err != nil {
			return nil, err
		}
		outcomes = made
		ops := make([]clientv3.Op, len(writes))
		for i, w := range writes {
			if w.Value == nil {
				ops[i] = clientv3.OpDelete(w.Key)
			} else {
				ops[i] = clientv3.OpPut(w.Key, string(w.Value))
			}
		}
		return nest(ops), nil
	})
	if err != nil {
		return nil, err
	}
	return outcomes, nil
}

func byName(prefix string, kvs []*mvccpb.KeyValue) map[string][]byte {
	out := make(map[string][]byte, len(kvs))
	for _, kv := range kvs {
		out[strings.TrimPrefix(string(kv.Key), prefix)] = kv.Value
	}
	return out
}

// nest makes transactions in a transaction of many operations: etcd takes 128 at once, counting those of one inner
// transaction and the outer one together, whatever the number of inner ones.
func nest(ops []clientv3.Op) []clientv3.Op {
	const most = 60
	if len(ops) <= most {
		return ops
	}
	var outer []clientv3.Op
	for len(ops) > 0 {
		n := min(most, len(ops))
		outer = append(outer, clientv3.OpTxn(nil, ops[:n], nil))
		ops = ops[n:]
	}
	return outer
}
