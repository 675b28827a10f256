package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/dockernet"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
)

// Migration of a stopped container's endpoint to another node, with its address: decision 0030. One
// transaction of the store takes the endpoint from this node and gives its address to the other
// (model.Move). Before it the endpoint is here, after it is not, whatever becomes of the agents;
// the other node's next endpoint of that name or address takes it up.

// migration gives endpoints to other nodes. It has no state of its own: what moves is in the store.
// It holds endpoints.change.
type migration struct {
	*host
	endpoints *endpoints
}

// Migrate gives endpoint name up for node req.To, or a move that nobody has taken up to that node.
func (mg *migration) Migrate(ctx context.Context, name string, req api.MigrateRequest) (out api.Migration, err error) {
	if err := req.Validate(); err != nil {
		return out, err
	}
	mg.endpoints.change.Lock()
	defer mg.endpoints.change.Unlock()
	e, ok := mg.known.named(name)
	if !ok {
		return mg.redirect(ctx, name, req.To)
	}
	if err := mg.mayMigrate(e, req.To); err != nil {
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
	step(api.StepCut, func() error { return mg.cutLeaving(e) })
	step(api.StepStore, func() error {
		// Out of the record first: an endpoint that it has and the store has not would come back.
		mg.dropEndpoint(e.ID)
		out.Move.Move, err = mg.giveUp(ctx, e, req.To)
		if err != nil {
			mg.saveEndpoint(e.ID) // if the store did it all the same, letGo will find out
		}
		return err
	})
	step(api.StepDetach, func() error { return mg.takeLeaving(e) })
	if err != nil {
		return out, err
	}
	out.Move.Waiting = true
	mg.log.Info("endpoint migrates", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "to", req.To)
	return out, nil
}

// giveUp has the store take e from this node and give its address to node to.
func (mg *migration) giveUp(ctx context.Context, e model.Endpoint, to string) (model.Move, error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	m, err := mg.store.GiveUpEndpoint(ctx, e, to)
	return m, moveError(err)
}

// mayMigrate says why e cannot go to node to.
func (mg *migration) mayMigrate(e model.Endpoint, to string) error {
	conflict := func(field, message, remedy string) error {
		return &api.Error{Code: api.CodeConflict, Field: field, Message: message, Remedy: remedy}
	}
	if to == mg.self.Name {
		return conflict("to", fmt.Sprintf("endpoint %s is on node %s already", e.Name, to), "name another node")
	}
	if e.Adopted != nil {
		return conflict("name", fmt.Sprintf("the address of %s is another network's", e.Name), "migrate it with the plugin that carries it")
	}
	if dockernet.Owns(e.Name) {
		return conflict("name", fmt.Sprintf("%s is Docker's, which gives out the addresses of each node by itself", e.Name),
			"docker network disconnect, and connect it on the other node, where it gets another address")
	}
	state, _ := mg.view.last()
	if !knowsNode(state, to) {
		return unknownNode(to, state.Nodes)
	}
	if state.Endpoints.Groups(to).Have(func(x *model.Endpoint) bool { return x.Name == e.Name }) {
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
func (mg *migration) cutLeaving(e model.Endpoint) error {
	if !model.ProtectMigrated.On() {
		return nil
	}
	cut, err := mg.planes.CutLeaving(e)
	if cut > 0 {
		mg.log.Info("connections of an endpoint that migrates ended", "endpoint", e.Name, "connections", cut)
	}
	if err != nil {
		// Peers learn it when they send, or by keepalive.
		mg.log.Warn("connections of an endpoint that migrates may be alive", "endpoint", e.Name, "err", err)
	}
	return nil
}

// takeLeaving detaches e, which the store has taken from this node already.
func (mg *migration) takeLeaving(e model.Endpoint) error {
	err := mg.endpoints.takeAway(e, mg.endpoints.deletionAnswers(), func(context.Context) error { return nil })
	// Who was handed sockets of e could connect until the programs forgot it.
	return errors.Join(err, mg.cutLeaving(e))
}

// redirect gives a move of an endpoint called name, which nobody has taken up, to node to. It is no
// error if that has been done. The caller holds change.
func (mg *migration) redirect(ctx context.Context, name, to string) (out api.Migration, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	moves, err := mg.store.Moves(ctx)
	if err != nil {
		return out, storeError(err)
	}
	var found *model.Move
	for _, m := range moves {
		if m.Name == name && (m.Node == mg.self.Name || m.From == mg.self.Name) && (found == nil || m.Since.After(found.Since)) {
			found = &m
		}
	}
	if found == nil {
		return out, api.ErrNotFound
	}
	began := time.Now()
	m := *found
	if m.Node != to {
		if m, err = mg.store.RedirectMove(ctx, found.Addr, to); err != nil {
			return out, moveError(err)
		}
		out.Steps = []api.MigrationStep{{Name: api.StepRedirect, Took: time.Since(began)}}
		mg.log.Info("migrated endpoint that nobody has taken up goes elsewhere", "endpoint", name, "addr", m.Addr, "to", to)
	}
	state, _ := mg.view.last()
	out.Move = moveOf(m, state)
	return out, nil
}

// moveOf says whether a move waits, as the last state has it.
func moveOf(m model.Move, state store.State) api.Move {
	taken := state.Endpoints.Groups(m.Node).Have(func(e *model.Endpoint) bool { return e.Addr4() == m.Addr })
	return api.Move{Move: m, Waiting: !taken}
}

// Moves lists the addresses that have moved, and which of them wait as last seen.
func (mg *migration) Moves(ctx context.Context) ([]api.Move, error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	moves, err := mg.store.Moves(ctx)
	if err != nil {
		return nil, storeError(err)
	}
	state, _ := mg.view.last()
	out := make([]api.Move, len(moves))
	for i, m := range moves {
		out[i] = moveOf(m, state)
	}
	return out, nil
}

// letGo detaches the endpoints of this node whose addresses a state says to be another's: a
// migration whose outcome the agent did not learn. The store is asked again, since a state may be
// older than an endpoint.
func (mg *migration) letGo(ctx context.Context, state store.State) error {
	gone := mg.movedAway(state.Moves)
	if len(gone) == 0 {
		return nil
	}
	mg.endpoints.change.Lock()
	defer mg.endpoints.change.Unlock()
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	moves, err := mg.store.Moves(ctx)
	if err != nil {
		return fmt.Errorf("endpoints that have migrated: %w", err)
	}
	var errs []error
	for _, e := range mg.movedAway(moves) {
		mg.log.Warn("endpoint has migrated to another node", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs)
		errs = append(errs, mg.cutLeaving(e), mg.takeLeaving(e))
	}
	return errors.Join(errs...)
}

// movedAway gives the endpoints of this node whose addresses are another node's.
func (mg *migration) movedAway(moves []model.Move) (out []model.Endpoint) {
	if len(moves) == 0 {
		return nil
	}
	to := make(map[netip.Addr]string, len(moves))
	for _, m := range moves {
		to[m.Addr] = m.Node
	}
	for addr, node := range to {
		id, here := mg.known.withAddr(addr)
		if e, ok := mg.known.withID(id); here && ok && e.Adopted == nil && node != mg.self.Name {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b model.Endpoint) int { return cmp.Compare(a.ID, b.ID) })
	return out
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
