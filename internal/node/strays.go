package node

import (
	"context"
	"time"

	"heddle.dev/heddle/internal/model"
)

// defaultCompareMaps is how often the programs' maps are compared with the endpoints.
const defaultCompareMaps = time.Minute

// keepEndpoints removes what the planes have of endpoints that are not in keep. The caller holds change.
func (a *Agent) keepEndpoints(keep map[model.EndpointID]bool) error {
	removed, err := a.planes.Keep(keep)
	if len(removed) > 0 {
		a.log.Warn("entries of endpoints that are not there are removed: an agent was killed while it wrote or forgot them", "entries", removed)
	}
	return err
}

// compareMaps does so for the endpoints there are, from time to time until ctx ends: whatever left entries behind, no later
// endpoint of the same address or id is to meet with them.
func (a *Agent) compareMaps(ctx context.Context) {
	ticker := time.NewTicker(a.cfg.CompareMaps)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := a.compareMapsOnce(); err != nil {
			a.log.Warn("the programs' maps are not compared with the endpoints; will try again", "err", err)
		}
	}
}

func (a *Agent) compareMapsOnce() error {
	a.change.Lock()
	defer a.change.Unlock()
	keep := make(map[model.EndpointID]bool)
	for _, e := range a.known.all() {
		keep[e.ID] = true
	}
	for _, e := range a.halfDone { // to be undone by those who know all of them
		keep[e.ID] = true
	}
	return a.keepEndpoints(keep)
}
