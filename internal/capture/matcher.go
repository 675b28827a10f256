package capture

import (
	"net/netip"

	"heddle.dev/heddle/internal/model"
)

// tuple names a connection by the addresses of its packets: local is the node's end.
type tuple struct{ local, remote netip.AddrPort }

// names are the addresses that the container's program sees for a connection. The zero names stand
// for a connection that is not the container's.
type names struct{ local, remote netip.AddrPort }

// maxFlows bounds the connections that a matcher remembers. One that is forgotten is asked for
// again.
const maxFlows = 1 << 16

// prefix6Bytes is the length of the prefix in an IPv6 overlay address; the rest is the IPv4
// address.
const prefix6Bytes = 12

// verdict says what a matcher makes of a packet.
type verdict int

const (
	verdictForeign verdict = iota // not the container's
	verdictOurs
	verdictUnknown // the agent must be asked
)

// matcher finds out whose packets are and what their addresses are to the container's programs.
type matcher struct {
	whose   model.Endpoint
	addrs   map[netip.Addr]bool // of the endpoint, on the overlay
	prefix6 []byte              // what makes an IPv6 overlay address of an IPv4 one; nil without IPv6
	node    map[netip.Addr]bool
	flows   *recent[tuple, names]
}

func newMatcher(e model.Endpoint, node []netip.Addr) *matcher {
	m := &matcher{whose: e, addrs: map[netip.Addr]bool{}, node: map[netip.Addr]bool{}, flows: newRecent[tuple, names](maxFlows)}
	for _, a := range e.Addrs {
		m.addrs[a] = true
	}
	for _, a := range node {
		m.node[a.Unmap()] = true
	}
	if a := e.Addr6(); a.IsValid() {
		m.prefix6 = a.AsSlice()[:prefix6Bytes]
	}
	return m
}

// learn takes in what the agent knows of the endpoint's connections.
func (m *matcher) learn(list []model.Connection) {
	for _, c := range list {
		if c.NodeRemote.IsValid() {
			m.flows.put(tuple{c.NodeLocal, c.NodeRemote}, names{c.Local, c.Remote})
		}
	}
}

// forget makes the matcher ask again for a connection that begins anew with the addresses of an
// earlier one.
func (m *matcher) forget(p *packet) {
	m.flows.remove(tuple{p.src, p.dst})
	m.flows.remove(tuple{p.dst, p.src})
}

// match gives the addresses of the packet as the container's programs see them, if it is theirs.
func (m *matcher) match(p *packet) (src, dst netip.AddrPort, v verdict) {
	if p.proto != protoTCP || p.l4 == 0 {
		return m.asItIs(p)
	}
	if n, ok := m.flows.get(tuple{p.src, p.dst}); ok {
		return n.local, n.remote, n.verdict()
	}
	if n, ok := m.flows.get(tuple{p.dst, p.src}); ok {
		return n.remote, n.local, n.verdict()
	}
	if src, dst, ok := m.inPod(p); ok {
		return src, dst, verdictOurs
	}
	ours, theirs := m.ends(p)
	switch {
	case ours && theirs:
		// Both ends are the container's, and the addresses stand for several.
		return src, dst, verdictUnknown
	case m.addrs[p.src.Addr()] || m.addrs[p.dst.Addr()]:
		return p.src, p.dst, verdictOurs
	}
	if o, ok := p.option(m.prefix6); ok {
		return m.direct(p, o)
	}
	if m.nodes(p.src.Addr()) || m.nodes(p.dst.Addr()) {
		return src, dst, verdictUnknown
	}
	return src, dst, verdictForeign
}

// inPod gives the addresses of a packet between a node socket of the container and a process of it
// that is not intercepted: they follow from those on the node.
func (m *matcher) inPod(p *packet) (src, dst netip.AddrPort, ok bool) {
	if plain, node, ok := model.MirrorNames(m.whose, p.src.Addr(), p.dst.Addr()); ok {
		return netip.AddrPortFrom(plain, p.src.Port()), netip.AddrPortFrom(node, p.dst.Port()), true
	}
	plain, node, ok := model.MirrorNames(m.whose, p.dst.Addr(), p.src.Addr())
	return netip.AddrPortFrom(node, p.src.Port()), netip.AddrPortFrom(plain, p.dst.Port()), ok
}

