package stacks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// rttConnections is of how many connections of a tenant round-trip times are looked at: the module
// lists each.
const rttConnections = 1024

// StackModules implements plane.StackReports. A module that nobody has wanted is none.
func (p *Plane) StackModules(ctx context.Context) (out []api.StackModule, err error) {
	ctx, cancel := context.WithTimeout(ctx, module.Answers)
	defer cancel()
	var errs []error
	for _, m := range p.allModules() {
		tenants := p.tenantsOf(m)
		l, ended, drains := m.State()
		report := api.StackModule{Stack: m.Kind, Ended: ended, Drain: drains}
		if l != nil {
			report.PID = l.PID
			err := p.report(ctx, l, tenants, &report)
			errs = append(errs, err)
		}
		if l != nil || len(tenants) > 0 || report.Ended > 0 {
			out = append(out, report)
		}
	}
	return out, errors.Join(errs...)
}

// report asks a module what it uses.
func (p *Plane) report(ctx context.Context, l *module.Link, tenants []*tenant, m *api.StackModule) error {
	whole, err := l.Stats(ctx, 0)
	if err != nil {
		return fmt.Errorf("ask module %s for what it uses: %w", m.Stack, err)
	}
	m.StackUse = used(&whole)
	for _, t := range tenants {
		use, err := useOf(ctx, l, t)
		if errors.Is(err, unix.ENODEV) { // it does not know of it yet
			continue
		}
		if err != nil {
			return fmt.Errorf("ask module %s for what %s uses: %w", m.Stack, t.Name, err)
		}
		m.Tenants = append(m.Tenants, api.StackTenant{Endpoint: t.Name, Profile: p.profileOf(t), StackUse: use})
	}
	slices.SortFunc(m.Tenants, func(a, b api.StackTenant) int { return cmp.Compare(a.Endpoint, b.Endpoint) })
	return nil
}

// profileOf gives the name of a tenant's profile; empty if that does not name a module any more.
func (p *Plane) profileOf(t *tenant) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.choices[t.ID]; c.Profile != nil {
		return c.Profile.Name
	}
	return ""
}

// useOf asks what a tenant uses.
func useOf(ctx context.Context, l *module.Link, t *tenant) (api.StackUse, error) {
	s, err := l.Stats(ctx, t.number())
	if err != nil {
		return api.StackUse{}, err
	}
	use := used(&s)
	if s.Connections == 0 || s.Connections > rttConnections {
		return use, nil
	}
	sockets, err := l.Sockets(ctx, t.number())
	if err != nil {
		return use, err
	}
	use.RTT = meanRTT(sockets)
	return use, nil
}

// meanRTT is that of the connections that have measured one.
func meanRTT(sockets []protocol.Info) time.Duration {
	var sum, n time.Duration
	for _, s := range sockets {
		if s.Kind == protocol.KindConnection && s.RTT != 0 {
			sum, n = sum+time.Duration(s.RTT)*time.Microsecond, n+1
		}
	}
	if n == 0 {
		return 0
	}
	return sum / n
}

func used(s *protocol.Stats) api.StackUse {
	dropped := s.DropMalformed + s.DropMartian + s.DropChecksum + s.DropProtocol + s.DropBacklog + s.DropConnections + s.DropMemory + s.DropRate + s.DropDevice
	return api.StackUse{
		Processor: time.Duration(s.Processor), Memory: s.Memory, Sockets: s.Sockets, Connections: s.Connections,
		BytesSent: s.BytesSent, BytesReceived: s.BytesReceived, Retransmits: s.Retransmits,
		SendQueue: s.SendQueued, ReceiveQueue: s.ReceiveQueued,
		Dropped: dropped, Refused: s.RefuseConnections + s.RefuseMemory + s.RefuseRate + s.RefuseSockets + s.RefusePorts,
	}
}
