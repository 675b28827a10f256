package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
)

// Bounds of the pause before what is at fault is tried again; it doubles from try to try.
const (
	firstRepair = time.Second
	lastRepair  = 30 * time.Second
)

// ProgressEvery is how often Config.Progress is called.
const ProgressEvery = 5 * time.Second

// defaultCompareMaps is how often what planes have is compared with the endpoints.
const defaultCompareMaps = time.Minute

// restorer takes over what an earlier agent left, tries again what went wrong with that, and
// removes what belongs to nobody. It holds endpoints.change.
type restorer struct {
	*host
	attachments *attachments
	endpoints   *endpoints
	migration   *migration
	topology    *topology
	left        []model.Endpoint // for finish
	untold      []model.Endpoint // that have other addresses than the store has for them
	progressed  time.Time        // when Config.Progress was called last
}

// restore takes over the endpoints that the store has for this node, an earlier agent's, and those
// that the store has lost. Those whose namespace is gone are removed, and so are devices and map
// entries of endpoints nobody knows. What else is wrong with one endpoint, or with limits, is a
// fault, and no reason not to start.
func (rs *restorer) restore(ctx context.Context) error {
	state, err := firstState(ctx, rs.store)
	if err != nil {
		return err
	}
	rs.endpoints.change.Lock()
	defer rs.endpoints.change.Unlock()
	mine := slices.Clone(state.Endpoints.Of(rs.self.Name))
	rs.leaveMoved(state)
	mine = append(mine, adopt(ctx, rs.store, rs.record, state, alive, rs.log)...)
	if rs.endpoints.leases, err = rs.restoreLeases(mine, state.Moves); err != nil {
		return err
	}
	local, err := netcfg.LocalPrefixes()
	if err != nil {
		return err
	}
	if state, err = rs.admit(state); err != nil {
		rs.log.Error("peers of encryption not set; will try again", "err", err)
	}
	for i, e := range mine {
		rs.progress()
		mine[i] = rs.refamily(e)
		rs.enforcer.know(mine[i])
	}
	rs.tellAddrs(ctx)
	if err := rs.enforcer.follow(state, local); err != nil {
		// An earlier agent's tables are in force, and no new endpoint will be attached.
		rs.log.Error("policy not applied; will try again", "err", err)
	}
	for _, e := range mine {
		rs.stacker.know(e)
	}
	if err := rs.stacker.follow(state); err != nil {
		rs.log.Error("stack profiles not applied; will try again", "err", err)
	}
	mine = rs.deleteNoted(mine)
	keep, addrs := make(map[model.EndpointID]bool), make(map[netip.Addr]bool)
	rs.attachments.routes = netcfg.ListOnce()
	for _, e := range mine {
		for _, addr := range e.Addrs {
			addrs[addr] = true
		}
		rs.progress()
		if rs.recall(e) || rs.takeOver(e) {
			keep[e.ID] = true
		}
	}
	rs.attachments.routes = nil
	rs.saveAll()
	if err := rs.devices.Firewall.SetPublished(publishedOf(rs.known.all(), nil)); err != nil {
		return err
	}
	if err := rs.keepEndpoints(keep); err != nil {
		return err
	}
	if err := errors.Join(rs.attachments.removeStaleDevices(keep), rs.attachments.leaveStaleDevices(), netcfg.KeepLocal(addrs)); err != nil {
		return err
	}
	_ = rs.planes.RestoreLimits(rs.endpoints.limited(model.Endpoint{})) // what fails is a fault, which repair tries again
	return rs.topology.applyTopology(state, local)
}

// recall makes an endpoint known whose calls can be answered by what an earlier agent left, and
// leaves to finish to look at that. It reports false for one that has to be taken over first.
func (rs *restorer) recall(e model.Endpoint) bool {
	inode, err := netcfg.NetnsInode(e.NetnsPath)
	if err != nil || checkSame(e) != nil || rs.stacker.hasProfile(e.ID) || !rs.planes.Recall(e, inode) {
		return false
	}
	if err := rs.attachments.setNetns(e.ID, inode); err != nil {
		return false
	}
	rs.known.add(e)
	rs.left = append(rs.left, e)
	return true
}

