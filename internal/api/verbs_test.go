package api

import (
	"errors"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func TestSetVerbs(t *testing.T) {
	agent := newFakeAgent()
	client := serve(t, agent)
	agent.endpoints["n1/c1"] = model.Endpoint{ID: 7, Name: "n1/c1"}
	want := model.VerbsEndpoint{Wanted: true, SpinMicros: 5}
	e, err := client.SetVerbs(t.Context(), "n1/c1", VerbsChange{VerbsEndpoint: want})
	if err != nil || e.Planes.Verbs.VerbsEndpoint != want {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := client.SetVerbs(t.Context(), "n1/c2", VerbsChange{VerbsEndpoint: want}); !errors.Is(err, ErrNotFound) {
		t.Errorf("an endpoint that is not there: %v", err)
	}
	if _, err := client.SetVerbs(t.Context(), "n1/c1", VerbsChange{Was: &model.VerbsEndpoint{}}); !IsChanged(err) {
		t.Errorf("made of something else than there is: %v", err)
	}
	if _, err := client.SetVerbs(t.Context(), "n1/c1", VerbsChange{Was: &want}); err != nil {
		t.Errorf("made of what there is: %v", err)
	}
}
