package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/store"
)

// kernelTCP is the kernel's TCP as stacks need it besides plane.Stacks.
type kernelTCP interface {
	// SetCongestion registers those of which used says so, verifies the others, and says what
	// became of each.
	SetCongestion(all []*stack.Object, used map[string]bool) []api.CongestionControl
	// KeepCongestion unregisters those that are not in used.
	KeepCongestion(used map[string]bool) error
	// CheckCongestion gives the name of the congestion control in an object that this kernel takes.
	CheckCongestion(object []byte) (name string, err error)
	// PlainSockets reports whether plain sockets of an endpoint's container reach what its node
	// sockets reach, by the overlay.
	PlainSockets(model.Endpoint) bool
	// FollowStacks brings live connections to what SetStack said last.
	FollowStacks() error
	// OwnStack says which settings of a profile a container's own stack has, and why not the
	// others.
	OwnStack(model.EndpointID, stack.Settings) *api.OwnStack
}

// stacker gives each endpoint of this node the stack that the network's profiles say. Of endpoints
// it believes the agent, of profiles the store.
type stacker struct {
	planes plane.Stacks
	kernel kernelTCP
	self   string
	faults *faults
	log    *slog.Logger
	away   *away         // is told whose TCP is the kernel's
	asked  chan struct{} // says that what planes serve has changed
	again  atomic.Bool   // so does this, to follow

	change  sync.Mutex // serialises changes; guards what follows
	own     map[model.EndpointID]model.Endpoint
	chosen  map[model.EndpointID]stack.Choice // what planes were told last
	seen    store.State                       // Stacks, Congestion, Namespaces and StackFaults of the last one
	behind  []string
	objects []api.CongestionControl
	news    chan struct{} // closed, and replaced, when a state has been applied
	failed  error         // of the last state
	settled bool          // nothing is left to try of it
}

func newStacker(self string, away *away, faults *faults, log *slog.Logger) *stacker {
	return &stacker{self: self, away: away, faults: faults, log: log, asked: make(chan struct{}, 1), own: make(map[model.EndpointID]model.Endpoint),
		chosen: make(map[model.EndpointID]stack.Choice), news: make(chan struct{})}
}

// ask has what planes serve looked at again, soon. Any goroutine may call it.
func (s *stacker) ask() {
	s.again.Store(true)
	select {
	case s.asked <- struct{}{}:
	default: // it is asked for
	}
}

// know notes an endpoint of this node, which the next state of the store gives its stack.
func (s *stacker) know(e model.Endpoint) {
	s.change.Lock()
	defer s.change.Unlock()
	s.own[e.ID] = e
}

// hasProfile reports whether the last state gave an endpoint a profile.
func (s *stacker) hasProfile(id model.EndpointID) bool {
	s.change.Lock()
	defer s.change.Unlock()
	c, told := s.chosen[id]
	return !told || c.Profile != nil
}

// moduleOf gives the stack that runs an endpoint's TCP, "" if the kernel does.
func (s *stacker) moduleOf(id model.EndpointID) string {
	s.change.Lock()
	defer s.change.Unlock()
	c, told := s.chosen[id]
	if !told || c.Stack.IsKernels() {
		return ""
	}
	return cmp.Or(string(c.Stack), "none")
}

// set gives an endpoint that is new or has changed its stack.
func (s *stacker) set(e model.Endpoint) error {
	s.change.Lock()
	defer s.change.Unlock()
	s.own[e.ID] = e
	err := s.apply(e)
	if err == nil {
		err = s.kernel.FollowStacks()
	}
	s.settled = s.settled && err == nil && s.chosen[e.ID].Fault == nil
	return err
}

// remove forgets an endpoint.
func (s *stacker) remove(e model.Endpoint) error {
	s.change.Lock()
	defer s.change.Unlock()
	delete(s.own, e.ID)
	delete(s.chosen, e.ID)
	s.away.forget(e.ID)
	s.faults.Clear(api.FaultStack, e.Name)
	return s.planes.SetStack(e, stack.Choice{Stack: stack.Kernel})
}

