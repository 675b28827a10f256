package verbs

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
	"heddle.dev/heddle/internal/testutil"
)

// asks has the router ask for a peer, and gives the answer's errno.
func (r *router) asks(peer string) unix.Errno { return unix.Errno(r.answers(peer).Number) }

func (r *router) answers(peer string) protocol.Answer {
	r.Helper()
	ask := protocol.Ends{Head: protocol.Head{Type: protocol.TypeAsk, Tag: 9, Endpoint: 5_000_000_009}, Destination: netip.MustParseAddr(peer).As16()}
	r.say(layout.Append(nil, &ask))
	m, _ := r.hear(protocol.TypeAnswer)
	answer, err := layout.Parse[protocol.Answer](m)
	if err != nil || answer.Head.Tag != ask.Head.Tag || answer.Destination != ask.Destination {
		r.Errorf("the answer %x does not say whom it is about", m)
	}
	return answer
}

// TestPeersWithoutHeddle: an endpoint that the operator lets outside reaches what he names, if
// policy lets both speak to each other, and no other does.
func TestPeersWithoutHeddle(t *testing.T) {
	n := runPlane(t)
	var said *api.Error
	if err := n.plane.Accepts(model.EndpointPlanes{Verbs: model.VerbsRecord{VerbsEndpoint: model.VerbsEndpoint{Wanted: true, Outside: true}}}); !errors.As(err, &said) || !strings.Contains(said.Remedy, "--rdma-outside") {
		t.Errorf("an endpoint on a node that reaches no such peers: %v", err)
	}
	n.plane.cfg.Outside = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	own, mute, deaf := wanted.Addr4(), netip.MustParseAddr("192.0.2.8"), netip.MustParseAddr("192.0.2.9")
	n.plane.cfg.Decide = func(from, to netip.Addr, port uint16) (model.Verdict, error) {
		if port == Port && (from == own && to == deaf || from == mute && to == own) {
			return model.VerdictReject, nil
		}
		return model.VerdictAllow, nil
	}
	e := wanted
	e.Planes.Verbs.Outside = true
	n.attach(e)
	r := n.startRouter()
	r.meet()
	r.hear(protocol.TypeBegin)
	told := func() uint32 {
		message, _ := r.hear(protocol.TypeEndpoint)
		m, err := layout.Parse[protocol.Endpoint](message)
		testutil.NoError(t, err)
		return m.Limits.Outside
	}
	if told() != 1 {
		t.Error("the router is not told that the endpoint is let outside")
	}
	r.hear(protocol.TypeEnd)
	nodes := []model.Node{{Name: "n2", Underlay: netip.MustParseAddr("192.0.2.2"), Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.64/28")},
		Planes: model.NodePlanes{Verbs: model.VerbsNode{Card: &model.VerbsCard{GIDs: []netip.Addr{netip.MustParseAddr("::ffff:192.0.2.3")}}}}}}
	if err := n.plane.SetTopology(nil, nodes, model.Endpoints{}); err != nil {
		t.Fatal(err)
	}
	r.hear(protocol.TypeAskAnew)
	for peer, want := range map[string]unix.Errno{
		"192.0.2.1":    0,
		"192.0.2.2":    unix.EHOSTUNREACH, // a node
		"192.0.2.3":    unix.EHOSTUNREACH, // its card
		"192.0.2.66":   unix.EHOSTUNREACH, // a container's
		"198.51.100.1": unix.EHOSTUNREACH,
		mute.String():  unix.EACCES,
		deaf.String():  unix.EACCES,
		"2001:db8::1":  unix.EPERM, // the endpoint has no such address
		"fe80::1":      unix.EPERM,
	} {
		if got := r.asks(peer); got != want {
			t.Errorf("%s: %v, want %v", peer, got, want)
		}
	}
	if err := n.plane.SetTopology(nil, nodes, model.Endpoints{}); err != nil { // nothing is new
		t.Fatal(err)
	}
	if _, err := n.plane.CutForbidden(); err != nil {
		t.Fatal(err)
	}
	r.hear(protocol.TypeAskAnew)
	if marks := r.answers("192.0.2.1").Marks; marks != 0 {
		t.Errorf("packets are marked by %#x, though the operator says nothing of them", marks)
	}
	dscp := uint8(8)
	e.Limits = &model.Limits{DSCP: &dscp, Priority: model.PriorityLow}
	if err := n.plane.SetLimits(e, nil); err != nil {
		t.Fatal(err)
	}
	told()
	if marks := r.answers("192.0.2.1").Marks; marks != protocol.MarkDSCP|8|protocol.MarkPriority {
		t.Errorf("packets are marked by %#x, not as the operator says", marks)
	}
	if err := n.plane.Attach(wanted, netcfg.EndpointDevice{}); err != nil {
		t.Fatal(err)
	}
	if told() != 0 {
		t.Error("the router is told that it is let outside still")
	}
	if got := r.asks("192.0.2.1"); got != unix.EPERM {
		t.Errorf("an endpoint that is not let outside: %v", got)
	}
}
