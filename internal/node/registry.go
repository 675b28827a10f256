package node

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// registry is what the agent knows of the endpoints of its node. Whoever changes an endpoint holds
// endpoints.change; whoever asks waits for no system call.
type registry struct {
	mu      sync.RWMutex // guards what follows; never held across a system call
	byName  map[string]model.EndpointID
	byID    map[model.EndpointID]model.Endpoint
	byAddr  map[netip.Addr]model.EndpointID     // by IPv4 address
	netns   map[model.EndpointID]uint64         // inodes of network namespaces
	byNetns map[uint64]model.EndpointID         // the reverse
	moved   map[netip.Addr]model.Move           // of endpoints here that migrated from another node
	awaited map[model.EndpointID]model.Endpoint // whose containers Docker has not made yet
}

func newRegistry() *registry {
	return &registry{
		byName: make(map[string]model.EndpointID), byID: make(map[model.EndpointID]model.Endpoint), byAddr: make(map[netip.Addr]model.EndpointID), netns: make(map[model.EndpointID]uint64),
		byNetns: make(map[uint64]model.EndpointID), moved: make(map[netip.Addr]model.Move), awaited: make(map[model.EndpointID]model.Endpoint),
	}
}

// add makes an endpoint known, in place of one of the same name.
func (r *registry) add(e model.Endpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropAddr(e.ID)
	r.byName[e.Name] = e.ID
	r.byID[e.ID] = e
	r.byAddr[e.Addr4()] = e.ID
}

// dropAddr is called with mu held.
func (r *registry) dropAddr(id model.EndpointID) {
	if addr := r.byID[id].Addr4(); r.byAddr[addr] == id {
		delete(r.byAddr, addr)
	}
}

// remove forgets an endpoint and all that is known of it.
func (r *registry) remove(e model.Endpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropAddr(e.ID)
	delete(r.byName, e.Name)
	delete(r.byID, e.ID)
	delete(r.moved, e.Addr4())
	r.dropNetns(e.ID)
	delete(r.awaited, e.ID)
}

// named gives the endpoint of that name.
func (r *registry) named(name string) (model.Endpoint, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	id, ok := r.byName[name]
	return r.byID[id], ok
}

// withID gives the endpoint with an id.
func (r *registry) withID(id model.EndpointID) (model.Endpoint, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e, ok := r.byID[id]
	return e, ok
}

// nameOf gives the name of an endpoint; "" if there is none with that id.
func (r *registry) nameOf(id model.EndpointID) string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.byID[id].Name
}

// all lists the endpoints by id.
func (r *registry) all() []model.Endpoint {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.SortedFunc(maps.Values(r.byID), func(x, y model.Endpoint) int { return cmp.Compare(x.ID, y.ID) })
}

// len is how many endpoints there are.
func (r *registry) len() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.byName)
}

// holds reports whether an endpoint has the IPv4 address addr.
func (r *registry) holds(addr netip.Addr) bool {
	_, held := r.withAddr(addr)
	return held
}

// withAddr gives the endpoint that has the IPv4 address addr.
func (r *registry) withAddr(addr netip.Addr) (id model.EndpointID, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	id, ok = r.byAddr[addr]
	return id, ok
}

// setNetns notes in which network namespace an endpoint is, and gives the one that was in a
// namespace of that number: it is in none any more.
func (r *registry) setNetns(id model.EndpointID, inode uint64) (other model.EndpointID, had bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropNetns(id)
	if other, had = r.byNetns[inode]; had {
		delete(r.netns, other)
	}
	r.netns[id], r.byNetns[inode] = inode, id
	return other, had
}

// dropNetns is called with mu held.
func (r *registry) dropNetns(id model.EndpointID) {
	if inode, ok := r.netns[id]; ok && r.byNetns[inode] == id {
		delete(r.byNetns, inode)
	}
	delete(r.netns, id)
}

// netnsOf gives the inode of an endpoint's network namespace.
func (r *registry) netnsOf(id model.EndpointID) (inode uint64, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	inode, ok = r.netns[id]
	return inode, ok
}

// inNetns gives the endpoint that was last seen in the network namespace with that inode, which may
// be another by now.
func (r *registry) inNetns(inode uint64) (model.Endpoint, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e, ok := r.byID[r.byNetns[inode]]
	return e, ok
}

// await notes that an endpoint's container has yet to be made.
func (r *registry) await(e model.Endpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.awaited[e.ID] = e
}

// came notes that an endpoint has its container.
func (r *registry) came(id model.EndpointID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.awaited, id)
}

// awaits reports whether e's container has yet to be made.
func (r *registry) awaits(e model.Endpoint) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	now, still := r.awaited[e.ID]
	return still && now.Name == e.Name
}

// listAwaited lists the endpoints whose containers have yet to be made.
func (r *registry) listAwaited() []model.Endpoint {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Collect(maps.Values(r.awaited))
}

// setMoved notes the move that an endpoint came here by, or is to come by.
func (r *registry) setMoved(m model.Move) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.moved[m.Addr] = m
}

// moveOf gives the move that an endpoint with the address addr came here by.
func (r *registry) moveOf(addr netip.Addr) (model.Move, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	m, ok := r.moved[addr]
	return m, ok
}

// moves lists the moves that endpoints came here by.
func (r *registry) moves() []model.Move {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.SortedFunc(maps.Values(r.moved), func(x, y model.Move) int { return x.Addr.Compare(y.Addr) })
}

// view is the state of the network that was applied last, for whoever asks.
type view struct {
	mu    sync.RWMutex // guards the rest
	state store.State
	err   error
}

// publish shows a state, and what was wrong when it was applied.
func (v *view) publish(state store.State, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state, v.err = state, err
}

// last gives what was published last.
func (v *view) last() (store.State, error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.state, v.err
}
