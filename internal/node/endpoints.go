package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
)

// endpoints makes and removes the endpoints of this node.
type endpoints struct {
	*host
	attachments *attachments

	// change serialises what alters endpoints, kernel state included. It guards the rest, and what
	// other parts say of themselves.
	change turn
	leases *endpoint.Leases
	// halfDone are endpoints, by name, that could not be made and not be undone either, or that are
	// deleted and the store has yet to hear of it. Their ids and addresses are not given out.
	halfDone map[string]halfDone
	silent   silent
}

// CreateEndpoint attaches a container: leases an address, tells the store, makes the devices and
// tells the programs. If a step fails the earlier ones are undone.
func (es *endpoints) CreateEndpoint(ctx context.Context, req api.EndpointRequest) (model.Endpoint, error) {
	asked := time.Now()
	if err := es.change.lockFor(ctx); err != nil {
		return model.Endpoint{}, err
	}
	defer es.change.Unlock()
	if have, ok := es.known.named(req.Name); ok {
		if have.NetnsPath != req.NetnsPath || have.Planes.TCP != req.Planes().TCP || req.Verbs.Wanted && have.Planes.Verbs.VerbsEndpoint != req.Verbs || have.ContainerDevice() != deviceOf(req) ||
			(have.Adopted != nil) != (req.Adopted != nil) || len(req.Ports) > 0 && !published(have, req.Ports) || req.Addr.IsValid() && !slices.Contains(have.Addrs, req.Addr) {
			return have, &api.Error{Code: api.CodeConflict, Field: "name", Message: fmt.Sprintf("endpoint %s exists with other settings", req.Name),
				Remedy: "delete it first: heddle endpoints delete " + req.Name}
		}
		// Those of CNI's may have been changed since, as heddle-kube does.
		if req.CNI == nil && !hasLabels(have, req.Labels) {
			return have, &api.Error{Code: api.CodeConflict, Field: "labels", Message: fmt.Sprintf("endpoint %s exists with other labels", req.Name),
				Remedy: "change them: heddle endpoints label " + req.Name + " KEY=VALUE... KEY-..."}
		}
		// The namespace may have been made anew under the same path.
		have, err := es.renew(ctx, have)
		if err != nil {
			return have, err
		}
		return have, es.attachments.attach(have)
	}
	if err := es.attachments.checkNetns(req.NetnsPath); err != nil {
		return model.Endpoint{}, err
	}
	if err := es.planes.Accepts(req.Planes()); err != nil {
		return model.Endpoint{}, err
	}
	if err := es.storeIsThere(req.Name, asked); err != nil {
		return model.Endpoint{}, err
	}
	return es.create(ctx, req, joining{
		steps: func(e model.Endpoint) []step { return es.attachments.attachSteps(e, new(netcfg.EndpointDevice)) },
		ahead: es.attachments.makeAhead, drop: es.attachments.dropAhead,
	})
}

// renew notes which network namespace is at the path of an endpoint that is asked for again. The
// caller holds change.
func (es *endpoints) renew(ctx context.Context, e model.Endpoint) (model.Endpoint, error) {
	now, err := identify(e.NetnsPath)
	if err != nil || now == e.Netns {
		return e, err
	}
	e.Netns = now
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := es.store.PutEndpoint(ctx, e); err != nil {
		return e, storeError(err)
	}
	es.known.add(e)
	es.saveEndpoint(e.ID)
	return e, nil
}

// joining is how a new endpoint gets its network.
type joining struct {
	// steps are those of attachSteps or awaitSteps.
	steps func(model.Endpoint) []step
	// ahead begins what can be done while the store is asked for the endpoint's address, and gives
	// what waits for it. drop undoes it, and so does the undo of steps. nil: nothing can.
	ahead func(model.Endpoint) (wait func())
	drop  func(model.Endpoint) error
}

// create leases an address, takes the steps of an endpoint, and lists it. If one fails all are
// undone. The caller holds change, and has asked storeIsThere.
func (es *endpoints) create(ctx context.Context, req api.EndpointRequest, join joining) (model.Endpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	e := model.Endpoint{
		Name: req.Name, Node: es.self.Name, Planes: req.Planes(),
		NetnsPath: req.NetnsPath, Device: req.Device, Adopted: req.Adopted, CNI: req.CNI, Labels: req.Labels, Created: time.Now().UTC(),
	}
	if !req.Limits.IsZero() {
		e.Limits = &req.Limits
	}
	var err error
	if e.Netns, err = identify(e.NetnsPath); err != nil {
		return model.Endpoint{}, err
	}
	if e.Ports, err = es.choosePorts(e, req.Ports); err != nil {
		return model.Endpoint{}, err
	}
	if err := es.leaseAndDo(ctx, &e, req, join); err != nil {
		return model.Endpoint{}, err
	}
	es.known.add(e)
	es.saveEndpoint(e.ID)
	es.log.Info("endpoint attached", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "intercepted", e.Planes.TCP.Intercepted)
	return e, nil
}

