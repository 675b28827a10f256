// Package endpoint gives out what makes a container an endpoint of its node: an id, overlay
// addresses and a name that nobody else on the node has. It keeps that in memory only and does no
// I/O; what was given out is restored from the endpoints in the store.
package endpoint

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"heddle.dev/heddle/internal/model"
)

// ErrExhausted is what an *ExhaustedError is.
var ErrExhausted = errors.New("no free endpoint address")

// ErrNameInUse is what a *NameInUseError is.
var ErrNameInUse = errors.New("endpoint name in use")

// ErrAddr says that an address that was asked for cannot be had.
var ErrAddr = errors.New("address not available")

// ErrNoID says that all ids are in use, or still tag sockets.
var ErrNoID = errors.New("no free endpoint id: end containers, or restart the agent when their sockets are gone")

// ExhaustedError says that every address of a node's prefixes is taken.
type ExhaustedError struct {
	Prefixes []netip.Prefix
	InUse    int // addresses that endpoints hold in Prefixes
}

// Error implements error.
func (e *ExhaustedError) Error() string {
	return fmt.Sprintf("%v in %v: %d in use: remove endpoints, or give the node a shorter prefix", ErrExhausted, e.Prefixes, e.InUse)
}

// Is makes errors.Is(err, ErrExhausted) true.
func (e *ExhaustedError) Is(target error) bool { return target == ErrExhausted }

// NameInUseError says which endpoint has a name.
type NameInUseError struct {
	Name string
	ID   model.EndpointID
}

// Error implements error.
func (e *NameInUseError) Error() string {
	return fmt.Sprintf("endpoint name %q: in use by endpoint %d: choose another, or remove that one", e.Name, e.ID)
}

// Is makes errors.Is(err, ErrNameInUse) true.
func (e *NameInUseError) Is(target error) bool { return target == ErrNameInUse }

// Config says what a node has to give out.
type Config struct {
	// Node is the node's name.
	Node string
	// Prefixes are the node's IPv4 overlay prefixes. An endpoint gets one address of them.
	Prefixes []netip.Prefix
	// Prefix6 makes an endpoint's IPv6 address of its IPv4 one (model.Overlay6). The zero Prefix:
	// endpoints have no IPv6 address.
	Prefix6 netip.Prefix
	// Endpoints are those the node has already.
	Endpoints []model.Endpoint
	// MovedHere are addresses that have moved to this node, so need not be in Prefixes; MovedAway
	// those that have moved to others, and are not to be given out.
	MovedHere, MovedAway []netip.Addr
	// LastID is the last id that is known to have been given out, 0 if unknown. With it, ids are
	// not given out again soon even if their endpoints were gone before a restart.
	LastID model.EndpointID
	// Busy, if set, tells ids that must not be given out although no endpoint has them, because
	// sockets still carry them. It is called with the Leases locked and must not call them.
	Busy func(model.EndpointID) bool
}

// Lease is what one endpoint holds.
type Lease struct {
	ID    model.EndpointID
	Name  string
	Addrs []netip.Addr // the IPv4 address, then the IPv6 one that follows from it, if any
}

// Leases gives out ids, addresses and names of one node. It is safe for concurrent use.
type Leases struct {
	node    string
	prefix6 netip.Prefix
	busy    func(model.EndpointID) bool

	mu        sync.Mutex // guards what follows
	lastID    model.EndpointID
	byID      map[model.EndpointID]Lease
	byName    map[string]model.EndpointID
	inUse     map[netip.Addr]model.EndpointID // by IPv4 address
	pool      *pool
	movedAway map[netip.Addr]bool
}

// New gives the leases of a node that has cfg.Endpoints already. An endpoint of another node, one
// outside the prefixes and two that hold the same thing are errors that name the endpoint.
func New(cfg Config) (*Leases, error) {
	l := &Leases{
		node:    cfg.Node,
		prefix6: cfg.Prefix6,
		busy:    cfg.Busy,
		lastID:  cfg.LastID,
		byID:    make(map[model.EndpointID]Lease),
		byName:  make(map[string]model.EndpointID),
		inUse:   make(map[netip.Addr]model.EndpointID),
	}
	l.setMovedAway(cfg.MovedAway)
	var err error
	if l.pool, err = newPool(cfg.Prefixes); err != nil {
		return nil, fmt.Errorf("leases of node %s: %w", cfg.Node, err)
	}
	// In the order they were made, so that what was given out last is what is given out again last.
	byAge := slices.Clone(cfg.Endpoints)
	slices.SortStableFunc(byAge, func(a, b model.Endpoint) int { return a.Created.Compare(b.Created) })
	for _, e := range byAge {
		if err := l.restore(e, slices.Contains(cfg.MovedHere, e.Addr4())); err != nil {
			return nil, fmt.Errorf("restore endpoint %d %q: %w", e.ID, e.Name, err)
		}
		if cfg.LastID == 0 {
			l.lastID = e.ID
		}
	}
	return l, nil
}

// restore takes in an endpoint that exists; moved says that it has an address that has moved here.
func (l *Leases) restore(e model.Endpoint, moved bool) error {
	if e.Node != l.node {
		return fmt.Errorf("belongs to node %q, not %q", e.Node, l.node)
	}
	if e.ID == 0 || e.ID > model.MaxEndpointID {
		return fmt.Errorf("id: want 1..%d", model.MaxEndpointID)
	}
	if other, used := l.byID[e.ID]; used {
		return fmt.Errorf("id belongs to endpoint %q too", other.Name)
	}
	if err := model.ValidateEndpointName(e.Name); err != nil {
		return err
	}
	if id, used := l.byName[e.Name]; used {
		return &NameInUseError{Name: e.Name, ID: id}
	}
	a := e.Addr4()
	if id, used := l.inUse[a]; used {
		return fmt.Errorf("address %s belongs to endpoint %d too", a, id)
	}
	if e.Adopted != nil {
		l.hold(e.ID, e.Name, a)
		return nil
	}
	if !l.pool.has(a) && !moved {
		return fmt.Errorf("address %s is not one that node %s can give", a, l.node)
	}
	l.hold(e.ID, e.Name, a)
	if l.pool.has(a) {
		l.pool.last = a
	}
	return nil
}

