package stacks

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
)

// forbids decides that nothing may be.
type forbids struct{ plane.StackModules }

func (forbids) Decide(netip.Addr, netip.Addr, uint16) (model.Verdict, error) {
	return model.VerdictReject, nil
}

// TestCutIsNotHeldUp: a tenant that does not say what it has keeps no other's connections alive that
// are forbidden.
func TestCutIsNotHeldUp(t *testing.T) {
	const tenants = 8
	l, other := linked(t)
	go func() { _, _, _, _ = l.Hear() }()
	p := &Plane{ctx: t.Context(), cfg: Config{StackModules: forbids{}, Faults: &faults{}}, tenants: map[model.EndpointID]*tenant{}}
	m := p.newModule(stack.Smoltcp)
	m.SetLink(l)
	for id := range model.EndpointID(tenants) {
		e := model.Endpoint{ID: id + 1}
		p.tenants[e.ID] = newTenant(e, netcfg.EndpointDevice{}, m)
	}
	go func() {
		for {
			b := make([]byte, protocol.MessageMax)
			n, err := other.Read(b)
			if err != nil {
				return
			}
			h, err := protocol.ParseHead(b[:min(n, 32)])
			if err != nil || h.Tenant == 1 { // says nothing
				continue
			}
			if h.Type == protocol.TypeList {
				i := protocol.Info{Head: h, Kind: protocol.KindConnection, State: 1,
					Local: protocol.AddressOf(netip.MustParseAddrPort("10.9.0.1:80")), Remote: protocol.AddressOf(netip.MustParseAddrPort("10.9.0.2:80"))}
				i.Head.Type, i.Head.ID = protocol.TypeListed, 5
				_, _ = other.Write(protocol.Append(nil, &i)) // the answer fails, too
			}
			reply(t, other, h)
		}
	}()
	cut, err := p.CutForbidden()
	if cut != tenants-1 {
		t.Errorf("%d connections are cut", cut)
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("of the one that says nothing: %v", err)
	}
}
