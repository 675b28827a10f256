package verbs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

const (
	// pollEvery is how often the router's counts are fetched, so that little is lost with it.
	pollEvery = 5 * time.Second
	// pollAge is how old they may be in a report.
	pollAge = 200 * time.Millisecond
	// statsTime bounds the wait for an answer.
	statsTime = time.Second
)

var errNoRouter = errors.New("no router runs")

// counted sums what an endpoint did, over the ends of routers, which begin at 0.
type counted struct {
	last protocol.EndpointRecord // of the router that runs
	// moved is what the TCP plane does not count: what was copied on the node, or went by a card.
	before, moved api.RDMATraffic
	// limited is moved when the endpoint got its caps.
	limited api.RDMATraffic
}

// restart says that the router has ended.
func (c *counted) restart() { c.before, c.last = c.moved, protocol.EndpointRecord{} }

// note takes a record over, and adds to sums what is new in its reasons.
func (c *counted) note(r protocol.EndpointRecord, sums *[len(reasons)]uint64) {
	for i, n := range r.Reasons {
		sums[min(i, len(sums)-1)] += n - min(n, c.last.Reasons[i])
	}
	c.last = r
	c.moved = c.before
	for _, t := range []protocol.Traffic{r.Traffic[byMemory], r.Traffic[byCard]} {
		c.moved.Requests += t.Requests
		c.moved.Served += t.Served
		c.moved.BytesSent += t.Sent
		c.moved.BytesReceived += t.Received
	}
}

// ask fetches all records of a kind from all routers. The caller holds asking.
func (p *Plane) ask(ctx context.Context, kind uint32, f func(l *link, b []byte)) error {
	p.mu.Lock()
	all := p.routers()
	p.mu.Unlock()
	if len(all) == 0 {
		return errNoRouter
	}
	var errs []error
	for _, l := range all {
		errs = append(errs, p.askOne(ctx, l, kind, func(b []byte) { f(l, b) }))
	}
	return errors.Join(errs...)
}

func (p *Plane) askOne(ctx context.Context, l *link, kind uint32, f func(b []byte)) error {
	ctx, cancel := context.WithTimeout(ctx, statsTime)
	defer cancel()
	for cursor := uint32(0); ; {
		p.asked++
		p.mu.Lock()
		p.send(l, statsMessage(p.asked, kind, cursor), nil)
		p.mu.Unlock()
		answer, err := l.answer(ctx, p.asked)
		if err != nil {
			return err
		}
		answer.each(f)
		if cursor = answer.Cursor; cursor == 0 {
			return nil
		}
	}
}

// answer waits for the answer to the STATS with a tag.
func (l *link) answer(ctx context.Context, tag uint32) (statistics, error) {
	for {
		select {
		case m := <-l.answers:
			if m.Tag == tag {
				return m.statistics, nil
			}
		case <-l.done:
			return statistics{}, errNoRouter
		case <-ctx.Done():
			return statistics{}, fmt.Errorf("%s, process %d, says nothing of what it did: %w", Program, l.PID, ctx.Err())
		}
	}
}

// poll fetches counts now and then while a router runs.
func (p *Plane) poll(ctx context.Context) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = p.refresh(ctx) // reports have what was there last
		}
	}
}

// refresh fetches the endpoints' counts, unless that was just done.
func (p *Plane) refresh(ctx context.Context) error {
	p.asking.Lock()
	defer p.asking.Unlock()
	p.mu.Lock()
	fresh := time.Since(p.reported) < pollAge
	p.mu.Unlock()
	if fresh {
		return nil
	}
	type key struct {
		router   *link
		endpoint uint64
	}
	records := make(map[key]protocol.EndpointRecord)
	err := p.ask(ctx, protocol.KindEndpoints, func(l *link, b []byte) {
		r := record[protocol.EndpointRecord](b)
		records[key{l, r.Endpoint}] = r
	})
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reported = time.Now()
	for _, ep := range p.endpoints {
		if r, ok := records[key{ep.router, ep.number}]; ok {
			ep.counted.note(r, &p.reasons)
		}
	}
	return nil
}

// lastCounts hears what an endpoint did at a router that gives it back next.
func (p *Plane) lastCounts(m heard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.number == m.Endpoint {
			m.statistics.each(func(b []byte) { ep.counted.note(record[protocol.EndpointRecord](b), &p.reasons) })
		}
	}
}

// Counters implements plane.Reports.
func (p *Plane) Counters() ([]api.Counter, error) {
	_ = p.refresh(context.Background()) // without a router nothing has happened since
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]api.Counter, len(reasons))
	for i, r := range reasons {
		out[i] = api.Counter{Name: r.Name, Kind: r.Kind, Help: r.Help, Value: p.reasons[i]}
	}
	return out, nil
}

