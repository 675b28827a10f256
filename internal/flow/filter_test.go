package flow

import (
	"errors"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// web is a flow that TestMatch asks filters about.
func web() *Flow {
	return &Flow{
		Event: Fallback, Verdict: Allowed, Path: "overlay", Reason: "fallback_bound", ReasonKind: model.KindFallback,
		From: Peer{Endpoint: "n1/c1", Node: "n1", Addr: netip.MustParseAddr("10.244.0.2"), Port: 40000, Labels: map[string]string{"app": "client"}},
		To:   Peer{Endpoint: "shop/web-7", Node: "n2", Addr: netip.MustParseAddr("10.244.1.3"), Port: 8080, Labels: map[string]string{"app": "web", "tier": "front"}},
	}
}

func TestMatch(t *testing.T) {
	for query, want := range map[string]bool{
		"":                            true,
		"from=n1/c1":                  true,
		"from=n1/*":                   true,
		"from=*":                      true,
		"from=n1/c?":                  true,
		"from=n1/c":                   false,
		"from=shop/*":                 false,
		"from=shop/*&from=n1/c1":      true,
		"from=10.244.0.2":             true,
		"from=10.244.0.3":             false,
		"from=10.244.0.0/16":          true,
		"to=10.244.0.0/24":            false,
		"to=*/web-*":                  true,
		"to=fd48::/16":                false,
		"label=app=web":               true,
		"label=app=client":            true,
		"label=app=db":                false,
		"label=tier":                  true,
		"label=tier=":                 false,
		"label=app=web&label=tier":    true,
		"label=app=client&label=tier": false, // one end must have both
		"port=8080":                   true,
		"port=8000-8999":              true,
		"port=40000":                  false, // the source's
		"port=80&port=8080":           true,
		"event=fallback":              true,
		"event=open":                  false,
		"verdict=allowed":             true,
		"verdict=denied&verdict=cut":  false,
		"path=overlay":                true,
		"path=direct":                 false,
		"reason=fallback_*":           true,
		"reason=fallback_stripped":    false,
		"from=n1/c1&to=n1/c1":         false,
		"from=n1/c1&port=8080&event=fallback&path=overlay&label=tier=front": true,
	} {
		f, err := ParseQuery(query)
		if err != nil {
			t.Errorf("%s: %v", query, err)
		} else if got := f.Match(web()); got != want {
			t.Errorf("%s: %v, want %v", query, got, want)
		}
	}
}

// TestMeaningless: what can choose no flow, or is no filter, is refused by the name of its key, with
// a remedy.
func TestMeaningless(t *testing.T) {
	for query, field := range map[string]string{
		"from=":                      "from",
		"from=10.0.0.1/8":            "from",
		"from=10.0.0.256":            "from",
		"to=fe80::1%25eth0":          "to",
		"to=a%20b":                   "to",
		"to=%ff":                     "to",
		"to=10.0.0.0/33":             "to",
		"to=::ffff:10.0.0.0/104":     "to",
		"label==x":                   "label",
		"port=0":                     "port",
		"port=65536":                 "port",
		"port=http":                  "port",
		"port=90-80":                 "port",
		"event=opened":               "event",
		"verdict=maybe":              "verdict",
		"path=Direct%20way":          "path",
		"reason=Fallback":            "reason",
		"since=0s":                   "since",
		"since=-5m":                  "since",
		"since=yesterday":            "since",
		"since=5m&since=6m":          "since",
		"last=0":                     "last",
		"last=-1":                    "last",
		"last=many":                  "last",
		"verdict=denied&event=open":  "event",
		"verdict=denied&path=direct": "path",
		"event=deny&path=direct":     "path",
		"form=n1":                    `"form"`,
		"from=" + strings.Repeat("a", maxValue+1):       "from",
		strings.Repeat("port=1&", maxValues) + "port=2": "port",
	} {
		f, err := ParseQuery(query)
		var fe *FieldError
		if !errors.As(err, &fe) || fe.Field != field || fe.Message == "" {
			t.Errorf("%.80s: %v, want a *FieldError of %s", query, err, field)
		}
		if !reflect.DeepEqual(f, Filter{}) {
			t.Errorf("%.80s: a filter beside an error: %+v", query, f)
		}
	}
}

func TestSince(t *testing.T) {
	now := time.Date(2026, 11, 28, 21, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"5m":                        now.Add(-5 * time.Minute),
		"2026-11-28T20:00:00Z":      now.Add(-time.Hour),
		"2026-11-28T21:30:00+01:00": now.Add(-30 * time.Minute),
	} {
		f, err := ParseFilter(url.Values{"since": {text}})
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got, err := f.Since.Start(now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v, want %v", text, got, err, want)
		}
	}
	f, err := ParseFilter(url.Values{"since": {"2026-11-28T21:00:01Z"}})
	if err != nil {
		t.Fatal(err)
	}
	var fe *FieldError
	if _, err := f.Since.Start(now); !errors.As(err, &fe) || fe.Field != "since" {
		t.Errorf("a time to come: %v", err)
	}
}

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true}, {"*", "", true}, {"**", "x", true}, {"?", "", false}, {"a*b*c", "a--b--bc", true}, {"a*b*c", "a--b--bd", false},
		{"*a", "aaab", false}, {"*ab", "aaab", true}, {"a", "ab", false},
		{strings.Repeat("*a", 50) + "b", strings.Repeat("a", 10000), false}, // in no time that grows with the stars
	} {
		if got := glob(c.pattern, c.s); got != c.want {
			t.Errorf("%.20q, %.20q: %v", c.pattern, c.s, got)
		}
	}
}

func TestPeerString(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	for want, p := range map[string]Peer{
		"web:80": {Endpoint: "web", Addr: a, Port: 80}, "web": {Endpoint: "web"}, "node n1:80": {Node: "n1", Addr: a, Port: 80},
		"192.0.2.1:80": {Addr: a, Port: 80}, "192.0.2.1": {Addr: a}, "?": {},
	} {
		if got := p.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Whatever a query says: a *FieldError and no filter, or one that is the same when it is written
// and read again.
func FuzzParseQuery(f *testing.F) {
	for _, s := range []string{
		"", "from=n1/c1&to=10.0.0.0/8&label=a=b&port=1-2&since=5m&last=3", "verdict=denied&event=deny", "path=direct&reason=fallback_*",
		"since=2026-11-28T21:00:00.5%2B01:00", "from=::ffff:10.0.0.1", "label=a&label=a", "from=%ff", "port=00080", "since=1h60m", "a=b;c=d", "%zz",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, query string) {
		parsed, err := ParseQuery(query)
		if err != nil {
			var fe *FieldError
			if !errors.As(err, &fe) || fe.Field == "" || fe.Message == "" {
				t.Fatalf("error %#v", err)
			}
			if !reflect.DeepEqual(parsed, Filter{}) {
				t.Fatalf("a filter beside an error: %+v", parsed)
			}
			return
		}
		again, err := ParseQuery(parsed.String())
		if err != nil || !reflect.DeepEqual(again, parsed) {
			t.Fatalf("%q is %+v; written as %q it is %+v, %v", query, parsed, parsed.String(), again, err)
		}
		parsed.Match(web())
	})
}