// leaseAndDo gives e an id and addresses, and takes its steps: by the moves that have come here if
// the store says that there are no others, which it is asked for otherwise.
func (es *endpoints) leaseAndDo(ctx context.Context, e *model.Endpoint, req api.EndpointRequest, join joining) error {
	put := func() error { return storeError(es.store.PutEndpoint(ctx, *e)) }
	if req.Adopted != nil {
		if err := es.leaseFor(e, req, nil); err != nil {
			return err
		}
		return es.doAll(ctx, *e, join.steps, put)
	}
	state, _ := es.view.last()
	if es.moveFor(req, state.Moves) == nil && es.leaseFor(e, req, nil) == nil {
		told, err := es.tellNew(ctx, *e, state.Revision, join.ahead)
		if told || err != nil {
			return es.doAll(ctx, *e, join.steps, func() error { return err }) // which the store may have after an error, too
		}
		if join.ahead != nil {
			if err := join.drop(*e); err != nil { // all else goes back, too
				return es.doAll(ctx, *e, join.steps, func() error { return fmt.Errorf("device made ahead: %w", err) })
			}
		}
		es.leases.Release(e.ID)
	}
	moves, err := es.store.Moves(ctx)
	if err != nil {
		return storeError(err)
	}
	if err := es.leaseFor(e, req, es.moveFor(req, moves)); err != nil {
		return err
	}
	return es.doAll(ctx, *e, join.steps, put)
}

// doAll takes the steps of an endpoint that has its lease, or none of them.
func (es *endpoints) doAll(ctx context.Context, e model.Endpoint, attach func(model.Endpoint) []step, put func() error) error {
	err := doSteps(es.steps(ctx, e, attach(e), put, nil))
	if err == nil {
		return nil
	}
	if isAway(err) {
		es.halfDone[e.Name] = halfDone{Endpoint: e} // the undo is not to wait as long once more
	}
	if undo := es.takeBack(e, es.deletionAnswers()); undo != nil {
		es.halfDone[e.Name] = halfDone{Endpoint: e} // until the store is back: it may have it
		err = errors.Join(err, undo)
	}
	return err
}

// steps are those that make an endpoint that has its lease: they are done in this order, and undone
// backwards, so that it never has a network without what holds it: policy and limits. What attach
// has is that of attachSteps or awaitSteps, put what is said to the store,
// and tell what is when the endpoint goes. The caller holds change.
func (es *endpoints) steps(ctx context.Context, e model.Endpoint, attach []step, put func() error, tell func(context.Context) error) []step {
	return slices.Concat([]step{
		{"note the id", func() error { return es.planes.SetLastID(e.ID) }, nil},
		{"tell the store", put, func() error { return tell(ctx) }},
		{
			// Its rules before its network: nothing it opens may be older than they.
			"policy", func() error { return es.enforcer.set(e) }, func() error { return es.enforcer.remove(e.ID) },
		},
		{"stack", func() error { return es.stacker.set(e) }, func() error { return es.stacker.remove(e) }},
		{"limits", func() error {
			if e.Limits == nil {
				return nil
			}
			if err := es.restoreLimits(); err != nil {
				return err
			}
			return es.applyLimits(e)
		}, func() error { return es.liftLimits(e) }},
	}, attach, es.portSteps(e))
}

// leaseFor gives e an id and addresses: those of a move to this node, if e takes it up.
func (es *endpoints) leaseFor(e *model.Endpoint, req api.EndpointRequest, move *model.Move) error {
	lease, err := es.leaseAgain(req.Addr, func() (endpoint.Lease, error) {
		if move == nil {
			return es.lease(req)
		}
		return es.takeUp(e, *move)
	})
	if err != nil {
		return leaseError(err)
	}
	e.ID, e.Addrs = lease.ID, lease.Addrs
	return nil
}

