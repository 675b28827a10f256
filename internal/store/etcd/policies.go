package etcd

import (
	"context"
	"errors"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// mostNamed is how many documents an edit may name for only those to be read: etcd takes 128
// operations at once.
const mostNamed = 100

// errNoTotals says that the size of all policies is not known, and everything has to be read for
// it.
var errNoTotals = errors.New("no policy totals")

// EditPolicies implements store.Store. What it costs is what the edit names: the policies of a
// network may be many.
func (s *Store) EditPolicies(ctx context.Context, edit store.PolicyEdit) (outcomes []store.PolicyOutcome, err error) {
	if edit.Names() <= mostNamed {
		outcomes, err = s.editNamed(ctx, edit)
		if !errors.Is(err, errNoTotals) {
			return outcomes, err
		}
	}
	return s.editAll(ctx, edit)
}

// editNamed reads what an edit names, and nothing else.
func (s *Store) editNamed(ctx context.Context, edit store.PolicyEdit) (outcomes []store.PolicyOutcome, err error) {
	reads := []read{{key: s.keys.Network()}, {key: s.keys.PolicyTotals()}}
	for _, p := range edit.Put {
		reads = append(reads, read{key: s.keys.Policy(p.Name)})
	}
	for _, name := range edit.Delete {
		reads = append(reads, read{key: s.keys.Policy(name)})
	}
	for _, n := range edit.PutNamespaces {
		reads = append(reads, read{key: s.keys.Namespace(n.Name)})
	}
	for _, name := range edit.DeleteNamespaces {
		reads = append(reads, read{key: s.keys.Namespace(name)})
	}
	err = s.update(ctx, "change policies", reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[1]) == 0 {
			return nil, errNoTotals
		}
		totals, err := store.ParsePolicyTotals(got[1][0].Value)
		if err != nil {
			return nil, errNoTotals
		}
		policies := byName(s.keys.Policies(), slices.Concat(got[2:2+len(edit.Put)+len(edit.Delete)]...))
		namespaces := byName(s.keys.Namespaces(), slices.Concat(got[2+len(edit.Put)+len(edit.Delete):]...))
		return s.plan(got[0], edit, policies, namespaces, totals, &outcomes)
	})
	if err != nil {
		return nil, err
	}
	return outcomes, nil
}

// editAll reads every policy, and counts them.
func (s *Store) editAll(ctx context.Context, edit store.PolicyEdit) (outcomes []store.PolicyOutcome, err error) {
	reads := []read{{key: s.keys.Network()}, {key: s.keys.PolicyTotals()}, {key: s.keys.Policies(), prefix: true}, {key: s.keys.Namespaces(), prefix: true}}
	err = s.update(ctx, "change policies", reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		policies := byName(s.keys.Policies(), got[2])
		return s.plan(got[0], edit, policies, byName(s.keys.Namespaces(), got[3]), store.CountPolicies(policies), &outcomes)
	})
	if err != nil {
		return nil, err
	}
	return outcomes, nil
}

// plan gives the operations of an edit, and what becomes of its documents.
func (s *Store) plan(network []*mvccpb.KeyValue, edit store.PolicyEdit, policies, namespaces map[string][]byte, totals store.PolicyTotals,
	outcomes *[]store.PolicyOutcome) ([]clientv3.Op, error) {
	if _, err := s.parseNetwork(network); err != nil {
		return nil, err
	}
	writes, made, err := store.PlanEdit(s.keys, edit, policies, namespaces, totals)
	if err != nil {
		return nil, err
	}
	*outcomes = made
	return operations(writes), nil
}

// operations gives those that write what an edit leads to.
func operations(writes []store.Written) []clientv3.Op {
	ops := make([]clientv3.Op, len(writes))
	for i, w := range writes {
		if w.Value == nil {
			ops[i] = clientv3.OpDelete(w.Key)
		} else {
			ops[i] = clientv3.OpPut(w.Key, string(w.Value))
		}
	}
	return nest(ops)
}

func byName(prefix string, kvs []*mvccpb.KeyValue) map[string][]byte {
	out := make(map[string][]byte, len(kvs))
	for _, kv := range kvs {
		out[strings.TrimPrefix(string(kv.Key), prefix)] = kv.Value
	}
	return out
}

// nest makes transactions in a transaction of many operations: etcd takes 128 at once, counting
// those of one inner transaction and the outer one together, whatever the number of inner ones.
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
