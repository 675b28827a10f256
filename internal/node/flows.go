package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/flowlog"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/otlp"
	"heddle.dev/heddle/internal/plane"
)

// openConnections is of how many live connections it is remembered when they began.
const openConnections = 65536

// followPulse is how often who follows hears that there is nothing.
const followPulse = 10 * time.Second

// flows gives what planes observe the names that it has at that moment, and keeps it.
type flows struct {
	*host
	kept   *flowlog.Log
	export *otlp.Exporter    // nil: to no collector
	queued *flowlog.Follower // of export

	mu        sync.Mutex // guards the rest; held by who observes, for microseconds
	directory directory
	openings  *flowlog.Openings
	judge     judge
	kinds     map[string]model.Kind // of reasons; nil until the first flow
}

func newFlows(h *host) *flows {
	return &flows{host: h, kept: flowlog.New(flowlog.Kept), openings: flowlog.NewOpenings(openConnections)}
}

// observe is told of a connection by planes, which it keeps waiting for no system call.
func (fl *flows) observe(o flow.Observation) {
	fl.mu.Lock()
	defer fl.mu.Unlock()
	state, _ := fl.view.last()
	fl.directory.follow(state.Endpoints, state.Nodes, fl.prefix6)
	if fl.isOfModule(o) {
		return
	}
	fl.kept.Add(fl.named(o))
}

// isOfModule reports whether what was observed is of a stack module's connection, of which the
// module's plane tells, as sockets do: a packet that leaves, or what is relayed to it.
func (fl *flows) isOfModule(o flow.Observation) bool {
	c := o.Connection
	id := c.Endpoint
	if packet := id == 0; packet {
		e := fl.directory.byAddr[c.Local.Addr()]
		if o.Event != flow.Open || c.Protocol != "tcp" && c.Protocol != "" || e == nil || e.Node != fl.self.Name {
			return false
		}
		id = e.ID
	} else if !o.Relayed {
		return false
	}
	return slices.ContainsFunc(fl.planes, func(p plane.Plane) bool {
		modules, ok := p.(plane.OwnTCP)
		return ok && modules.RunsTCPOf(id)
	})
}

// named makes a flow of what was observed. The caller holds mu.
func (fl *flows) named(o flow.Observation) flow.Flow {
	c := o.Connection
	own, other := fl.peers(c)
	packet := c.Endpoint == 0 // not of a socket's: there will be no end
	f := flow.Flow{
		Time: o.At, Node: fl.self.Name, Event: o.Event, Verdict: o.Event.Verdict(), Protocol: c.Protocol,
		From: own, To: other, SeenBy: flow.SideFrom, Reason: c.Reason, ReasonKind: fl.kindOf(c.Reason), Error: o.Error,
		Relayed: o.Relayed, BytesSent: c.BytesSent, BytesReceived: c.BytesReceived, Retransmits: c.Retransmits, RTT: o.RTT, Socket: c.Cookie,
	}
	if f.Protocol == "" {
		f.Protocol = "tcp"
	}
	if c.Path != model.PathNone {
		f.Path = c.Path
	}
	if o.Accepted {
		f.From, f.To, f.SeenBy = other, own, flow.SideTo
		f.BytesSent, f.BytesReceived = c.BytesReceived, c.BytesSent
	}
	switch {
	case packet:
	case o.Event == flow.Open, o.Event == flow.Fallback:
		fl.openings.Note(c.Cookie, flowlog.Opening{At: o.At, From: f.From, To: f.To})
	case o.Event == flow.End, o.Event == flow.Cut, o.Event == flow.Fail:
		if opening, seen := fl.openings.Take(c.Cookie); seen {
			f.From, f.To, f.Duration = opening.From, opening.To, o.At.Sub(opening.At)
		}
	}
	fl.explain(&f)
	return f
}

// peers gives the ends of a connection, its own first.
func (fl *flows) peers(c model.Connection) (own, other flow.Peer) {
	if c.Endpoint == 0 {
		return fl.directory.peer(c.Local), fl.directory.peer(c.Remote)
	}
	own = flow.Peer{Node: fl.self.Name, Addr: c.Local.Addr(), Port: c.Local.Port()}
	e, known := fl.known.withID(c.Endpoint)
	if known {
		own.Endpoint, own.Labels = e.Name, e.Labels
	}
	if !own.Addr.IsValid() {
		for _, a := range e.Addrs {
			if a.Is4() == c.Remote.Addr().Is4() {
				own.Addr = a
			}
		}
	}
	if c.Remote.Addr().IsLoopback() {
		other = own
		other.Addr, other.Port = c.Remote.Addr(), c.Remote.Port()
		return own, other
	}
	return own, fl.directory.peer(c.Remote)
}

