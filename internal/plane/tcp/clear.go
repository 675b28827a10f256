package tcp

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// lookForClear is how often a node that encrypts looks for direct connections in the clear: one may
// have been under way to be established when the programs were changed.
const lookForClear = 10 * time.Second

// clearWatch ends, or counts, direct connections that are older than the node's encryption.
type clearWatch struct {
	keep  bool
	end   func() (int, error)
	count func() (map[netip.Addr]int, error)
	log   *slog.Logger
}

// run looks at once, and again until ctx ends.
func (c clearWatch) run(ctx context.Context) {
	said := map[netip.Addr]int{}
	for {
		said = c.look(said)
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookForClear):
		}
	}
}

// look gives what the log has been told of.
func (c clearWatch) look(said map[netip.Addr]int) map[netip.Addr]int {
	if c.keep {
		now, err := c.count()
		if err != nil {
			c.log.Error("not known which connections go on in the clear; will look again", "err", err)
			return said
		}
		if !maps.Equal(now, said) {
			for peer, n := range now {
				c.log.Warn("direct connections from before encryption go on in the clear", "peer", peer, "connections", n)
			}
		}
		return now
	}
	ended, err := c.end()
	if err = unlessStuck(err); err != nil {
		c.log.Error("connections from before encryption may go on in the clear; will try again", "err", err)
	}
	if ended > 0 {
		c.log.Warn("direct connections from before encryption ended: they went on in the clear", "connections", ended)
	}
	return said
}

// inTheClear gives how many direct connections there are from before the node's encryption.
func (p *Plane) inTheClear() (n int, err error) {
	by, err := p.datapath.Clear()
	for _, some := range by {
		n += some
	}
	return n, err
}

// followClear is clearWatch's run on a node that encrypts.
func (p *Plane) followClear(ctx context.Context) {
	if p.cfg.Devices.Encrypted() {
		clearWatch{p.cfg.Clear == model.ClearKeep, p.datapath.CutClear, p.datapath.Clear, p.log}.run(ctx)
	}
}