// Traffic implements plane.Reports: what the router copied on one node, and what went by a card.
// Other bytes are those of TCP connections, which the TCP plane counts.
func (p *Plane) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	_ = p.refresh(context.Background())
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]model.Traffic, len(endpoints))
	for i, e := range endpoints {
		if ep, ok := p.endpoints[e.ID]; ok {
			out[i].BytesSent, out[i].BytesReceived = ep.counted.moved.BytesSent, ep.counted.moved.BytesReceived
		}
	}
	return out, nil
}

// SetLimits implements plane.Limits.
func (p *Plane) SetLimits(e model.Endpoint, _ []model.Endpoint) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	ep, ok := p.endpoints[e.ID]
	if !ok {
		return nil // it has them when it is attached
	}
	if ep.Limits == nil {
		ep.counted.limited = ep.counted.moved
	}
	ep.Limits = e.Limits
	p.reported = time.Time{} // the router's report of limits is not these
	p.tellIfThere(ep)
	return nil
}

// SpreadLimits implements plane.Limits: the router has no devices.
func (p *Plane) SpreadLimits() {}

// RestoreLimits implements plane.Limits: endpoints are attached with theirs.
func (p *Plane) RestoreLimits([]model.Endpoint) error { return nil }

// LimitUse implements plane.Limits: bytes that the router copied on one node under caps.
func (p *Plane) LimitUse(all []model.Endpoint) ([]model.LimitUse, error) {
	_ = p.refresh(context.Background())
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]model.LimitUse, len(all))
	for i, e := range all {
		ep, ok := p.endpoints[e.ID]
		if !ok || e.Limits == nil {
			continue
		}
		now, from := ep.counted.moved, ep.counted.limited
		if e.Limits.Egress > 0 {
			out[i].Egress.Bytes = now.BytesSent - from.BytesSent
		}
		if e.Limits.Ingress > 0 {
			out[i].Ingress.Bytes = now.BytesReceived - from.BytesReceived
		}
	}
	return out, nil
}

// RDMA implements plane.RDMA.
func (p *Plane) RDMA(ctx context.Context) (api.RDMA, error) {
	err := p.refresh(ctx)
	router := p.Router()
	out := api.RDMA{Router: &router}
	names := make(map[uint64]string)
	p.mu.Lock()
	for _, ep := range p.endpoints {
		names[ep.number] = ep.Name
		out.Devices = append(out.Devices, ep.report(p.cfg))
	}
	p.mu.Unlock()
	slices.SortFunc(out.Devices, func(a, b api.RDMADevice) int { return strings.Compare(a.Endpoint, b.Endpoint) })
	if err == nil {
		p.asking.Lock()
		err = p.ask(ctx, protocol.KindQPs, func(_ *link, b []byte) {
			number, q := parseQP(b)
			if q.Endpoint = names[number]; q.Endpoint != "" {
				out.QueuePairs = append(out.QueuePairs, q)
			}
		})
		err = errors.Join(err, p.ask(ctx, protocol.KindIDs, func(_ *link, b []byte) {
			number, id := parseID(b)
			if id.Endpoint = names[number]; id.Endpoint != "" {
				out.CMIDs = append(out.CMIDs, id)
			}
		}))
		p.asking.Unlock()
	}
	if errors.Is(err, errNoRouter) {
		err = nil // the router's state says so
	}
	return out, err
}

// report says what is known of the endpoint's device.
func (ep *endpoint) report(node Config) api.RDMADevice {
	d := api.RDMADevice{Endpoint: ep.Name, GIDs: ep.Addrs, SpinMicros: spinOf(ep.Endpoint, node), Known: ep.counted.last.Endpoint != 0}
	if !d.Known {
		return d
	}
	r := ep.counted.last
	d.Used, d.Limits = make(map[string]uint64), make(map[string]uint64)
	for i, what := range api.RDMAObjects {
		d.Used[what], d.Limits[what] = r.Used[i], r.Limits[i]
	}
	d.Traffic = map[api.RDMAPath]api.RDMATraffic{api.RDMAMemory: trafficOf(r.Traffic[byMemory]), api.RDMATCP: trafficOf(r.Traffic[byTCP]), api.RDMACard: trafficOf(r.Traffic[byCard])}
	d.Errors = r.Errors
	return d
}

// Connections implements plane.Reports: those of queue pairs are the TCP plane's to list.
func (p *Plane) Connections() ([]model.Connection, error) { return nil, nil }