// DeleteEndpoint detaches a container. A store that does not answer is told later, by this agent or
// the next one: engines must get rid of containers.
func (es *endpoints) DeleteEndpoint(ctx context.Context, name string) error {
	es.change.Lock()
	defer es.change.Unlock()
	e, ok := es.known.named(name)
	if h, half := es.halfDone[name]; !ok && half {
		e, ok = h.Endpoint, true
	}
	if !ok {
		return es.dropWaiting(ctx, name)
	}
	err := es.detach(e, es.deletionAnswers())
	var untold *untoldError
	if errors.As(err, &untold) {
		return es.tellLater(e, untold)
	}
	if err != nil {
		return unlessAway(err)
	}
	es.log.Info("endpoint detached", "endpoint", e.Name, "id", e.ID)
	return nil
}

// EndpointDevice looks up how an endpoint is attached now.
func (es *endpoints) EndpointDevice(_ context.Context, name string) (api.EndpointDevice, error) {
	es.change.Lock() // an endpoint that is being made or removed has half of its devices
	defer es.change.Unlock()
	e, ok := es.known.named(name)
	if !ok {
		return api.EndpointDevice{}, api.ErrNotFound
	}
	inspect := netcfg.InspectEndpoint
	if e.Adopted != nil {
		inspect = netcfg.InspectAdopted
	}
	st, err := inspect(es.attachments.deviceConfig(e))
	if err != nil {
		return api.EndpointDevice{}, err
	}
	d := api.EndpointDevice{
		Name: e.ContainerDevice(), MAC: st.ContainerMAC, NodeName: st.Name, NodeMAC: st.HostMAC, MTU: st.MTU, Problems: st.Problems,
		Gateways: []netip.Addr{},
	}
	for _, gw := range es.devices.Gateways {
		if e.Adopted == nil && (gw.Is4() || e.Addr6().IsValid()) {
			d.Gateways = append(d.Gateways, gw)
		}
	}
	return d, nil
}

// detach undoes everything CreateEndpoint does; what was not done is no error. answers bounds what
// the store is asked.
func (es *endpoints) detach(e model.Endpoint, answers time.Duration) error {
	return es.takeAway(e, answers, func(ctx context.Context) error { return es.store.DeleteEndpoint(ctx, e.Node, e.ID) })
}

// takeAway is detach, tell being what is said to the store; an *untoldError if that is all that is
// missing. The address goes back last, when nothing answers to it any more.
func (es *endpoints) takeAway(e model.Endpoint, answers time.Duration, tell func(context.Context) error) error {
	es.dropEndpoint(e.ID)
	ctx, cancel := context.WithTimeout(context.Background(), answers)
	defer cancel()
	var away error
	err := undoSteps(es.steps(ctx, e, es.attachments.attachSteps(e, nil), nil, func(ctx context.Context) error {
		err := tell(ctx)
		if isAway(err) {
			away = fmt.Errorf("tell the store: %w", err)
			return nil
		}
		return err
	}))
	if err == nil && away != nil {
		err = &untoldError{away}
	} else {
		err = errors.Join(err, away)
	}
	if err != nil {
		return fmt.Errorf("detach endpoint %s: %w", e.Name, err)
	}
	es.leases.Release(e.ID)
	es.known.remove(e)
	es.faults.ClearEndpoint(e.Name)
	if es.halfDone[e.Name].deleted {
		err = api.DropDeletion(es.cfg.APISocket, e.Name) // the next agent drops it, too
	}
	if err != nil {
		es.log.Error("note of a deleted endpoint stays", "endpoint", e.Name, "err", err)
	}
	delete(es.halfDone, e.Name)
	return nil
}

// hasLabels reports whether an endpoint has labels, which may be some of its.
func hasLabels(e model.Endpoint, labels map[string]string) bool {
	for k, v := range labels {
		if has, ok := e.Labels[k]; !ok || has != v {
			return false
		}
	}
	return true
}

// deviceOf gives the name of the device that a request asks for.
func deviceOf(req api.EndpointRequest) string {
	return model.Endpoint{Device: req.Device}.ContainerDevice()
}

