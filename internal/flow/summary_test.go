package flow

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

// TestSummary: flows of one edge are one row, by label or else by name, each connection once; what
// two nodes say adds up to what one would have said.
func TestSummary(t *testing.T) {
	flows := []*Flow{web(), web(), web(), web(), web()}
	flows[1].Event, flows[1].BytesSent, flows[1].BytesReceived, flows[1].RTT, flows[1].Time = End, 10, 20, time.Millisecond, noon.Add(-time.Second)
	flows[2].SeenBy = SideTo // the other end's node tells of it, too
	flows[3].Event, flows[3].Verdict, flows[3].Path, flows[3].From.Labels = Deny, Denied, "", nil
	flows[4].Event, flows[4].RTT, flows[4].Time, flows[4].To = End, time.Second, noon.Add(-time.Hour), Peer{}
	for i := range flows {
		if i != 2 {
			flows[i].SeenBy = SideFrom
		}
	}
	whole, halves := NewSummary("app", 10), [2]*Summary{NewSummary("app", 10), NewSummary("app", 10)}
	for i, f := range flows {
		whole.Add(f, noon)
		halves[i%2].Add(f, noon)
	}
	merged := NewSummary("app", 10)
	for _, h := range halves {
		raw, err := json.Marshal(h.Text(10))
		if err != nil {
			t.Fatal(err)
		}
		var text SummaryText
		if err := json.Unmarshal(raw, &text); err != nil {
			t.Fatal(err)
		}
		merged.Merge(&text)
	}
	got := whole.Text(10)
	if !reflect.DeepEqual(got, merged.Text(10)) {
		t.Errorf("whole: %+v\nmerged: %+v", got, merged.Text(10))
	}
	if got.Flows != 4 || len(got.Edges) != 3 {
		t.Fatalf("%+v", got)
	}
	seen := ""
	for _, e := range got.Edges {
		seen += fmt.Sprintf("%s>%s:%d %d/%d %d %d %v; ", e.From, e.To, e.Port, e.Allowed, e.Denied, e.Sent, e.Received, e.Paths)
	}
	if want := "client>web:8080 1/0 10 20 [overlay]; n1/c1>web:8080 0/1 0 0 []; client>outside:0 0/0 0 0 [overlay]; "; seen != want {
		t.Errorf("got %s\nwant %s", seen, want)
	}
	if m := got.Lately.Median(); m < 900*time.Microsecond || m > 1100*time.Microsecond {
		t.Errorf("lately %s, want a millisecond: what ended an hour ago is none of it", m)
	}
}

// TestSummaryIsBounded: whatever a scanner does, there are no more edges than may be, and what is
// left out is counted.
func TestSummaryIsBounded(t *testing.T) {
	s, many := NewSummary("app", 100), NewSummary("app", 100)
	f := web()
	f.SeenBy = SideFrom
	for port := range 60_000 {
		f.To.Port, f.RTT = uint16(port), time.Duration(port)*time.Microsecond
		s.Add(f, noon)
	}
	text := s.Text(1 << 20)
	raw, err := json.Marshal(text)
	if err != nil || len(raw) > 20_000 || len(text.Edges) != 100 || text.LeftOut != 59_900 || text.Flows != 60_000 {
		t.Errorf("%d bytes, %d edges, %d of %d flows left out: %v", len(raw), len(text.Edges), text.LeftOut, text.Flows, err)
	}
	for node := range 50 {
		for i := range text.Edges {
			text.Edges[i].To = fmt.Sprint(node)
		}
		many.Merge(&text)
	}
	if many.Len() != 100 || many.LeftOut != 50*59_900+49*100 || many.Flows != 50*60_000 {
		t.Errorf("merged: %d edges, %d of %d flows left out", many.Len(), many.LeftOut, many.Flows)
	}
	if n := len(many.Text(7).Edges); n != 7 {
		t.Errorf("%d edges of the busiest 7", n)
	}
}

// TestSummaryRates: connections of the last half minute make a rate, whatever became of them, and
// not their ends; of a memory that reaches less far, of that time.
func TestSummaryRates(t *testing.T) {
	for _, reach := range []time.Duration{time.Hour, 10 * time.Second} {
		s := NewSummary("app", 10)
		s.Reach(noon.Add(-reach), noon)
		for i := range 240 {
			if time.Duration(i/2)*time.Second/2 >= reach {
				break
			}
			f := web()
			f.SeenBy, f.Time = SideFrom, noon.Add(-time.Duration(i/2)*time.Second/2)
			if i%2 == 0 {
				f.Event, f.Verdict, f.Path = Deny, Denied, ""
			} else {
				f.To.Port = 1
			}
			s.Add(f, noon)
			f.Event = End
			s.Add(f, noon)
		}
		for _, e := range s.Text(10).Edges {
			if e.Rate < 1.98 || e.Rate > 2.02 {
				t.Errorf("flows reach back %s, port %d: %v a second, want 2", reach, e.Port, e.Rate)
			}
		}
	}
}
