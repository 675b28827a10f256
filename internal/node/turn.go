package node

import (
	"context"
	"sync"

	"heddle.dev/heddle/internal/api"
)

// turn is a lock that whoever waits for it can give up. Those who wait get it in the order in which
// they came. The zero value is free.
type turn struct {
	once sync.Once
	held chan struct{} // has an element while it is
}

func (t *turn) state() chan struct{} {
	t.once.Do(func() { t.held = make(chan struct{}, 1) })
	return t.held
}

func (t *turn) Lock() { t.state() <- struct{}{} }

func (t *turn) Unlock() { <-t.state() }

func (t *turn) TryLock() bool {
	select {
	case t.state() <- struct{}{}:
		return true
	default:
		return false
	}
}

// lockFor is Lock for a caller who has gone when ctx ends: nothing is to be made for it then.
func (t *turn) lockFor(ctx context.Context) error {
	if ctx.Err() == nil {
		select {
		case t.state() <- struct{}{}:
			return nil
		case <-ctx.Done():
		}
	}
	return &api.Error{Code: api.CodeUnavailable, Message: "other endpoints are being made or removed: " + ctx.Err().Error(), Remedy: "try again"}
}
