package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
)

// startIdle starts an agent that does not run: nothing but the test uses its store.
func startIdle(t *testing.T, cfg Config) (a *Agent, end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	a, err := Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a, func() {
		cancel()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

// silentStore is a store that, while it is away, lets whoever asks about endpoints wait.
type silentStore struct {
	store.Store
	away atomic.Bool
}

func (s *silentStore) wait(ctx context.Context) error {
	if !s.away.Load() {
		return nil
	}
	<-ctx.Done()
	return fmt.Errorf("a test: %w", ctx.Err())
}

func (s *silentStore) PutEndpoint(ctx context.Context, e model.Endpoint) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Store.PutEndpoint(ctx, e)
}

func (s *silentStore) PutNewEndpoint(ctx context.Context, e model.Endpoint, since int64) (bool, error) {
	if err := s.wait(ctx); err != nil {
		return false, err
	}
	return s.Store.PutNewEndpoint(ctx, e, since)
}

func (s *silentStore) DeleteEndpoint(ctx context.Context, node string, id model.EndpointID) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Store.DeleteEndpoint(ctx, node, id)
}

func (s *silentStore) Moves(ctx context.Context) ([]model.Move, error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	return s.Store.Moves(ctx)
}

// createsWithoutStore: while the store does not answer, endpoints that cannot be made hold one
// address, whatever their number, and none that goes waits for them all.
func createsWithoutStore(t *testing.T, cfg Config) {
	t.Helper()
	defer func(was time.Duration) { storeAnswers = was }(storeAnswers)
	storeAnswers = 2 * storeProbe
	a, end := startIdle(t, cfg)
	defer end()
	s := &silentStore{Store: a.store}
	a.store = s
	create(t, a, "goes")
	s.away.Store(true)
	var made sync.WaitGroup
	errs := make([]error, 10)
	for i := range errs {
		req := api.EndpointRequest{Name: fmt.Sprintf("s%d", i), NetnsPath: namespace(t, fmt.Sprintf("s%d", i)), Intercepted: true}
		made.Go(func() { _, errs[i] = a.CreateEndpoint(t.Context(), req) })
	}
	<-time.After(storeProbe / 10) // all of them wait, or are about to
	began, most := time.Now(), storeAnswers+4*storeProbe
	if err := a.DeleteEndpoint(t.Context(), "goes"); err != nil || time.Since(began) > most {
		t.Errorf("deleted after %v, %v; want %v at most", time.Since(began), err, most)
	}
	made.Wait()
	if took := time.Since(began); took > most+storeProbe {
		t.Errorf("ten that cannot be made have their answers after %v", took)
	}
	for _, err := range errs {
		var said *api.Error
		if !errors.As(err, &said) || said.Code != api.CodeUnavailable {
			t.Errorf("made without a store: %v", err)
		}
	}
	if held := a.leases.All(); len(held) > 2 {
		t.Errorf("held are %+v, want what is deleted, and one", held)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a.endpoints.change.Lock()
	_, err := a.CreateEndpoint(ctx, api.EndpointRequest{Name: "late", NetnsPath: namespace(t, "late")})
	if a.endpoints.change.Unlock(); err == nil || !strings.Contains(err.Error(), "other endpoints") {
		t.Errorf("made for a caller that has gone: %v", err)
	}
	s.away.Store(false)
	create(t, a, "back")
	if err := a.DeleteEndpoint(t.Context(), "back"); err != nil {
		t.Fatal(err)
	}
	a.undoHalfDone()
	state, err := firstState(t.Context(), s)
	if held := a.leases.All(); err != nil || len(held)+len(state.Endpoints.Of("n1")) > 0 {
		t.Errorf("with the store, held are %+v, and the store has %+v, %v", held, state.Endpoints.Of("n1"), err)
	}
}

// otherMoves is a store that has moves which have not come here.
type otherMoves struct{ store.Store }

func (otherMoves) PutNewEndpoint(context.Context, model.Endpoint, int64) (bool, error) {
	return false, nil
}

// dropFails: what was made ahead for nothing and cannot be taken away once takes nothing with it: the
// name, the address and the device are free again.
func dropFails(t *testing.T, cfg Config) {
	t.Helper()
	a, end := startIdle(t, cfg)
	defer end()
	a.store = otherMoves{a.store}
	stuck := errors.New("stuck, as the test wants it")
	a.endpoints.change.Lock()
	_, err := a.endpoints.create(t.Context(), api.EndpointRequest{Name: "ahead", NetnsPath: namespace(t, "ahead"), Intercepted: true}, joining{
		steps: func(e model.Endpoint) []step { return a.attachments.attachSteps(e, new(netcfg.EndpointDevice)) },
		ahead: a.attachments.makeAhead, drop: func(model.Endpoint) error { return stuck },
	})
	a.endpoints.change.Unlock()
	if !errors.Is(err, stuck) {
		t.Errorf("made with %v", err)
	}
	links, errLinks := netcfg.Endpoints()
	if held := a.leases.All(); errLinks != nil || len(held)+len(links) > 0 {
		t.Errorf("held are %+v, and devices %+v, %v", held, links, errLinks)
	}
}