// follow brings every endpoint to a state of the store. What one endpoint cannot have is a fault of
// its; an error means that a plane could not be told.
func (s *stacker) follow(state store.State) error {
	s.change.Lock()
	defer s.change.Unlock()
	unchanged := same(s.seen.Stacks, state.Stacks) && same(s.seen.Congestion, state.Congestion) && same(s.seen.Namespaces, state.Namespaces)
	s.seen = store.State{Stacks: state.Stacks, Congestion: state.Congestion, Namespaces: state.Namespaces, StackFaults: state.StackFaults}
	s.behind = nil
	for _, n := range state.Nodes {
		if n.ReadsSchema < store.StacksSchema {
			s.behind = append(s.behind, n.Name)
		}
	}
	if again := s.again.Swap(false); s.settled && unchanged && !again {
		return nil // most states are about something else, and endpoints are many
	}
	used := make(map[string]bool)
	for _, p := range state.Stacks {
		if p.Settings.Congestion != "" {
			used[p.Settings.Congestion] = true
		}
	}
	s.objects = s.kernel.SetCongestion(state.Congestion, used)
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(s.own)) {
		errs = append(errs, s.apply(s.own[id]))
	}
	errs = append(errs, s.kernel.FollowStacks())
	// Last: no profile that is in force names them any more.
	stored := make(map[string]bool)
	for _, o := range state.Congestion {
		stored[o.Name] = used[o.Name]
	}
	errs = append(errs, s.kernel.KeepCongestion(stored))
	s.failed = errors.Join(errs...)
	s.settled = s.failed == nil && !s.lacking()
	close(s.news)
	s.news = make(chan struct{})
	return s.failed
}

// lacking reports whether something cannot be served that may be later. The caller holds change.
func (s *stacker) lacking() bool {
	for _, c := range s.chosen {
		if c.Fault != nil {
			return true
		}
	}
	return slices.ContainsFunc(s.objects, func(c api.CongestionControl) bool { return c.State == api.CongestionFailed })
}

// apply chooses an endpoint's stack and tells the planes. The caller holds change.
func (s *stacker) apply(e model.Endpoint) error {
	c := stack.Serve(stack.Choose(s.seen.Stacks, e, s.seen.Namespaces), s.planes.ServeStack)
	s.away.setPlain(e.ID, c.Stack.IsKernels() && s.kernel.PlainSockets(e))
	if err := s.planes.SetStack(e, c); err != nil {
		delete(s.chosen, e.ID)
		return fmt.Errorf("endpoint %s: %w", e.Name, err)
	}
	s.chosen[e.ID] = c
	switch {
	case c.Fault == nil:
		s.faults.Clear(api.FaultStack, e.Name)
	case s.faults.Set(api.FaultStack, e.Name, fmt.Errorf("profile %s: %w", c.Profile.Name, c.Fault)):
		s.log.Warn("an endpoint's stack profile cannot be served here", "endpoint", e.Name, "profile", c.Profile.Name, "err", c.Fault, "has", cmp.Or(string(c.Stack), "no TCP"))
	}
	return nil
}

// giveBack stores the profiles and congestion controls that this node knew and a store does not
// have that was lost. It gives their number.
func (s *stacker) giveBack(ctx context.Context, to store.Store, state store.State) (lost int, err error) {
	s.change.Lock()
	seen := s.seen
	s.change.Unlock()
	var edit store.StackEdit
	for _, p := range seen.Stacks {
		if !slices.ContainsFunc(state.Stacks, func(q *stack.Profile) bool { return q.Name == p.Name }) {
			edit.Put = append(edit.Put, p)
		}
	}
	if lost = len(edit.Put); lost > 0 {
		_, err = to.EditStacks(ctx, edit)
	}
	for _, o := range seen.Congestion { // one at a time: they are large
		if !slices.ContainsFunc(state.Congestion, func(p *stack.Object) bool { return p.Name == o.Name }) {
			_, failed := to.EditStacks(ctx, store.StackEdit{PutObjects: []*stack.Object{o}})
			lost, err = lost+1, errors.Join(err, failed)
		}
	}
	return lost, err
}

