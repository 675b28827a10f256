package plane_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/planetest"
	"heddle.dev/heddle/internal/stack"
)

// noted is a plane.Faults.
type noted struct {
	sync.Map
}

func (n *noted) Set(r api.FaultReason, endpoint string, err error) bool {
	_, was := n.Swap(string(r)+" "+endpoint, err)
	return !was
}

func (n *noted) Clear(r api.FaultReason, endpoint string) bool {
	_, was := n.LoadAndDelete(string(r) + " " + endpoint)
	return was
}

func (n *noted) Has(r api.FaultReason) (has bool) {
	n.Range(func(key, _ any) bool {
		has = has || strings.HasPrefix(key.(string), string(r)+" ")
		return !has
	})
	return has
}

// three gives three planes in a set.
func three() (set plane.Set, planes []*planetest.Miniature, calls *planetest.Calls, faults *noted) {
	calls, faults = &planetest.Calls{}, &noted{}
	for _, name := range []string{"first", "second", "third"} {
		m := planetest.New(name, faults, calls)
		planes, set = append(planes, m), append(set, m)
	}
	return set, planes, calls, faults
}

func endpointOf(id model.EndpointID, name, addr string) model.Endpoint {
	return model.Endpoint{ID: id, Name: name, Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr(addr)}}
}

// TestSetOrder: endpoints are attached to planes in their order and detached backwards, for a plane
// may stand on those before it.
func TestSetOrder(t *testing.T) {
	set, planes, calls, _ := three()
	e := endpointOf(1, "c1", "10.244.1.2")
	want := func(what string, calls []string, want ...string) {
		t.Helper()
		if !slices.Equal(calls, want) {
			t.Errorf("%s: %q, want %q", what, calls, want)
		}
	}
	for _, what := range []string{"attach", "attach again"} {
		if err := set.Attach(e, netcfg.EndpointDevice{}); err != nil {
			t.Fatal(err)
		}
		want(what, calls.Take(), "first attach c1", "second attach c1", "third attach c1")
	}
	for _, m := range planes {
		want(m.Name(), m.Attached(), "c1")
	}
	if err := set.Detach(e); err != nil {
		t.Fatal(err)
	}
	want("detach", calls.Take(), "third detach c1", "second detach c1", "first detach c1")
	for _, m := range planes {
		want(m.Name(), m.Attached())
	}
	if err := set.Close(); err != nil {
		t.Fatal(err)
	}
	want("close", calls.Take(), "third close", "second close", "first close")
}

// TestSetAttachFails: a plane that fails is named, those behind it are not asked, and a detach
// leaves nothing in those before it.
func TestSetAttachFails(t *testing.T) {
	set, planes, calls, faults := three()
	e := endpointOf(1, "c1", "10.244.1.2")
	planes[1].Refuse("c1", true)
	for what, attach := range map[string]func() error{
		"attach": func() error { return set.Attach(e, netcfg.EndpointDevice{}) },
		"await":  func() error { return set.Await(e, 7) },
	} {
		err := attach()
		if !errors.Is(err, planetest.ErrRefused) || !strings.Contains(err.Error(), "second plane: ") {
			t.Errorf("%s: %v, want the second plane's", what, err)
		}
		if got := calls.Take(); !slices.Equal(got, []string{"first " + what + " c1", "second " + what + " c1"}) {
			t.Errorf("%s: %q", what, got)
		}
		if !faults.Has(planetest.FaultRefused) {
			t.Errorf("%s: no fault", what)
		}
		if err := set.Detach(e); err != nil {
			t.Fatal(err)
		}
		calls.Take()
		if got := planes[0].Attached(); len(got) != 0 {
			t.Errorf("%s: the first plane has %q still", what, got)
		}
	}
	planes[1].Refuse("c1", false)
	if err := set.Attach(e, netcfg.EndpointDevice{}); err != nil || faults.Has(planetest.FaultRefused) {
		t.Errorf("once it is not refused: %v, fault %v", err, faults.Has(planetest.FaultRefused))
	}
}

