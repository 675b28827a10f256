package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
	"heddle.dev/heddle/internal/testutil"
)

// refusing is a store that takes the endpoints that err is nil for.
type refusing struct {
	store.Store
	err   func(model.Endpoint) error
	asked int
	put   []model.Endpoint
}

func (r *refusing) PutEndpoint(_ context.Context, e model.Endpoint) error {
	r.asked++
	err := r.err(e)
	if err == nil {
		r.put = append(r.put, e)
	}
	return err
}

// TestStartWithContradictions: values of the store that contradict each other, and a store that does
// not take what it is told, keep no agent from starting.
func TestStartWithContradictions(t *testing.T) {
	keys := store.KeysOf(3)
	view := store.NewView(keys, slog.New(slog.DiscardHandler), func() {})
	raw, err := store.EncodeNode(model.Node{Name: "n1", Underlay: netip.MustParseAddr("192.0.2.1"), Prefixes: prefixes("10.244.1.0/24")})
	testutil.NoError(t, err)
	view.Set(keys.Node("n1"), raw, 1)
	for i, addr := range []string{"10.244.1.2", "10.244.1.3"} {
		e := endpointOf(model.EndpointID(i+1), "twice", addr)
		raw, err := store.EncodeEndpoint(e)
		testutil.NoError(t, err)
		view.Set(keys.Endpoint("n1", e.ID), raw, 1)
	}
	mine := view.State(1).Endpoints.Of("n1")
	h := recordingHost(t.TempDir())
	h.planes = plane.Set{}
	rs := compose(h).restorer
	if _, err := rs.restoreLeases(mine, nil); err != nil || len(mine) != 1 {
		t.Errorf("leases of %+v: %v", mine, err)
	}
}

// TestAddressesAreToldAgain: what the store does not take is a fault until it does, or until the
// endpoint is gone. A store that does not answer is asked once.
func TestAddressesAreToldAgain(t *testing.T) {
	h := recordingHost(t.TempDir())
	h.planes, h.prefix6 = plane.Set{}, netip.MustParsePrefix("fd48:6464:3::/96")
	s := &refusing{err: func(e model.Endpoint) error {
		if e.Name == "b" {
			return errors.New("no")
		}
		return nil
	}}
	h.store = s
	progress := 0
	h.cfg.Progress = func() { progress++ }
	rs := compose(h).restorer
	for i, name := range []string{"a", "b", "c"} {
		e := rs.refamily(endpointOf(model.EndpointID(i+1), name, "10.244.1.2"))
		if len(e.Addrs) != 2 {
			t.Fatalf("addresses %v", e.Addrs)
		}
		h.known.add(e)
		if again := rs.refamily(e); !slices.Equal(again.Addrs, e.Addrs) || len(rs.untold) != i+1 {
			t.Fatalf("told again of %v", rs.untold)
		}
	}
	faults := func(want ...string) {
		t.Helper()
		var got []string
		for _, f := range h.faults.List() {
			if f.Reason == api.FaultAddrs {
				got = append(got, f.Endpoint)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("faults of %v, want %v", got, want)
		}
	}
	all := slices.Clone(rs.untold)
	rs.tellAddrs(t.Context())
	faults("b")
	if progress != 1 { // it was quick
		t.Errorf("%d calls of Progress", progress)
	}
	if rs.progressed = time.Now().Add(-ProgressEvery); len(s.put) != 2 {
		t.Errorf("the store has been told of %+v", s.put)
	}

	rs.untold, s.asked = all, 0
	s.err = func(model.Endpoint) error { return &etcd.UnreachableError{} }
	rs.repairOnce(t.Context())
	faults("a", "b", "c")
	if progress != 2 {
		t.Errorf("%d calls of Progress", progress)
	}
	if s.asked != 1 {
		t.Errorf("a store that does not answer was asked %d times", s.asked)
	}

	gone, _ := h.known.named("c")
	h.known.remove(gone)
	s.put, s.err = nil, func(model.Endpoint) error { return nil }
	rs.repairOnce(t.Context())
	faults()
	if len(s.put) != 2 || len(rs.untold) != 0 {
		t.Errorf("the store has been told of %+v", s.put)
	}
}

// TestFullStore: who is told that the store is full can ask again, and reads what to do about it.
func TestFullStore(t *testing.T) {
	err := storeError(fmt.Errorf("store endpoint n1/1: %w: compact it", etcd.ErrFull))
	var said *api.Error
	if !errors.As(err, &said) || said.Code != api.CodeUnavailable || !strings.Contains(said.Error(), "compact it") || strings.Contains(said.Error(), "is up") {
		t.Errorf("%v", err)
	}
}
