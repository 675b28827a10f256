package flow

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"heddle.dev/heddle/internal/model"
)

// lately is of how far back a Summary has round trip times and rates.
const lately = 30 * time.Second

// Outside is the name of what is neither an endpoint nor a node.
const Outside = "outside"

// Edge is what went from one service to a port of another. A service is a value of the label that
// a Summary goes by, or by itself an endpoint or node without the label.
type Edge struct {
	From string `json:"from"`
	To   string `json:"to"`
	Port uint16 `json:"port"`
}

// Load is what flows of an edge amount to.
type Load struct {
	Allowed     uint64 `json:"allowed"`
	Denied      uint64 `json:"denied"`
	Cut         uint64 `json:"cut"`
	Failed      uint64 `json:"failed"`
	Sent        uint64 `json:"sent"`
	Received    uint64 `json:"received"`
	Retransmits uint64 `json:"retransmits"`
	// Rate is how many connections were asked for a second, lately, whatever became of them.
	Rate  float64      `json:"per_second,omitempty"`
	RTTs  RTTs         `json:"rtts,omitempty"`
	Paths []model.Path `json:"paths,omitempty"`
}

// connections is how many there were.
func (l *Load) connections() uint64 { return l.Allowed + l.Denied + l.Cut + l.Failed }

func (l *Load) merge(o *Load) {
	l.Allowed, l.Denied, l.Cut, l.Failed = l.Allowed+o.Allowed, l.Denied+o.Denied, l.Cut+o.Cut, l.Failed+o.Failed
	l.Sent, l.Received, l.Retransmits = l.Sent+o.Sent, l.Received+o.Received, l.Retransmits+o.Retransmits
	l.Rate += o.Rate
	l.RTTs.merge(o.RTTs)
	for _, p := range o.Paths {
		l.addPath(p)
	}
}

func (l *Load) addPath(p model.Path) {
	if p != "" && !slices.Contains(l.Paths, p) {
		l.Paths = append(l.Paths, p)
	}
}

// RTTs counts round trip times by their size, in steps of a twelfth or so: a few hundred at most.
type RTTs map[int]uint64

const rttSteps = 8 // to twice the time

func (r *RTTs) add(d time.Duration) {
	if d <= 0 {
		return
	}
	if *r == nil {
		*r = make(RTTs)
	}
	(*r)[int(rttSteps*math.Log2(float64(d)))]++
}

func (r *RTTs) merge(o RTTs) {
	if *r == nil && len(o) > 0 {
		*r = make(RTTs)
	}
	for step, n := range o {
		(*r)[step] += n
	}
}

// Median gives it, to a twelfth; 0: none was measured.
func (r RTTs) Median() time.Duration {
	var all, below uint64
	for _, n := range r {
		all += n
	}
	for _, step := range slices.Sorted(maps.Keys(r)) {
		if below += r[step]; 2*below >= all {
			return time.Duration(math.Exp2((float64(step) + .5) / rttSteps))
		}
	}
	return 0
}

// Summary is what many flows amount to, by services. It is as large as it may be, whatever the
// flows: those of edges for which there is no room are counted.
type Summary struct {
	by     string
	most   int           // edges
	window time.Duration // of which there are rates
	edges  map[Edge]*Load
	SummaryTotals
}

// SummaryTotals is of all flows of a summary.
type SummaryTotals struct {
	Flows uint64 `json:"flows"`
	// LeftOut are those of edges that there was no room for.
	LeftOut uint64 `json:"left_out"`
	// Lately has the round trips of connections that ended within the last half minute.
	Lately RTTs `json:"lately,omitempty"`
}

// SummaryText is a summary as it travels: the busiest edges first.
type SummaryText struct {
	SummaryTotals
	Edges []EdgeText `json:"edges"`
}

// EdgeText is an edge with its load.
type EdgeText struct {
	Edge
	Load
}

// NewSummary makes one by the values of a label, of so many edges at most.
func NewSummary(by string, most int) *Summary {
	return &Summary{by: by, most: most, window: lately, edges: make(map[Edge]*Load)}
}

// Reach says since when flows are known, if not since ever: rates are of no longer. It is called
// before Add.
func (s *Summary) Reach(since, now time.Time) {
	s.window = max(min(now.Sub(since), lately), time.Second/10)
}

// Add adds a flow, unless it is what the other end's node tells of as well.
func (s *Summary) Add(f *Flow, now time.Time) {
	if f.SeenBy != SideFrom && f.From.Endpoint != "" {
		return
	}
	s.Flows++
	ended := f.Event == End || f.Event == Cut
	if ended && now.Sub(f.Time) < lately {
		s.Lately.add(f.RTT)
	}
	l := s.load(Edge{s.serviceOf(&f.From), s.serviceOf(&f.To), f.To.Port}, 1)
	if l == nil {
		return
	}
	if f.Event != End && f.Event != Cut && now.Sub(f.Time) < s.window {
		l.Rate += 1 / s.window.Seconds()
	}
	switch {
	case f.Event == End: // it has been counted
	case f.Verdict == Allowed:
		l.Allowed++
	case f.Verdict == Denied:
		l.Denied++
	case f.Verdict == WasCut:
		l.Cut++
	case f.Verdict == Failed:
		l.Failed++
	}
	if ended {
		l.Sent, l.Received, l.Retransmits = l.Sent+f.BytesSent, l.Received+f.BytesReceived, l.Retransmits+uint64(f.Retransmits)
	}
	l.RTTs.add(f.RTT)
	l.addPath(f.Path)
}

// load gives that of an edge; nil: there is no room, and so many flows are left out.
func (s *Summary) load(e Edge, flows uint64) *Load {
	l := s.edges[e]
	if l == nil && len(s.edges) >= s.most {
		s.LeftOut += flows
		return nil
	}
	if l == nil {
		l = new(Load)
		s.edges[e] = l
	}
	return l
}

// Merge adds another one, as it came.
func (s *Summary) Merge(o *SummaryText) {
	s.Flows, s.LeftOut = s.Flows+o.Flows, s.LeftOut+o.LeftOut
	s.Lately.merge(o.Lately)
	for i := range o.Edges {
		if l := s.load(o.Edges[i].Edge, o.Edges[i].connections()); l != nil {
			l.merge(&o.Edges[i].Load)
		}
	}
}

// Len is how many edges there are.
func (s *Summary) Len() int { return len(s.edges) }

// Text gives the busiest edges, so many at most.
func (s *Summary) Text(most int) SummaryText {
	out := SummaryText{SummaryTotals: s.SummaryTotals, Edges: make([]EdgeText, 0, len(s.edges))}
	for e, l := range s.edges {
		out.Edges = append(out.Edges, EdgeText{e, *l})
	}
	slices.SortFunc(out.Edges, func(a, b EdgeText) int {
		return cmp.Or(cmp.Compare(b.connections(), a.connections()), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To), cmp.Compare(a.Port, b.Port))
	})
	out.Edges = out.Edges[:min(most, len(out.Edges))]
	return out
}

func (s *Summary) serviceOf(p *Peer) string {
	switch {
	case p.Labels[s.by] != "":
		return p.Labels[s.by]
	case p.Endpoint != "":
		return p.Endpoint
	case p.Node != "":
		return "node " + p.Node
	}
	return Outside
}
