package model

import "net/netip"

// PrefixHolders says who holds a prefix that overlaps a given one, or an address, without comparing
// with each. The zero value holds nothing.
type PrefixHolders struct {
	holder map[netip.Prefix]string
	// within counts, for each prefix around one that is held, what is in use of it: its halves, and
	// itself.
	within  map[netip.Prefix]int
	lengths [129]int // of the prefixes that are held, of either family
}

// Add makes name the holder of p.
func (h *PrefixHolders) Add(p netip.Prefix, name string) {
	if h.holder == nil {
		h.holder, h.within = make(map[netip.Prefix]string), make(map[netip.Prefix]int)
	}
	p = p.Masked()
	_, held := h.holder[p]
	h.holder[p] = name
	if held {
		return
	}
	h.lengths[p.Bits()]++
	for bits := p.Bits(); bits >= 0; bits-- {
		around := netip.PrefixFrom(p.Addr(), bits).Masked()
		h.within[around]++
		if h.within[around] > 1 {
			break // it counts in what is around it already
		}
	}
}

// Remove makes p nobody's. That it is already is no error.
func (h *PrefixHolders) Remove(p netip.Prefix) {
	p = p.Masked()
	if _, held := h.holder[p]; !held {
		return
	}
	delete(h.holder, p)
	h.lengths[p.Bits()]--
	for bits := p.Bits(); bits >= 0; bits-- {
		around := netip.PrefixFrom(p.Addr(), bits).Masked()
		if h.within[around]--; h.within[around] > 0 {
			break
		}
		delete(h.within, around)
	}
}

// Overlapping gives a prefix that overlaps p, and who holds it.
func (h *PrefixHolders) Overlapping(p netip.Prefix) (q netip.Prefix, name string, overlaps bool) {
	if h.within[p.Masked()] > 0 {
		q = h.heldIn(p.Masked())
		return q, h.holder[q], true
	}
	for bits := p.Bits() - 1; bits >= 0; bits-- {
		if h.lengths[bits] == 0 {
			continue
		}
		q = netip.PrefixFrom(p.Addr(), bits).Masked()
		if name, overlaps = h.holder[q]; overlaps {
			return q, name, true
		}
	}
	return netip.Prefix{}, "", false
}

// Holder gives who holds a prefix that a is in.
func (h *PrefixHolders) Holder(a netip.Addr) (name string, held bool) {
	_, name, held = h.Overlapping(netip.PrefixFrom(a, a.BitLen()))
	return name, held
}

// heldIn gives a prefix that is held and within p, of which there is one.
func (h *PrefixHolders) heldIn(p netip.Prefix) netip.Prefix {
	for {
		if _, held := h.holder[p]; held {
			return p
		}
		low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
		if h.within[low] == 0 {
			b := p.Addr().AsSlice()
			b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
			high, _ := netip.AddrFromSlice(b)
			low = netip.PrefixFrom(high, p.Bits()+1)
		}
		p = low
	}
}
