package queues

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
	"heddle.dev/heddle/internal/stack"
)

// Kind is what reports of modules call the service.
const Kind stack.Kind = "queues"

// StackModules implements plane.StackReports. A service that nobody has wanted is none.
func (p *Plane) StackModules(ctx context.Context) ([]api.StackModule, error) {
	ctx, cancel := context.WithTimeout(ctx, process.Answers)
	defer cancel()
	p.mu.Lock()
	l, ended := p.link, p.ended
	names := map[uint64]string{}
	profiles := map[string]string{}
	for id, r := range p.regions {
		names[id] = r.of.Name
		profiles[r.of.Name] = r.of.profile
	}
	p.mu.Unlock()
	report := api.StackModule{Stack: Kind, Ended: ended}
	if l == nil {
		if ended == 0 {
			return nil, nil
		}
		return []api.StackModule{report}, nil
	}
	report.PID = l.PID
	whole, err := l.useOf(ctx, 0)
	if err != nil {
		return nil, fmt.Errorf("ask the service of queues for what it uses: %w", err)
	}
	report.StackUse = whole
	tenants := map[string]*api.StackTenant{}
	for id, name := range names {
		use, err := l.useOf(ctx, id)
		if errors.Is(err, unix.ENOENT) { // it has ended since
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ask the service of queues for what %s uses: %w", name, err)
		}
		t := tenants[name]
		if t == nil {
			t = &api.StackTenant{Endpoint: name, Profile: profiles[name]}
			tenants[name] = t
		}
		t.Processor += use.Processor
		t.Sockets += use.Sockets
		t.Connections += use.Connections
		t.BytesSent += use.BytesSent
		t.BytesReceived += use.BytesReceived
		t.Refused += use.Refused
	}
	for _, t := range tenants {
		report.Tenants = append(report.Tenants, *t)
	}
	slices.SortFunc(report.Tenants, func(a, b api.StackTenant) int { return cmp.Compare(a.Endpoint, b.Endpoint) })
	return []api.StackModule{report}, nil
}

// Counters implements plane.Reports.
func (p *Plane) Counters() ([]api.Counter, error) { return nil, nil }

// Connections implements plane.Reports: they are the TCP plane's.
func (p *Plane) Connections() ([]model.Connection, error) { return nil, nil }

// Traffic implements plane.Reports: the TCP plane counts it.
func (p *Plane) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	return make([]model.Traffic, len(endpoints)), nil
}

// useOf asks what a region uses; 0: all.
func (l *link) useOf(ctx context.Context, region uint64) (api.StackUse, error) {
	ask := protocol.Plain{Head: protocol.Head{Type: protocol.TypeStats, Region: region}}
	s, back, err := request[protocol.Plain, protocol.Stats](ctx, l, &ask, &ask.Head, -1)
	closeFD(back)
	if err != nil {
		return api.StackUse{}, err
	}
	return api.StackUse{
		Processor: time.Duration(s.Processor), Sockets: s.Sockets, Connections: s.Connections,
		BytesSent: s.Sent, BytesReceived: s.Received, Refused: s.Refused,
	}, nil
}
