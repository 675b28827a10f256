package etcd

import (
	"net/netip"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// TestPutNewEndpoint: an endpoint is stored by what was read before if the store has the same, and
// otherwise not at all.
func TestPutNewEndpoint(t *testing.T) {
	t.Parallel()
	s := threeNodes(t)
	revision := func() int64 {
		t.Helper()
		resp, err := s.client.Get(t.Context(), s.keys.Network())
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	stored := func(e model.Endpoint) bool {
		t.Helper()
		resp, err := s.client.Get(t.Context(), s.keys.Endpoint(e.Node, e.ID), clientv3.WithCountOnly())
		if err != nil {
			t.Fatal(err)
		}
		return resp.Count > 0
	}
	try := func(what string, e model.Endpoint, since int64, want bool) {
		t.Helper()
		had := stored(e)
		if done, err := s.PutNewEndpoint(t.Context(), e, since); err != nil || done != want || stored(e) != (had || want) {
			t.Errorf("%s: done %v, stored %v, want %v: %v", what, done, stored(e), want, err)
		}
	}
	try("the first, when nothing was read", endpoint("n1", 1, "10.244.0.2"), revision(), true)
	try("another", endpoint("n1", 2, "10.244.0.3"), revision(), true)
	try("that an earlier try has put, whose answer was lost", endpoint("n1", 1, "10.244.0.2"), revision(), true)
	other := endpoint("n1", 1, "10.244.0.2")
	other.Name = "other"
	try("of an id that is another's", other, revision(), false)
	try("of an address that is another's", endpoint("n1", 3, "10.244.0.2"), revision(), false)
	try("of an address outside", endpoint("n1", 3, "10.244.1.2"), revision(), false)
	try("of no node", endpoint("n9", 3, "10.244.0.4"), revision(), false)
	if owner := s.owner(t, "n1", "10.244.0.3"); owner != 2 {
		t.Errorf("the address of the second is %d's", owner)
	}

	before := revision()
	moved := endpoint("n2", 1, "10.244.1.2")
	put(t, s, moved)
	if _, err := s.GiveUpEndpoint(t.Context(), moved, "n1"); err != nil {
		t.Fatal(err)
	}
	try("made before a move that it does not know of", endpoint("n1", 4, "10.244.0.5"), before, false)
	try("made since", endpoint("n1", 4, "10.244.0.5"), revision(), true)
	try("at its old node, with an address that has moved", endpoint("n2", 1, "10.244.1.2"), revision(), false)
	try("at its new node", endpoint("n1", 5, "10.244.1.2"), revision(), false)

	changed := node(1)
	changed.Underlay = netip.MustParseAddr("192.0.2.99")
	join(t, s, changed)
	try("after its node has changed", endpoint("n1", 6, "10.244.0.6"), revision(), true)
	changed.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.244.9.0/24")}
	if err := s.LeaveNode(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	try("after its node has left", endpoint("n1", 7, "10.244.0.7"), revision(), false)
	join(t, s, changed)
	try("after its node has come back with other prefixes", endpoint("n1", 7, "10.244.0.7"), revision(), false)
	carried := endpoint("n1", 8, "192.0.2.7")
	carried.Adopted = &model.Adopted{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
	try("of another network's address", carried, revision(), false)
}

// owner gives whose an address is.
func (s *Store) owner(t *testing.T, node, addr string) model.EndpointID {
	t.Helper()
	resp, err := s.client.Get(t.Context(), s.keys.Addr(node, netip.MustParseAddr(addr)))
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("%v, %v", resp, err)
	}
	id, err := store.ParseOwner(resp.Kvs[0].Value)
	if err != nil {
		t.Fatal(err)
	}
	return id
}
