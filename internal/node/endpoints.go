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
	"heddle.dev/heddle/internal/plane/tcp"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
)

// CreateEndpoint attaches a container: leases an address, tells the store, makes the devices and tells
// the programs. If a step fails the earlier ones are undone.
func (a *Agent) CreateEndpoint(ctx context.Context, req api.EndpointRequest) (model.Endpoint, error) {
	a.change.Lock()
	defer a.change.Unlock()
	if have, ok := a.known.named(req.Name); ok {
		if have.NetnsPath != req.NetnsPath || have.Planes != req.Planes() || have.ContainerDevice() != deviceOf(req) ||
			(have.Carried != nil) != (req.Carried != nil) || req.Addr.IsValid() && !slices.Contains(have.Addrs, req.Addr) {
			return have, &api.Error{Code: api.CodeConflict, Field: "name", Message: fmt.Sprintf("endpoint %s exists with other settings", req.Name),
				Remedy: "delete it first: heddle endpoints delete " + req.Name}
		}
		// The namespace may have been made anew under the same path.
		return have, a.attach(have)
	}
	if err := a.checkNetns(req.NetnsPath); err != nil {
		return model.Endpoint{}, err
	}
	return a.create(ctx, req, func(e model.Endpoint) []step { return a.attachSteps(e, new(netcfg.EndpointDevice)) })
}

