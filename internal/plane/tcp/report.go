package tcp

import (
	"context"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// Declaration is what the plane says of its names.
var Declaration = plane.Declaration{Paths: names.Paths, Reasons: names.Reasons}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

// Paths gives the direct paths to other nodes.
func (p *Plane) Paths() model.DirectPaths { return p.prober.Paths() }

// Heard says when a node last answered a probe; the zero time: never.
func (p *Plane) Heard(n model.Node) time.Time { return p.prober.Answered(n.Underlay) }

// Counters gives the counts of the programs by reason.
func (p *Plane) Counters() ([]api.Counter, error) {
	counts, err := p.datapath.Counters()
	if err != nil {
		return nil, err
	}
	return api.CountersOf(names.Reasons, func(i int) uint64 { return counts[i] }), nil
}

// Connections lists the sockets of this node's endpoints. Names are not filled in.
func (p *Plane) Connections() ([]model.Connection, error) { return p.datapath.Connections() }

// Interception reports how trapped calls were answered.
func (p *Plane) Interception(context.Context) (api.Interception, error) {
	unguarded, err := p.datapath.SocketOwners()
	if err != nil {
		return api.Interception{}, err
	}
	// Sums of counters, no differences: a count that falls would be taken for a restart.
	sockets := p.sockets.Stats()
	misses := sockets.PoolMisses + p.cfg.Traps.Redelivered(p.sockets)
	return api.Interception{
		Answered: sockets.PoolHits + misses, Ioctls: p.ioctls.Made(),
		EndpointSockets: p.cfg.EndpointSockets, EndpointPorts: uint64(p.cfg.EndpointPorts),
		PremadeHits: sockets.PoolHits, PremadeMisses: misses, Batches: sockets.Batches, BatchSockets: sockets.BatchSockets, Unguarded: unguarded,
	}, nil
}
