package node

import (
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/testutil"
)

// TestChangeOfWhatWas: a change that was made of something else than there is changes nothing.
func TestChangeOfWhatWas(t *testing.T) {
	h := recordingHost(t.TempDir())
	h.planes, h.store = plane.Set{}, &refusing{err: func(model.Endpoint) error { return nil }}
	a := compose(h)
	h.known.add(endpointOf(1, "c1", "10.244.1.2"))
	first := model.Limits{Egress: 1e6}
	set := func(l, was model.Limits) error {
		_, err := a.SetLimits(t.Context(), "c1", api.LimitsChange{Limits: l, Was: &was})
		return err
	}
	if err := set(first, model.Limits{Ingress: 1e6}); !api.IsChanged(err) {
		t.Errorf("made of limits that there are not: %v", err)
	}
	testutil.NoError(t, set(first, model.Limits{}))
	if err := set(model.Limits{Ingress: 1e6}, model.Limits{}); !api.IsChanged(err) {
		t.Errorf("made of none: %v", err)
	}
	if e, _ := h.known.named("c1"); e.Limits == nil || *e.Limits != first {
		t.Errorf("limits %+v", e.Limits)
	}
	testutil.NoError(t, set(model.Limits{}, first))
	change := api.VerbsChange{VerbsEndpoint: model.VerbsEndpoint{Wanted: true}, Was: &model.VerbsEndpoint{Outside: true}}
	if _, err := a.SetVerbs(t.Context(), "c1", change); !api.IsChanged(err) {
		t.Errorf("made of another device: %v", err)
	}
	if e, _ := h.known.named("c1"); e.Planes.Verbs.Wanted {
		t.Error("the endpoint has a device")
	}
}
