package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/dockernet"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
)

// Migration of a stopped container's endpoint to another node, with its address: decision 0030. One transaction of the
// store takes the endpoint from this node and gives its address to the other (model.Move). Before it the endpoint is
// here, after it is not, whatever becomes of the agents; the other node's next endpoint of that name or address takes
// it up.

// Migrate gives endpoint name up for node req.To, or a move that nobody has taken up to that node.
func (a *Agent) Migrate(ctx context.Context, name string, req api.MigrateRequest) (out api.Migration, err error) {
	if err := req.Validate(); err != nil {
		return out, err
	}
	a.change.Lock()
	defer a.change.Unlock()
	e, ok := a.known.named(name)
	if !ok {
		return a.redirect(ctx, name, req.To)
	}
	if err := a.mayMigrate(e, req.To); err != nil {
		return out, err
	}
	step := func(what string, do func() error) {
		if err != nil {
			return
		}
		began := time.Now()
		if err = do(); err == nil {
			out.Steps = append(out.Steps, api.MigrationStep{Name: what, Took: time.Since(began)})
		}
	}
	// While this node still speaks for the address, so that peers see a reset.
	step(api.StepCut, func() error { return a.cutLeaving(e) })
	step(api.StepStore, func() error {
		// Out of the record first: an endpoint that it has and the store has not would come back.
		a.saveRecord(e.ID)
		out.Move.Move, err = a.giveUp(ctx, e, req.To)
		if err != nil {
			a.saveRecord(0) // if the store did it all the same, letGo will find out
		}
		return err
	})
	step(api.StepDetach, func() error { return a.takeLeaving(e) })
	if err != nil {
		return out, err
	}
	out.Move.Waiting = true
	a.log.Info("endpoint migrates", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "to", req.To)
	return out, nil
}

// giveUp has the store take e from this node and give its address to node to.
func (a *Agent) giveUp(ctx context.Context, e model.Endpoint, to string) (model.Move, error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	m, err := a.store.GiveUpEndpoint(ctx, e, to)
	return m, moveError(err)
}

// mayMigrate says why e cannot go to node to.
func (a *Agent) mayMigrate(e model.Endpoint, to string) error {
	conflict := func(field, message, remedy string) error {
		return &api.Error{Code: api.CodeConflict, Field: field, Message: message, Remedy: remedy}
	}
	if to == a.self.Name {
		return conflict("to", fmt.Sprintf("endpoint %s is on node %s already", e.Name, to), "name another node")
	}
	if e.Carried != nil {
		return conflict("name", fmt.Sprintf("the address of %s is another network's", e.Name), "migrate it with the plugin that carries it")
	}
	if dockernet.Owns(e.Name) {
		return conflict("name", fmt.Sprintf("%s is Docker's, which gives out the addresses of each node by itself", e.Name),
			"docker network disconnect, and connect it on the other node, where it gets another address")
	}
	state, _ := a.view.last()
	if !knowsNode(state, to) {
		return unknownNode(to, state.Nodes)
	}
	if slices.ContainsFunc(state.Endpoints.Of(to), func(x model.Endpoint) bool { return x.Name == e.Name }) {
		return conflict("name", fmt.Sprintf("node %s has an endpoint %s already", to, e.Name), "delete that one first, or choose another node")
	}
	pids, err := netcfg.Processes(e.NetnsPath)
	if err != nil {
		return fmt.Errorf("look for processes of endpoint %s: %w", e.Name, err)
	}
	if len(pids) > 0 {
		return conflict("name", fmt.Sprintf("endpoint %s is in use: %d processes are in its network namespace, one of them %d", e.Name, len(pids), pids[0]),
			"stop its container first; endpoints of running containers are not migrated")
	}
	return nil
}

// cutLeaving ends what sockets of e there still are.
func (a *Agent) cutLeaving(e model.Endpoint) error {
	if !model.ProtectMigrated.On() {
		return nil
	}
	cut, err := a.planes.CutLeaving(e)
	if cut > 0 {
		a.log.Info("connections of an endpoint that migrates ended", "endpoint", e.Name, "connections", cut)
	}
	if err != nil {
		// Peers learn it when they send, or by keepalive.
		a.log.Warn("connections of an endpoint that migrates may be alive", "endpoint", e.Name, "err", err)
	}
	return nil
}