// finish takes over the endpoints that restore has recalled, unless ctx ends: then they stay as
// they were left. Calls are answered meanwhile: with many containers it takes seconds.
func (rs *restorer) finish(ctx context.Context) error {
	rs.endpoints.change.Lock()
	defer rs.endpoints.change.Unlock()
	rs.attachments.routes = netcfg.ListOnce()
	defer func() { rs.attachments.routes, rs.left = nil, nil }()
	for _, e := range rs.left {
		if ctx.Err() != nil {
			return nil
		}
		rs.progress()
		rs.takeOver(e)
	}
	return nil
}

// progress says that Start has got further.
func (rs *restorer) progress() {
	if now := time.Now(); rs.cfg.Progress != nil && now.Sub(rs.progressed) >= ProgressEvery {
		rs.progressed = now
		rs.cfg.Progress()
	}
}

// deleteNoted deletes the endpoints that were to be deleted while no agent ran, and gives the
// others. One that cannot be deleted is among them, and will be tried again by the next agent.
func (rs *restorer) deleteNoted(mine []model.Endpoint) (others []model.Endpoint) {
	notes, done, err := api.Deletions(rs.cfg.APISocket)
	if err != nil {
		rs.log.Error("endpoints that were deleted while no agent ran may come back: delete them again", "err", err)
		return mine
	}
	for _, e := range mine {
		if at, noted := notes[e.Name]; !noted || at.Before(e.Created) {
			others = append(others, e)
			continue
		}
		if failed := rs.endpoints.detach(e, rs.endpoints.deletionAnswers()); failed != nil {
			rs.log.Error("endpoint that was deleted while no agent ran is still there: delete it again", "endpoint", e.Name, "err", failed)
			others, err = append(others, e), errors.Join(err, failed)
			continue
		}
		rs.log.Info("endpoint was deleted while no agent ran", "endpoint", e.Name, "id", e.ID)
	}
	if err == nil {
		err = done()
	}
	if err != nil {
		rs.log.Error("notes of deleted endpoints stay", "err", err)
	}
	return others
}

// restoreLeases makes the leases of a node that has endpoints. An id is given out only when no
// socket carries it any more: the hooks would take such a socket for the new endpoint's.
func (rs *restorer) restoreLeases(mine []model.Endpoint, moves []model.Move) (*endpoint.Leases, error) {
	var here, away []netip.Addr
	for _, m := range append(slices.Clip(rs.record.Moves), moves...) {
		if m.Node == rs.self.Name {
			here = append(here, m.Addr)
			rs.known.setMoved(m)
		} else {
			away = append(away, m.Addr)
		}
	}
	last, err := rs.planes.LastID()
	if err != nil {
		return nil, err
	}
	inUse, err := rs.planes.InUse()
	if err != nil {
		return nil, fmt.Errorf("endpoint ids in use: %w", err)
	}
	return endpoint.New(endpoint.Config{
		Node: rs.self.Name, Prefixes: rs.self.Prefixes, Prefix6: rs.prefix6, Endpoints: mine, LastID: last, MovedHere: here, MovedAway: away,
		Busy: func(id model.EndpointID) bool { return inUse[id] },
	})
}

// takeOver attaches an endpoint of an earlier agent and reports whether it is still there. Only one
// whose container is gone is removed. Another that cannot be attached may work as the earlier agent
// left it: it stays, as a fault, and repair tries it again. The caller holds change.
func (rs *restorer) takeOver(e model.Endpoint) (kept bool) {
	err := checkSame(e)
	if err == nil {
		err = rs.attachments.attach(e)
	}
	if err == nil {
		rs.known.add(e)
		return true
	}
	if errors.Is(err, netcfg.ErrNoContainer) {
		rs.log.Warn("endpoint's container is gone; removing the endpoint", "endpoint", e.Name, "err", err)
		gone := e
		gone.NetnsPath = "" // what is there now is somebody else's
		if err = rs.endpoints.detach(gone, rs.endpoints.deletionAnswers()); err == nil {
			return false
		}
	} else {
		err = errors.Join(err, rs.answer(e))
	}
	if rs.faults.Set(api.FaultEndpoint, e.Name, err) {
		rs.log.Error("endpoint not restored; will try again", "reason", api.FaultEndpoint, "endpoint", e.Name, "err", err)
	}
	rs.known.add(e)
	return true
}

