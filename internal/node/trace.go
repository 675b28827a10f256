package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
)

const (
	// traceConnects is how long a connect of a trace may take.
	traceConnects = 3 * time.Second
	// traceTold is how long after it the node may take to tell of it: of one that does not end a
	// second.
	traceTold = 2 * time.Second
)

// tracer tries connections in the name of endpoints.
type tracer struct {
	*host
	policies *policies
	flows    *flows
}

// Trace says what the rules make of a connection of an endpoint of this node, and makes it: as a
// program of the endpoint would, with the same policy, limits and path. It is ended at once, and
// nothing is sent by it.
func (tr *tracer) Trace(ctx context.Context, req api.TraceRequest) (t api.Trace, err error) {
	e, known := tr.known.named(req.From)
	if !known {
		return t, &api.Error{Code: api.CodeNotFound, Field: "from", Message: fmt.Sprintf("no endpoint %s on this node", req.From), Remedy: "`heddle endpoints` lists them; ask on its node"}
	}
	ports, err := req.Ports()
	if err != nil {
		return t, err
	}
	began := time.Now()
	if t.Policy, err = tr.policies.ExplainPolicy(ctx, api.ExplainRequest{From: req.From, To: req.To, Ports: ports}); err != nil {
		return t, err
	}
	t.Steps = append(t.Steps, api.TraceStep{Name: "policy", Took: time.Since(began)})
	sockets := tr.sockets()
	if !e.Planes.TCP.Intercepted || sockets == nil {
		return t, &api.Error{Code: api.CodeUnsupported, Field: "from", Message: fmt.Sprintf("%s is not intercepted: no connection can be made in its name", req.From),
			Remedy: "`heddle policy explain` says what the rules make of it"}
	}
	to := netip.AddrPortFrom(t.Policy.To, req.Port)
	if t.Way, err = tr.way(e, to, t.Policy.Verdict); err != nil {
		return t, err
	}
	filter := flow.Filter{From: []flow.PeerMatch{{Name: req.From}}, Ports: []flow.PortRange{{First: req.Port, Last: req.Port}}, Last: 1}
	_, told, err := tr.flows.kept.Follow(filter, began)
	if err != nil {
		return t, &api.Error{Code: api.CodeExhausted, Message: err.Error(), Remedy: "end some that follow this node's flows"}
	}
	defer told.Close()
	step, source := tryConnect(ctx, func(ctx context.Context) (int, func() error, error) {
		f, err := sockets.ConnectAs(ctx, e.ID, to)
		if err != nil {
			return -1, nil, err
		}
		return int(f.Fd()), f.Close, nil
	})
	t.Steps = append(t.Steps, step)
	t.Connected = step.Error == ""
	began = time.Now()
	t.Flow = awaitTold(ctx, told.Flows(), to.Addr(), source, step.Took >= traceConnects)
	t.Steps = append(t.Steps, api.TraceStep{Name: "told", Took: time.Since(began)})
	return t, nil
}

// way says which path a connection would take.
func (tr *tracer) way(e model.Endpoint, to netip.AddrPort, verdict string) (*api.Way, error) {
	stack := tr.stacker.moduleOf(e.ID)
	if verdict != model.VerdictAllow.String() {
		return &api.Way{Why: "policy does not allow it: nothing is sent", Stack: stack}, nil
	}
	for _, p := range tr.planes {
		ways, ok := p.(plane.Ways)
		if !ok {
			continue
		}
		way, err := ways.WayTo(e, to, tr.known.all())
		way.Stack = stack
		return &way, err
	}
	return nil, nil
}

// tryConnect makes a connection and ends it, and gives the port that it came from; 0: there was
// none.
func tryConnect(ctx context.Context, connect func(context.Context) (fd int, end func() error, err error)) (api.TraceStep, uint16) {
	limited, cancel := context.WithTimeout(ctx, traceConnects)
	defer cancel()
	began := time.Now()
	fd, end, err := connect(limited)
	step := api.TraceStep{Name: "connect", Took: time.Since(began)}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		step.Error = fmt.Sprintf("no answer within %s", traceConnects)
	case err != nil:
		step.Error = err.Error()
	}
	if err != nil {
		return step, 0
	}
	defer func() { _ = end() }() // there is nothing to send
	switch at, err := unix.Getsockname(fd); a := at.(type) {
	case *unix.SockaddrInet4:
		return step, uint16(a.Port)
	case *unix.SockaddrInet6:
		return step, uint16(a.Port)
	default:
		_ = err // the address helps to find the flow, and no more
		return step, 0
	}
}

// awaitTold gives the flow of a try: that of its source port, or, if it has none, the first to its
// address. givenUp: the kernel tells of its end only.
func awaitTold(ctx context.Context, flows <-chan *flow.Flow, to netip.Addr, source uint16, givenUp bool) *flow.Flow {
	limit := time.NewTimer(traceTold)
	defer limit.Stop()
	for {
		select {
		case f := <-flows:
			if f.SeenBy == flow.SideFrom && f.To.Addr == to && (source == 0 || f.From.Port == source) && (source != 0 || givenUp || f.Event != flow.Open) {
				return f
			}
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// sockets gives the plane that makes sockets in the name of endpoints; nil: none does.
func (tr *tracer) sockets() plane.Sockets {
	for _, p := range tr.planes {
		if s, ok := p.(plane.Sockets); ok {
			return s
		}
	}
	return nil
}
