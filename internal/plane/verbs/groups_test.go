package verbs

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

var (
	group1 = netip.MustParseAddr("239.1.2.3")
	group2 = netip.MustParseAddr("ff0e::9")
)

// records are the groups of endpoints that the plane has had noted; the first time it is refused.
type records struct {
	mu    sync.Mutex // guards the rest
	asked int
	of    map[model.EndpointID][]netip.Addr
}

func (r *records) set(_ context.Context, id model.EndpointID, groups []netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asked++; r.asked == 1 {
		return errors.New("the store is away")
	}
	r.of[id] = groups
	return nil
}

func (r *records) has(id model.EndpointID, groups ...netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	got, known := r.of[id]
	return known && slices.Equal(got, groups)
}

// routerGroups is a router's GROUPS of an endpoint.
func routerGroups(number uint64, groups ...netip.Addr) []byte {
	return appendAddrs(layout.Append(nil, &protocol.Groups{Head: protocol.Head{Type: protocol.TypeGroups, Endpoint: number}}), groups)
}

// TestGroupsGoIntoRecords: what a router says of its endpoints is noted, also when the store was
// away at first, and of no endpoint that it does not have.
func TestGroupsGoIntoRecords(t *testing.T) {
	n := newNode(t)
	noted := &records{of: map[model.EndpointID][]netip.Addr{}}
	n.setGroups = noted.set
	r := n.startRouter()
	n.plane = n.open(wanted)
	r.meet()
	r.hear(protocol.TypeBegin)
	r.hear(protocol.TypeEndpoint)
	r.hear(protocol.TypeEnd)
	r.say(routerGroups(4, group1))
	r.say(routerGroups(5_000_000_009, group2, group1))
	n.eventually("the groups", func() bool { return noted.has(wanted.ID, group1, group2) })
	r.say(routerGroups(5_000_000_009))
	n.eventually("no groups", func() bool { return noted.has(wanted.ID) })
	if len(noted.of) != 1 {
		t.Errorf("noted %v", noted.of)
	}
}

// TestARecordDoesNotChangeWithoutEnd: of a program that joins and leaves all the time the store
// hears now and then, in the end of what is so; and of others at once.
func TestARecordDoesNotChangeWithoutEnd(t *testing.T) {
	var written []netip.Addr
	count := 0
	p := Open(Config{SetGroups: func(_ context.Context, id model.EndpointID, groups []netip.Addr) error {
		if id == 1 {
			count, written = count+1, groups
		}
		return nil
	}})
	for i := range 10 * changesAtOnce {
		p.groups.joined[1] = []netip.Addr{group1, group2}[i%2:]
		p.recordGroups(t.Context())
	}
	if count != changesAtOnce {
		t.Errorf("%d changes, want %d", count, changesAtOnce)
	}
	p.groups.joined[1], p.groups.joined[2] = nil, []netip.Addr{group1}
	p.recordGroups(t.Context())
	if _, waits := p.groups.joined[1]; !waits || len(p.groups.joined) != 1 {
		t.Errorf("%v are left", p.groups.joined)
	}
	made := p.groups.made[1]
	p.groups.made[1] = changes{made.count, made.at.Add(-changeAgain)}
	p.recordGroups(t.Context())
	if len(p.groups.joined) != 0 || count != changesAtOnce+1 || written != nil {
		t.Errorf("%v are left, %d changes, the last one to %v", p.groups.joined, count, written)
	}
}

// TestRoutersHearOfMembers: of those that there are when it comes, and of each change.
func TestRoutersHearOfMembers(t *testing.T) {
	n := runPlane(t)
	in := func(node string, id model.EndpointID, addr string, groups ...netip.Addr) model.Endpoint {
		e := model.Endpoint{ID: id, Node: node, Addrs: []netip.Addr{netip.MustParseAddr(addr)}}
		e.Planes.Verbs.Groups = groups
		return e
	}
	tell := func(all ...model.Endpoint) {
		t.Helper()
		if err := n.plane.SetTopology(nil, nil, model.EndpointsOf(all...)); err != nil {
			t.Fatal(err)
		}
	}
	a, other := in("n2", 1, "10.244.1.2", group1), in("n2", 2, "10.244.1.3")
	tell(a, other)
	n.attach(wanted)
	r := n.startRouter()
	r.meet()
	r.hear(protocol.TypeBegin)
	r.hear(protocol.TypeEndpoint)
	hears := func(addr string, groups ...netip.Addr) {
		t.Helper()
		got, _ := r.hear(protocol.TypeGroups)
		if want := groupsMessage([2]netip.Addr{netip.MustParseAddr(addr)}, groups); !bytes.Equal(got, want) {
			t.Errorf("GROUPS\n%x, want\n%x", got, want)
		}
	}
	hears("10.244.1.2", group1)
	r.hear(protocol.TypeEnd)
	// An endpoint that stays as it is is not told of, one that moves is there still.
	moved := in("n3", 5, "10.244.1.2", group1, group2)
	tell(moved, other, in("n4", 1, "10.244.4.2"))
	hears("10.244.1.2", group1, group2)
	tell(moved, in("n2", 2, "10.244.1.3", group2))
	hears("10.244.1.3", group2)
	tell(moved)
	hears("10.244.1.3")
}

func TestParseGroups(t *testing.T) {
	good := routerGroups(4, group2, group1)
	m, err := parse(good)
	if err != nil || m.Endpoint != 4 || !slices.Equal(m.groups, []netip.Addr{group1, group2}) {
		t.Errorf("%+v, %v", m, err)
	}
	for name, bad := range map[string][]byte{
		"no endpoint": routerGroups(0, group1), "cut": good[:len(good)-1], "without GIDs": good[:32],
		"too many": routerGroups(4, slices.Repeat([]netip.Addr{group1}, model.MaxVerbsGroups+1)...),
	} {
		if _, err := parse(bad); !errors.Is(err, layout.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
