package runtime

import (
	"fmt"
	"math"
	"math/bits"
)

// span is a set of values of one system call argument: the x with lo <= x <= hi and x&mask == want.
// Every comparison OCI seccomp knows is one or two spans, and the intersection and the difference of
// spans are spans again, so that a profile's rules can be cut exactly where Heddle's begin.
type span struct{ lo, hi, mask, want uint64 }

var anySpan = span{hi: math.MaxUint64}

// point gives the set that holds just v.
func point(v uint64) span { return span{lo: v, hi: v} }

// masked gives the x with x&mask == want.
func masked(mask, want uint64) span { return span{hi: math.MaxUint64, mask: mask, want: want & mask} }

// meet gives the intersection; ok is false if it is empty.
func (a span) meet(b span) (s span, ok bool) {
	s = span{lo: max(a.lo, b.lo), hi: min(a.hi, b.hi), mask: a.mask | b.mask, want: a.want | b.want}
	if s.lo > s.hi || a.mask&b.mask&(a.want^b.want) != 0 {
		return span{}, false
	}
	if s.lo == s.hi {
		if s.lo&s.mask != s.want {
			return span{}, false
		}
		s.mask, s.want = 0, 0
	}
	return s, true
}

// minus gives a without b, as disjoint spans.
func (a span) minus(b span) []span {
	both, ok := a.meet(b)
	if !ok {
		return []span{a}
	}
	var rest []span
	add := func(s span) {
		if s, ok := a.meet(s); ok {
			rest = append(rest, s)
		}
	}
	if b.lo > 0 {
		add(span{hi: b.lo - 1})
	}
	if b.hi < math.MaxUint64 {
		add(span{lo: b.hi + 1, hi: math.MaxUint64})
	}
	// Inside b's interval: one span a bit that b's mask fixes and a leaves open, with that bit flipped
	// and the bits before it as b wants them.
	cur := span{lo: both.lo, hi: both.hi, mask: a.mask, want: a.want}
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

// comparisons writes the span as alternatives of one comparison each, because libseccomp takes one
// comparison an argument and rule. A single nil means that every value belongs to it.
func (a span) comparisons() []*comparison {
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
		s, ok := block.meet(span{hi: math.MaxUint64, mask: a.mask, want: a.want})
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
func alignedBlocks(lo, hi uint64) []span {
	var blocks []span
	for {
		shift := min(bits.TrailingZeros64(lo), 64)
		for shift == 64 || lo+(1<<shift-1) > hi {
			if shift == 64 && lo == 0 && hi == math.MaxUint64 {
				return []span{anySpan}
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

// spans gives the values for which the comparison holds.
func (c comparison) spans() ([]span, error) {
	v := c.value
	var out []span
	below := func(v uint64) { out = append(out, span{hi: v}) }
	above := func(v uint64) { out = append(out, span{lo: v, hi: math.MaxUint64}) }
	switch c.op {
	case opEQ:
		return []span{point(v)}, nil
	case opMaskedEQ: // value is the mask
		return []span{masked(v, c.valueTwo)}, nil
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

// box is a set of system calls of one number: those whose every argument is in its span.
type box [numArgs]span

// anyBox gives the box of all calls.
func anyBox() (b box) {
	for i := range b {
		b[i] = anySpan
	}
	return b
}

// meet gives the intersection; ok is false if it is empty.
func (b box) meet(c box) (out box, ok bool) {
	for i := range b {
		if out[i], ok = b[i].meet(c[i]); !ok {
			return box{}, false
		}
	}
	return out, true
}

// minus gives b without c, as disjoint boxes.
func (b box) minus(c box) []box {
	if _, ok := b.meet(c); !ok {
		return []box{b}
	}
	var out []box
	cur := b
	for i := range b {
		for _, s := range b[i].minus(c[i]) {
			piece := cur
			piece[i] = s
			out = append(out, piece)
		}
		cur[i], _ = b[i].meet(c[i])
	}
	return out
}

// minusAll gives bs without every box of cs.
func minusAll(bs, cs []box) []box {
	for _, c := range cs {
		var next []box
		for _, b := range bs {
			next = append(next, b.minus(c)...)
		}
		bs = next
	}
	return bs
}
