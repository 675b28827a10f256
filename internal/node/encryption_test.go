package node

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/wireguard"
)

// TestSwitchAfterHold: an agent that cannot be asked, and holds its name when a key is used, was
// there when the key was published, or later.
func TestSwitchAfterHold(t *testing.T) {
	if wireguard.SwitchAfter <= store.HoldTime {
		t.Errorf("a key is used %s after it was published, and names are held for %s without an agent", wireguard.SwitchAfter, store.HoldTime)
	}
}

// TestSilence: an agent that never answers holds a key up for a bounded time; one that has answered
// meanwhile is waited for anew.
func TestSilence(t *testing.T) {
	s, start := make(silence), time.Unix(1000, 0)
	said := func(after time.Duration, what wireguard.Said) wireguard.Said {
		all := map[string]wireguard.Said{"n2": what}
		s.judge(all, start.Add(after))
		return all["n2"]
	}
	for _, c := range []struct {
		after      time.Duration
		what, want wireguard.Said
	}{
		{0, wireguard.Silent, wireguard.Silent},
		{answersWithin - 1, wireguard.Silent, wireguard.Silent},
		{answersWithin, wireguard.Silent, wireguard.Never},
		{answersWithin, wireguard.Without, wireguard.Without},
		{answersWithin + 1, wireguard.Silent, wireguard.Silent},
		{2*answersWithin + 1, wireguard.Silent, wireguard.Never},
	} {
		if got := said(c.after, c.what); got != c.want {
			t.Errorf("after %s: %v for %v, want %v", c.after, got, c.what, c.want)
		}
	}
}

// TestReportWaits: whom a key has waited for for long is a fault, until it waits no more.
func TestReportWaits(t *testing.T) {
	k := keepKeys{host: &host{log: slog.New(slog.DiscardHandler)}}
	k.encryption.published = time.Now()
	if k.reportWaits([]string{"n2"}); len(k.faults.List()) > 0 {
		t.Errorf("at once: %+v", k.faults.List())
	}
	k.encryption.published = time.Now().Add(-waitsLong)
	k.reportWaits([]string{"n2", "n3"})
	if all := k.faults.List(); len(all) != 1 || all[0].Reason != api.FaultKey || !strings.Contains(all[0].Error, "n2, n3: ") {
		t.Errorf("after a minute: %+v", all)
	}
	if k.reportWaits(nil); k.faults.Has(api.FaultKey) {
		t.Error("it waits for nobody, and is at fault")
	}
}

// TestAdmit: a node that does not encrypt takes nothing of a network but the nodes that do not
// either, and their endpoints.
func TestAdmit(t *testing.T) {
	prefix := netip.MustParsePrefix("100.72.0.0/16")
	self := model.Node{Name: "n1", Underlay: netip.MustParseAddr("192.0.2.1")}
	plain := model.Node{Name: "n2", Underlay: netip.MustParseAddr("192.0.2.2")}
	other := model.Node{Name: "n3", Underlay: netip.MustParseAddr("100.72.0.1"), WireGuard: model.WireGuardNode{
		Endpoint: netip.MustParseAddrPort("192.0.2.3:51872"), Prefix: prefix, Key: model.PublicKey{3}}}
	h := &host{self: self, log: slog.New(slog.DiscardHandler)}
	endpoints := model.EndpointsOf(model.Endpoint{Node: "n1", ID: 1}, model.Endpoint{Node: "n2", ID: 2}, model.Endpoint{Node: "n3", ID: 3})
	state := store.State{Nodes: []model.Node{self, plain, other}, Endpoints: endpoints}
	got, err := h.admit(state)
	if err != nil || len(got.Nodes) != 2 || got.Nodes[1].Name != "n2" || got.Endpoints.Len() != 2 || len(got.Endpoints.Of("n3")) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if len(state.Nodes) != 3 || state.Endpoints.Len() != 3 || len(state.Endpoints.Of("n3")) != 1 {
		t.Errorf("the state itself was changed: %+v", state)
	}
	said := h.encryptionStatus(time.Now())
	if said == nil || said.Enabled || len(said.Peers) != 1 || said.Peers[0] != (api.EncryptedPeer{Node: "n3", State: api.PeerLeftOut, Reason: model.SelfPlain}) {
		t.Errorf("status: %+v", said)
	}
	state.Nodes, state.Endpoints = state.Nodes[:2], endpoints[:2]
	if got, err = h.admit(state); err != nil || &got.Nodes[0] != &state.Nodes[0] || !got.Endpoints.Same(state.Endpoints) {
		t.Errorf("nothing to leave out, and another state: %+v, %v", got, err)
	}
	if said := h.encryptionStatus(time.Now()); said != nil {
		t.Errorf("status where nobody encrypts: %+v", said)
	}
}