// create leases an address, takes the steps of an endpoint with attach, and lists it. If a step fails all are undone. The caller
// holds change.
func (a *Agent) create(ctx context.Context, req api.EndpointRequest, attach func(model.Endpoint) []step) (model.Endpoint, error) {
	if e, ok := a.halfDone[req.Name]; ok {
		if err := a.takeBack(e); err != nil {
			return model.Endpoint{}, unlessAway(err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	e := model.Endpoint{
		Name: req.Name, Node: a.self.Name, Planes: req.Planes(),
		NetnsPath: req.NetnsPath, Device: req.Device, Carried: req.Carried, CNI: req.CNI, Labels: req.Labels, Created: time.Now().UTC(),
	}
	if err := a.leaseFor(ctx, &e, req); err != nil {
		return model.Endpoint{}, err
	}
	if err := doSteps(a.steps(ctx, e, attach(e), nil)); err != nil {
		if undo := a.takeBack(e); undo != nil {
			a.halfDone[e.Name] = e // until the store is back: it may have it
			err = errors.Join(err, undo)
		}
		return model.Endpoint{}, err
	}
	a.known.add(e)
	a.saveRecord(0)
	a.log.Info("endpoint attached", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "intercepted", e.Planes.TCP.Intercepted)
	return e, nil
}

// steps are those that make an endpoint that has its lease: they are done in this order, and undone backwards. What attach has is
// that of attachSteps or awaitSteps, tell what is said to the store when the endpoint goes. The caller holds change.
func (a *Agent) steps(ctx context.Context, e model.Endpoint, attach []step, tell func(context.Context) error) []step {
	return slices.Concat([]step{
		{"note the id", func() error { return a.tcp.SetLastID(e.ID) }, nil},
		{"tell the store", func() error { return storeError(a.store.PutEndpoint(ctx, e)) }, func() error { return tell(ctx) }},
		{
			// Its rules before its network: nothing it opens may be older than they.
			"policy", func() error { return a.enforcer.set(e) }, func() error { return a.enforcer.remove(e.ID) },
		},
	}, attach, []step{
		{"limits", func() error {
			if e.Limits == nil {
				return nil
			}
			return a.applyLimits(e)
		}, func() error { return a.liftLimits(e) }},
	})
}

// leaseFor gives e an id and addresses: those of an endpoint that has migrated here, if e takes it up.
func (a *Agent) leaseFor(ctx context.Context, e *model.Endpoint, req api.EndpointRequest) (err error) {
	var move *model.Move
	if req.Carried == nil {
		if move, err = a.moveFor(ctx, req); err != nil {
			return err
		}
	}
	var lease endpoint.Lease
	if move == nil {
		lease, err = a.lease(req)
	} else {
		lease, err = a.takeUp(e, *move)
	}
	if err != nil {
		return leaseError(err)
	}
	e.ID, e.Addrs = lease.ID, lease.Addrs
	return nil
}

// DeleteEndpoint detaches a container.
func (a *Agent) DeleteEndpoint(ctx context.Context, name string) error {
	a.change.Lock()
	defer a.change.Unlock()
	e, ok := a.known.named(name)
	if !ok {
		e, ok = a.halfDone[name]
	}
	if !ok {
		return a.dropWaiting(ctx, name)
	}
	if err := a.detach(e); err != nil {
		return unlessAway(err)
	}
	a.log.Info("endpoint detached", "endpoint", e.Name, "id", e.ID)
	return nil
}

// attachSteps are those that attach an endpoint to its container. They may be repeated.
func (a *Agent) attachSteps(e model.Endpoint, dev *netcfg.EndpointDevice) []step {
	return []step{
		{
			"make devices", func() (err error) {
				*dev, err = a.addDevice(e)
				return err
			}, func() error { return errors.Join(a.leaveDevice(e), netcfg.DelEndpoint(e.ID, e.Addrs)) },
		},
		{"network namespace", func() error { return a.setNetns(e.ID, uint64(dev.Netns)) }, nil},
		{"attach", func() error { return a.planes.Attach(e, *dev) }, func() error {
			a.planes.Forget(e.ID)
			return a.planes.Detach(e)
		}},
	}
}

// attach brings devices and planes to an endpoint that is there. A device that it made goes again if it fails: without programs it
// would let anything through.
func (a *Agent) attach(e model.Endpoint) error {
	var dev netcfg.EndpointDevice
	if err := doSteps(a.attachSteps(e, &dev)); err != nil {
		if dev.Made {
			err = errors.Join(err, netcfg.DelEndpoint(e.ID, e.Addrs))
		}
		return fmt.Errorf("endpoint %s: %w", e.Name, err)
	}
	a.faults.Clear(api.FaultEndpoint, e.Name)
	return nil
}

// deviceConfig says what e's devices are to be.
func (a *Agent) deviceConfig(e model.Endpoint) netcfg.EndpointConfig {
	return netcfg.EndpointConfig{
		ID: e.ID, Name: e.Name, Addrs: e.Addrs, Gateways: a.devices.Gateways, NetnsPath: e.NetnsPath, Device: e.Device,
		Table: tcp.Table, Intercepted: e.Planes.TCP.Intercepted,
		Adopt: dockernet.Owns(e.Name), // Docker has given the container routes
	}
}

// EndpointDevice looks up how an endpoint is attached now.
func (a *Agent) EndpointDevice(_ context.Context, name string) (api.EndpointDevice, error) {
	a.change.Lock() // an endpoint that is being made or removed has half of its devices
	defer a.change.Unlock()
	e, ok := a.known.named(name)
	if !ok {
		return api.EndpointDevice{}, api.ErrNotFound
	}
	inspect := netcfg.InspectEndpoint
	if e.Carried != nil {
		inspect = netcfg.InspectAdopted
	}
	st, err := inspect(a.deviceConfig(e))
	if err != nil {
		return api.EndpointDevice{}, err
	}
	d := api.EndpointDevice{
		Name: e.ContainerDevice(), MAC: st.ContainerMAC, NodeName: st.Name, NodeMAC: st.HostMAC, MTU: st.MTU, Problems: st.Problems,
		Gateways: []netip.Addr{},
	}
	for _, gw := range a.devices.Gateways {
		if e.Carried == nil && (gw.Is4() || e.Addr6().IsValid()) {
			d.Gateways = append(d.Gateways, gw)
		}
	}
	return d, nil
}

// detach undoes everything CreateEndpoint does; what was not done is no error.
func (a *Agent) detach(e model.Endpoint) error {
	return a.takeAway(e, func(ctx context.Context) error { return a.store.DeleteEndpoint(ctx, e.Node, e.ID) })
}

// takeAway is detach, tell being what is said to the store. The address goes back last, when nothing answers to it any more.
func (a *Agent) takeAway(e model.Endpoint, tell func(context.Context) error) error {
	a.saveRecord(e.ID)
	ctx, cancel := context.WithTimeout(context.Background(), storeAnswers)
	defer cancel()
	if err := undoSteps(a.steps(ctx, e, a.attachSteps(e, nil), tell)); err != nil {
		return fmt.Errorf("detach endpoint %s: %w", e.Name, err)
	}
	a.leases.Release(e.ID)
	a.known.remove(e)
	a.faults.ClearEndpoint(e.Name)
	delete(a.halfDone, e.Name)
	return nil
}

// undoHalfDone tries again to undo endpoints that could not be made. It waits for nobody: the next state of the store, or
// whoever asks for the endpoint, tries again, too.
func (a *Agent) undoHalfDone() {
	if !a.change.TryLock() {
		return
	}
	defer a.change.Unlock()
	for _, e := range a.halfDone {
		if err := a.takeBack(e); err != nil {
			a.log.Warn("endpoint that could not be made is not undone; will try again", "endpoint", e.Name, "id", e.ID, "err", err)
		}
	}
}

// restore takes over the endpoints that the store has for this node, an earlier agent's, and those that the
// store has lost. Those whose namespace is gone are removed, and so are devices and map entries of endpoints
// nobody knows. What else is wrong with one endpoint, or with limits, is a fault, and no reason not to start.
func (a *Agent) restore(ctx context.Context) error {
	state, err := firstState(ctx, a.store)
	if err != nil {
		return err
	}
	a.change.Lock()
	defer a.change.Unlock()
	mine := slices.Clone(state.Endpoints.Of(a.self.Name))
	a.leaveMoved(state)
	mine = append(mine, adopt(ctx, a.store, a.record, state, netcfg.CheckNetns, a.log)...)
	if a.leases, err = a.restoreLeases(mine, state.Moves); err != nil {
		return err
	}
	local, err := netcfg.LocalPrefixes()
	if err != nil {
		return err
	}
	for i, e := range mine {
		if mine[i], err = a.refamily(ctx, e); err != nil {
			return err
		}
		a.enforcer.know(mine[i])
	}
	if err := a.enforcer.follow(state, local); err != nil {
		// An earlier agent's tables are in force, and no new endpoint will be attached.
		a.log.Error("policy not applied; will try again", "err", err)
	}
	mine = a.deleteNoted(mine)
	keep, addrs := make(map[model.EndpointID]bool), make(map[netip.Addr]bool)
	for _, e := range mine {
		for _, addr := range e.Addrs {
			addrs[addr] = true
		}
		if a.takeOver(e) {
			keep[e.ID] = true
		}
	}
	a.saveRecord(0)
	if err := a.keepEndpoints(keep); err != nil {
		return err
	}
	if err := errors.Join(a.removeStaleDevices(keep), a.leaveStaleDevices(), netcfg.KeepLocal(addrs)); err != nil {
		return err
	}
	_ = a.planes.RestoreLimits(a.limited(model.Endpoint{})) // what fails is a fault, which repair tries again
	return a.applyTopology(state, local)
}

// deleteNoted deletes the endpoints that were to be deleted while no agent ran, and gives the others. One that cannot be
// deleted is among them, and will be tried again by the next agent.
func (a *Agent) deleteNoted(mine []model.Endpoint) (others []model.Endpoint) {
	notes, done, err := api.Deletions(a.cfg.APISocket)
	if err != nil {
		a.log.Error("endpoints that were deleted while no agent ran may come back: delete them again", "err", err)
		return mine
	}
	for _, e := range mine {
		if at, noted := notes[e.Name]; !noted || at.Before(e.Created) {
			others = append(others, e)
			continue
		}
		if failed := a.detach(e); failed != nil {
			a.log.Error("endpoint that was deleted while no agent ran is still there: delete it again", "endpoint", e.Name, "err", failed)
			others, err = append(others, e), errors.Join(err, failed)
			continue
		}
		a.log.Info("endpoint was deleted while no agent ran", "endpoint", e.Name, "id", e.ID)
	}
	if err == nil {
		err = done()
	}
	if err != nil {
		a.log.Error("notes of deleted endpoints stay", "err", err)
	}
	return others
}

// refamily gives an endpoint of an earlier agent the addresses of the families that the node has now, and
// tells the store if they are others.
func (a *Agent) refamily(ctx context.Context, e model.Endpoint) (model.Endpoint, error) {
	addrs := model.OverlayAddrs(a.prefix6, e.Addr4())
	if slices.Equal(addrs, e.Addrs) {
		return e, nil
	}
	e.Addrs = addrs
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := a.store.PutEndpoint(ctx, e); err != nil {
		return e, fmt.Errorf("endpoint %s: change addresses to %s: %w", e.Name, addrs, err)
	}
	a.log.Info("endpoint has other addresses", "endpoint", e.Name, "addrs", addrs)
	return e, nil
}

// restoreLeases makes the leases of a node that has endpoints. An id is given out only when no socket carries it
// any more: the hooks would take such a socket for the new endpoint's.
func (a *Agent) restoreLeases(mine []model.Endpoint, moves []model.Move) (*endpoint.Leases, error) {
	var here, away []netip.Addr
	for _, m := range append(slices.Clip(a.record.Moves), moves...) {
		if m.Node == a.self.Name {
			here = append(here, m.Addr)
			a.known.setMoved(m)
		} else {
			away = append(away, m.Addr)
		}
	}
	last, err := a.tcp.LastID()
	if err != nil {
		return nil, err
	}
	inUse, err := a.planes.InUse()
	if err != nil {
		return nil, fmt.Errorf("endpoint ids in use: %w", err)
	}
	return endpoint.New(endpoint.Config{
		Node: a.self.Name, Prefixes: a.self.Prefixes, Prefix6: a.prefix6, Endpoints: mine, LastID: last, Moved: here, Away: away,
		Busy: func(id model.EndpointID) bool { return inUse[id] },
	})
}

func (a *Agent) removeStaleDevices(keep map[model.EndpointID]bool) error {
	links, err := netcfg.Endpoints()
	if err != nil {
		return fmt.Errorf("list endpoint devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		if !keep[l.ID] {
			a.log.Warn("removing the device of an endpoint nobody knows; if its container lives it has no network: restart it",
				"device", l.Name, "endpoint_id", l.ID)
			errs = append(errs, netcfg.DelEndpoint(l.ID, nil))
		}
	}
	return errors.Join(errs...)
}

// deviceOf gives the name of the device that a request asks for.
func deviceOf(req api.EndpointRequest) string {
	return model.Endpoint{Device: req.Device}.ContainerDevice()
}

// leaseError gives a lease's failure its code on the wire.
func leaseError(err error) error {
	code, field := api.CodeInvalid, "addr"
	switch {
	case errors.Is(err, endpoint.ErrExhausted):
		code = api.CodeExhausted
	case errors.Is(err, endpoint.ErrNameInUse):
		code, field = api.CodeConflict, "name"
	}
	return &api.Error{Code: code, Field: field, Message: err.Error()}
}

// storeError gives what the store says its code on the wire; nil stays nil.
func storeError(err error) error {
	if err == nil {
		return nil
	}
	var inUse *store.AddrInUseError
	if errors.As(err, &inUse) {
		return &api.Error{Code: api.CodeConflict, Field: "addr", Message: err.Error(), Remedy: "ask for another address or for none"}
	}
	return unlessAway(fmt.Errorf("store: %w", err))
}

// unlessAway gives an error its code on the wire if it comes of a store that does not answer, or of an agent that ends: what was
// asked for can be asked again.
func unlessAway(err error) error {
	var unreachable *etcd.UnreachableError
	if errors.As(err, &unreachable) || errors.Is(err, etcd.ErrClosed) || errors.Is(err, context.DeadlineExceeded) {
		return &api.Error{Code: api.CodeUnavailable, Message: err.Error(), Remedy: "check that etcd is up and try again"}
	}
	return err
}
