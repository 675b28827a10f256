package etcd

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// parseMove reads the one move of address a; nil if there is none.
func (s *Store) parseMove(a netip.Addr, kvs []*mvccpb.KeyValue) (*model.Move, error) {
	if len(kvs) == 0 {
		return nil, nil
	}
	m, err := store.ParseMove(a, kvs[0].Value)
	if err != nil {
		return nil, err // whoever has the address, it is not known: nobody gets it
	}
	return &m, nil
}

// parseMoves reads moves, leaving out invalid ones as every reader does.
func (s *Store) parseMoves(kvs []*mvccpb.KeyValue) (moves []model.Move) {
	for _, kv := range kvs {
		k, err := s.keys.Parse(string(kv.Key))
		if err != nil {
			continue
		}
		if m, err := store.ParseMove(k.Addr, kv.Value); err == nil {
			moves = append(moves, m)
		}
	}
	return moves
}

// Moves implements store.Store.
func (s *Store) Moves(ctx context.Context) ([]model.Move, error) {
	resp, err := s.get(ctx, s.keys.Moves(), clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	return s.parseMoves(resp.Kvs), nil
}

// GiveUpEndpoint implements store.Store.
func (s *Store) GiveUpEndpoint(ctx context.Context, e model.Endpoint, to string) (given model.Move, err error) {
	if err := model.ValidateName("node", to); err != nil {
		return given, err
	}
	key, addr := s.keys.Endpoint(e.Node, e.ID), e.Addr4()
	reads := []read{{key: key}, {key: s.keys.Addr(e.Node, addr)}, {key: s.keys.Node(to)}, {key: s.keys.Move(addr)}}
	err = s.update(ctx, fmt.Sprintf("give up endpoint %s/%d", e.Node, e.ID), reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[2]) == 0 {
			return nil, &store.UnknownNodeError{Name: to}
		}
		before, err := s.parseMove(addr, got[3])
		if err != nil {
			return nil, err
		}
		if !s.holds(e, got[0], got[1]) {
			if before != nil && before.Node == to && before.From == e.Node && before.Name == e.Name {
				given = *before
				return nil, nil
			}
			return nil, &store.UnknownMoveError{Addr: addr}
		}
		given = model.Move{Addr: addr, Node: to, From: e.Node, Home: e.Node, Name: e.Name, Labels: e.Labels, Limits: e.Limits,
			Since: time.Now().UTC()}
		if before != nil {
			given.Home = before.Home
		}
		value, err := store.EncodeMove(given)
		if err != nil {
			return nil, err
		}
		return []clientv3.Op{
			clientv3.OpPut(s.keys.Move(addr), string(value)), clientv3.OpDelete(key), clientv3.OpDelete(s.keys.Addr(e.Node, addr)),
		}, nil
	})
	return given, err
}

// holds reports whether the store has endpoint e with its address.
func (s *Store) holds(e model.Endpoint, value, owner []*mvccpb.KeyValue) bool {
	if len(value) == 0 || len(owner) == 0 {
		return false
	}
	have, err := store.ParseEndpoint(e.Node, e.ID, value[0].Value)
	if err != nil || have.Addr4() != e.Addr4() || have.Name != e.Name {
		return false
	}
	id, err := store.ParseOwner(owner[0].Value)
	return err == nil && id == e.ID
}

// RedirectMove implements store.Store.
func (s *Store) RedirectMove(ctx context.Context, a netip.Addr, to string) (model.Move, error) {
	if err := model.ValidateName("node", to); err != nil {
		return model.Move{}, err
	}
	return s.changeMove(ctx, a, []read{{key: s.keys.Node(to)}}, func(m *model.Move, got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[0]) == 0 {
			return nil, &store.UnknownNodeError{Name: to}
		}
		if m == nil {
			return nil, &store.UnknownMoveError{Addr: a}
		}
		if m.Node == to {
			return nil, nil
		}
		m.From, m.Node, m.Since = m.Node, to, time.Now().UTC()
		value, err := store.EncodeMove(*m)
		return []clientv3.Op{clientv3.OpPut(s.keys.Move(a), string(value))}, err
	})
}

// DropMove implements store.Store.
func (s *Store) DropMove(ctx context.Context, a netip.Addr, node string) error {
	_, err := s.changeMove(ctx, a, nil, func(m *model.Move, _ [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if m == nil || m.Node != node {
			return nil, nil
		}
		return []clientv3.Op{clientv3.OpDelete(s.keys.Move(a))}, nil
	})
	return err
}

// changeMove changes the move of address a, which decide gets with what more was read, as long as
// no endpoint has taken it up. Where the move leads to is known only when it has been read, so it
// is read twice.
func (s *Store) changeMove(ctx context.Context, a netip.Addr, more []read,
	decide func(m *model.Move, got [][]*mvccpb.KeyValue) ([]clientv3.Op, error)) (changed model.Move, err error) {
	resp, err := s.get(ctx, s.keys.Move(a))
	if err != nil {
		return changed, err
	}
	first, err := s.parseMove(a, resp.Kvs)
	if err != nil {
		return changed, err
	}
	reads := append([]read{{key: s.keys.Move(a)}}, more...)
	if first != nil {
		reads = append(reads, read{key: s.keys.Addr(first.Node, a)})
	}
	err = s.update(ctx, fmt.Sprintf("change the move of %s", a), reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		m, err := s.parseMove(a, got[0])
		if err != nil {
			return nil, err
		}
		if m != nil && (first == nil || m.Node != first.Node) {
			return nil, fmt.Errorf("address %s is being moved by somebody else: try again", a)
		}
		if m != nil && len(got[len(got)-1]) != 0 {
			return nil, &store.MoveInUseError{Move: *m}
		}
		ops, err := decide(m, got[1:])
		if m != nil {
			changed = *m
		}
		return ops, err
	})
	return changed, err
}

// KeepMove implements store.Store.
func (s *Store) KeepMove(ctx context.Context, m model.Move) error {
	value, err := store.EncodeMove(m)
	if err != nil {
		return err
	}
	reads := []read{{key: s.keys.Move(m.Addr)}, {key: s.keys.Addr(m.Home, m.Addr)}, {key: s.keys.Nodes(), prefix: true}}
	return s.update(ctx, fmt.Sprintf("keep the move of %s", m.Addr), reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		have, err := s.parseMove(m.Addr, got[0])
		if err != nil {
			return nil, err
		}
		if have != nil && have.Node != m.Node {
			return nil, &store.MovedError{Move: *have}
		}
		if have != nil {
			return nil, nil
		}
		if len(got[1]) != 0 {
			owner, _ := store.ParseOwner(got[1][0].Value) // 0: who has it is not known
			return nil, &store.AddrInUseError{Addr: m.Addr, Node: m.Home, Owner: owner}
		}
		nodes, _ := s.parseNodes(got[2], "")
		for _, n := range nodes {
			if n.Name != m.Home && store.CheckAddr(n, m.Addr) == nil {
				return nil, &store.AddrInUseError{Addr: m.Addr, Node: n.Name} // it may have given it out
			}
		}
		return []clientv3.Op{clientv3.OpPut(s.keys.Move(m.Addr), string(value))}, nil
	})
}
