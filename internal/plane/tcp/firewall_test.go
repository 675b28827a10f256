package tcp

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// answersOf are what a look is told of each key, probe after probe; the last one again and again.
type answersOf map[datapath.FirewallKey][]firewallAnswer

func (a answersOf) ask(_ context.Context, keys []datapath.FirewallKey) map[datapath.FirewallKey]firewallAnswer {
	out := make(map[datapath.FirewallKey]firewallAnswer)
	for _, k := range keys {
		out[k] = a[k][0]
		if len(a[k]) > 1 {
			a[k] = a[k][1:]
		}
	}
	return out
}

func firewallKey(port uint16) datapath.FirewallKey {
	return datapath.FirewallKey{Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.AddrPortFrom(netip.MustParseAddr("10.244.2.2"), port)}
}

// TestFirewallWatch: what is forbidden twice is ended, or kept and named; one probe that is lost, or
// that could not be sent, ends nothing.
func TestFirewallWatch(t *testing.T) {
	lost, forbidden, passes, unknown := firewallKey(1), firewallKey(2), firewallKey(3), firewallKey(4)
	for _, live := range []model.FirewallLive{model.FirewallLiveEnd, model.FirewallLiveKeep} {
		t.Run(string(live), func(t *testing.T) {
			answers := answersOf{
				lost: {firewallForbids, firewallPassed}, forbidden: {firewallForbids}, passes: {firewallPassed}, unknown: {firewallUnknown},
			}
			var ended []datapath.FirewallKey
			w := firewallWatch{
				live: live, wanted: true, log: slog.New(slog.DiscardHandler), ask: answers.ask,
				past: func() (map[datapath.FirewallKey]int, error) {
					return map[datapath.FirewallKey]int{lost: 1, forbidden: 3, passes: 1, unknown: 1}, nil
				},
				end: func(keys []datapath.FirewallKey) (int, error) {
					ended = append(ended, keys...)
					return len(keys), nil
				},
			}
			if err := w.look(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantEnded, wantNamed := []datapath.FirewallKey{forbidden}, []model.Forbidden(nil)
			if live == model.FirewallLiveKeep {
				wantEnded, wantNamed = nil, []model.Forbidden{{Src: forbidden.Src, Dst: forbidden.Dst, Connections: 3}}
			}
			if got := w.status().Forbidden; !slices.Equal(ended, wantEnded) || !reflect.DeepEqual(got, wantNamed) {
				t.Errorf("ended %v, named %v; want %v, %v", ended, got, wantEnded, wantNamed)
			}
			answers[forbidden] = []firewallAnswer{firewallPassed}
			if err := w.look(t.Context()); err != nil || len(w.status().Forbidden) != 0 {
				t.Errorf("after the rule is gone: %v, named %v", err, w.status().Forbidden)
			}
		})
	}
}

// TestFirewallWatchFails: what cannot be listed or ended is said, and an agent that ends meanwhile
// takes no silence for a rule.
func TestFirewallWatchFails(t *testing.T) {
	key, broken := firewallKey(1), errors.New("broken")
	w := firewallWatch{
		live: model.FirewallLiveEnd, log: slog.New(slog.DiscardHandler), ask: answersOf{key: {firewallForbids}}.ask,
		past: func() (map[datapath.FirewallKey]int, error) { return nil, broken },
		end:  func([]datapath.FirewallKey) (int, error) { return 0, broken },
	}
	if err := w.look(t.Context()); !errors.Is(err, broken) {
		t.Errorf("not listed: %v", err)
	}
	w.past = func() (map[datapath.FirewallKey]int, error) {
		return maps.Clone(map[datapath.FirewallKey]int{key: 1}), nil
	}
	if err := w.look(t.Context()); !errors.Is(err, broken) {
		t.Errorf("not ended: %v", err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.look(over); err != nil {
		t.Errorf("after the agent's end: %v", err)
	}
}
