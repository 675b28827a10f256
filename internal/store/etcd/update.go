package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// read names a key, or with prefix all keys that start with it, that a transaction depends on.
type read struct {
	key    string
	prefix bool
}

// update reads, decides and writes, as if in one step: what decide returns is done only if nothing
// that was read has changed since; else everything is read and decided anew. A prefix counts as
// changed when a key in it is written; a key that vanished from it only makes room. decide gets one
// list of pairs for each read, and may be called several times. Without operations nothing is
// written.
func (s *Store) update(ctx context.Context, op string, reads []read,
	decide func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error)) error {
	call, cancel := s.bound(ctx)
	defer cancel()
	for wait := time.Millisecond; ; wait = min(2*wait, maxConflictPause) {
		err := s.try(call, func(ctx context.Context) error { return s.updateOnce(ctx, reads, decide) })
		var refused *refusal
		switch {
		case err == nil:
			return nil
		case !errors.As(err, &refused):
			return s.explain(ctx, op, err)
		case refused.err != errConflict:
			return refused.err
		}
		// The deadline bounds this; a winner always exists, so the others' work shrinks. Many that
		// want the same, as when a whole network starts, must not read everything again after every
		// one.
		if !pause(call, wait/2+rand.N(wait)) {
			return s.explain(ctx, op, call.Err())
		}
	}
}

// maxConflictPause bounds the pause of a transaction that has met others.
const maxConflictPause = 200 * time.Millisecond

// errConflict says that somebody else wrote what a transaction had read.
var errConflict = errors.New("changed meanwhile")

// refusal carries a decision not to write, or that nothing was written, past the handling of etcd's
// errors.
type refusal struct{ err error }

func (r *refusal) Error() string { return r.err.Error() }

func (s *Store) updateOnce(call context.Context, reads []read,
	decide func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error)) error {
	got, unchanged, err := s.readAll(call, reads)
	if err != nil {
		return err
	}
	ops, err := decide(got)
	if err != nil {
		return &refusal{err}
	}
	if len(ops) == 0 {
		return nil
	}
	resp, err := s.client.Txn(call).If(unchanged...).Then(ops...).Commit()
	if err == nil && !resp.Succeeded {
		err = &refusal{errConflict}
	}
	return err
}

// readAll reads at one revision, and gives the comparisons that hold as long as nothing changes.
func (s *Store) readAll(call context.Context, reads []read) (got [][]*mvccpb.KeyValue, unchanged []clientv3.Cmp, err error) {
	if len(reads) == 0 {
		return nil, nil, nil
	}
	gets := make([]clientv3.Op, len(reads))
	for i, r := range reads {
		var opts []clientv3.OpOption
		if r.prefix {
			opts = append(opts, clientv3.WithPrefix())
		}
		gets[i] = clientv3.OpGet(r.key, opts...)
	}
	resp, err := s.client.Txn(call).Then(gets...).Commit()
	if err != nil {
		return nil, nil, err
	}
	for i, r := range reads {
		kvs := resp.Responses[i].GetResponseRange().Kvs
		got = append(got, kvs)
		switch {
		case r.prefix:
			unchanged = append(unchanged, clientv3.Compare(clientv3.ModRevision(r.key).WithPrefix(), "<", resp.Header.Revision+1))
		case len(kvs) == 0:
			unchanged = append(unchanged, clientv3.Compare(clientv3.ModRevision(r.key), "=", 0))
		default:
			unchanged = append(unchanged, clientv3.Compare(clientv3.ModRevision(r.key), "=", kvs[0].ModRevision))
		}
	}
	return got, unchanged, nil
}

