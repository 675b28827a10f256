package lifecycle

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
	"heddle.dev/heddle/test/labstore"
)

// storeFaultKinds are what TestChaosStore kills beside faultKinds: members of the store's cluster,
// without a word.
var storeFaultKinds = []faultKind{
	{"store member killed", func(c *chaos, f fault) { c.killStoreMembers(f, c.members(f)[:1]) }},
	{"store leader killed", func(c *chaos, f fault) { c.killStoreMembers(f, []string{leader(c.t)}) }},
	{"store leader and an agent killed at once", (*chaos).killLeaderAndAgent},
	{"two store members killed, no majority left", (*chaos).killMajority},
	{"all store members killed", (*chaos).killStore},
}

// members gives the store's members in an order that the fault says.
func (c *chaos) members(f fault) []string {
	first := min(int(f.cut*float64(len(labstore.Members))), len(labstore.Members)-1)
	return slices.Concat(labstore.Members[first:], labstore.Members[:first])
}

// killStoreMembers kills members of which the others can do without, has an endpoint come and go on
// a node meanwhile, and brings them back.
func (c *chaos) killStoreMembers(f fault, members []string) {
	c.t.Helper()
	killMembers(c.t, members...)
	c.withoutThem(f)
	c.up()
	c.survive(f.kind)
}

// withoutThem demands that connections go on and endpoints can be made.
func (c *chaos) withoutThem(f fault) {
	c.t.Helper()
	c.moves()
	rt := c.attachment(f.node, "member")
	c.add(f.node, rt)
	c.del(f.node, rt)
}

// killLeaderAndAgent kills both; the agent comes back to a store with another leader.
func (c *chaos) killLeaderAndAgent(f fault) {
	c.t.Helper()
	agent, _ := c.processes(f.node)
	ended := make(chan error, 1)
	member := leader(c.t)
	go func() { ended <- lab.KillAgent(agent, syscall.SIGKILL) }()
	killMembers(c.t, member)
	testutil.NoError(c.t, <-ended)
	c.up()
	c.withoutThem(f)
	c.survive(f.kind)
}

func (c *chaos) killMajority(f fault) {
	c.t.Helper()
	c.loseStore(f, c.members(f)[:2])
}

func (c *chaos) killStore(f fault) {
	c.t.Helper()
	c.loseStore(f, labstore.Members)
}

// loseStore kills so many members that nothing can be decided: connections go on, and endpoints
// wait for the store.
func (c *chaos) loseStore(f fault, members []string) {
	c.t.Helper()
	killMembers(c.t, members...)
	c.moves()
	e, rt := c.engines[f.node], c.attachment(f.node, "storeless")
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*testutil.WaitTimeout)
	_, err := e.CNI.AddNetworkList(ctx, e.List, rt)
	cancel()
	if !away(err) {
		c.t.Error(errors.Join(errors.New("ADD without a store that can decide: want that it is to be tried again"), err))
	}
	c.moves()
	c.up()
	if f.repeat {
		c.add(f.node, rt)
	}
	c.del(f.node, rt)
	c.survive(f.kind)
}
