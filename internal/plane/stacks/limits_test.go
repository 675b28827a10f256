package stacks

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
)

// TestCapsAreTold: a module is told of an endpoint's caps with the endpoint, and when they change; it
// is told somewhat less than the kernel lets pass, so that nothing has to be dropped.
func TestCapsAreTold(t *testing.T) {
	dir, err := os.MkdirTemp("", "stacks") // t's own is too long for a socket's path
	testutil.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("PATH", dir) // no module is found
	played := play(t, filepath.Join(dir, socketOf[stack.Smoltcp]), true)
	p, _ := runPlane(t, dir, &modules{})
	played.hear(protocol.TypeHello)
	played.hear(protocol.TypeBegin)
	played.hear(protocol.TypeEnd)
	e := model.Endpoint{ID: 7, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.2")}, Created: time.Unix(5, 9)}
	told := func(want protocol.Limits) {
		t.Helper()
		played.hear(protocol.TypeTenant)
		if got := <-played.limits; got != want {
			t.Errorf("it was told %+v, want %+v", got, want)
		}
	}
	limit := func(l *model.Limits) {
		t.Helper()
		e.Limits = l
		testutil.NoError(t, p.SetLimits(e, nil))
	}
	limit(&model.Limits{Egress: 100_000_000, Priority: "low"})
	testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.Smoltcp}))
	testutil.NoError(t, p.Attach(e, netcfg.EndpointDevice{}))
	told(protocol.Limits{SendRate: 12_250_000})
	limit(&model.Limits{Egress: 100_000_000}) // nothing of a module's has changed
	limit(&model.Limits{Ingress: 8_000_000})
	told(protocol.Limits{ReceiveRate: 980_000})
	e.Limits = &model.Limits{Egress: 8_000_000}
	testutil.NoError(t, p.RestoreLimits([]model.Endpoint{e}))
	told(protocol.Limits{SendRate: 980_000})
	limit(nil)
	told(protocol.Limits{})
}
