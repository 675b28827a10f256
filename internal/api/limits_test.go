package api

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func TestSetLimits(t *testing.T) {
	agent := newFakeAgent()
	agent.endpoints["n1/c1"] = model.Endpoint{ID: 1, Name: "n1/c1"}
	client := serve(t, agent)
	dscp := uint8(0)
	want := model.Limits{Egress: 1e8, ConnectionIngress: 2e6, Priority: model.PriorityHigh, DSCP: &dscp}
	e, err := client.SetLimits(t.Context(), "n1/c1", LimitsChange{Limits: want})
	if err != nil || e.Limits == nil || !reflect.DeepEqual(*e.Limits, want) {
		t.Errorf("limits %+v, %v", e.Limits, err)
	}
	if got := *agent.endpoints["n1/c1"].Limits; !reflect.DeepEqual(got, want) {
		t.Errorf("the agent was told %+v", got)
	}
	if _, err := client.SetLimits(t.Context(), "n1/c2", LimitsChange{Limits: want}); !errors.Is(err, ErrNotFound) {
		t.Errorf("limits of no endpoint: %v", err)
	}
	if _, err := client.SetLimits(t.Context(), "n1/c1", LimitsChange{Limits: model.Limits{Ingress: 1}}); !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "ingress_bps: ") {
		t.Errorf("invalid limits: %v", err)
	}
	other := want
	other.Egress++
	if _, err := client.SetLimits(t.Context(), "n1/c1", LimitsChange{Was: &other}); !IsChanged(err) || !errors.Is(err, ErrConflict) {
		t.Errorf("made of others than there are: %v", err)
	}
	same := uint8(0)
	other = want
	other.DSCP = &same
	if _, err := client.SetLimits(t.Context(), "n1/c1", LimitsChange{Was: &other}); err != nil {
		t.Errorf("made of those there are: %v", err)
	}
}

func TestLimitUse(t *testing.T) {
	agent := newFakeAgent()
	list, err := serve(t, agent).LimitUse(t.Context())
	want, _ := agent.LimitUse(t.Context())
	if err != nil || !reflect.DeepEqual(list, want) {
		t.Errorf("limits %+v, %v", list, err)
	}
}

// Whatever bytes arrive: an *Error, or limits that are valid and that a client could have sent.
func FuzzDecodeLimits(f *testing.F) {
	for _, s := range []string{``, `{}`, `null`, `[]`, `{"egress_bps":100000000,"dscp":46,"priority":"low"}`, `{"egress_bps":-1}`,
		`{"egress_bps":1.5}`, `{"ingress_bps":1e8}`, `{"dscp":64}`, `{"dscp":256}`, `{"priority":""}`, `{"burst":1}`, `{"connection_egress_bps":18446744073709551615}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		l, err := decodeLimits(strings.NewReader(body))
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Code != CodeInvalid && e.Code != CodeTooLarge || e.Message == "" {
				t.Fatalf("error %#v", err)
			}
			return
		}
		sent, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeLimits(strings.NewReader(string(sent)))
		if err != nil || !reflect.DeepEqual(again, l) {
			t.Fatalf("%s decodes to %+v (%v), want %+v", sent, again, err, l)
		}
	})
}
