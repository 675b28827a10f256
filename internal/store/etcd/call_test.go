package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestMemberWithoutMajority: a member that cannot decide, and says so in its own words when time is up, is as good as one that
// does not answer: another is asked, and what cannot be had may be asked for again.
func TestMemberWithoutMajority(t *testing.T) {
	late := status.Error(codes.Unknown, "context deadline exceeded")
	s := &Store{options: optionsOf([]Option{WithTimeout(30 * time.Second)}), endpoints: []string{"https://127.0.0.1:1", "https://127.0.0.1:2"}, ctx: t.Context()}
	call, cancel := s.bound(t.Context())
	defer cancel()
	asked := 0
	err := s.try(call, func(context.Context) error {
		if asked++; asked == 1 {
			return late
		}
		return nil
	})
	if err != nil || asked != 2 {
		t.Errorf("asked %d times: %v", asked, err)
	}
	if err := s.try(call, func(context.Context) error { return status.Error(codes.Unknown, "something else") }); err == nil {
		t.Error("another error was tried again")
	}
	cancel()
	if err := s.try(call, func(context.Context) error { return late }); !errors.Is(err, late) {
		t.Errorf("when time is up: %v", err)
	}
	var unreachable *UnreachableError
	if err := s.explain(t.Context(), "read x", late); !errors.As(err, &unreachable) {
		t.Errorf("explained as %v, want a store that does not answer", err)
	}
}
