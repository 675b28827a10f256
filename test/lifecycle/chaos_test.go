package lifecycle

import (
	"errors"
	"flag"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/test/lab"
)

var (
	chaosSeed = flag.Uint64("chaos.seed", 0, "make the faults of this seed; 0: of a fixed one, or with -chaos.for of one by the clock")
	chaosFor  = flag.Duration("chaos.for", 0, "make faults for this long; 0: a few")
)

// few is how many faults are made without -chaos.for, and fewSeed the seed whose first ones are of
// kinds that no other test has.
const few, fewSeed = 8, 17879

// fault is one thing that is killed, and when.
type fault struct {
	kind   string
	node   string
	after  time.Duration // since the one before has been got over
	cut    float64       // at which part of the operation it is killed in, 0 to 1
	repeat bool          // the operation is repeated afterwards, not only undone
}

func (f fault) String() string {
	return fmt.Sprintf("%s on %s, at %.2f, after %s, repeated: %v", f.kind, f.node, f.cut, f.after, f.repeat)
}

// schedule gives the faults of a seed, of some kinds, without end: every kind once, in some order,
// then again in another.
func schedule(seed uint64, kinds []faultKind) iter.Seq[fault] {
	return func(yield func(fault) bool) {
		r := rand.New(rand.NewPCG(seed, 0))
		for {
			for _, i := range r.Perm(len(kinds)) {
				f := fault{kind: kinds[i].name, node: []string{"n1", "n2"}[r.IntN(2)], after: time.Duration(r.IntN(200)) * time.Millisecond,
					cut: r.Float64(), repeat: r.IntN(2) == 0}
				if !yield(f) {
					return
				}
			}
		}
	}
}

// TestScheduleIsOfItsSeed: the same seed gives the same faults, all kinds of them, and another seed
// others.
func TestScheduleIsOfItsSeed(t *testing.T) {
	take := func(seed uint64) (out []fault) {
		for f := range schedule(seed, faultKinds) {
			if out = append(out, f); len(out) == 2*len(faultKinds) {
				break
			}
		}
		return out
	}
	one := take(1)
	if !slices.Equal(one, take(1)) {
		t.Error("two schedules of one seed differ")
	}
	if slices.Equal(one, take(2)) {
		t.Error("the schedules of two seeds are equal")
	}
	for _, k := range faultKinds {
		if n := len(slices.DeleteFunc(slices.Clone(one), func(f fault) bool { return f.kind != k.name })); n != 2 {
			t.Errorf("%s: %d times in two rounds", k.name, n)
		}
	}
}

// TestChaos kills what Heddle is made of, in an order that the seed says, while connections on all
// paths have traffic, others are made, and endpoints come and go. docs/howto/chaos.md says what may
// fail then, and what may not. Afterwards everything is as it was before.
func TestChaos(t *testing.T) {
	t.Cleanup(func() { // for the tests that follow
		if t.Failed() {
			lab.Dump(t.Output())
			if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
				t.Error(err)
			}
		}
	})
	runChaos(t, newChaos(t, faultKinds))
}

// TestChaosStore is TestChaos with a cluster of three etcd members as the store, which are killed
// as well.
func TestChaosStore(t *testing.T) {
	if *chaosFor == 0 {
		t.Skip("takes minutes: make chaos-store")
	}
	inLab(t, "-s", "--nodes", "2", "--containers", "2", "--store-members", "3")
	c := newChaos(t, slices.Concat(faultKinds, storeFaultKinds))
	c.cluster = true
	runChaos(t, c)
}

// runChaos makes the faults of a seed in the lab.
func runChaos(t *testing.T, c *chaos) {
	seed := *chaosSeed
	if seed == 0 {
		seed = fewSeed
		if *chaosFor > 0 {
			seed = uint64(time.Now().Unix())
		}
	}
	t.Logf("seed %d: go test ./test/lifecycle -run '^%s$' -chaos.seed %[1]d -chaos.for %[3]s", seed, t.Name(), *chaosFor)
	same := leaksNothing(t)
	c.measure()
	loads, stop := startChaosLoads(t)
	c.loads = loads
	churn := c.startChurn()
	began, number := time.Now(), 0
	for f := range schedule(seed, c.kinds) {
		if *chaosFor == 0 && number == few || *chaosFor > 0 && time.Since(began) > *chaosFor {
			break
		}
		number++
		c.make(number, f)
		c.moves()
		if t.Failed() {
			break
		}
	}
	churned := churn()
	for _, l := range loads {
		l.finish()
	}
	stop()
	same()
	t.Logf("seed %d: survived %d faults in %s:\n%s", seed, number, time.Since(began).Round(time.Second), c.counts())
	t.Logf("endpoints that came and went meanwhile: %d", churned)
	for _, l := range loads {
		t.Log(l.summary())
	}
}

// moves waits until something more has come on every stream, and a call to every server been
// answered.
func (c *chaos) moves() {
	c.t.Helper()
	for _, l := range c.loads {
		l.moves()
	}
}

// counts prints the faults that were survived, by kind.
func (c *chaos) counts() string {
	var b strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(c.survived)) {
		fmt.Fprintf(&b, "%6d  %s\n", c.survived[kind], kind)
	}
	return b.String()
}