func (n names) verdict() verdict {
	if n == (names{}) {
		return verdictForeign
	}
	return verdictOurs
}

// asItIs judges a packet by its addresses alone.
func (m *matcher) asItIs(p *packet) (src, dst netip.AddrPort, v verdict) {
	if m.addrs[p.src.Addr()] || m.addrs[p.dst.Addr()] {
		return p.src, p.dst, verdictOurs
	}
	return src, dst, verdictForeign
}

// ends tells which ends of a packet are addresses of the container, loopback ones included.
func (m *matcher) ends(p *packet) (src, dst bool) {
	own := func(a netip.Addr) bool {
		_, loopback := model.LoopbackShown(m.whose.ID, a)
		return loopback || m.addrs[a]
	}
	return own(p.src.Addr()), own(p.dst.Addr())
}

// nodes reports whether a is an address of the node itself, and so perhaps of one of its sockets.
func (m *matcher) nodes(a netip.Addr) bool { return m.node[a] || a.IsLoopback() }

// direct reads the addresses of a direct connection from its SYN.
func (m *matcher) direct(p *packet, o option) (src, dst netip.AddrPort, v verdict) {
	src = netip.AddrPortFrom(o.src, p.src.Port())
	outgoing := m.addrs[o.src] && m.node[p.src.Addr()]
	incoming := m.addrs[o.dst.Addr()] && m.node[p.dst.Addr()]
	switch {
	case outgoing:
		m.flows.put(tuple{p.src, p.dst}, names{src, o.dst})
	case incoming:
		m.flows.put(tuple{p.dst, p.src}, names{o.dst, src})
	default:
		m.flows.put(tuple{p.src, p.dst}, names{})
		return src, o.dst, verdictForeign
	}
	return src, o.dst, verdictOurs
}

// resolve judges a packet of a connection that the agent does not know. One between the container's
// own ends must be its own: it ended before the agent was asked, and has the usual loopback
// addresses. Anything else is taken for the node's until a SYN begins it anew; only its handshake
// proves nothing, since the agent lists no connection that is about to be accepted.
func (m *matcher) resolve(p *packet) (src, dst netip.AddrPort, v verdict) {
	if src, dst, v = m.match(p); v != verdictUnknown {
		return src, dst, v
	}
	t, n := tuple{p.src, p.dst}, names{}
	if ours, theirs := m.ends(p); ours && theirs {
		n = m.ownNames(p)
	}
	if n != (names{}) || p.flags&flagSYN == 0 {
		m.flows.put(t, n)
	}
	return n.local, n.remote, n.verdict()
}

// ownNames guesses the names of a connection of the container with itself. A wildcard listener that
// was reached over loopback has its overlay address in the packet.
func (m *matcher) ownNames(p *packet) names {
	n := names{p.src, p.dst}
	src, fromLoopback := model.LoopbackShown(m.whose.ID, p.src.Addr())
	dst, toLoopback := model.LoopbackShown(m.whose.ID, p.dst.Addr())
	switch {
	case fromLoopback && !toLoopback:
		dst = src
	case toLoopback && !fromLoopback:
		src = dst
	case !fromLoopback:
		return n
	}
	return names{netip.AddrPortFrom(src, p.src.Port()), netip.AddrPortFrom(dst, p.dst.Port())}
}

// recent is a map that forgets: it holds at least the limit/2 keys that were used last.
type recent[K comparable, V any] struct {
	limit        int
	young, older map[K]V
}

func newRecent[K comparable, V any](limit int) *recent[K, V] {
	return &recent[K, V]{limit: limit, young: map[K]V{}, older: map[K]V{}}
}

func (r *recent[K, V]) put(k K, v V) {
	if _, have := r.young[k]; !have && len(r.young) >= r.limit/2 {
		r.young, r.older = map[K]V{}, r.young
	}
	r.young[k] = v
	delete(r.older, k)
}

func (r *recent[K, V]) get(k K) (V, bool) {
	v, ok := r.young[k]
	if !ok {
		if v, ok = r.older[k]; ok {
			r.put(k, v)
		}
	}
	return v, ok
}

func (r *recent[K, V]) remove(k K) {
	delete(r.young, k)
	delete(r.older, k)
}
