package datapath

import (
	"net/netip"
	"reflect"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestAccountLives with its endpoint: it is there from SetEndpoint on, keeps its counts when the
// endpoint is set again, and goes with the endpoint.
func TestAccountLives(t *testing.T) {
	d := loadForTest(t)
	e := model.Endpoint{ID: 77, Name: "b/c77", Addrs: []netip.Addr{netip.MustParseAddr("10.244.2.77")}, Planes: intercepted(true)}
	read := func() model.Traffic {
		t.Helper()
		got, err := d.Account(e.ID)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	set := func() {
		t.Helper()
		if err := d.SetEndpoint(e, 777, ContainerSide{}); err != nil {
			t.Fatal(err)
		}
	}
	set()
	counted := heddleAccount{Opened: 1, Accepted: 2, Refused: 3, TimedOut: 4, Failed: 5, Closed: 6, Broken: 7, BytesSent: 8, BytesReceived: 9, Retransmits: 10}
	if err := d.objs.AccountByEndpoint.Put(uint32(e.ID), &counted); err != nil {
		t.Fatal(err)
	}
	set() // as an agent that starts again does
	want := model.Traffic{Endpoint: e.ID, Opened: 1, Accepted: 2, Refused: 3, TimedOut: 4, Failed: 5, Closed: 6, Broken: 7, BytesSent: 8, BytesReceived: 9, Retransmits: 10}
	if got := read(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if err := d.DeleteEndpoint(e.ID); err != nil {
		t.Fatal(err)
	}
	set()
	if got := read(); !reflect.DeepEqual(got, model.Traffic{Endpoint: e.ID}) {
		t.Errorf("a new endpoint begins with %+v", got)
	}
	if _, err := d.KeepEndpoints(nil); err != nil {
		t.Fatal(err)
	}
	var raw heddleAccount
	if err := ignoreAbsent(d.objs.AccountByEndpoint.Lookup(uint32(e.ID), &raw)); err != nil || raw != (heddleAccount{}) {
		t.Errorf("an account without endpoint is left: %+v, %v", raw, err)
	}
}

// TestWildcardOfTheNode: a listener that was never bound shows the wildcard of its family.
func TestWildcardOfTheNode(t *testing.T) {
	for family, want := range map[uint8]netip.Addr{2: netip.IPv4Unspecified(), 10: netip.IPv6Unspecified()} {
		rec := record()
		rec.State, rec.Family, rec.Tag.Flags = tcpListen, family, 0
		rec.NodeLocal = fromAddr(netip.IPv4Unspecified())
		if c := toConnection(&rec); c.Local.Addr() != want {
			t.Errorf("family %d: %s, want %s", family, c.Local, want)
		}
	}
}