// answer has the sockets of an endpoint answered that cannot be attached, unless its network
// namespace is known to be another endpoint's: that one's are.
func (rs *restorer) answer(e model.Endpoint) error {
	inode, err := netcfg.NetnsInode(e.NetnsPath)
	if err != nil {
		return nil
	}
	if other, taken := rs.known.inNetns(inode); taken && other.ID != e.ID {
		return fmt.Errorf("%s is the network namespace of endpoint %s", e.NetnsPath, other.Name)
	}
	return rs.attachments.setNetns(e.ID, inode)
}

// repair tries again what was at fault when the agent started, until all is well.
func (rs *restorer) repair(ctx context.Context) {
	for pause := firstRepair; len(rs.faults.List()) > 0; pause = min(2*pause, lastRepair) {
		select {
		case <-time.After(pause):
			rs.repairOnce(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (rs *restorer) repairOnce(ctx context.Context) {
	rs.endpoints.change.Lock()
	defer rs.endpoints.change.Unlock()
	for _, f := range rs.faults.List() {
		if f.Reason != api.FaultEndpoint {
			continue
		}
		if e, ok := rs.known.named(f.Endpoint); !ok {
			rs.faults.Clear(f.Reason, f.Endpoint)
		} else if rs.takeOver(e) && !rs.faults.Has(f.Reason) {
			rs.log.Info("endpoints restored")
		}
	}
	if rs.faults.Has(api.FaultLimits) || rs.faults.Has(api.FaultLimitsTighter) {
		_ = rs.planes.RestoreLimits(rs.endpoints.limited(model.Endpoint{}))
	}
	rs.retell(ctx)
}

// keepEndpoints removes what the planes have of endpoints that are not in keep. The caller holds
// change.
func (rs *restorer) keepEndpoints(keep map[model.EndpointID]bool) error {
	removed, err := rs.planes.Keep(keep)
	if len(removed) > 0 {
		rs.log.Warn("entries of endpoints that are not there are removed: an agent was killed while it wrote or forgot them", "entries", removed)
	}
	return err
}

// compareMaps does so for the endpoints there are, from time to time until ctx ends: whatever left
// entries behind, no later endpoint of the same address or id is to meet with them.
func (rs *restorer) compareMaps(ctx context.Context) {
	ticker := time.NewTicker(rs.cfg.CompareMaps)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := rs.compareMapsOnce(); err != nil {
			rs.log.Warn("the programs' maps are not compared with the endpoints; will try again", "err", err)
		}
	}
}

func (rs *restorer) compareMapsOnce() error {
	rs.endpoints.change.Lock()
	defer rs.endpoints.change.Unlock()
	keep := make(map[model.EndpointID]bool)
	for _, e := range rs.known.all() {
		keep[e.ID] = true
	}
	for _, e := range rs.endpoints.halfDone { // to be undone by those who know all of them
		keep[e.ID] = true
	}
	return rs.keepEndpoints(keep)
}

// leaveMoved is letGo for an agent that starts: it lets go of the endpoints of the one before whose
// addresses the store has given to other nodes meanwhile, so that nothing of theirs goes on here in
// the name of what is elsewhere.
func (rs *restorer) leaveMoved(state store.State) {
	to := make(map[netip.Addr]string, len(state.Moves))
	for _, m := range state.Moves {
		to[m.Addr] = m.Node
	}
	for _, e := range rs.record.lost(state) {
		node := to[e.Addr4()]
		if e.Adopted != nil || node == "" || node == rs.self.Name {
			continue
		}
		rs.log.Warn("endpoint has migrated to another node while no agent ran", "endpoint", e.Name, "id", e.ID, "addrs", e.Addrs, "to", node)
		if err := errors.Join(rs.planes.Detach(e), rs.migration.cutLeaving(e), netcfg.DelEndpoint(e.ID, e.Addrs, model.Table)); err != nil {
			rs.log.Error("what is left of an endpoint that has migrated stays", "endpoint", e.Name, "err", err)
		}
		rs.record.Endpoints = slices.DeleteFunc(rs.record.Endpoints, func(x model.Endpoint) bool { return x.ID == e.ID })
	}
}
