package netstack

import (
	"hash/maphash"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// Ports that are chosen for programs: of Linux's ip_local_port_range those that the container's own
// stack does not choose.
const (
	firstPort  = 32768
	countPorts = protocol.FirstOwnPort - firstPort
)

// bound is a bound socket or listener.
type bound struct {
	id      uint64
	local   netip.AddrPort
	flags   uint32
	listens bool
}

// dual reports whether it is the unspecified address of both families.
func (b *bound) dual() bool {
	a := b.local.Addr()
	return a.Is6() && a.IsUnspecified() && b.flags&protocol.V6Only == 0
}

// takes says how exactly it takes packets to an address; 0 is not at all.
func (b *bound) takes(to netip.Addr) int {
	own := b.local.Addr()
	switch {
	case own == to:
		return 3
	case !own.IsUnspecified() || (own.Is4() && to.Is6()) || (own.Is6() && to.Is4() && !b.dual()):
		return 0
	case b.dual():
		return 1
	}
	return 2
}

func (b *bound) overlaps(o *bound) bool {
	x, y := b.local.Addr(), o.local.Addr()
	if x.Is4() != y.Is4() && !b.dual() && !o.dual() {
		return false
	}
	return x == y || x.IsUnspecified() || y.IsUnspecified()
}

func (b *bound) both(o *bound, flag uint32) bool { return b.flags&o.flags&flag != 0 }

// ports are a tenant's: who has which, by Linux's rules for bind().
type ports struct {
	bound  map[uint16][]*bound
	used   map[uint16]int // connections by local port
	count  int
	chosen uint64 // how many have been
	seed   maphash.Seed
}

func newPorts() ports {
	return ports{bound: map[uint16][]*bound{}, used: map[uint16]int{}, seed: maphash.MakeSeed()}
}

// bind reserves an address and port, or any port for 0.
func (p *ports) bind(id uint64, at netip.AddrPort, flags uint32) (netip.AddrPort, error) {
	b := &bound{id: id, local: at, flags: flags}
	if at.Port() == 0 {
		port, ok := portFrom(rand.Uint64(), func(port uint16) bool { return len(p.bound[port]) == 0 && p.used[port] == 0 })
		if !ok {
			return at, unix.EADDRINUSE
		}
		b.local = netip.AddrPortFrom(at.Addr(), port)
	} else if p.conflicts(b) {
		return at, unix.EADDRINUSE
	}
	p.bound[b.local.Port()] = append(p.bound[b.local.Port()], b)
	p.count++
	return b.local, nil
}

func (p *ports) conflicts(b *bound) bool {
	port := b.local.Port()
	if b.flags&(protocol.ReuseAddress|protocol.ReusePort) == 0 && p.used[port] > 0 {
		return true
	}
	for _, o := range p.bound[port] {
		shared := b.both(o, protocol.ReusePort) || (b.both(o, protocol.ReuseAddress) && !o.listens)
		if b.overlaps(o) && !shared {
			return true
		}
	}
	return false
}

// listen makes a bound socket a listener.
func (p *ports) listen(id uint64, port uint16) error {
	var own *bound
	for _, b := range p.bound[port] {
		if b.id == id {
			own = b
		}
	}
	if own == nil {
		return unix.ENOENT
	}
	for _, o := range p.bound[port] {
		if o != own && o.listens && own.overlaps(o) && !own.both(o, protocol.ReusePort) {
			return unix.EADDRINUSE
		}
	}
	own.listens = true
	return nil
}

// release gives back what a bound socket or listener has.
func (p *ports) release(id uint64, port uint16) {
	all := p.bound[port]
	for i, b := range all {
		if b.id != id {
			continue
		}
		p.count--
		if all = append(all[:i:i], all[i+1:]...); len(all) == 0 {
			delete(p.bound, port)
		} else {
			p.bound[port] = all
		}
		return
	}
}

// listener says which takes a SYN; 0: none. Those that share a port have a part each of all peers.
func (p *ports) listener(to, from netip.AddrPort) uint64 {
	best := 0
	var equal []uint64
	for _, b := range p.bound[to.Port()] {
		score := b.takes(to.Addr())
		if !b.listens || score == 0 || score < best {
			continue
		}
		if score > best {
			best, equal = score, nil
		}
		equal = append(equal, b.id)
	}
	switch len(equal) {
	case 0:
		return 0
	case 1:
		return equal[0]
	}
	return equal[maphash.Comparable(p.seed, from)%uint64(len(equal))]
}

// choose gives a port for a connection to remote that free allows: RFC 6056, algorithm 3. One is
// taken again when all others were, or the peer may have it in TIME-WAIT.
func (p *ports) choose(remote netip.AddrPort, free func(uint16) bool) (uint16, error) {
	offset := maphash.Comparable(p.seed, remote)
	var tried uint64
	port, ok := portFrom(offset+p.chosen, func(port uint16) bool {
		tried++
		return len(p.bound[port]) == 0 && free(port)
	})
	if !ok {
		return 0, unix.EADDRNOTAVAIL
	}
	p.chosen += tried
	return port, nil
}

func (p *ports) connected(port uint16) { p.used[port]++ }

func (p *ports) disconnected(port uint16) {
	if p.used[port]--; p.used[port] <= 0 {
		delete(p.used, port)
	}
}

// portFrom finds a port that is good, from one of them on.
func portFrom(number uint64, good func(uint16) bool) (uint16, bool) {
	start := number % countPorts
	for i := range uint64(countPorts) {
		if port := uint16(firstPort + (start+i)%countPorts); good(port) {
			return port, true
		}
	}
	return 0, false
}
