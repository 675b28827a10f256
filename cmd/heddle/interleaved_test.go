package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// contendedAgent has an endpoint that somebody else changes right after it was read.
type contendedAgent struct {
	inspectedAgent

	mu       sync.Mutex
	endpoint model.Endpoint
	other    func(*model.Endpoint) // nil: nobody
}

func (a *contendedAgent) Endpoints(context.Context) ([]model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.endpoint
	if a.other != nil {
		a.other(&a.endpoint)
		a.other = nil
	}
	return []model.Endpoint{before}, nil
}

func (a *contendedAgent) SetLimits(_ context.Context, _ string, change api.LimitsChange) (model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if change.Was == nil {
		return a.endpoint, errors.New("what the limits were made of is not said")
	}
	if !change.Was.Equal(*a.endpoint.Limits) {
		return a.endpoint, api.HasChanged("limits")
	}
	a.endpoint.Limits = &change.Limits
	return a.endpoint, nil
}

func (a *contendedAgent) SetVerbs(_ context.Context, _ string, change api.VerbsChange) (model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if change.Was != nil && *change.Was != a.endpoint.Planes.Verbs.VerbsEndpoint {
		return a.endpoint, api.HasChanged("verbs")
	}
	a.endpoint.Planes.Verbs.VerbsEndpoint = change.VerbsEndpoint
	return a.endpoint, nil
}

// TestInterleavedChanges: two who change parts of an endpoint's limits, or of its RDMA device, at a
// time lose nothing of each other.
func TestInterleavedChanges(t *testing.T) {
	a := &contendedAgent{endpoint: model.Endpoint{ID: 1, Name: "c1", Limits: &model.Limits{Ingress: 1e6}}}
	socket := filepath.Join(t.TempDir(), "api.sock")
	ln, err := api.Listen(socket)
	testutil.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- api.ServeOn(ctx, ln, api.NewHandler(a, nil, slog.New(slog.DiscardHandler))) }()
	t.Cleanup(func() { stop(); testutil.NoError(t, <-done) })

	a.other = func(e *model.Endpoint) {
		l := *e.Limits
		l.Priority = model.PriorityHigh
		e.Limits = &l
	}
	if out, err := runInspect(t, newRootCmd(), "limit", "set", "c1", "--api", socket, "--egress", "2mbit"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if want := (model.Limits{Ingress: 1e6, Egress: 2e6, Priority: model.PriorityHigh}); *a.endpoint.Limits != want {
		t.Errorf("limits %+v, want %+v", *a.endpoint.Limits, want)
	}

	a.other = func(e *model.Endpoint) { e.Planes.Verbs.Outside = true }
	if out, err := runInspect(t, newRootCmd(), "endpoints", "verbs", "c1", "--api", socket, "--spin-us", "7"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if want := (model.VerbsEndpoint{Wanted: true, SpinMicros: 7, Outside: true}); a.endpoint.Planes.Verbs.VerbsEndpoint != want {
		t.Errorf("verbs %+v, want %+v", a.endpoint.Planes.Verbs.VerbsEndpoint, want)
	}
}
