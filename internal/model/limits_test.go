package model

import (
	"errors"
	"testing"
)

func TestParseRate(t *testing.T) {
	for s, want := range map[string]Rate{
		"none": 0, "100kbit": 100_000, "100mbit": 100_000_000, "2.5gbit": 2_500_000_000, "1tbit": MaxRate, "800000bit": 800_000,
	} {
		if got, err := ParseRate(s); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "100", "100mb", "mbit", "-1mbit", "0mbit", "99kbit", "2tbit", "NaNmbit", "1e300gbit", "Infgbit", "100 mbit", "0"} {
		if got, err := ParseRate(s); err == nil {
			t.Errorf("%q: %d, want an error", s, got)
		}
	}
	for _, r := range []Rate{0, MinRate, 123_456_789, 100_000_000, 2_500_000_000, MaxRate} {
		if got, err := ParseRate(r.String()); err != nil || got != r {
			t.Errorf("%d is shown as %s, which is read as %d (%v)", r, r, got, err)
		}
	}
}

func TestValidateLimits(t *testing.T) {
	dscp := func(n uint8) *uint8 { return &n }
	for want, l := range map[string]Limits{
		"":                       {Egress: MinRate, Ingress: MaxRate, Priority: PriorityLow, DSCP: dscp(63)},
		"egress_bps":             {Egress: MinRate - 1},
		"ingress_bps":            {Ingress: MaxRate + 1},
		"connection_egress_bps":  {ConnectionEgress: 1},
		"connection_ingress_bps": {ConnectionIngress: 1},
		"priority":               {Priority: "urgent"},
		"dscp":                   {DSCP: dscp(64)},
	} {
		err := l.Validate()
		var wrong *LimitError
		if want == "" && err != nil || want != "" && (!errors.As(err, &wrong) || wrong.Field != want) {
			t.Errorf("%+v: %v, want field %q", l, err, want)
		}
	}
	if !(Limits{}).IsZero() || (Limits{DSCP: dscp(0)}).IsZero() {
		t.Error("the zero Limits are those without any field")
	}
}
