package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// get reads one key, or what opts make of it.
func (s *Store) get(ctx context.Context, key string, opts ...clientv3.OpOption) (resp *clientv3.GetResponse, err error) {
	call, cancel := s.bound(ctx)
	defer cancel()
	err = s.try(call, func(ctx context.Context) (err error) {
		resp, err = s.client.Get(ctx, key, opts...)
		return err
	})
	return resp, s.explain(ctx, "read "+key, err)
}

// bound gives the context of one call: it ends with the caller's, with the store and after the timeout.
func (s *Store) bound(caller context.Context) (context.Context, context.CancelFunc) {
	call, cancel := context.WithTimeout(caller, s.options.timeout)
	stop := context.AfterFunc(s.ctx, cancel)
	return call, func() { stop(); cancel() }
}

// try makes a request until it is answered or call ends. Requests go round the members: one that is cut off from its
// cluster refuses them at once, for want of a leader, and one that does not answer has half of the time.
func (s *Store) try(call context.Context, request func(context.Context) error) error {
	for {
		ctx, cancel := clientv3.WithRequireLeader(call), context.CancelFunc(func() {})
		if len(s.endpoints) > 1 {
			ctx, cancel = context.WithTimeout(ctx, s.options.timeout/2)
		}
		err := request(ctx)
		late := ctx.Err() != nil && call.Err() == nil
		cancel()
		if err == nil || !late && !s.again(call, err) {
			return err
		}
	}
}

// again reports whether a request that failed with err may work a moment later, and waits for that moment.
func (s *Store) again(call context.Context, err error) bool {
	if c := codeOf(err); c != codes.Unavailable && c != codes.DeadlineExceeded || s.ctx.Err() != nil {
		return false
	}
	return pause(call, 50*time.Millisecond)
}

// pause waits for d; it is false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// explain turns what etcd's client says about a call into what an operator can act on. caller is the
// context that the caller gave, without the store's own time limit.
func (s *Store) explain(caller context.Context, op string, err error) error {
	switch {
	case err == nil:
		return nil
	case s.ctx.Err() != nil:
		return fmt.Errorf("%s: store is closed", op)
	case caller.Err() != nil:
		return fmt.Errorf("%s: %w", op, caller.Err())
	}
	if c := codeOf(err); c == codes.DeadlineExceeded || c == codes.Unavailable {
		return fmt.Errorf("%s: %w", op, &UnreachableError{Endpoints: s.endpoints, After: s.options.timeout, Reason: s.probe(caller, err)})
	}
	if remedy := explainLogin(err); remedy != "" {
		return fmt.Errorf("%s: %w: %s", op, err, remedy)
	}
	return fmt.Errorf("%s: %w", op, err)
}

func codeOf(err error) codes.Code {
	if errors.Is(err, context.DeadlineExceeded) {
		return codes.DeadlineExceeded
	}
	if e := (rpctypes.EtcdError{}); errors.As(err, &e) {
		return e.Code()
	}
	s := status.Convert(err)
	if s.Code() == codes.Unknown && s.Message() == context.DeadlineExceeded.Error() {
		// A member that has no majority ends a request as late as its client does, perhaps a moment before, and gives no code.
		return codes.DeadlineExceeded
	}
	return s.Code()
}
