package node

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

// fakeVerdicts keeps what it is told, and fails as often as it is told.
type fakeVerdicts struct {
	changes         []model.PolicyChange
	cuts            int
	failApply, fail int
	inContainers    atomic.Int64  // calls of CutForbiddenIn
	takes           time.Duration // each of them
}

func (f *fakeVerdicts) ApplyPolicy(c model.PolicyChange) error {
	if f.failApply > 0 {
		f.failApply--
		return errors.New("map full")
	}
	f.changes = append(f.changes, c)
	return nil
}

func (f *fakeVerdicts) CutForbidden() (int, error) {
	if f.fail > 0 {
		f.fail--
		return 0, errors.New("no iterator")
	}
	f.cuts++
	return 1, nil
}

func (f *fakeVerdicts) CutForbiddenIn(string) (int, error) {
	f.inContainers.Add(1)
	time.Sleep(f.takes) // of synctest's time
	return 0, nil
}

func testEnforcer(f *fakeVerdicts) (*enforcer, store.State) {
	prefix6 := netip.MustParsePrefix("fd48:6464:1::/96")
	e := newEnforcer(f, "n1", prefixes("10.244.0.0/16"), prefix6, quiet())
	return e, store.State{Revision: 7,
		Nodes: []model.Node{{Name: "n1", Underlay: netip.MustParseAddr("172.31.0.1"), Prefixes: prefixes("10.244.1.0/24")}},
		Policies: []*policy.Policy{{Name: "p", Subject: policy.Subject{Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"a": "b"}}}},
			Ingress: &policy.Direction{Default: policy.DefaultDeny}}}}
}

// TestNewEndpointCutsNothing: nobody is asked for the connections of an endpoint that has no network
// yet; its labels may forbid some later, and one that has moved here brings peers.
func TestNewEndpointCutsNothing(t *testing.T) {
	f := &fakeVerdicts{}
	e, state := testEnforcer(f)
	defer e.close()
	state.Nodes = append(state.Nodes, model.Node{Name: "n2", Underlay: netip.MustParseAddr("172.31.0.2"), Prefixes: prefixes("10.244.2.0/24")})
	labels := func(ep model.Endpoint) model.Endpoint {
		ep.Labels = map[string]string{"a": "b"}
		return ep
	}
	elsewhere := labels(endpointOf(1, "moves", "10.244.2.9"))
	elsewhere.Node = "n2"
	state.Endpoints = model.EndpointsOf(elsewhere)
	if err := e.follow(state, nil); err != nil {
		t.Fatal(err)
	}
	set := func(what string, ep model.Endpoint, more int) {
		t.Helper()
		changes, cuts := len(f.changes), f.cuts
		if err := e.set(ep); err != nil {
			t.Fatal(err)
		}
		if len(f.changes) != changes+1 || f.cuts != cuts+more {
			t.Errorf("%s: %d changes, %d cuts; want one and %d", what, len(f.changes)-changes, f.cuts-cuts, more)
		}
	}
	c1 := endpointOf(1, "c1", "10.244.1.2")
	set("new", labels(c1), 0)
	set("other labels", c1, 1)
	moved := endpointOf(2, "moves", "10.244.2.9")
	set("one that was elsewhere, with other labels", moved, 1)
}

// TestRoundsLeaveTime: however often something changes, going through a node's containers takes a
// tenth of the time.
func TestRoundsLeaveTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeVerdicts{takes: time.Millisecond}
		e, state := testEnforcer(f)
		for _, ep := range crowd(1000) {
			e.know(ep)
		}
		if err := e.follow(state, nil); err != nil {
			t.Fatal(err)
		}
		for range 1000 { // a change every 100 ms
			e.cutPlain()
			time.Sleep(100 * time.Millisecond)
		}
		e.close()
		if calls := f.inContainers.Load(); calls < 9*1000 || calls > 11*1000 {
			t.Errorf("%d containers were looked through in 100 s, want some 10,000", calls)
		}
	})
}