// TestEncryptedPeers: what the device says decides a peer's state.
func TestEncryptedPeers(t *testing.T) {
	now := time.Unix(10000, 0)
	inner := netip.MustParseAddr("100.72.0.2")
	peers := []wireguard.Peer{{Node: "b", Key: model.PublicKey{1}, Inner: inner}, {Node: "c", Key: model.PublicKey{2}, Inner: inner},
		{Node: "a", Key: model.PublicKey{3}, Inner: inner}, {Node: "a", Key: model.PublicKey{4}}}
	device := map[model.PublicKey]netcfg.WireGuardState{
		{1}: {Handshake: now.Add(-time.Minute), Sent: 5, Received: 6}, {3}: {Handshake: now.Add(-time.Hour)}}
	got := encryptedPeers(peers, map[string]model.PlainReason{"d": model.PeerPlain}, device, now)
	for i, want := range []struct {
		node  string
		state api.EncryptedPeerState
	}{{"a", api.PeerIdle}, {"b", api.PeerEncrypted}, {"c", api.PeerNoHandshake}, {"d", api.PeerLeftOut}} {
		if got[i].Node != want.node || got[i].State != want.state {
			t.Errorf("%d: %+v, want %+v", i, got[i], want)
		}
	}
	if got[0].Next != (model.PublicKey{4}) || got[1].Sent != 5 || got[1].Received != 6 {
		t.Errorf("%+v", got)
	}
}

// TestAnswered: what an agent's answer says of a key, whatever build it is of.
func TestAnswered(t *testing.T) {
	next := model.PublicKey{2}
	of := func(k model.PublicKey) string { return `"` + k.String() + `"` }
	for what, c := range map[string]struct {
		status int
		body   string
		want   wireguard.Said
	}{
		"sends":           {http.StatusOK, `{"sends":` + of(next) + `,"accepts":` + of(model.PublicKey{1}) + `}`, wireguard.Sends},
		"accepts":         {http.StatusOK, `{"sends":` + of(model.PublicKey{1}) + `,"accepts":` + of(next) + `}`, wireguard.Accepts},
		"another":         {http.StatusOK, `{"sends":` + of(model.PublicKey{1}) + `}`, wireguard.Without},
		"none":            {http.StatusOK, `{}`, wireguard.Without},
		"nonsense":        {http.StatusOK, `{"sends":`, wireguard.Silent},
		"fails":           {http.StatusInternalServerError, `{}`, wireguard.Silent},
		"another's build": {http.StatusNotFound, "404 page not found", wireguard.Never},
	} {
		resp := &http.Response{StatusCode: c.status, Body: io.NopCloser(strings.NewReader(c.body))}
		if got := answered(resp, next); got != c.want {
			t.Errorf("%s: %v, want %v", what, got, c.want)
		}
	}
}

// TestDeviceGone: a device that was removed is a fault, and no reason for a status to fail. The agent
// ends for the next one to make it, but not if that cannot, nor again and again.
func TestDeviceGone(t *testing.T) {
	k := keepKeys{host: &host{log: slog.New(slog.DiscardHandler), started: time.Now().Add(-deviceLasts)}}
	k.cfg.EncryptPrefix = netip.MustParsePrefix("100.72.0.0/16")
	if said := k.encryptionStatus(time.Now()); said == nil || !said.Enabled || !k.faults.Has(api.FaultEncryption) { // there is none here
		t.Errorf("status without the device: %+v, faults %+v", said, k.faults.List())
	}
	yes, no := func() error { return nil }, func() error { return errors.New("no module") }
	if err := k.keepDevice(nil, no); err != nil || k.faults.Has(api.FaultEncryption) {
		t.Errorf("there: %v, faults %+v", err, k.faults.List())
	}
	gone := netcfg.FindWireGuard(1)
	if !errors.Is(gone, netcfg.ErrNoWireGuard) {
		t.Fatalf("not there: %v", gone)
	}
	if err := k.keepDevice(errors.New("not read"), yes); err != nil || !k.faults.Has(api.FaultEncryption) {
		t.Errorf("not read: %v, faults %+v", err, k.faults.List())
	}
	if err := k.keepDevice(gone, no); err != nil {
		t.Errorf("cannot be made: %v", err)
	}
	if err := k.keepDevice(gone, yes); !errors.Is(err, netcfg.ErrNoWireGuard) {
		t.Errorf("can be made: %v", err)
	}
	k.started = time.Now()
	if err := k.keepDevice(gone, yes); err != nil {
		t.Errorf("soon after the start: %v", err)
	}
}
