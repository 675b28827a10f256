package etcd

import (
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// frame is what a new endpoint is checked against: pairs of the network and of its node, as they
// were read last.
type frame struct{ network, node *mvccpb.KeyValue }

// same reports whether two frames are of the same revisions.
func (f frame) same(g frame) bool {
	return f.network.GetModRevision() == g.network.GetModRevision() && f.node.GetModRevision() == g.node.GetModRevision()
}

// PutNewEndpoint implements store.Store. It is one transaction on what was read before.
func (s *Store) PutNewEndpoint(ctx context.Context, e model.Endpoint, since int64) (done bool, err error) {
	value, err := store.EncodeEndpoint(e)
	if err != nil {
		return false, err
	}
	call, cancel := s.bound(ctx)
	defer cancel()
	for range 2 { // the second time with what the first read
		have, _ := s.frames.Load(e.Node)
		known, _ := have.(frame)
		var read frame
		err := s.try(call, func(ctx context.Context) (err error) {
			done, read, err = s.putNew(ctx, e, string(value), since, known)
			return err
		})
		if err != nil || done {
			return done, s.explain(ctx, fmt.Sprintf("store endpoint %s/%d", e.Node, e.ID), err)
		}
		if read.same(known) {
			break // it was not for that
		}
		s.frames.Store(e.Node, read)
	}
	return false, nil
}

// putNew puts an endpoint if known is what the store has, and the endpoint, its address and moves
// since a revision are not there. Otherwise it reads what known is to be. An endpoint that is there
// with this very value has been put by an earlier try, whose answer was lost.
func (s *Store) putNew(call context.Context, e model.Endpoint, value string, since int64, known frame) (done bool, read frame, err error) {
	networkKey, nodeKey := s.keys.Network(), s.keys.Node(e.Node)
	key, addr, move := s.keys.Endpoint(e.Node, e.ID), s.keys.Addr(e.Node, e.Addr4()), s.keys.Move(e.Addr4())
	txn := s.client.Txn(call)
	if s.fits(e, known) {
		txn = txn.If(
			clientv3.Compare(clientv3.ModRevision(networkKey), "=", known.network.ModRevision),
			clientv3.Compare(clientv3.ModRevision(nodeKey), "=", known.node.ModRevision),
			clientv3.Compare(clientv3.ModRevision(key), "=", 0),
			clientv3.Compare(clientv3.ModRevision(addr), "=", 0),
			clientv3.Compare(clientv3.ModRevision(move), "=", 0),
			clientv3.Compare(clientv3.ModRevision(s.keys.Moves()).WithPrefix(), "<", since+1),
		).Then(clientv3.OpPut(key, value), clientv3.OpPut(addr, string(store.EncodeOwner(e.ID))))
	} else {
		txn = txn.If(clientv3.Compare(clientv3.Version(networkKey), "<", 0)) // never
	}
	resp, err := txn.Else(clientv3.OpGet(networkKey), clientv3.OpGet(nodeKey), clientv3.OpGet(key)).Commit()
	if err != nil || resp.Succeeded {
		return err == nil, frame{}, err
	}
	if have := only(resp, 2); have != nil && string(have.Value) == value {
		return true, frame{}, nil
	}
	return false, frame{only(resp, 0), only(resp, 1)}, nil
}

// fits reports whether e is an endpoint that the network and its node of known may have.
func (s *Store) fits(e model.Endpoint, known frame) bool {
	if known.network == nil || known.node == nil || e.Adopted != nil {
		return false
	}
	network, err := store.ParseNetwork(s.id, known.network.Value)
	if err != nil {
		return false
	}
	node, err := store.ParseNode(e.Node, known.node.Value)
	return err == nil && store.CheckEndpoint(network, node, e, nil) == nil
}

// only gives the pair that the n-th read of a transaction found; nil if there is none.
func only(resp *clientv3.TxnResponse, n int) *mvccpb.KeyValue {
	if kvs := resp.Responses[n].GetResponseRange().Kvs; len(kvs) > 0 {
		return kvs[0]
	}
	return nil
}
