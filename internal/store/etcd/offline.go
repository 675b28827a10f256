package etcd

import (
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// NoteOffline implements store.Store.
func (s *Store) NoteOffline(ctx context.Context, a store.OfflineRecord) error {
	if err := model.ValidateName("node", a.Node); err != nil {
		return err
	}
	key := s.keys.Offline(a.Node)
	reads := []read{{key: s.keys.Node(a.Node)}, {key: s.keys.NameLease(a.Node)}, {key: key}}
	return s.update(ctx, "note that node "+a.Node+" is offline", reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[0]) == 0 || len(got[1]) != 0 {
			return nil, nil
		}
		next := a
		if len(got[2]) != 0 {
			if have, err := store.ParseOfflineRecord(a.Node, got[2][0].Value); err == nil {
				if have.Since.Before(next.Since) {
					next.Since = have.Since
				}
				if have.Seen.After(next.Seen) {
					next.Seen = have.Seen
				}
			}
		}
		value, err := store.EncodeOfflineRecord(next)
		if err != nil || len(got[2]) != 0 && string(value) == string(got[2][0].Value) {
			return nil, err
		}
		return []clientv3.Op{clientv3.OpPut(key, string(value))}, nil
	})
}

// ForgetNode implements store.Store.
func (s *Store) ForgetNode(ctx context.Context, name string, quiet time.Time) error {
	if err := model.ValidateName("node", name); err != nil {
		return err
	}
	reads := []read{{key: s.keys.Node(name)}, {key: s.keys.NameLease(name)}, {key: s.keys.Offline(name)}, {key: s.keys.Moves(), prefix: true}}
	return s.update(ctx, "forget node "+name, reads, func(got [][]*mvccpb.KeyValue) ([]clientv3.Op, error) {
		if len(got[1]) != 0 {
			// What nobody could have written holds nothing.
			if h, err := store.ParseNameLease(name, got[1][0].Value); err == nil {
				return nil, &store.NodeLiveError{Lease: h}
			}
		}
		if !quiet.IsZero() {
			noted := store.OfflineRecord{Node: name, Since: time.Now()} // nobody knows since when
			if len(got[2]) != 0 {
				if a, err := store.ParseOfflineRecord(name, got[2][0].Value); err == nil {
					noted = a
				}
			}
			if noted.Last().After(quiet) {
				return nil, &store.NodeSeenError{Record: noted}
			}
		}
		return s.leaving(name, got[3]), nil
	})
}

// leaving gives what removes a node and all that belongs to it. moves are the values of all moves.
func (s *Store) leaving(name string, moves []*mvccpb.KeyValue) []clientv3.Op {
	ops := []clientv3.Op{
		clientv3.OpDelete(s.keys.Node(name)),
		clientv3.OpDelete(s.keys.Offline(name)),
		clientv3.OpDelete(s.keys.Endpoints(name), clientv3.WithPrefix()),
		clientv3.OpDelete(s.keys.Addrs(name), clientv3.WithPrefix()),
	}
	for _, m := range s.parseMoves(moves) {
		if m.Node == name {
			ops = append(ops, clientv3.OpDelete(s.keys.Move(m.Addr)))
		}
	}
	return nest(ops)
}