// leaseError gives a lease's failure its code on the wire.
func leaseError(err error) error {
	if isAway(err) {
		return unlessAway(err)
	}
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

// unlessAway gives an error its code on the wire if it comes of a store that does not answer, or is
// full, or of an agent that ends: what was asked for can be asked again.
func unlessAway(err error) error {
	switch {
	case errors.Is(err, etcd.ErrFull):
		return &api.Error{Code: api.CodeUnavailable, Message: err.Error()}
	case isAway(err):
		return &api.Error{Code: api.CodeUnavailable, Message: err.Error(), Remedy: "check that etcd is up and try again"}
	}
	return err
}

// isAway reports whether an error comes of a store that does not answer, or of an agent that ends.
func isAway(err error) bool {
	var unreachable *etcd.UnreachableError
	return errors.As(err, &unreachable) || errors.Is(err, etcd.ErrClosed) || errors.Is(err, context.DeadlineExceeded)
}

// lease gives an endpoint its id, and an address unless it has one.
func (es *endpoints) lease(req api.EndpointRequest) (endpoint.Lease, error) {
	if req.Adopted == nil {
		return es.leases.Lease(req.Name, req.Addr)
	}
	for _, p := range append(req.Adopted.Prefixes, netip.PrefixFrom(req.Addr, req.Addr.BitLen())) {
		for _, own := range es.network.Pool {
			if own.Overlaps(p) {
				return endpoint.Lease{}, fmt.Errorf("%w: %s is another network's, but overlaps Heddle's pool %s: give one of them other addresses",
					endpoint.ErrAddr, p, own)
			}
		}
	}
	return es.leases.Adopt(req.Name, req.Addr)
}

// LabelEndpoint changes labels of an endpoint of this node.
func (es *endpoints) LabelEndpoint(ctx context.Context, name string, req api.LabelRequest) (model.Endpoint, error) {
	es.change.Lock()
	defer es.change.Unlock()
	old, ok := es.known.named(name)
	if !ok {
		return old, api.ErrNotFound
	}
	labels := maps.Clone(old.Labels)
	if labels == nil {
		labels = make(map[string]string)
	}
	for _, k := range req.Remove {
		delete(labels, k)
	}
	maps.Copy(labels, req.Set)
	if err := (api.LabelRequest{Set: labels, Remove: []string{""}}).Validate(); err != nil {
		return old, err
	}
	e := old
	e.Labels = labels
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	// The store first: rules that nobody has agreed to would cut connections.
	if err := es.store.PutEndpoint(ctx, e); err != nil {
		return old, storeError(err)
	}
	if err := es.choose(e); err != nil {
		return old, errors.Join(err, es.store.PutEndpoint(ctx, old), es.choose(old))
	}
	es.known.add(e)
	es.saveEndpoint(e.ID)
	return e, nil
}

// choose gives an endpoint the rules and the stack that its labels have.
func (es *endpoints) choose(e model.Endpoint) error {
	policy, stack := es.enforcer.set(e), es.stacker.set(e)
	if policy != nil {
		policy = fmt.Errorf("policy: %w", policy)
	}
	if stack != nil {
		stack = fmt.Errorf("stack: %w", stack)
	}
	return errors.Join(policy, stack)
}

// noteGroups notes which multicast groups the queue pairs of an endpoint are in, for other nodes.
func (es *endpoints) noteGroups(ctx context.Context, id model.EndpointID, groups []netip.Addr) error {
	es.change.Lock()
	defer es.change.Unlock()
	e, ok := es.known.named(es.known.nameOf(id))
	if !ok || slices.Equal(e.Planes.Verbs.Groups, groups) {
		return nil
	}
	e.Planes.Verbs.Groups = groups
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := es.store.PutEndpoint(ctx, e); err != nil {
		return storeError(err)
	}
	es.known.add(e)
	es.saveEndpoint(e.ID)
	return nil
}

// applyLimits brings the planes to the limits of e. The caller holds change.
func (es *endpoints) applyLimits(e model.Endpoint) error {
	return es.planes.SetLimits(e, es.limited(e))
}

// restoreLimits takes over those of an earlier agent if that has failed: what is set beside them
// would take them away. The caller holds change.
func (es *endpoints) restoreLimits() error {
	if !es.faults.Has(api.FaultLimits) {
		return nil
	}
	if err := es.planes.RestoreLimits(es.limited(model.Endpoint{})); err != nil {
		return &api.Error{Code: api.CodeUnavailable, Message: "limits of an earlier agent could not be taken over: " + err.Error(),
			Remedy: "repair that, or try again later"}
	}
	return nil
}

// liftLimits lifts those that e has, for an endpoint that goes. The caller holds change.
func (es *endpoints) liftLimits(e model.Endpoint) error {
	if e.Limits == nil {
		return nil
	}
	e.Limits = nil
	return es.applyLimits(e)
}

// limited lists the endpoints with limits by id, changed in place of what is known of it.
func (es *endpoints) limited(changed model.Endpoint) []model.Endpoint {
	var out []model.Endpoint
	for _, e := range es.known.all() {
		if e.Limits != nil && e.ID != changed.ID {
			out = append(out, e)
		}
	}
	if changed.Limits != nil {
		out = append(out, changed)
	}
	slices.SortFunc(out, func(x, y model.Endpoint) int { return cmp.Compare(x.ID, y.ID) })
	return out
}
