package policy

import "heddle.dev/heddle/internal/model"

// revision is what a reclassify has done to classes.
type revision struct {
	fresh  map[*class]bool       // made by it
	before map[*class]*signature // of those that have another signature now
}

// pairAll computes the pairs that may have changed with the signatures of classes.
//
// The verdict on a pair of classes comes from the rules of each that name a term of the other, from
// the rules for any peer, and from the defaults. So a class that has got or lost a policy has other
// verdicts with the classes that have a term of that policy, or had; and one that has got or lost a
// term, with the classes that have a policy which names it, or had. With all others it has the
// verdicts of before, unless rules for any peer or defaults are others now.
func (c *Compiler) pairAll(changed map[*class]bool, r revision) {
	lostTerm := make(map[termID]map[*class]bool)
	for k, before := range r.before {
		for _, t := range before.terms {
			put(lostTerm, t, k)
		}
	}
	done := make(map[*class]bool)
	for _, k := range inOrder(changed) {
		before := r.before[k]
		switch {
		case r.fresh[k] || before != nil && c.broadly(before, k.signature):
			c.pairUp(k, c.allOthers(k), done)
			done[k] = true
		case before != nil:
			c.pairUp(k, c.concerned(k, before, lostTerm), done)
		}
	}
}

// compiledOf gives a policy that is there, or was before this update.
func (c *Compiler) compiledOf(id policyID) *compiled {
	if x := c.byID[id]; x != nil {
		return x
	}
	return c.removed[id]
}

// broadly reports whether two signatures differ in what their policies say of any peer.
func (c *Compiler) broadly(a, b *signature) bool {
	for _, id := range difference(a.policies, b.policies) {
		for _, d := range c.compiledOf(id).directions {
			if len(d.any) > 0 {
				return true
			}
		}
	}
	return c.defaults(a) != c.defaults(b)
}

func (c *Compiler) defaults(s *signature) (out [2]model.Verdict) {
	for _, id := range s.policies {
		for i, d := range c.compiledOf(id).directions {
			out[i] = out[i].Worse(d.byDefault)
		}
	}
	return out
}

// difference gives what is in one of two sorted lists without repetitions, and not in the other.
func difference[T policyID | termID](a, b []T) (out []T) {
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0] == b[0]:
			a, b = a[1:], b[1:]
		case a[0] < b[0]:
			out, a = append(out, a[0]), a[1:]
		default:
			out, b = append(out, b[0]), b[1:]
		}
	}
	return append(append(out, a...), b...)
}

// concerned gives the classes with which k may have other verdicts than before, but for those that
// find k themselves, because what they name of it has changed. lostTerm are classes that had a term
// before they got another signature.
func (c *Compiler) concerned(k *class, before *signature, lostTerm map[termID]map[*class]bool) map[*class]bool {
	others := make(map[*class]bool)
	for _, id := range difference(before.policies, k.signature.policies) {
		for t := range c.compiledOf(id).terms {
			addOthers(others, k, c.withTerm[t])
			addOthers(others, k, lostTerm[t])
		}
	}
	for _, t := range difference(before.terms, k.signature.terms) {
		for id := range c.usedBy[t] {
			addOthers(others, k, c.withRules[id]) // those that have lost it find k
		}
	}
	return others
}

// addOthers adds the classes of set whose pairs with k this node needs.
func addOthers(others map[*class]bool, k *class, set map[*class]bool) {
	for other := range set {
		if k.signature.local || other.signature.local {
			others[other] = true
		}
	}
}

// allOthers gives every class that has an entry with k, or may need one.
func (c *Compiler) allOthers(k *class) map[*class]bool {
	others := make(map[*class]bool, len(k.pairs))
	for other := range k.pairs {
		others[other] = true
	}
	for _, id := range k.signature.policies {
		for t := range c.byID[id].terms {
			addOthers(others, k, c.withTerm[t])
		}
	}
	for _, t := range k.signature.terms {
		for id := range c.usedBy[t] {
			addOthers(others, k, c.withRules[id])
		}
	}
	addOthers(others, k, c.wide)
	if c.wide[k] {
		for _, other := range c.classes {
			if k.signature.local || other.signature.local {
				others[other] = true
			}
		}
	}
	return others
}

// pairUp computes the pairs of k with others, but for those that are done.
func (c *Compiler) pairUp(k *class, others, done map[*class]bool) {
	for other := range others {
		if done[other] || len(other.members) == 0 {
			continue
		}
		forth, back := c.pair(k, other), c.pair(other, k)
		if forth || back {
			k.pairs[other], other.pairs[k] = true, true
		} else {
			delete(k.pairs, other)
			delete(other.pairs, k)
		}
	}
}
