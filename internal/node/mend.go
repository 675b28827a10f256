package node

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/firewall"
)

// remedyOfMending is what an operator does about it.
const remedyOfMending = `what removes it does so again, and policy is weaker until it is back: "Reload your rules" in docs/howto/firewall.md`

// mender puts back what others take away of the node's network: the nftables table, and rules and
// routes that nobody else of the agent's looks at. The kernel tells it of their changes.
type mender struct {
	*host
	damaged chan<- struct{} // tells the topology to compare its routes with the kernel's
	// fights are each the goroutine's that mends the thing.
	fights map[api.MendedThing]*fight
}

func newMender(h *host, damaged chan<- struct{}) *mender {
	return &mender{h, damaged, map[api.MendedThing]*fight{api.MendedFirewall: {}, api.MendedRouting: {}}}
}

// run follows nftables and routing until ctx ends.
func (m *mender) run(ctx context.Context) {
	var wg sync.WaitGroup
	follow := func(what string, f func() error) {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := f(); err != nil {
					m.log.Error(what+" not followed; will try again", "err", err)
				}
				select {
				case <-time.After(retryTopology):
				case <-ctx.Done():
				}
			}
		})
	}
	follow("changes of nftables", func() error { return firewall.Follow(ctx, func(by string) error { return m.mendFirewall(ctx, by) }) })
	follow("changes of rules and routes", func() error { return netcfg.FollowRouting(ctx, func() error { return m.mendRouting(ctx) }) })
	wg.Wait()
}

// mendFirewall writes the nftables table again if it is not as it should be; by is who has changed
// rules last, if that is known.
func (m *mender) mendFirewall(ctx context.Context, by string) error {
	m.pause(ctx, api.MendedFirewall)
	gone, err := m.devices.Firewall.Mend()
	return m.done(api.Mended{What: api.MendedFirewall, Gone: gone, By: by}, err)
}

// mendRouting adds rules and routes that are gone. Whoever took them may have taken others, too.
func (m *mender) mendRouting(ctx context.Context) error {
	m.pause(ctx, api.MendedRouting)
	restored, err := netcfg.RestoreRouting(m.wanted)
	if len(restored) > 0 {
		select {
		case m.damaged <- struct{}{}:
		default: // it is being told
		}
	}
	return m.done(api.Mended{What: api.MendedRouting, Gone: strings.Join(restored, ", ")}, err)
}

// done tells what has become of a try to put back what was gone, if anything was.
func (m *mender) done(what api.Mended, err error) error {
	if err != nil {
		if m.faults.Set(what.What.Fault(), "", err) {
			m.log.Error("not known to be as it should be; will try again", "what", what.What, "gone", what.Gone, "by", what.By, "err", err)
		}
		return err
	}
	m.faults.Clear(what.What.Fault(), "")
	if what.Gone != "" {
		m.putBack(what)
	} else {
		m.lasts(what.What)
	}
	return nil
}

// mended are the things that were put back, each with how often and when last. Its methods may be
// called from several goroutines.
type mended struct {
	mu  sync.Mutex
	all map[api.MendedThing]api.Mended
}

// add notes that something was put back just now.
func (m *mended) add(what api.Mended) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		m.all = make(map[api.MendedThing]api.Mended)
	}
	what.Times, what.Last = m.all[what.What].Times+1, time.Now().UTC()
	m.all[what.What] = what
}

// list gives what was put back at all.
func (m *mended) list() []api.Mended {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.SortedFunc(maps.Values(m.all), func(x, y api.Mended) int { return cmp.Compare(x.What, y.What) })
}

// counts gives how often, by the name of the reason.
func (m *mended) counts() map[string]uint64 {
	out := make(map[string]uint64)
	for _, x := range m.list() {
		out[x.What.Reason()] = x.Times
	}
	return out
}