// TestSetFollows: policy, limits, topology and what is kept reach each plane.
func TestSetFollows(t *testing.T) {
	set, planes, _, _ := three()
	a, b := endpointOf(1, "a", "10.244.1.2"), endpointOf(2, "b", "10.244.1.3")
	limits := model.Limits{Egress: 1e6}
	a.Limits = &limits
	for _, e := range []model.Endpoint{a, b} {
		if err := set.Attach(e, netcfg.EndpointDevice{}); err != nil {
			t.Fatal(err)
		}
	}
	deny := model.PolicyChange{Reset: true, Set: model.PolicyTables{ByAddr: map[netip.Addr]model.ClassInfo{b.Addr4(): {Class: 1, Ingress: model.VerdictReject}}}}
	for _, m := range planes {
		if err := m.Connect(1, 2, 80); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(set.SetLimits(a, []model.Endpoint{a}), set.SetTopology(nil, []model.Node{{Name: "n1"}}, nil), set.ApplyPolicy(deny)); err != nil {
		t.Fatal(err)
	}
	if used, err := set.InUse(); err != nil || !used[1] || !used[2] || len(used) != 2 {
		t.Errorf("ids in use %v, %v", used, err)
	}
	if cut, err := set.CutForbidden(); cut != 3 || err != nil {
		t.Errorf("cut %d, %v, want one of each plane", cut, err)
	}
	for _, m := range planes {
		if err := m.Connect(1, 2, 80); !errors.Is(err, planetest.ErrForbidden) {
			t.Errorf("%s: connect: %v", m.Name(), err)
		}
		if err := m.Connect(2, 1, 80); err != nil {
			t.Errorf("%s: connect the other way: %v", m.Name(), err)
		}
		if m.Limits(1) != limits || !slices.Equal(m.Nodes(), []string{"n1"}) {
			t.Errorf("%s: limits %v, nodes %q", m.Name(), m.Limits(1), m.Nodes())
		}
	}
	removed, err := set.Keep(map[model.EndpointID]bool{1: true})
	if err != nil || len(removed) != 3 || removed["second endpoints"] != 1 || !slices.Equal(planes[2].Attached(), []string{"a"}) {
		t.Errorf("removed %v, %v; the third plane has %q", removed, err, planes[2].Attached())
	}
}

// TestSetReports: what planes report is listed one after the other, and summed for each endpoint.
func TestSetReports(t *testing.T) {
	set, planes, _, _ := three()
	a, b := endpointOf(1, "a", "10.244.1.2"), endpointOf(2, "b", "10.244.1.3")
	a.Limits = &model.Limits{Egress: 1e6}
	all := []model.Endpoint{a, b}
	for _, e := range all {
		if err := set.Attach(e, netcfg.EndpointDevice{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := set.RestoreLimits(all[:1]); err != nil {
		t.Fatal(err)
	}
	for i, m := range planes {
		if err := m.Connect(1, 2, uint16(80+i)); err != nil {
			t.Fatal(err)
		}
	}
	counters, err := set.Counters()
	if err != nil || len(counters) != 3 || counters[1].Name != "second_connections" || counters[1].Value != 1 {
		t.Errorf("counters %+v, %v", counters, err)
	}
	connections, err := set.Connections()
	if err != nil || len(connections) != 3 || connections[2].Remote != netip.MustParseAddrPort("10.244.1.3:82") {
		t.Errorf("connections %+v, %v", connections, err)
	}
	traffic, err := set.Traffic(all)
	if err != nil || len(traffic) != 2 || traffic[0].Name != "a" || traffic[0].Opened != 3 || traffic[1].Opened != 0 {
		t.Errorf("traffic %+v, %v", traffic, err)
	}
	use, err := set.LimitUse(all[:1])
	if err != nil || len(use) != 1 || use[0].Endpoint != "a" || use[0].Egress.Packets != 3 || use[0].Limits != *a.Limits {
		t.Errorf("use of limits %+v, %v", use, err)
	}
	if services, err := set.Services(); err != nil || services != nil {
		t.Errorf("services of planes that have none: %v, %v", services, err)
	}
}

// TestSetNames: what planes declare is listed one after the other, and no two may declare the same.
func TestSetNames(t *testing.T) {
	set, planes, _, _ := three()
	for _, m := range planes {
		if err := m.Attach(endpointOf(1, "a", "10.244.1.2"), netcfg.EndpointDevice{}); err != nil {
			t.Fatal(err)
		}
		if err := m.Connect(1, 1, 80); err != nil {
			t.Fatal(err)
		}
		planetest.CheckReports(t, m)
	}
	d := set.Declares()
	if err := set.CheckNames(); err != nil || len(d.Reasons) != 3 || d.Reasons[1].Name != "second_connections" ||
		!slices.Equal(d.Paths, []model.Path{"first_table", "second_table", "third_table"}) || !slices.Equal(d.Protocols, []string{"first", "second", "third"}) {
		t.Errorf("%+v, %v", d, err)
	}
	err := append(set, set[1]).CheckNames()
	for _, twice := range []string{`plane "second"`, `path "second_table"`, `protocol "second"`, `reason "second_connections"`} {
		if err == nil || !strings.Contains(err.Error(), "second plane: "+twice+" is the second plane's") {
			t.Errorf("twice in a set: %v, want a word of %s", err, twice)
		}
	}
}

// stacked is a plane that has one stack.
type stacked struct {
	*planetest.Miniature
	kind  stack.Kind
	fails error
	told  map[model.EndpointID]stack.Choice
}

func (s stacked) ServeStack(kind stack.Kind, _ stack.Settings) error {
	if kind != s.kind {
		return plane.ErrOtherStack
	}
	return s.fails
}

func (s stacked) SetStack(e model.Endpoint, c stack.Choice) error {
	s.told[e.ID] = c
	return s.fails
}

// TestSetStacks: the plane whose stack it is says whether it can serve; every plane that has stacks
// hears of every endpoint, also when another one fails.
func TestSetStacks(t *testing.T) {
	_, planes, _, _ := three()
	broken := errors.New("broken")
	kernel := stacked{planes[0], stack.Kernel, broken, make(map[model.EndpointID]stack.Choice)}
	other := stacked{planes[1], stack.Smoltcp, nil, make(map[model.EndpointID]stack.Choice)}
	set := plane.Set{kernel, other, planes[2]}
	for kind, want := range map[stack.Kind]error{stack.Kernel: broken, stack.Smoltcp: nil, stack.Netstack: plane.ErrOtherStack} {
		if err := set.ServeStack(kind, stack.Settings{}); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("%s: %v, want %v", kind, err, want)
		}
	}
	e := endpointOf(7, "c1", "10.244.1.2")
	if err := set.SetStack(e, stack.Choice{Stack: stack.Smoltcp}); !errors.Is(err, broken) || other.told[7].Stack != stack.Smoltcp || kernel.told[7].Stack != stack.Smoltcp {
		t.Errorf("%v, told %v and %v", err, kernel.told, other.told)
	}
}

// keeping is a plane that keeps the last id and has a member of the status.
type keeping struct {
	*planetest.Miniature
	last model.EndpointID
}

func (k *keeping) LastID() (model.EndpointID, error)   { return k.last, nil }
func (k *keeping) SetLastID(id model.EndpointID) error { k.last = id; return nil }
func (k *keeping) FillStatus(_ context.Context, st *api.Status) error {
	st.Peers += int(k.last)
	return nil
}

// TestSetAsksWhoHas: what not every plane has is asked of those that have it.
func TestSetAsksWhoHas(t *testing.T) {
	set, _, calls, faults := three()
	var st api.Status
	if last, err := set.LastID(); last != 0 || err != nil {
		t.Errorf("planes that keep no ids: %d, %v", last, err)
	}
	if err := errors.Join(set.SetLastID(7), set.FillStatus(t.Context(), &st)); err != nil || st.Peers != 0 {
		t.Errorf("planes that have none of it: %v, %+v", err, st)
	}
	a, b := &keeping{Miniature: planetest.New("a", faults, calls), last: 3}, &keeping{Miniature: planetest.New("b", faults, calls), last: 2}
	set = append(set, a, b)
	if last, err := set.LastID(); last != 3 || err != nil {
		t.Errorf("last id %d, %v, want the higher of two", last, err)
	}
	if err := set.SetLastID(9); err != nil || a.last != 9 || b.last != 9 {
		t.Errorf("%v: noted %d and %d", err, a.last, b.last)
	}
	if err := set.FillStatus(t.Context(), &st); err != nil || st.Peers != 18 {
		t.Errorf("%v: %d, want what both have filled in", err, st.Peers)
	}
}
