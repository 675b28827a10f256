package ui

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// Bounds of answers to a browser, and of what is kept to make them.
const (
	keptEdges    = 20_000 // between services, of all nodes
	shownEdges   = 500
	shownFlows   = 2000
	shownRows    = 500 // of other lists
	pageRows     = 200 // of endpoints and nodes
	ofANode      = 20  // entries of a node's lists
	flowsOfRound = 40_000
	fewestFlows  = 8 // of a node
)

// briefStatus is what nodes are asked of how they are.
const briefStatus = "/v1/status?most=20"

// Rates are what all nodes' endpoints do, a second.
type Rates struct {
	Sent        float64 `json:"sent"`
	Received    float64 `json:"received"`
	Opened      float64 `json:"opened"`
	Retransmits float64 `json:"retransmits"`
}

// EdgeAnswer is what went between two services.
type EdgeAnswer struct {
	flow.Edge
	flow.Load
	RTT time.Duration `json:"rtt_ns"`
}

// SummaryAnswer is the answer to /api/summary.
type SummaryAnswer struct {
	Edges []EdgeAnswer `json:"edges"`
	// Total is how many edges there are; of flows of edges beyond that LeftOut were.
	Total   int    `json:"total"`
	Flows   uint64 `json:"flows"`
	LeftOut uint64 `json:"left_out"`
	// Rates are missing until there are two answers of a node.
	Rates *Rates        `json:"rates,omitempty"`
	RTT   time.Duration `json:"rtt_ns"`
	Live  uint64        `json:"live"`
	Progress
}

// counted is what a node's endpoints had done at a time.
type counted struct {
	at      time.Time
	traffic model.Traffic
}

// summaries puts those of nodes together.
type summaries struct {
	sum    *flow.Summary
	counts map[string]counted
	before map[string]counted
	rates  Rates
	rated  int // nodes
	live   uint64
}

func newSummaries(before gather) gather {
	g := &summaries{sum: flow.NewSummary("", keptEdges), counts: make(map[string]counted)}
	if before != nil {
		g.before = before.(*summaries).counts
	}
	return g
}

func (g *summaries) read(body []byte) (func(string), error) {
	var said api.NodeSummary
	if err := json.Unmarshal(body, &said); err != nil {
		return nil, err
	}
	now := time.Now()
	return func(node string) {
		g.sum.Merge(&said.SummaryText)
		g.live += said.Traffic.LiveTotal()
		g.counts[node] = counted{now, said.Traffic}
		if then, there := g.before[node]; there {
			g.rate(then, g.counts[node])
		}
	}, nil
}

func (g *summaries) rate(then, now counted) {
	took := now.at.Sub(then.at).Seconds()
	per := func(n, before uint64) float64 { return float64(n-min(n, before)) / took }
	a, b := now.traffic, then.traffic
	g.rated++
	g.rates.Sent += per(a.BytesSent, b.BytesSent)
	g.rates.Received += per(a.BytesReceived, b.BytesReceived)
	g.rates.Opened += per(a.Opened, b.Opened)
	g.rates.Retransmits += per(a.Retransmits, b.Retransmits)
}

// answer gives what a browser is told, in memory of its own.
func (g *summaries) answer() SummaryAnswer {
	text := g.sum.Text(shownEdges)
	out := SummaryAnswer{Edges: make([]EdgeAnswer, len(text.Edges)), Total: g.sum.Len(), Flows: text.Flows, LeftOut: text.LeftOut, RTT: text.Lately.Median(), Live: g.live}
	for i, e := range text.Edges {
		out.Edges[i] = EdgeAnswer{e.Edge, e.Load, e.RTTs.Median()}
		out.Edges[i].RTTs, out.Edges[i].Paths = nil, slices.Clone(e.Paths)
	}
	if g.rated > 0 {
		rates := g.rates
		out.Rates = &rates
	}
	return out
}

// FlowsAnswer is the answer to /api/flows.
type FlowsAnswer struct {
	Flows []flow.Flow `json:"flows"` // latest first
	Lost  uint64      `json:"lost"`
	// Each is how many a node is asked for; Full nodes have at least as many.
	Each int `json:"each"`
	Full int `json:"full"`
	Progress
}

// latest keeps the latest flows of all nodes.
type latest struct {
	each, full int
	lost       uint64
	list       []flow.Flow
}

// eachNode is how many flows each of so many nodes is asked for.
func eachNode(nodes int) int { return min(max(flowsOfRound/max(nodes, 1), fewestFlows), shownFlows) }

func (g *latest) read(body []byte) (func(string), error) {
	var list []flow.Flow
	var lost uint64
	for line := range bytes.Lines(body) {
		var said api.FlowLine
		if err := json.Unmarshal(line, &said); err != nil {
			return nil, err
		}
		if lost += said.Lost; said.Flow != nil {
			list = append(list, *said.Flow)
		}
	}
	return func(string) {
		g.lost += lost
		if len(list) >= g.each {
			g.full++
		}
		if g.list = append(g.list, list...); len(g.list) > 2*shownFlows {
			g.trim()
		}
	}, nil
}

// trim leaves the latest ones, in order.
func (g *latest) trim() {
	slices.SortStableFunc(g.list, func(a, b flow.Flow) int { return b.Time.Compare(a.Time) })
	g.list = slices.Clone(g.list[:min(len(g.list), shownFlows)])
}