// report gives what the API shows.
func (s *stacker) report() api.Stacks {
	s.change.Lock()
	defer s.change.Unlock()
	out := api.Stacks{Profiles: s.seen.Stacks, Congestion: slices.Clone(s.objects), Faults: s.seen.StackFaults, Behind: s.behind}
	for id, c := range s.chosen {
		if c.Profile == nil {
			continue
		}
		e := api.EndpointStack{Endpoint: s.own[id].Name, Profile: c.Profile.Name, Stack: c.Stack, Settings: c.Settings.String(),
			Intercepted: s.own[id].Planes.TCP.Intercepted}
		if c.Stack.IsKernels() {
			e.Own = s.kernel.OwnStack(id, c.Settings)
		}
		if c.Fault != nil {
			e.Fault = c.Fault.Error()
		}
		out.Endpoints = append(out.Endpoints, e)
	}
	slices.SortFunc(out.Endpoints, func(a, b api.EndpointStack) int { return cmp.Compare(a.Endpoint, b.Endpoint) })
	return out
}

// await returns when a state has been applied of which holds says so.
func (s *stacker) await(ctx context.Context, holds func(store.State) bool) error {
	for {
		s.change.Lock()
		news, seen, failed := s.news, s.seen, s.failed
		s.change.Unlock()
		if failed == nil && holds(seen) {
			return nil
		}
		select {
		case <-ctx.Done():
			why := "no news from the store"
			if failed != nil {
				why = failed.Error()
			}
			return &api.Error{Code: api.CodeUnavailable, Message: "the store has the change, but it is not in force on this node: " + why, Remedy: "see heddle status"}
		case <-news:
		}
	}
}

// stacks answers what the API asks of stack profiles. It has no state of its own.
type stacks struct{ *host }

// Stacks lists the network's profiles, which of this node's endpoints has which, and its modules. A
// module that says nothing is a fault, and no reason to say nothing of all else.
func (st *stacks) Stacks(ctx context.Context) (api.Stacks, error) {
	out := st.stacker.report()
	var err error
	if out.Modules, err = st.planes.StackModules(ctx); err != nil {
		out.Faults = append(out.Faults, err.Error())
	}
	return out, nil
}

// EditStacks changes profiles in the store, and waits until this node's endpoints have what they
// lead to.
func (st *stacks) EditStacks(ctx context.Context, edit api.StackEdit) ([]api.PolicyOutcome, error) {
	limited, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	change := store.StackEdit{Put: edit.Profiles, Delete: edit.Delete, DeleteObjects: edit.DeleteObjects}
	for i, elf := range edit.Objects {
		name, err := st.stacker.kernel.CheckCongestion(elf)
		if err != nil {
			return nil, &api.Error{Code: api.CodeInvalid, Field: fmt.Sprintf("objects[%d]", i), Message: err.Error()}
		}
		change.PutObjects = append(change.PutObjects, &stack.Object{Name: name, SHA256: stack.Sum(elf), Object: elf})
	}
	made, err := st.store.EditStacks(limited, change)
	if err != nil {
		return nil, stackError(err)
	}
	out := make([]api.PolicyOutcome, len(made))
	for i, o := range made {
		out[i] = api.PolicyOutcome(o)
	}
	return out, st.stacker.await(limited, func(s store.State) bool { return hasStacks(s, change) })
}

// hasStacks reports whether a state has what an edit leads to.
func hasStacks(s store.State, edit store.StackEdit) bool {
	profiles, objects := make(map[string]*stack.Profile), make(map[string]*stack.Object)
	for _, p := range s.Stacks {
		profiles[p.Name] = p
	}
	for _, o := range s.Congestion {
		objects[o.Name] = o
	}
	for _, p := range edit.Put {
		if have := profiles[p.Name]; have == nil || !sameJSON(have, p) {
			return false
		}
	}
	for _, o := range edit.PutObjects {
		if have := objects[o.Name]; have == nil || have.SHA256 != o.SHA256 {
			return false
		}
	}
	return !slices.ContainsFunc(edit.Delete, func(name string) bool { return profiles[name] != nil }) &&
		!slices.ContainsFunc(edit.DeleteObjects, func(name string) bool { return objects[name] != nil })
}

// stackError gives a failed edit its code on the wire.
func stackError(err error) error {
	var inUse *store.StackInUseError
	if errors.As(err, &inUse) {
		return &api.Error{Code: api.CodeConflict, Field: "delete_objects", Message: err.Error()}
	}
	return policyError(err)
}