// takeLeaving detaches e, which the store has taken from this node already.
func (a *Agent) takeLeaving(e model.Endpoint) error {
	err := a.takeAway(e, func(context.Context) error { return nil })
	// Who was handed sockets of e could connect until the programs forgot it.
	return errors.Join(err, a.cutLeaving(e))
}

// redirect gives a move of an endpoint called name, which nobody has taken up, to node to. It is no error if that has
// been done. The caller holds change.
func (a *Agent) redirect(ctx context.Context, name, to string) (out api.Migration, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	moves, err := a.store.Moves(ctx)
	if err != nil {
		return out, storeError(err)
	}
	var found *model.Move
	for _, m := range moves {
		if m.Name == name && (m.Node == a.self.Name || m.From == a.self.Name) && (found == nil || m.Since.After(found.Since)) {
			found = &m
		}
	}
	if found == nil {
		return out, api.ErrNotFound
	}
	began := time.Now()
	m := *found
	if m.Node != to {
		if m, err = a.store.RedirectMove(ctx, found.Addr, to); err != nil {
			return out, moveError(err)
		}
		out.Steps = []api.MigrationStep{{Name: api.StepRedirect, Took: time.Since(began)}}
		a.log.Info("migrated endpoint that nobody has taken up goes elsewhere", "endpoint", name, "addr", m.Addr, "to", to)
	}
	state, _ := a.view.last()
	out.Move = moveOf(m, state)
	return out, nil
}

// moveOf says whether a move waits, as the last state has it.
func moveOf(m model.Move, state store.State) api.Move {
	taken := slices.ContainsFunc(state.Endpoints.Of(m.Node), func(e model.Endpoint) bool { return e.Addr4() == m.Addr })
	return api.Move{Move: m, Waiting: !taken}
}

// Moves lists the addresses that have moved, and which of them wait as last seen.
func (a *Agent) Moves(ctx context.Context) ([]api.Move, error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	moves, err := a.store.Moves(ctx)
	if err != nil {
		return nil, storeError(err)
	}
	state, _ := a.view.last()
	out := make([]api.Move, len(moves))
	for i, m := range moves {
		out[i] = moveOf(m, state)
	}
	return out, nil
}

// moveFor finds the move to this node that a request for an endpoint takes up: that of its address or, if it names none,
// of its name. It asks the store, which may know of moves that have not come here yet, and keeps what has moved away
// from being given out. The caller holds change.
func (a *Agent) moveFor(ctx context.Context, req api.EndpointRequest) (*model.Move, error) {
	moves, err := a.store.Moves(ctx)
	if err != nil {
		return nil, storeError(err)
	}
	var away []netip.Addr
	var found *model.Move
	for _, m := range moves {
		switch {
		case m.Node != a.self.Name:
			away = append(away, m.Addr)
		case a.known.holds(m.Addr):
		case req.Addr.IsValid() && slices.Contains(model.OverlayAddrs(a.prefix6, m.Addr), req.Addr), !req.Addr.IsValid() && m.Name == req.Name:
			found = &m
		default:
			away = append(away, m.Addr) // it waits for another
		}
	}
	a.leases.SetAway(away)
	return found, nil
}

// takeUp leases the address of a move, and gives e what comes with it: labels and limits, unless e has labels of its own.
func (a *Agent) takeUp(e *model.Endpoint, m model.Move) (endpoint.Lease, error) {
	lease, err := a.leases.Adopt(e.Name, m.Addr)
	if err != nil {
		return lease, err
	}
	if len(e.Labels) == 0 {
		e.Labels = m.Labels
	}
	e.Limits = m.Limits
	a.known.setMoved(m)
	return lease, nil
}

// takeBack undoes what create has done for e. What had migrated here goes on waiting.
func (a *Agent) takeBack(e model.Endpoint) error {
	if _, migrated := a.known.moveOf(e.Addr4()); !migrated {
		return a.detach(e)
	}
	return a.takeAway(e, func(ctx context.Context) error {
		_, err := a.store.GiveUpEndpoint(ctx, e, a.self.Name)
		var never *store.UnknownMoveError
		if errors.As(err, &never) {
			return nil // it had not come so far
		}
		return err
	})
}

