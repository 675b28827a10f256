package stacks

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// TestFlows: what modules say of connections is told as other planes tell it, under one cookie from
// the opening to the end, which no kernel's socket has.
func TestFlows(t *testing.T) {
	var got []flow.Observation
	p := &Plane{ctx: t.Context(), tenants: map[model.EndpointID]*tenant{}, cfg: Config{Observe: func(o flow.Observation) { got = append(got, o) }}}
	tn := newTenant(model.Endpoint{ID: 3}, netcfg.EndpointDevice{}, new(module.Module))
	p.tenants[3] = tn
	local, remote := netip.MustParseAddrPort("10.9.0.1:40000"), netip.MustParseAddrPort("10.9.0.2:80")
	n := socket.Note{ID: 7, Remote: protocol.AddressOf(remote)}
	p.tellConnect(tn, &n, &outgoing{local: protocol.AddressOf(local)})
	p.tellConnect(tn, &n, &outgoing{errno: unix.ECONNREFUSED})
	ended := protocol.Info{Head: protocol.Head{Type: protocol.TypeEnded, Tenant: 3, ID: 7, Error: int32(unix.ECONNRESET)}, Local: protocol.AddressOf(local), Remote: protocol.AddressOf(remote),
		BytesSent: 10, BytesReceived: 20, Retransmits: 2, RTT: 150}
	hear := func() {
		t.Helper()
		if err := p.endedOne(protocol.Append(nil, &ended)); err != nil {
			t.Fatal(err)
		}
	}
	hear()
	ended.Head.Error, ended.Listener = int32(unix.ECONNABORTED), 5
	tn.cuts(7)
	hear()
	hear()
	want := []struct {
		event    flow.Event
		err      string
		reason   string
		accepted bool
		local    netip.AddrPort
	}{
		{flow.Open, "", "", false, local}, {flow.Fail, "ECONNREFUSED", "", false, netip.AddrPort{}}, {flow.End, "ECONNRESET", "", false, local},
		{flow.Cut, "", reasonCut.Name, true, local}, {flow.End, "ECONNABORTED", "", true, local},
	}
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i, w := range want {
		o := got[i]
		c := o.Connection
		if o.Event != w.event || o.Error != w.err || c.Reason != w.reason || o.Accepted != w.accepted || c.Local != w.local || c.Remote != remote || c.Endpoint != 3 || c.Path != Path || c.Cookie != got[0].Connection.Cookie || c.Cookie>>63 != 1 {
			t.Errorf("%d: %+v, want %+v", i, o, w)
		}
	}
	if c := got[2]; c.Connection.BytesSent != 10 || c.Connection.BytesReceived != 20 || c.Connection.Retransmits != 2 || c.RTT != 150*time.Microsecond {
		t.Errorf("the end: %+v", c)
	}
	for id := range uint64(3 * maxCutting) {
		if tn.cuts(id); len(tn.cutting) > maxCutting {
			t.Fatalf("%d are remembered", len(tn.cutting))
		}
	}
}
