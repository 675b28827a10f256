package node

import (
	"context"

	"heddle.dev/heddle/internal/api"
)

// turn is a lock that whoever waits for it can give up. Those who wait get it in the order in which
// they came.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) Lock() { t <- struct{}{} }

func (t turn) Unlock() { <-t }

func (t turn) TryLock() bool {
	select {
	case t <- struct{}{}:
		return true
	default:
		return false
	}
}

// lockFor is Lock for a caller who has gone when ctx ends: nothing is to be made for it then.
func (t turn) lockFor(ctx context.Context) error {
	if ctx.Err() == nil {
		select {
		case t <- struct{}{}:
			return nil
		case <-ctx.Done():
		}
	}
	return &api.Error{Code: api.CodeUnavailable, Message: "other endpoints are being made or removed: " + ctx.Err().Error(), Remedy: "try again"}
}
