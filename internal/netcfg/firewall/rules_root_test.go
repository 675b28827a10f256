package firewall

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
)

// nft runs nft in the calling thread's network namespace.
func nft(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("nft", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("nft %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// newRules writes a table that has all that there may be, and gives it as nft lists it.
func newRules(t *testing.T) (rules *Rules, list string) {
	t.Helper()
	at := netip.MustParseAddr("192.0.2.1")
	pool := netip.MustParsePrefix("10.99.0.0/16")
	rules, err := Set(Config{
		Underlay: at, VTEP: at, VXLANPort: 4789, VNI: 1, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.99.1.0/24")}, Gateways: []netip.Addr{netip.MustParseAddr("10.99.1.1")},
		Pool: []netip.Prefix{pool}, Mark: 1, OverlayMark: 2, DropMark: 3, RejectMark: 4, DirectPorts: model.DefaultDirectPorts, Stores: []netip.AddrPort{netip.AddrPortFrom(at, 2379)},
	}, netdev.LoopbackIfindex, netdev.LoopbackIfindex, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	port := model.PublishedPort{HostPort: 8080, Port: 80, Protocol: model.PortTCP}
	err = errors.Join(
		rules.ChangeKnownNodes(nil, map[string]netip.Addr{"a": netip.MustParseAddr("192.0.2.2"), "b": netip.MustParseAddr("192.0.2.3")}),
		rules.SetMoved([]netip.Addr{netip.MustParseAddr("10.99.2.9")}),
		rules.SetAdopted([]netip.Addr{netip.MustParseAddr("198.51.100.9")}),
		rules.SetPublished([]Published{{PublishedPort: port, To: []netip.Addr{netip.MustParseAddr("10.99.1.2")}}}))
	if err != nil {
		t.Fatal(err)
	}
	return rules, nft(t, "-s", "list", "table", "inet", Table)
}

// TestMend: whatever somebody does to the table, it is as it was again, with what its sets have and
// its guards have counted; what is as it should be is left alone.
func TestMend(t *testing.T) {
	inNew(t, func() error {
		rules, want := newRules(t)
		for _, line := range []string{"chain moved", "chain carried", "8080", "192.0.2.2, 192.0.2.3", "meta pkttype set host"} {
			if !strings.Contains(want, line) {
				t.Errorf("no %q in:\n%s", line, want)
			}
		}
		mend := func(gone string) {
			t.Helper()
			if got, err := rules.Mend(); err != nil || !strings.HasPrefix(got, gone) || (got == "") != (gone == "") {
				t.Errorf("gone was %q, %v, want %q", got, err, gone)
			}
		}
		mend("")
		rules.counts["drop_plain"] = 7
		for _, c := range []struct{ damage, gone string }{
			{"flush ruleset", "the table"},
			{"flush ruleset; add table inet " + Table, "the table, which has another"},
			{"flush table inet " + Table, "some of its rules"},
			{"flush chain inet heddle rejected", "some of its rules"},
			{"insert rule inet heddle early-in accept", "some of its rules"},
			{"add table inet heddle { flags dormant; }", "what the table is switched on by"},
		} {
			nft(t, c.damage)
			mend(c.gone)
			if got := nft(t, "-s", "list", "table", "inet", Table); got != want {
				t.Errorf("%.40s: now there is\n%s\nwant\n%s", c.damage, got, want)
			}
			mend("")
			if counts, err := rules.GuardCounts(); err != nil || counts["drop_plain"] != 7 {
				t.Errorf("%.40s: counts %v, %v", c.damage, counts, err)
			}
		}
		// Who has a change for a table that is not there writes all of it.
		for _, change := range []func() error{
			func() error { return rules.SetPublished(nil) },
			func() error { return rules.SetKnownNodes(nil) },
		} {
			nft(t, "flush ruleset")
			if err := change(); err != nil {
				t.Error(err)
			}
			mend("the table")
			mend("")
		}
		if got := nft(t, "list", "table", "inet", Table); strings.Contains(got, "8080") || !strings.Contains(got, "198.51.100.9") {
			t.Errorf("after a change of a table that was gone:\n%s", got)
		}
		return nil
	})
}

// TestFollow: a change of rules is noticed, with whose it was; many are one, and what fails is tried
// again.
func TestFollow(t *testing.T) {
	inNew(t, func() error {
		rules, _ := newRules(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		looks := 0
		look := func(by string) error {
			looks++
			others := strings.HasPrefix(by, "nft (process ")
			gone, err := rules.Mend()
			switch looks {
			case 1: // at once
				nft(t, "flush ruleset")
			case 2:
				if !others || gone != "the table" {
					t.Errorf("flushed: %q by %q", gone, by)
				}
			case 3: // its own change
				if by != "" || gone != "" {
					t.Errorf("mended: %q by %q", gone, by)
				}
				for range 20 {
					nft(t, "add table ip others; add chain ip others c; add rule ip others c counter")
				}
			case 4:
				if !others || gone != "" {
					t.Errorf("others' changes: %q by %q", gone, by)
				}
				return errors.New("again")
			default:
				if by != "" || gone != "" {
					t.Errorf("again: %q by %q", gone, by)
				}
				cancel()
			}
			return err
		}
		if err := Follow(ctx, look); err != nil {
			return err
		}
		if looks != 5 {
			t.Errorf("%d looks", looks)
		}
		return nil
	})
}
