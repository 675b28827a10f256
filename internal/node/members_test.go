package node

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// TestTendMembers: who notes and forgets which nodes.
func TestTendMembers(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	ago := func(hours float64) time.Time { return now.Add(-time.Duration(hours * float64(time.Hour))) }
	const forgetAfter = 24 * time.Hour
	lease := func(name string) store.NameLease { return store.NameLease{Node: name, Instance: name} }
	snapshot := func(offline map[string]store.OfflineRecord, held ...string) store.State {
		s := store.State{NameLeases: map[string]store.NameLease{}, Offline: offline}
		for i := range 4 {
			s.Nodes = append(s.Nodes, model.Node{Name: fmt.Sprintf("n%d", i+1), Underlay: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Planes: model.NodePlanes{TCP: model.TCPNode{AnswersProbes: i != 3}}})
		}
		for _, h := range held {
			s.NameLeases[h] = lease(h)
		}
		return s
	}
	offline := func(name string, since, seen time.Time) map[string]store.OfflineRecord {
		return map[string]store.OfflineRecord{name: {Node: name, Since: since, Seen: seen}}
	}
	never := time.Time{}
	for _, c := range []struct {
		name     string
		state    store.State
		self     string
		answered time.Time // of every node
		after    time.Duration
		note     string
		forget   string
	}{
		{"the first live node notes", snapshot(nil, "n2", "n3", "n4"), "n2", never, forgetAfter, "n1 since 0h", ""},
		{"others do not", snapshot(nil, "n2", "n3", "n4"), "n3", never, forgetAfter, "", ""},
		{"who holds no name does nothing", snapshot(nil, "n3", "n4"), "n2", never, forgetAfter, "", ""},
		{"it is dead, but not for long", snapshot(offline("n1", ago(23), never), "n2", "n3", "n4"), "n2", never, forgetAfter, "", ""},
		{"it is dead for long", snapshot(offline("n1", ago(25), never), "n2", "n3", "n4"), "n2", never, forgetAfter, "", "n1"},
		{"another does not forget it", snapshot(offline("n1", ago(25), never), "n2", "n3", "n4"), "n3", never, forgetAfter, "", ""},
		{"nodes are never forgotten", snapshot(offline("n1", ago(2500), never), "n2", "n3", "n4"), "n2", never, 0, "", ""},
		{"others have seen it", snapshot(offline("n1", ago(50), ago(23)), "n2", "n3", "n4"), "n2", never, forgetAfter, "", ""},
		{"it answers: noted, not forgotten", snapshot(offline("n1", ago(50), ago(25)), "n2", "n3", "n4"), "n2", ago(0.1), forgetAfter, "n1 since 50h seen 0.1h", ""},
		{"it answers, which is noted already", snapshot(offline("n1", ago(50), ago(0.5)), "n2", "n3", "n4"), "n2", ago(0.1), forgetAfter, "", ""},
		{"it answers another, which leaves it to the first", snapshot(offline("n1", ago(50), ago(1.5)), "n2", "n3", "n4"), "n3", ago(0.1), forgetAfter, "", ""},
		{"it answers another, and the first says nothing", snapshot(offline("n1", ago(50), ago(2.5)), "n2", "n3", "n4"), "n3", ago(0.1), forgetAfter, "n1 since 50h seen 0.1h", ""},
		{"it answered before it went", snapshot(offline("n1", ago(25), never), "n2", "n3", "n4"), "n2", ago(26), forgetAfter, "", "n1"},
		{"it cannot answer probes", snapshot(offline("n4", ago(2500), never), "n1", "n2", "n3"), "n1", never, forgetAfter, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			noticed := make(offlineSince)
			for name, note := range c.state.Offline {
				noticed.look(map[string]store.OfflineRecord{name: note}, note.Last())
			}
			got := reconcile(c.state, lease(c.self), func(model.Node) time.Time { return c.answered }, noticed, c.after, now)
			var notes []string
			for _, a := range got.note {
				s := fmt.Sprintf("%s since %gh", a.Node, now.Sub(a.Since).Hours())
				if !a.Seen.IsZero() {
					s += fmt.Sprintf(" seen %gh", now.Sub(a.Seen).Hours())
				}
				notes = append(notes, s)
			}
			if n, f := strings.Join(notes, ", "), strings.Join(got.forget, ", "); n != c.note || f != c.forget {
				t.Errorf("notes %q, forgets %q; want %q and %q", n, f, c.note, c.forget)
			}
		})
	}
}

// TestClocksDiffer: a note that is old by its time, but of which this agent has known for less than
// dead nodes are remembered, forgets nobody, whoever's clock was wrong.
func TestClocksDiffer(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	const forgetAfter = 24 * time.Hour
	n1, n2 := model.Node{Name: "n1", Planes: model.NodePlanes{TCP: model.TCPNode{AnswersProbes: true}}}, model.Node{Name: "n2"}
	own := store.NameLease{Node: "n2", Instance: "a"}
	state := store.State{Nodes: []model.Node{n1, n2}, NameLeases: map[string]store.NameLease{"n2": own}}
	note := func(since, seen time.Time) {
		state.Offline = map[string]store.OfflineRecord{"n1": {Node: "n1", Since: since, Seen: seen}}
	}
	noticed := make(offlineSince)
	forgets := func() int {
		noticed.look(state.Offline, now)
		return len(reconcile(state, own, func(model.Node) time.Time { return time.Time{} }, noticed, forgetAfter, now).forget)
	}
	note(time.Unix(0, 0), time.Time{}) // of a clock that begins in 1970
	if forgets() != 0 {
		t.Error("a node is forgotten that this agent has missed for a moment")
	}
	now = now.Add(forgetAfter - time.Second)
	note(time.Unix(0, 0), time.Unix(10, 0)) // somebody has heard of it
	if forgets() != 0 {
		t.Error("a node is forgotten of which others have just heard")
	}
	now = now.Add(forgetAfter + time.Second)
	if forgets() != 1 {
		t.Error("a node is not forgotten that has been gone for longer than dead nodes are remembered")
	}
	state.Offline = nil
	if forgets(); len(noticed) != 0 {
		t.Errorf("notes that are gone are kept: %v", noticed)
	}
}

func TestOwnDifferences(t *testing.T) {
	endpoint := func(node string, id model.EndpointID, label string) model.Endpoint {
		return model.Endpoint{ID: id, Node: node, Name: fmt.Sprint(id), Labels: map[string]string{"a": label}, Created: time.Unix(int64(id), 0).UTC()}
	}
	state := store.State{Endpoints: model.EndpointsOf(endpoint("n1", 1, ""), endpoint("n1", 2, "old"), endpoint("n1", 3, ""), endpoint("n2", 4, ""))}
	put, remove := ownDifferences(state, "n1", []model.Endpoint{endpoint("n1", 5, ""), endpoint("n1", 2, "new"), endpoint("n1", 1, "")})
	if len(put) != 2 || put[0].ID != 2 || put[0].Labels["a"] != "new" || put[1].ID != 5 {
		t.Errorf("to be put: %+v", put)
	}
	if len(remove) != 1 || remove[0] != 3 {
		t.Errorf("to be removed: %v", remove)
	}
}