// InitNetwork implements store.Store.
func (s *Store) InitNetwork(ctx context.Context, want store.Network) (inForce store.Network, err error) {
	if want.ID != 0 && want.ID != s.id {
		return store.Network{}, &store.MismatchError{Field: "id", Want: fmt.Sprint(want.ID), Have: fmt.Sprint(s.id)}
	}
	want.ID = s.id
	err = s.update(ctx, "set up network", []read{{key: s.keys.Network()}}, func(got [][]*mvccpb.KeyValue) (_ []clientv3.Op, err error) {
		if len(got[0]) != 0 {
			if inForce, err = store.ParseNetwork(s.id, got[0][0].Value); err != nil {
				return nil, err
			}
			return nil, want.CheckAgainst(inForce)
		}
		inForce = want.WithDefaults()
		value, err := store.EncodeNetwork(inForce)
		if err != nil {
			return nil, err
		}
		inForce.NoPrefix6 = false // a wish, and no parameter
		return []clientv3.Op{clientv3.OpPut(s.keys.Network(), string(value))}, nil
	})
	if err != nil {
		return store.Network{}, err
	}
	return inForce, nil
}

// Network implements store.Store.
func (s *Store) Network(ctx context.Context) (store.Network, error) {
	resp, err := s.get(ctx, s.keys.Network())
	if err != nil {
		return store.Network{}, err
	}
	return s.parseNetwork(resp.Kvs)
}

func (s *Store) parseNetwork(kvs []*mvccpb.KeyValue) (store.Network, error) {
	if len(kvs) == 0 {
		return store.Network{}, store.ErrNoNetwork
	}
	return store.ParseNetwork(s.id, kvs[0].Value)
}

// JoinNode implements store.Store.
func (s *Store) JoinNode(ctx context.Context, n model.Node) (stored model.Node, err error) {
	if err := model.ValidateName("node", n.Name); err != nil {
		return model.Node{}, err // before the name becomes part of a key
	}
	reads := []read{{key: s.keys.Network()}, {key: s.keys.Nodes(), prefix: true}, {key: s.keys.Addrs(n.Name), prefix: true}, {key: s.keys.Moves(), prefix: true}}
	err = s.update(ctx, "join node "+n.Name, reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		network, err := s.parseNetwork(got[0])
		if err != nil {
			return nil, err
		}
		nodes, before := s.parseNodes(got[1], n.Name)
		if stored, err = store.AllocatePrefixes(network, nodes, n); err != nil {
			return nil, err
		}
		if err := store.CheckHeld(network, stored, s.parseHeld(got[2]), s.parseMoves(got[3])); err != nil {
			return nil, err
		}
		value, err := store.EncodeNode(stored)
		if err != nil || string(value) == before {
			return nil, err
		}
		ops := []clientv3.Op{clientv3.OpPut(s.keys.Node(n.Name), string(value))}
		schema, err := store.CheckReaders(nodes, stored)
		if err == nil && schema > network.Schema {
			network.Schema = schema
			value, err = store.EncodeNetwork(network)
			ops = append(ops, clientv3.OpPut(s.keys.Network(), string(value)))
		}
		return ops, err
	})
	if err != nil {
		return model.Node{}, err
	}
	return stored, nil
}

// parseNodes reads node values, leaving out invalid ones as every reader does, and gives self's raw
// value.
func (s *Store) parseNodes(kvs []*mvccpb.KeyValue, self string) (nodes []model.Node, selfValue string) {
	for _, kv := range kvs {
		k, err := s.keys.Parse(string(kv.Key))
		if err != nil {
			continue
		}
		if k.Node == self {
			selfValue = string(kv.Value)
		}
		if n, err := store.ParseNode(k.Node, kv.Value); err == nil {
			nodes = append(nodes, n)
		}
	}
	return nodes, selfValue
}

// parseHeld reads which addresses a node's endpoints hold, leaving out invalid entries.
func (s *Store) parseHeld(kvs []*mvccpb.KeyValue) map[netip.Addr]model.EndpointID {
	held := make(map[netip.Addr]model.EndpointID, len(kvs))
	for _, kv := range kvs {
		k, err := s.keys.Parse(string(kv.Key))
		if err != nil {
			continue
		}
		if id, err := store.ParseOwner(kv.Value); err == nil {
			held[k.Addr] = id
		}
	}
	return held
}