func (g *latest) answer() FlowsAnswer {
	g.trim()
	return FlowsAnswer{Flows: slices.Clone(g.list), Lost: g.lost, Each: g.each, Full: g.full}
}

// digest is what is shown of a node's status.
type digest struct {
	Version string           `json:"version"`
	Healthy bool             `json:"healthy"`
	Error   string           `json:"error,omitempty"`
	paths   []model.PeerPath // that are not direct
}

// statuses puts those of nodes together.
type statuses struct {
	nodes    map[string]digest
	faults   []FaultAnswer
	total    int // faults
	checks   map[[2]string]*CheckAnswer
	counters map[string]*CounterAnswer
}

func newStatuses(gather) gather {
	return &statuses{nodes: make(map[string]digest), checks: make(map[[2]string]*CheckAnswer), counters: make(map[string]*CounterAnswer)}
}

func (g *statuses) read(body []byte) (func(string), error) {
	var st api.Status
	if err := json.Unmarshal(body, &st); err != nil {
		return nil, err
	}
	return func(node string) {
		g.nodes[node] = digest{st.Version, st.Store.Healthy, st.Store.Error, slices.Clone(st.Direct.Overlay[:min(len(st.Direct.Overlay), ofANode)])}
		g.total += len(st.Faults) + st.Omitted["faults"]
		for _, f := range st.Faults[:min(len(st.Faults), ofANode, shownRows-len(g.faults))] {
			g.faults = append(g.faults, FaultAnswer{node, f})
		}
		for _, c := range st.Features {
			g.check(node, c)
		}
		for _, c := range st.Counters {
			g.count(node, c)
		}
	}, nil
}

// check counts what a machine lacks.
func (g *statuses) check(node string, c api.Check) {
	key := [2]string{c.Name, string(c.Status)}
	sum := g.checks[key]
	if c.Status == api.CheckOK || sum == nil && len(g.checks) >= shownRows {
		return
	}
	if sum == nil {
		sum = &CheckAnswer{Check: c, Node: node}
		g.checks[key] = sum
	}
	sum.Count++
}

// count adds what a node counts.
func (g *statuses) count(node string, c api.Counter) {
	sum := g.counters[c.Name]
	if c.Value == 0 || c.Kind == model.KindPath || sum == nil && len(g.counters) >= shownRows {
		return
	}
	if sum == nil {
		sum = &CounterAnswer{Counter: api.Counter{Name: c.Name, Kind: c.Kind, Help: c.Help}}
		g.counters[c.Name] = sum
	}
	if c.Value > sum.most {
		sum.most, sum.Node = c.Value, node
	}
	sum.Value += c.Value
	sum.Count++
}

// PathAnswer is a path between two nodes that is not direct.
type PathAnswer struct {
	From string `json:"from"`
	model.PeerPath
}

// NodeAnswer is a node, with what it says of itself if it does.
type NodeAnswer struct {
	api.Node
	Digest *digest
}

// MarshalJSON writes the node's members with the digest as status.
func (n NodeAnswer) MarshalJSON() ([]byte, error) {
	raw, err := json.Marshal(n.Node)
	if err != nil || n.Digest == nil {
		return raw, err
	}
	status, err := json.Marshal(n.Digest)
	return slices.Concat(raw[:len(raw)-1], []byte(`,"status":`), status, []byte("}")), err
}

// NodesAnswer is the answer to /api/nodes: a page.
type NodesAnswer struct {
	List   []NodeAnswer          `json:"list"`
	Total  int                   `json:"total"` // on all pages
	States map[api.NodeState]int `json:"states"`
	Paths  []PathAnswer          `json:"paths"` // of these nodes
	Progress
}

// FaultAnswer is a node's fault.
type FaultAnswer struct {
	Node string `json:"node"`
	api.Fault
}

// CheckAnswer is what machines lack, and how many.
type CheckAnswer struct {
	api.Check
	Count int    `json:"count"`
	Node  string `json:"node"` // one of them
}

// CounterAnswer is a count of all nodes.
type CounterAnswer struct {
	api.Counter
	Count int    `json:"count"` // nodes
	Node  string `json:"node"`  // that has most
	most  uint64
}

// FaultsAnswer is the answer to /api/faults.
type FaultsAnswer struct {
	Faults   []FaultAnswer   `json:"faults"`
	Total    int             `json:"total"` // faults
	Checks   []CheckAnswer   `json:"checks"`
	Counters []CounterAnswer `json:"counters"`
	Progress
}

// answer gives what a browser is told, in memory of its own.
func (g *statuses) answer() FaultsAnswer {
	out := FaultsAnswer{Faults: append([]FaultAnswer{}, g.faults...), Total: g.total, Checks: []CheckAnswer{}, Counters: []CounterAnswer{}}
	for _, c := range g.checks {
		out.Checks = append(out.Checks, *c)
	}
	for _, c := range g.counters {
		out.Counters = append(out.Counters, *c)
	}
	slices.SortFunc(out.Faults, func(a, b FaultAnswer) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Reason, b.Reason))
	})
	slices.SortFunc(out.Checks, func(a, b CheckAnswer) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Status, b.Status))
	})
	slices.SortFunc(out.Counters, func(a, b CounterAnswer) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name)) })
	return out
}
