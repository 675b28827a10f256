package node

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
)

// faults are what the agent has found that is not as it should be. Its methods may be called from
// several goroutines.
type faults struct {
	mu  sync.Mutex
	all map[faultKey]api.Fault
}

type faultKey struct {
	reason   api.FaultReason
	endpoint string
}

// Set notes that a fault is there; endpoint "" means the node. It reports whether that is news: a
// fault that was not there, or met another error.
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
