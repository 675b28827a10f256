package node

import (
	"errors"
	"log/slog"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/store"
)

// countedTCP is a plane with the kernel's TCP, which has no congestion control but those in has.
type countedTCP struct {
	has   map[string]bool
	told  map[model.EndpointID]stack.Choice
	calls int
	fails error // of SetStack
}

func (c *countedTCP) ServeStack(kind stack.Kind, s stack.Settings) error {
	if kind != stack.Kernel || s.Congestion != "" && !c.has[s.Congestion] {
		return errors.New("not here")
	}
	return nil
}

func (c *countedTCP) SetStack(e model.Endpoint, choice stack.Choice) error {
	c.calls++
	c.told[e.ID] = choice
	return c.fails
}

func (c *countedTCP) SetCongestion(all []*stack.Object, used map[string]bool) (out []api.CongestionControl) {
	for _, o := range all {
		c.has[o.Name] = used[o.Name]
		out = append(out, api.CongestionControl{Name: o.Name, State: api.CongestionRegistered})
	}
	return out
}

func (c *countedTCP) KeepCongestion(map[string]bool) error { return nil }

func (c *countedTCP) CheckCongestion([]byte) (string, error) { return "", nil }

func (c *countedTCP) FollowStacks() error { return nil }

func (c *countedTCP) OwnStack(model.EndpointID, stack.Settings) *api.OwnStack { return nil }

func (c *countedTCP) PlainSockets(e model.Endpoint) bool { return e.Adopted == nil }

// TestStackerFollows: endpoints have what profiles say, and states that say nothing new of these
// cost nothing; what could not be served is tried again, with the next state or when a plane asks.
func TestStackerFollows(t *testing.T) {
	tcp := &countedTCP{has: map[string]bool{"bbr": true}, told: make(map[model.EndpointID]stack.Choice)}
	var all faults
	s := newStacker("n1", newAway(func() {}), &all, slog.New(slog.DiscardHandler))
	s.planes, s.kernel = tcp, tcp
	s.know(model.Endpoint{ID: 1, Name: "a", Labels: map[string]string{"tier": "wan"}})
	s.know(model.Endpoint{ID: 2, Name: "b"})
	p := &stack.Profile{Name: "wan", Stack: stack.Kernel, Fallback: stack.Refuse, Settings: stack.Settings{Congestion: "bbr"},
		Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"tier": "wan"}}}}
	state := store.State{Stacks: []*stack.Profile{p}, Nodes: []model.Node{{Name: "n1", ReadsSchema: store.Schema}, {Name: "old", ReadsSchema: 2}}}
	follow := func(what string, calls int) {
		t.Helper()
		before := tcp.calls
		if err := s.follow(state); err != nil || tcp.calls-before != calls {
			t.Errorf("%s: %v, told of %d endpoints, want %d", what, err, tcp.calls-before, calls)
		}
	}
	follow("first", 2)
	if c := tcp.told[1]; c.Profile != p || c.Stack != stack.Kernel || c.Settings.Congestion != "bbr" || tcp.told[2].Profile != nil {
		t.Errorf("told %+v", tcp.told)
	}
	state.Revision++
	follow("nothing new", 0)
	s.ask()
	follow("asked", 2)
	follow("asked once", 0)

	lacks := *p
	lacks.Settings.Congestion = "mine"
	state.Stacks = []*stack.Profile{&lacks}
	follow("changed", 2)
	if !tcp.told[1].Refused() || !all.Has(api.FaultStack) {
		t.Errorf("not served: %+v, faults %v", tcp.told[1], all.List())
	}
	follow("lacking", 2)
	state.Congestion = []*stack.Object{{Name: "mine"}}
	follow("loaded", 2)
	if tcp.told[1].Refused() || all.Has(api.FaultStack) {
		t.Errorf("served: %+v, faults %v", tcp.told[1], all.List())
	}
	follow("served", 0)

	// So is what a new endpoint cannot have, or a plane could not be told of one.
	delete(tcp.has, "mine")
	late := model.Endpoint{ID: 3, Name: "late", Labels: map[string]string{"tier": "wan"}}
	if err := s.set(late); err != nil || !tcp.told[3].Refused() {
		t.Errorf("a late endpoint: %v, %+v", err, tcp.told[3])
	}
	follow("a late endpoint lacks it", 3)
	follow("which is served", 0)
	tcp.fails = errors.New("map is full")
	if err := s.set(late); err == nil {
		t.Error("a plane that fails is not told of")
	}
	tcp.fails = nil
	follow("a plane failed", 3)
	if err := s.remove(late); err != nil {
		t.Error(err)
	}
	if r := s.report(); len(r.Endpoints) != 1 || r.Endpoints[0].Endpoint != "a" || len(r.Behind) != 1 || r.Behind[0] != "old" {
		t.Errorf("report %+v", r)
	}
	if err := s.remove(model.Endpoint{ID: 1, Name: "a"}); err != nil || tcp.told[1].Profile != nil || len(s.report().Endpoints) != 0 {
		t.Errorf("removed: %v, %+v", err, tcp.told[1])
	}
}