// hold records a lease, that of IPv4 address a.
func (l *Leases) hold(id model.EndpointID, name string, a netip.Addr) Lease {
	lease := Lease{ID: id, Name: name, Addrs: model.OverlayAddrs(l.prefix6, a)}
	l.byID[id] = lease
	l.byName[name] = id
	l.inUse[a] = id
	return lease
}

// Lease gives a new endpoint called name its id and addresses. want, if valid, becomes its address
// of that family, and decides the other. Errors: a malformed name, *NameInUseError,
// *ExhaustedError, ErrAddr, ErrNoID. On error nothing is taken.
func (l *Leases) Lease(name string, want netip.Addr) (Lease, error) {
	return l.lease(name, func() (netip.Addr, error) {
		a, err := l.freeAddr(want)
		if err == nil {
			l.pool.last = a
		}
		return a, err
	})
}

// Adopt is Lease for an endpoint whose IPv4 address another network gave it, or that brings it from
// another node.
func (l *Leases) Adopt(name string, a netip.Addr) (Lease, error) {
	return l.lease(name, func() (netip.Addr, error) {
		if other, used := l.inUse[a]; used {
			return a, fmt.Errorf("%w: %s belongs to endpoint %q", ErrAddr, a, l.byID[other].Name)
		}
		return a, nil
	})
}

// lease gives a new endpoint its id, and the address that choose chooses with mu held.
func (l *Leases) lease(name string, choose func() (netip.Addr, error)) (Lease, error) {
	if err := model.ValidateEndpointName(name); err != nil {
		return Lease{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if id, used := l.byName[name]; used {
		return Lease{}, &NameInUseError{Name: name, ID: id}
	}
	id, err := l.freeID()
	if err != nil {
		return Lease{}, err
	}
	a, err := choose()
	if err != nil {
		return Lease{}, err
	}
	l.lastID = id
	return clone(l.hold(id, name, a)), nil
}

// freeAddr gives a free IPv4 address: the one that want is or stands for, or any if want is the
// zero Addr.
func (l *Leases) freeAddr(want netip.Addr) (netip.Addr, error) {
	if !want.IsValid() {
		a, found := l.pool.free(l.isFree)
		if !found {
			return netip.Addr{}, &ExhaustedError{Prefixes: l.pool.prefixes, InUse: len(l.inUse)}
		}
		return a, nil
	}
	a := want
	if want.Is6() {
		a = model.Overlay4(l.prefix6, want)
	}
	if !l.pool.has(a) {
		return netip.Addr{}, fmt.Errorf("%w: %s is not one that node %s can give", ErrAddr, want, l.node)
	}
	if other, used := l.inUse[a]; used {
		return netip.Addr{}, fmt.Errorf("%w: %s belongs to endpoint %q", ErrAddr, want, l.byID[other].Name)
	}
	if l.movedAway[a] {
		return netip.Addr{}, fmt.Errorf("%w: %s has moved to another node", ErrAddr, want)
	}
	return a, nil
}

// isFree reports whether address a may be given out.
func (l *Leases) isFree(a netip.Addr) bool {
	_, used := l.inUse[a]
	return !used && !l.movedAway[a]
}

// SetMovedAway says which addresses have moved to other nodes: they are not given out, whether or
// not they are of this node's prefixes.
func (l *Leases) SetMovedAway(addrs []netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setMovedAway(addrs)
}

func (l *Leases) setMovedAway(addrs []netip.Addr) {
	l.movedAway = make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		l.movedAway[a] = true
	}
}

// freeID gives the next id after the last that is free.
func (l *Leases) freeID() (model.EndpointID, error) {
	id := l.lastID
	for range model.MaxEndpointID {
		if id++; id > model.MaxEndpointID {
			id = 1
		}
		if _, used := l.byID[id]; !used && (l.busy == nil || !l.busy(id)) {
			return id, nil
		}
	}
	return 0, ErrNoID
}

// Release takes back what an endpoint holds; it is false if there is no such endpoint. Its
// addresses and its id are the last in line to be given out again.
func (l *Leases) Release(id model.EndpointID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	lease, ok := l.byID[id]
	if !ok {
		return false
	}
	delete(l.byID, id)
	delete(l.byName, lease.Name)
	delete(l.inUse, lease.Addrs[0])
	return true
}

// ByName gives the lease of the endpoint called name.
func (l *Leases) ByName(name string) (Lease, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lease, ok := l.byID[l.byName[name]] // no lease has id 0
	return clone(lease), ok
}

// All gives every lease, sorted by id.
func (l *Leases) All() []Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]Lease, 0, len(l.byID))
	for _, id := range slices.Sorted(maps.Keys(l.byID)) {
		all = append(all, clone(l.byID[id]))
	}
	return all
}

// LastID gives the id that was given out last, for Config.LastID after a restart.
func (l *Leases) LastID() model.EndpointID {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastID
}

func clone(lease Lease) Lease {
	lease.Addrs = slices.Clone(lease.Addrs)
	return lease
}
