package endpoint

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// pool finds free addresses in a node's prefixes. Leases guards it.
type pool struct {
	prefixes []netip.Prefix
	last     netip.Addr // given out last; the search goes on behind it
}

func newPool(prefixes []netip.Prefix) (*pool, error) {
	p := &pool{}
	for _, prefix := range prefixes {
		if !prefix.Addr().Is4() || prefix != prefix.Masked() {
			return nil, fmt.Errorf("prefix %s: want NETWORK-ADDRESS/LENGTH in IPv4", prefix)
		}
		if slices.ContainsFunc(p.prefixes, prefix.Overlaps) {
			return nil, fmt.Errorf("prefix %s: overlaps another of the node's", prefix)
		}
		p.prefixes = append(p.prefixes, prefix)
	}
	if len(p.prefixes) == 0 {
		return nil, errors.New("no prefixes")
	}
	return p, nil
}

// has reports whether a is an address that the pool can give out.
func (p *pool) has(a netip.Addr) bool {
	return slices.ContainsFunc(p.prefixes, func(prefix netip.Prefix) bool { return usable(prefix, a) })
}

// usable reports whether an endpoint may have address a of prefix: it is neither the network
// address, nor the gateway, nor the broadcast address.
func usable(prefix netip.Prefix, a netip.Addr) bool {
	if !prefix.Contains(a) || a == prefix.Addr() || a == model.Gateway(prefix) {
		return false
	}
	return prefix.Contains(a.Next())
}

// free finds the first free address behind the one given out last, going round through all prefixes
// once. It steps over no more addresses than are in use.
func (p *pool) free(isFree func(netip.Addr) bool) (netip.Addr, bool) {
	start := slices.IndexFunc(p.prefixes, func(prefix netip.Prefix) bool { return prefix.Contains(p.last) })
	if start < 0 {
		start = 0
	} else if a, found := firstFree(p.prefixes[start], p.last.Next(), isFree); found {
		return a, true
	} else {
		start++ // and come back to the beginning of this prefix at the end of the round
	}
	for i := range p.prefixes {
		prefix := p.prefixes[(start+i)%len(p.prefixes)]
		if a, found := firstFree(prefix, prefix.Addr(), isFree); found {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// firstFree finds the first free address in prefix at or after from.
func firstFree(prefix netip.Prefix, from netip.Addr, isFree func(netip.Addr) bool) (netip.Addr, bool) {
	for a := from; prefix.Contains(a); a = a.Next() {
		if isFree(a) && usable(prefix, a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}
