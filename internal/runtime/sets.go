package runtime

import (
	"fmt"
	"math"
	"math/bits"
)

// valueSet is a set of values of one system call argument: the x with lo <= x <= hi and x&mask ==
// want. Every comparison OCI seccomp knows is one or two valueSets, and the intersection and the
// difference of valueSets are valueSets again, so that a profile's rules can be cut exactly where
// Heddle's begin.
type valueSet struct{ lo, hi, mask, want uint64 }

var anyValue = valueSet{hi: math.MaxUint64}

// point gives the set that holds just v.
func point(v uint64) valueSet { return valueSet{lo: v, hi: v} }

// masked gives the x with x&mask == want.
func masked(mask, want uint64) valueSet {
	return valueSet{hi: math.MaxUint64, mask: mask, want: want & mask}
}

// intersect gives the intersection; ok is false if it is empty.
func (a valueSet) intersect(b valueSet) (s valueSet, ok bool) {
	s = valueSet{lo: max(a.lo, b.lo), hi: min(a.hi, b.hi), mask: a.mask | b.mask, want: a.want | b.want}
	if s.lo > s.hi || a.mask&b.mask&(a.want^b.want) != 0 {
		return valueSet{}, false
	}
	if s.lo == s.hi {
		if s.lo&s.mask != s.want {
			return valueSet{}, false
		}
		s.mask, s.want = 0, 0
	}
	return s, true
}

// subtract gives a without b, as disjoint valueSets.
func (a valueSet) subtract(b valueSet) []valueSet {
	both, ok := a.intersect(b)
	if !ok {
		return []valueSet{a}
	}
	var rest []valueSet
	add := func(s valueSet) {
		if s, ok := a.intersect(s); ok {
			rest = append(rest, s)
		}
	}
	if b.lo > 0 {
		add(valueSet{hi: b.lo - 1})
	}
	if b.hi < math.MaxUint64 {
		add(valueSet{lo: b.hi + 1, hi: math.MaxUint64})
	}
	// Inside b's interval: one valueSet a bit that b's mask fixes and a leaves open, with that bit
	// flipped and the bits before it as b wants them.
	cur := valueSet{lo: both.lo, hi: both.hi, mask: a.mask, want: a.want}
	if cur.lo == cur.hi {
		return rest // a single value that is in b as well
	}
	for open := b.mask &^ a.mask; open != 0; open &= open - 1 {
		bit := open & -open
		flipped := cur
		flipped.mask |= bit
		flipped.want |= bit &^ b.want
		add(flipped)
		cur.mask |= bit
		cur.want |= bit & b.want
	}
	return rest
}

// comparison is one argument condition as config.json writes it. A nil *comparison is no condition.
type comparison struct {
	op              string
	value, valueTwo uint64
}

// comparisons writes the valueSet as alternatives of one comparison each, because libseccomp takes
// one comparison an argument and rule. A single nil means that every value belongs to it.
func (a valueSet) comparisons() []*comparison {
	if a.mask == 0 {
		switch {
		case a.lo == 0 && a.hi == math.MaxUint64:
			return []*comparison{nil}
		case a.lo == a.hi:
			return []*comparison{{op: opEQ, value: a.lo}}
		case a.lo == 0:
			return []*comparison{{op: opLE, value: a.hi}}
		case a.hi == math.MaxUint64:
			return []*comparison{{op: opGE, value: a.lo}}
		}
	}
	var out []*comparison
	for _, block := range alignedBlocks(a.lo, a.hi) {
		s, ok := block.intersect(valueSet{hi: math.MaxUint64, mask: a.mask, want: a.want})
		if !ok {
			continue
		}
		if s.mask == math.MaxUint64 || s.lo == s.hi && s.mask == 0 {
			out = append(out, &comparison{op: opEQ, value: s.want | s.lo})
			continue
		}
		out = append(out, &comparison{op: opMaskedEQ, value: s.mask, valueTwo: s.want})
	}
	return out
}

// alignedBlocks cuts lo..hi into blocks of a power of two each, as one cuts an address range into
// prefixes: every block is a mask and a value.
func alignedBlocks(lo, hi uint64) []valueSet {
	var blocks []valueSet
	for {
		shift := min(bits.TrailingZeros64(lo), 64)
		for shift == 64 || lo+(1<<shift-1) > hi {
			if shift == 64 && lo == 0 && hi == math.MaxUint64 {
				return []valueSet{anyValue}
			}
			shift--
		}
		last := lo + (1<<shift - 1)
		blocks = append(blocks, masked(^uint64(1<<shift-1), lo))
		if last == hi {
			return blocks
		}
		lo = last + 1
	}
}

// The comparison operators of the OCI runtime specification.
const (
	opNE       = "SCMP_CMP_NE"
	opLT       = "SCMP_CMP_LT"
	opLE       = "SCMP_CMP_LE"
	opEQ       = "SCMP_CMP_EQ"
	opGE       = "SCMP_CMP_GE"
	opGT       = "SCMP_CMP_GT"
	opMaskedEQ = "SCMP_CMP_MASKED_EQ"
)

// values gives the values for which the comparison holds.
func (c comparison) values() ([]valueSet, error) {
	v := c.value
	var out []valueSet
	below := func(v uint64) { out = append(out, valueSet{hi: v}) }
	above := func(v uint64) { out = append(out, valueSet{lo: v, hi: math.MaxUint64}) }
	switch c.op {
	case opEQ:
		return []valueSet{point(v)}, nil
	case opMaskedEQ: // value is the mask
		return []valueSet{masked(v, c.valueTwo)}, nil
	case opLE:
		below(v)
	case opGE:
		above(v)
	case opLT, opNE, opGT:
		if c.op != opGT && v > 0 {
			below(v - 1)
		}
		if c.op != opLT && v < math.MaxUint64 {
			above(v + 1)
		}
	default:
		return nil, fmt.Errorf("%q is no comparison of the OCI runtime specification (SCMP_CMP_EQ and so on)", c.op)
	}
	return out, nil
}

// numArgs is how many arguments a system call has.
const numArgs = 6

// callSet is a set of system calls of one number: those whose every argument is in its valueSet.
type callSet [numArgs]valueSet

// anyCall gives the callSet of all calls.
func anyCall() (b callSet) {
	for i := range b {
		b[i] = anyValue
	}
	return b
}

// intersect gives the intersection; ok is false if it is empty.
func (b callSet) intersect(c callSet) (out callSet, ok bool) {
	for i := range b {
		if out[i], ok = b[i].intersect(c[i]); !ok {
			return callSet{}, false
		}
	}
	return out, true
}

// subtract gives b without c, as disjoint callSets.
func (b callSet) subtract(c callSet) []callSet {
	if _, ok := b.intersect(c); !ok {
		return []callSet{b}
	}
	var out []callSet
	cur := b
	for i := range b {
		for _, s := range b[i].subtract(c[i]) {
			piece := cur
			piece[i] = s
			out = append(out, piece)
		}
		cur[i], _ = b[i].intersect(c[i])
	}
	return out
}

// subtractAll gives bs without every callSet of cs.
func subtractAll(bs, cs []callSet) []callSet {
	for _, c := range cs {
		var next []callSet
		for _, b := range bs {
			next = append(next, b.subtract(c)...)
		}
		bs = next
	}
	return bs
}
