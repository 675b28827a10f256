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
var Declaration = plane.Declaration{Paths: names.Paths, Reasons: names.Reasons, Faults: []api.FaultReason{FaultPassStuck}}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

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

// FillStatus says to which nodes connections can be direct, and how trapped calls were answered.
func (p *Plane) FillStatus(_ context.Context, st *api.Status) (err error) {
	st.Direct = p.prober.Paths()
	in := &st.Interception
	if in.Unguarded, err = p.datapath.SocketOwners(); err != nil {
		return err
	}
	// Sums of counters, no differences: a count that falls would be taken for a restart.
	sockets := p.sockets.Stats()
	in.PremadeHits, in.PremadeMisses = sockets.PoolHits, sockets.PoolMisses+p.cfg.Traps.Redelivered(p.sockets)
	in.Answered = in.PremadeHits + in.PremadeMisses
	in.Batches, in.BatchSockets, in.Ioctls = sockets.Batches, sockets.BatchSockets, p.ioctls.Made()
	if st.Encryption != nil {
		if st.Encryption.Clear, err = p.inTheClear(); err != nil {
			return err
		}
	}
	st.Packets, st.Firewall = p.packets.status(), p.firewall.status()
	if st.Packets.Native, err = p.packets.natives(); err != nil {
		return err
	}
	in.EndpointSockets, in.EndpointPorts = p.cfg.EndpointSockets, uint64(p.cfg.EndpointPorts)
	return nil
}
