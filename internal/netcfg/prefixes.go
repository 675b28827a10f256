package netcfg

import "net/netip"

// prefixHolders says who has a prefix that overlaps a given one, without comparing it with each.
type prefixHolders struct {
	byPrefix map[netip.Prefix]string       // the prefixes themselves
	within   map[netip.Prefix]netip.Prefix // one of them, by every prefix around it, itself included
	lengths  [129]bool                     // that they have, of either family
}

func (h *prefixHolders) add(p netip.Prefix, name string) {
	if h.byPrefix == nil {
		h.byPrefix, h.within = map[netip.Prefix]string{}, map[netip.Prefix]netip.Prefix{}
	}
	p = p.Masked()
	h.byPrefix[p], h.lengths[p.Bits()] = name, true
	for bits := p.Bits(); bits >= 0; bits-- {
		around := netip.PrefixFrom(p.Addr(), bits).Masked()
		if _, known := h.within[around]; known {
			break // so are all that are shorter
		}
		h.within[around] = p
	}
}

// overlapping gives a prefix that overlaps p, and who has it.
func (h *prefixHolders) overlapping(p netip.Prefix) (q netip.Prefix, name string, overlaps bool) {
	if q, overlaps = h.within[p.Masked()]; overlaps {
		return q, h.byPrefix[q], true
	}
	for bits := p.Bits() - 1; bits >= 0; bits-- {
		if !h.lengths[bits] {
			continue
		}
		q = netip.PrefixFrom(p.Addr(), bits).Masked()
		if name, overlaps = h.byPrefix[q]; overlaps {
			return q, name, true
		}
	}
	return netip.Prefix{}, "", false
}
