package node

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// Bounds of the pause before what is at fault is tried again; it doubles from try to try.
const (
	firstRepair = time.Second
	lastRepair  = 30 * time.Second
)

// faults are what the agent has found that is not as it should be. Its methods may be called from several goroutines.
type faults struct {
	mu  sync.Mutex
	all map[faultKey]api.Fault
}

type faultKey struct {
	reason   api.FaultReason
	endpoint string
}

// Set notes that a fault is there; endpoint "" means the node. It reports whether that is news: a fault that was not
// there, or met another error.
func (f *faults) Set(reason api.FaultReason, endpoint string, err error) (news bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := faultKey{reason, endpoint}
	fault, was := f.all[key]
	if !was {
		fault = api.Fault{Reason: reason, Endpoint: endpoint, Since: time.Now().UTC()}
	}
	news = fault.Error != err.Error()
	fault.Error = err.Error()
	if f.all == nil {
		f.all = make(map[faultKey]api.Fault)
	}
	f.all[key] = fault
	return news
}

// Clear notes that a fault is not there, and reports whether it was.
func (f *faults) Clear(reason api.FaultReason, endpoint string) (was bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := faultKey{reason, endpoint}
	_, was = f.all[key]
	delete(f.all, key)
	return was
}

// ClearEndpoint notes that nothing is wrong with an endpoint, or that it is gone.
func (f *faults) ClearEndpoint(endpoint string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.all, func(k faultKey, _ api.Fault) bool { return k.endpoint == endpoint })
}

// List gives all faults, sorted.
func (f *faults) List() []api.Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []api.Fault
	for _, fault := range f.all {
		out = append(out, fault)
	}
	slices.SortFunc(out, func(x, y api.Fault) int {
		return cmp.Or(cmp.Compare(x.Reason, y.Reason), cmp.Compare(x.Endpoint, y.Endpoint))
	})
	return out
}

// Has reports whether something is at fault for this reason.
func (f *faults) Has(reason api.FaultReason) bool {
	return slices.ContainsFunc(f.List(), func(x api.Fault) bool { return x.Reason == reason })
}

// takeOver attaches an endpoint of an earlier agent and reports whether it is still there. Only one whose container is
// gone is removed. Another that cannot be attached may work as the earlier agent left it: it stays, as a fault, and
// repair tries it again. The caller holds change.
func (a *Agent) takeOver(e model.Endpoint) (kept bool) {
	err := a.attach(e)
	if err == nil {
		a.known.add(e)
		return true
	}
	if errors.Is(err, netcfg.ErrNoContainer) {
		a.log.Warn("endpoint's container is gone; removing the endpoint", "endpoint", e.Name, "err", err)
		if err = a.detach(e); err == nil {
			return false
		}
	} else if inode, bad := netcfg.NetnsInode(e.NetnsPath); bad == nil {
		// Its sockets are answered all the same.
		err = errors.Join(err, a.setNetns(e.ID, inode))
	}
	if a.faults.Set(api.FaultEndpoint, e.Name, err) {
		a.log.Error("endpoint not restored; will try again", "reason", api.FaultEndpoint, "endpoint", e.Name, "err", err)
	}
	a.known.add(e)
	return true
}

// repair tries again what was at fault when the agent started, until all is well.
func (a *Agent) repair(ctx context.Context) {
	for pause := firstRepair; len(a.faults.List()) > 0; pause = min(2*pause, lastRepair) {
		select {
		case <-time.After(pause):
			a.repairOnce()
		case <-ctx.Done():
			return
		}
	}
}

func (a *Agent) repairOnce() {
	a.change.Lock()
	defer a.change.Unlock()
	for _, f := range a.faults.List() {
		if f.Reason != api.FaultEndpoint {
			continue
		}
		if e, ok := a.known.named(f.Endpoint); !ok {
			a.faults.Clear(f.Reason, f.Endpoint)
		} else if a.takeOver(e) && !a.faults.Has(f.Reason) {
			a.log.Info("endpoints restored")
		}
	}
	if a.faults.Has(api.FaultLimits) || a.faults.Has(api.FaultLimitsTighter) {
		_ = a.planes.RestoreLimits(a.limited(model.Endpoint{}))
	}
}
