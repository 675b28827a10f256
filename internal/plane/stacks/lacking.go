package stacks

import (
	"context"
	"maps"
	"slices"
	"time"

	"heddle.dev/heddle/internal/stack"
)

// lookEvery is how often it is looked for modules that profiles name and the node has not.
const lookEvery = 2 * time.Second

// lacks notes whether the node lacks an own module that a profile names.
func (p *Plane) lacks(kind stack.Kind, err error) {
	if _, own := kind.Module(); !own {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.lacking, kind)
	} else if len(p.lacking) < stack.MaxProfiles {
		p.lacking[kind] = true
	}
}

// lookForOwn says so when a module has been installed that was lacking.
func (p *Plane) lookForOwn(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		p.mu.Lock()
		all := slices.Collect(maps.Keys(p.lacking))
		p.mu.Unlock()
		for _, kind := range all {
			if _, err := p.cfg.Find(kind); err == nil {
				p.lacks(kind, nil)
				p.cfg.StacksChanged()
			}
		}
	}
}