// LeaveNode implements store.Store.
func (s *Store) LeaveNode(ctx context.Context, name string) error {
	if err := model.ValidateName("node", name); err != nil {
		return err
	}
	return s.update(ctx, "remove node "+name, []read{{key: s.keys.Moves(), prefix: true}}, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		return s.leaving(name, got[0]), nil
	})
}

// PutEndpoint implements store.Store.
func (s *Store) PutEndpoint(ctx context.Context, e model.Endpoint) error {
	value, err := store.EncodeEndpoint(e)
	if err != nil {
		return err
	}
	key := s.keys.Endpoint(e.Node, e.ID)
	addr := e.Addr4()
	reads := []read{{key: s.keys.Network()}, {key: s.keys.Node(e.Node)}, {key: key}, {key: s.keys.Addr(e.Node, addr)}, {key: s.keys.Move(addr)}}
	return s.update(ctx, fmt.Sprintf("store endpoint %s/%d", e.Node, e.ID), reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		network, err := s.parseNetwork(got[0])
		if err != nil {
			return nil, err
		}
		if len(got[1]) == 0 {
			return nil, &store.UnknownNodeError{Name: e.Node}
		}
		node, err := store.ParseNode(e.Node, got[1][0].Value)
		if err != nil {
			return nil, err
		}
		move, err := s.parseMove(addr, got[4])
		if err != nil {
			return nil, err
		}
		if err := store.CheckEndpoint(network, node, e, move); err != nil {
			return nil, err
		}
		ops := []clientv3.Op{clientv3.OpPut(key, string(value))}
		if move != nil && e.Adopted == nil && store.CheckAddr(node, addr) == nil {
			ops = append(ops, clientv3.OpDelete(s.keys.Move(addr))) // it is home
		}
		if kvs := got[3]; len(kvs) == 0 {
			ops = append(ops, clientv3.OpPut(s.keys.Addr(e.Node, addr), string(store.EncodeOwner(e.ID))))
		} else if owner, err := store.ParseOwner(kvs[0].Value); err != nil || owner != e.ID {
			return nil, &store.AddrInUseError{Addr: addr, Node: e.Node, Owner: owner}
		}
		if len(got[2]) != 0 {
			ops = append(ops, s.releaseAddr(e.Node, e.ID, got[2][0].Value, addr)...)
		}
		return ops, nil
	})
}

// releaseAddr frees the address in an endpoint's stored value, unless the endpoint keeps it.
func (s *Store) releaseAddr(node string, id model.EndpointID, value []byte, keep netip.Addr) []clientv3.Op {
	old, err := store.ParseEndpoint(node, id, value)
	if err != nil || old.Addr4() == keep {
		return nil
	}
	return []clientv3.Op{clientv3.OpDelete(s.keys.Addr(node, old.Addr4()))}
}

// DeleteEndpoint implements store.Store.
func (s *Store) DeleteEndpoint(ctx context.Context, node string, id model.EndpointID) error {
	if err := model.ValidateName("node", node); err != nil {
		return err
	}
	// All of the node's addresses are read, not those in the endpoint's value, so that an endpoint
	// whose value somebody damaged gives its address back too.
	reads := []read{{key: s.keys.Endpoint(node, id)}, {key: s.keys.Addrs(node), prefix: true}, {key: s.keys.Moves(), prefix: true}}
	return s.update(ctx, fmt.Sprintf("remove endpoint %s/%d", node, id), reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		var ops []clientv3.Op
		if len(got[0]) != 0 {
			ops = append(ops, clientv3.OpDelete(s.keys.Endpoint(node, id)))
		}
		for _, kv := range got[1] {
			if owner, err := store.ParseOwner(kv.Value); err == nil && owner == id {
				ops = append(ops, clientv3.OpDelete(string(kv.Key)))
			}
		}
		held := s.parseHeld(got[1])
		for _, m := range s.parseMoves(got[2]) {
			if m.Node == node && held[m.Addr] == id {
				ops = append(ops, clientv3.OpDelete(s.keys.Move(m.Addr)))
			}
		}
		return ops, nil
	})
}