// letGo detaches the endpoints of this node whose addresses a state says to be another's: a migration whose outcome the
// agent did not learn. The store is asked again, since a state may be older than an endpoint.
func (a *Agent) letGo(ctx context.Context, state store.State) error {
	gone := a.movedAway(state.Moves)
	if len(gone) == 0 {
		return nil
	}
	a.change.Lock()
	defer a.change.Unlock()
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	moves, err := a.store.Moves(ctx)
	if err != nil {
		return fmt.Errorf("endpoints that have migrated: %w", err)
	}
	var errs []error
	for _, e := range a.movedAway(moves) {
		a.log.Warn("endpoint has migrated to another node", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs)
		errs = append(errs, a.cutLeaving(e), a.takeLeaving(e))
	}
	return errors.Join(errs...)
}

// leaveMoved is letGo for an agent that starts: it lets go of the endpoints of the one before whose addresses the store has
// given to other nodes meanwhile, so that nothing of theirs goes on here in the name of what is elsewhere.
func (a *Agent) leaveMoved(state store.State) {
	to := make(map[netip.Addr]string, len(state.Moves))
	for _, m := range state.Moves {
		to[m.Addr] = m.Node
	}
	for _, e := range a.record.lost(state) {
		node := to[e.Addr4()]
		if e.Carried != nil || node == "" || node == a.self.Name {
			continue
		}
		a.log.Warn("endpoint has migrated to another node while no agent ran", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "to", node)
		if err := errors.Join(a.planes.Detach(e), a.cutLeaving(e), netcfg.DelEndpoint(e.ID, e.Addrs)); err != nil {
			a.log.Error("what is left of an endpoint that has migrated stays", "endpoint", e.Name, "err", err)
		}
		a.record.Endpoints = slices.DeleteFunc(a.record.Endpoints, func(x model.Endpoint) bool { return x.ID == e.ID })
	}
}

// movedAway gives the endpoints of this node whose addresses are another node's.
func (a *Agent) movedAway(moves []model.Move) (out []model.Endpoint) {
	if len(moves) == 0 {
		return nil
	}
	to := make(map[netip.Addr]string, len(moves))
	for _, m := range moves {
		to[m.Addr] = m.Node
	}
	for _, e := range a.known.all() {
		if node := to[e.Addr4()]; e.Carried == nil && node != "" && node != a.self.Name {
			out = append(out, e)
		}
	}
	return out
}

// dropWaiting ends a move to this node of an endpoint called name that nobody has taken up: its address goes home.
// ErrNotFound if there is none.
func (a *Agent) dropWaiting(ctx context.Context, name string) error {
	state, _ := a.view.last()
	for _, m := range state.Moves {
		if m.Node != a.self.Name || m.Name != name || a.known.holds(m.Addr) {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, storeAnswers)
		defer cancel()
		if err := a.store.DropMove(ctx, m.Addr, a.self.Name); err != nil {
			return moveError(err)
		}
		a.log.Info("migrated endpoint that nobody has taken up is deleted", "endpoint", name, "addr", m.Addr)
		return nil
	}
	return api.ErrNotFound
}

// unknownNode names some of the nodes that there are.
func unknownNode(name string, nodes []model.Node) error {
	const most = 20
	remedy := "name one that is:"
	for i, n := range nodes {
		if i == most {
			remedy += " ..."
			break
		}
		remedy += " " + n.Name
	}
	return &api.Error{Code: api.CodeInvalid, Field: "to", Message: fmt.Sprintf("node %s is not in the network", name), Remedy: remedy}
}

// moveError gives a failure to change moves its code on the wire.
func moveError(err error) error {
	var (
		unknown *store.UnknownNodeError
		inUse   *store.MoveInUseError
		none    *store.UnknownMoveError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &unknown):
		return &api.Error{Code: api.CodeInvalid, Field: "to", Message: fmt.Sprintf("node %s is not in the network", unknown.Name)}
	case errors.As(err, &inUse):
		return &api.Error{Code: api.CodeConflict, Field: "name", Message: fmt.Sprintf("%s is attached on node %s", inUse.Move.Name, inUse.Move.Node),
			Remedy: "stop its container and run heddle migrate on that node"}
	case errors.As(err, &none):
		return api.ErrNotFound
	}
	return storeError(err)
}