// TestEnforcerAfterFailures: tables that may not be in force are sent whole, and a cut that failed
// is tried again, also when nothing changes any more.
func TestEnforcerAfterFailures(t *testing.T) {
	f := &fakeVerdicts{}
	e, state := testEnforcer(f)
	if err := e.follow(state, prefixes("172.31.0.9/32", "192.0.2.0/24")); err != nil {
		t.Fatal(err)
	}
	if len(f.changes) != 1 || !f.changes[0].Reset || f.cuts != 1 {
		t.Fatalf("a new agent: %+v, %d cuts; want whole tables", f.changes, f.cuts)
	}
	if _, ok := f.changes[0].Set.ByAddr[netip.MustParseAddr("172.31.0.9")]; !ok {
		t.Error("an address of the node's own has no class")
	}
	if err := e.follow(state, prefixes("172.31.0.9/32")); err != nil || len(f.changes) != 1 || f.cuts != 1 {
		t.Errorf("nothing new: %d changes, %d cuts, %v", len(f.changes), f.cuts, err)
	}
	f.failApply = 1
	ep := endpointOf(1, "c1", "10.244.1.2")
	if err := e.set(ep); err == nil {
		t.Error("an endpoint without rules in force")
	}
	if status, _ := e.snapshot(); status.Error == "" || status.Revision != 7 {
		t.Errorf("status %+v", status)
	}
	if err := e.set(ep); err != nil || len(f.changes) != 2 || !f.changes[1].Reset {
		t.Fatalf("after a failure: %v, %+v; want whole tables", err, f.changes[1:])
	}
	ep.Labels, f.fail = map[string]string{"a": "b"}, 1
	if err := e.set(ep); err != nil {
		t.Errorf("a connection that could not be ended undoes an endpoint: %v", err)
	}
	if e.own[ep.ID].Labels["a"] != "b" {
		t.Errorf("the endpoint is %+v, and its tables are in force", e.own[ep.ID])
	}
	if status, _ := e.snapshot(); status.Error != "" || status.CutError != "no iterator" {
		t.Errorf("status %+v; want the cut's error beside tables in force", status)
	}
	select {
	case <-e.recut:
	default:
		t.Error("nobody is asked to try the cut again")
	}
	if len(f.changes) != 3 || f.changes[2].Reset || f.changes[2].Set.ByAddr[ep.Addr4()].Ingress != model.VerdictReject {
		t.Fatalf("new labels: %+v", f.changes[2:])
	}
	cuts := f.cuts
	if err := e.follow(state, prefixes("172.31.0.9/32")); err != nil || f.cuts != cuts+1 {
		t.Errorf("a cut that failed was not tried again: %v", err)
	}
	if status, _ := e.snapshot(); status.Error != "" || status.CutError != "" || status.Policies != 1 || status.Cut != uint64(f.cuts) {
		t.Errorf("status %+v after %d cuts", status, f.cuts)
	}
}

// TestEnforcerBelievesTheAgent: of this node's endpoints the store may lag behind.
func TestEnforcerBelievesTheAgent(t *testing.T) {
	f := &fakeVerdicts{}
	e, state := testEnforcer(f)
	mine := endpointOf(1, "c1", "10.244.1.2")
	mine.Labels = map[string]string{"a": "b"}
	e.know(mine)
	stale := mine
	stale.Labels = nil
	gone := endpointOf(2, "c2", "10.244.1.3")
	state.Endpoints = model.EndpointsOf(stale, gone)
	if err := e.follow(state, nil); err != nil {
		t.Fatal(err)
	}
	tables := f.changes[0].Set
	if tables.ByAddr[mine.Addr4()].Ingress != model.VerdictReject {
		t.Error("the store's older labels count")
	}
	if _, ok := tables.ByAddr[gone.Addr4()]; ok {
		t.Error("an endpoint that the agent has removed is still there")
	}
	if err := e.remove(mine.ID); err != nil || len(f.changes) != 2 || len(f.changes[1].DeleteAddrs) != 1 {
		t.Errorf("removed: %v, %+v", err, f.changes[1:])
	}
}