// explain adds what policy says of a flow, where that is why, or where it is new.
func (fl *flows) explain(f *flow.Flow) {
	byPolicy := f.Event == flow.Cut && (f.Reason == "" || strings.Contains(f.Reason, "policy")) ||
		f.Event == flow.Deny && strings.Contains(f.Reason, "policy")
	if !byPolicy && f.Event != flow.Open && f.Event != flow.Fallback && f.Event != flow.Fail {
		return
	}
	if _, known := policyProtocols[f.Protocol]; !known {
		return // a plane's own, of which policy says nothing by itself
	}
	_, reported := fl.enforcer.snapshot()
	f.Policy, f.Rule = fl.judge.explain(f, byPolicy, fl.enforcer.applying.Load(), reported)
}

// kindOf gives the kind of a reason that a plane declares.
func (fl *flows) kindOf(reason string) model.Kind {
	if fl.kinds == nil {
		fl.kinds = make(map[string]model.Kind)
		for _, r := range fl.planes.Declares().Reasons {
			fl.kinds[r.Name] = r.Kind
		}
	}
	return fl.kinds[reason]
}

// Flows gives emit the kept flows that a filter chooses, and then, if asked, those that come until
// ctx ends.
func (fl *flows) Flows(ctx context.Context, req api.FlowRequest, emit func(api.FlowLine) error) error {
	if err := fl.checkDeclared(req.Filter); err != nil {
		return err
	}
	if !req.Follow {
		recent, err := fl.kept.Recent(req.Filter, time.Now())
		if err != nil {
			return api.FlowError(err)
		}
		if since := fl.kept.Since(); !since.IsZero() {
			if err := emit(api.FlowLine{Since: since}); err != nil {
				return err
			}
		}
		return emitAll(ctx, recent, emit)
	}
	recent, follower, err := fl.kept.Follow(req.Filter, time.Now())
	if errors.Is(err, flowlog.ErrFull) {
		return &api.Error{Code: api.CodeExhausted, Message: fmt.Sprintf("%d follow this node's flows already", flowlog.MaxFollowers), Remedy: "end some, or ask without following"}
	}
	if err != nil {
		return api.FlowError(err)
	}
	defer follower.Close()
	if err := emitAll(ctx, recent, emit); err != nil {
		return err
	}
	return follow(ctx, follower, emit)
}

func emitAll(ctx context.Context, from *flowlog.Reader, emit func(api.FlowLine) error) error {
	for {
		list, lost, more := from.Next()
		if !more {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if lost > 0 {
			if err := emit(api.FlowLine{Lost: lost}); err != nil {
				return err
			}
		}
		for i := range list {
			if err := emit(api.FlowLine{Flow: &list[i]}); err != nil {
				return err
			}
		}
	}
}

// follow emits flows as they come, and how many were lost before them.
func follow(ctx context.Context, w *flowlog.Follower, emit func(api.FlowLine) error) error {
	pulse := time.NewTicker(followPulse)
	defer pulse.Stop()
	line := api.FlowLine{} // says at once that the following has begun
	for {
		line.Lost = w.Lost()
		if err := emit(line); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case f := <-w.Flows():
			line = api.FlowLine{Flow: f}
		case <-pulse.C:
			line = api.FlowLine{}
		}
	}
}

// checkDeclared refuses paths and reasons that no plane of this node has.
func (fl *flows) checkDeclared(f flow.Filter) error {
	declared := fl.planes.Declares()
	for _, p := range f.Paths {
		if !slices.Contains(declared.Paths, p) {
			var known []string
			for _, p := range declared.Paths {
				if p != model.PathNone && p != model.PathListen {
					known = append(known, string(p))
				}
			}
			return &api.Error{Code: api.CodeInvalid, Field: "path", Message: fmt.Sprintf("%q is no path of this node", p), Remedy: "use " + strings.Join(known, ", ")}
		}
	}
	names := make([]string, len(declared.Reasons))
	for i, r := range declared.Reasons {
		names[i] = r.Name
	}
	if none := f.NoReason(names); none != "" {
		return &api.Error{Code: api.CodeInvalid, Field: "reason", Message: fmt.Sprintf("%q is no reason of this node", none), Remedy: "`heddle status --all` lists them; * and ? stand for any characters, as in fallback_*"}
	}
	return nil
}

// flowStats gives what a log has done the form that travels.
func flowStats(s flowlog.Stats) api.FlowStats {
	out := api.FlowStats{Kept: s.Kept, Followers: s.Followers, Lost: s.Lost}
	for k, n := range s.Counts {
		out.Counts = append(out.Counts, api.FlowCount{Event: k.Event, Path: k.Path, Count: n})
	}
	slices.SortFunc(out.Counts, func(a, b api.FlowCount) int {
		return strings.Compare(string(a.Event)+" "+string(a.Path), string(b.Event)+" "+string(b.Path))
	})
	return out
}
