package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
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

// bound gives the context of one call: it ends with the caller's, with the store and after the
// timeout.
func (s *Store) bound(caller context.Context) (context.Context, context.CancelFunc) {
	call, cancel := context.WithTimeout(caller, s.options.timeout)
	stop := context.AfterFunc(s.ctx, cancel)
	return call, func() { stop(); cancel() }
}

// try makes a request until etcd has answered it or call ends. It may be made again: reads, and
// transactions that decide anew by what they read, whatever became of the one before. So it does
// not matter what went wrong. Requests go round the members: one that is cut off from its cluster
// refuses them at once, for want of a leader, and one that does not answer has half of the time.
func (s *Store) try(call context.Context, request func(context.Context) error) error {
	for {
		ctx, cancel := clientv3.WithRequireLeader(call), context.CancelFunc(func() {})
		if len(s.endpoints) > 1 {
			ctx, cancel = context.WithTimeout(ctx, s.options.timeout/2)
		}
		err := request(ctx)
		late := ctx.Err() != nil && call.Err() == nil
		cancel()
		switch {
		case err == nil, answered(err), s.ctx.Err() != nil:
			return err
		case !late && !pause(call, tryAgain):
			return err
		}
	}
}

// tryAgain is the pause before a request is made again.
const tryAgain = 50 * time.Millisecond

// answered reports whether a request that failed has got its answer: one that this package gave
// itself, or one of etcd's own that the same request would get again. Everything else is trouble on
// the way there or back, or a member's that cannot answer now.
func answered(err error) bool {
	var refused *refusal
	var said rpctypes.EtcdError
	if errors.As(err, &refused) {
		return true
	}
	if !errors.As(err, &said) {
		return false
	}
	switch said.Code() {
	case codes.ResourceExhausted: // too many requests; or it is full, and stays so
		return errors.Is(said, ErrFull)
	case codes.Unavailable, codes.DeadlineExceeded: // no leader, too late
		return false
	}
	return true
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

// explain turns what etcd's client says about a call into what an operator can act on. caller is
// the context that the caller gave, without the store's own time limit.
func (s *Store) explain(caller context.Context, op string, err error) error {
	switch {
	case err == nil:
		return nil
	case s.ctx.Err() != nil:
		return fmt.Errorf("%s: %w", op, ErrClosed)
	case caller.Err() != nil:
		return fmt.Errorf("%s: %w", op, caller.Err())
	}
	if !answered(err) {
		return fmt.Errorf("%s: %w", op, &UnreachableError{Endpoints: s.endpoints, After: s.options.timeout, Reason: s.probe(caller, err)})
	}
	if remedy := explainRefusal(err); remedy != "" {
		return fmt.Errorf("%s: %w: %s", op, err, remedy)
	}
	return fmt.Errorf("%s: %w", op, err)
}
