package etcd

import (
	"context"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// bulkOps is how many operations etcd takes at once.
const bulkOps = 128

// Fill stores nodes and endpoints without looking what is there, many at a time: for benches, which
// make them up and see to it that they are in nobody's way. What is malformed is an error.
func (s *Store) Fill(ctx context.Context, nodes []model.Node, endpoints []model.Endpoint) error {
	ops := make([]clientv3.Op, 0, len(nodes)+2*len(endpoints))
	for _, n := range nodes {
		value, err := store.EncodeNode(n)
		if err != nil {
			return err
		}
		ops = append(ops, clientv3.OpPut(s.keys.Node(n.Name), string(value)))
	}
	for _, e := range endpoints {
		value, err := store.EncodeEndpoint(e)
		if err != nil {
			return err
		}
		ops = append(ops, clientv3.OpPut(s.keys.Endpoint(e.Node, e.ID), string(value)),
			clientv3.OpPut(s.keys.Addr(e.Node, e.Addr4()), string(store.EncodeOwner(e.ID))))
	}
	for some := range slices.Chunk(ops, bulkOps) {
		call, cancel := s.bound(ctx)
		err := s.try(call, func(ctx context.Context) error {
			_, err := s.client.Txn(ctx).Then(some...).Commit()
			return err
		})
		cancel()
		if err != nil {
			return s.explain(ctx, fmt.Sprintf("store %d nodes and %d endpoints", len(nodes), len(endpoints)), err)
		}
	}
	return nil
}

// Revision gives the store's present revision.
func (s *Store) Revision(ctx context.Context) (int64, error) {
	resp, err := s.get(ctx, s.keys.Network(), clientv3.WithKeysOnly())
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}