// TestEnforcerSharedAddress: an endpoint of this node is judged as what it is, also if an entry of
// another node, as may be left over when a container has moved, has its address.
func TestEnforcerSharedAddress(t *testing.T) {
	for _, other := range []string{"n0", "n2"} {
		f := &fakeVerdicts{}
		e, state := testEnforcer(f)
		stale := endpointOf(1, "c1", "10.88.1.2")
		stale.Node = other
		mine := endpointOf(1, "c1", "10.88.1.2")
		mine.Labels = map[string]string{"a": "b"}
		e.know(mine)
		state.Endpoints = model.EndpointsOf(stale)
		if err := e.follow(state, nil); err != nil {
			t.Fatal(err)
		}
		if got := f.changes[0].Set.ByAddr[mine.Addr4()].Ingress; got != model.VerdictReject {
			t.Errorf("an entry of %s: what is sent to it: %v", other, got)
		}
		p := policy.Probe{From: netip.MustParseAddr("192.0.2.1"), To: mine.Addr4(), Protocol: model.ProtocolTCP, Port: 80}
		if got := policy.Decide(e.judged, p); got != model.VerdictReject {
			t.Errorf("an entry of %s: explained as %v", other, got)
		}
	}
}

// TestEnforcerFollowsChanges: whatever sequence of changes led to a state, it is judged by what an
// enforcer that sees it first would judge it by; and what has not changed is shared with the last
// one, which the compiler goes by.
func TestEnforcerFollowsChanges(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	f := &fakeVerdicts{}
	e, state := testEnforcer(f)
	var local []netip.Prefix
	nodes := map[string]model.Node{"n1": state.Nodes[0]}
	for step := range 300 {
		before := e.judged
		name, changed := fmt.Sprint("n", r.IntN(5)), ""
		switch r.IntN(6) {
		case 0, 1:
			changed = name
			nodes = maps.Clone(nodes)
			nodes[name] = model.Node{Name: name, Underlay: netip.AddrFrom4([4]byte{172, 31, 0, byte(1 + r.IntN(5))}), Prefixes: prefixes(fmt.Sprintf("10.244.%d.0/24", r.IntN(5)))}
			if r.IntN(3) == 0 {
				delete(nodes, name)
			}
			state.Nodes = nil
			for _, n := range slices.Sorted(maps.Keys(nodes)) {
				state.Nodes = append(state.Nodes, nodes[n])
			}
		case 2, 3:
			ep := endpointOf(model.EndpointID(r.IntN(3)), "c", fmt.Sprintf("10.244.%d.%d", r.IntN(5), 2+r.IntN(3)))
			ep.Node = name
			state.Endpoints = state.Endpoints.With(map[string][]model.Endpoint{name: []model.Endpoint{ep}[:r.IntN(2)]})
		case 4:
			local = prefixes(fmt.Sprintf("172.31.0.%d/32", 7+r.IntN(3)))
			changed = "n1"
		case 5:
			if id := model.EndpointID(1 + r.IntN(3)); r.IntN(2) == 0 {
				e.know(endpointOf(id, "c", fmt.Sprintf("10.244.1.%d", 2+r.IntN(3))))
			} else if err := e.remove(id); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.follow(state, local); err != nil {
			t.Fatal(err)
		}
		anew := newEnforcer(f, "n1", e.pool, e.prefix6, quiet())
		for _, ep := range e.own {
			anew.know(ep)
		}
		if err := anew.follow(state, local); err != nil {
			t.Fatal(err)
		}
		if got, want := e.judged, anew.judged; !slices.EqualFunc(got.Nodes, want.Nodes, func(a, b policy.Node) bool {
			return a.Name == b.Name && slices.Equal(a.Addrs, b.Addrs)
		}) || !reflect.DeepEqual(slices.Collect(got.Endpoints.All()), slices.Collect(want.Endpoints.All())) {
			t.Fatalf("step %d: judged by\n%+v\nwant\n%+v", step, got, want)
		}
		for i, n := range e.judged.Nodes {
			if before == nil || i >= len(before.Nodes) || n.Name == changed || before.Nodes[i].Name != n.Name {
				continue
			}
			if &n.Addrs[0] != &before.Nodes[i].Addrs[0] {
				t.Fatalf("step %d: node %s is another, though %s has changed", step, n.Name, changed)
			}
		}
	}
}
