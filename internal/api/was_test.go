package api

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"path/filepath"
	"reflect"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// earlierAgent serves changes as an agent does that does not know what they were made of.
func earlierAgent(t *testing.T) (client *Client, asked *[]string) {
	t.Helper()
	asked = new([]string)
	change := func(body any) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			*asked = append(*asked, r.URL.Path)
			into := reflect.New(reflect.TypeOf(body)).Interface()
			status, answer := http.StatusOK, any(model.Endpoint{ID: 7, Name: "n1/c1"})
			if err := decodeStrict(r.Body, MaxRequestBytes, into); err != nil {
				var e *Error
				errors.As(err, &e)
				status, answer = e.Status(), errorBody{e}
			}
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(answer)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /v1/endpoints/{name}/limits", change(model.Limits{}))
	mux.HandleFunc("PUT /v1/endpoints/{name}/verbs", change(model.VerbsEndpoint{}))
	socket := filepath.Join(t.TempDir(), "s")
	ln, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	go func() { _ = server.Serve(ln) }() // until it is closed
	client = Dial(socket)
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, asked
}

// Agents of an earlier version are told changes without what they were made of.
func TestChangesByEarlierAgents(t *testing.T) {
	client, asked := earlierAgent(t)
	if e, err := client.SetLimits(t.Context(), "c1", LimitsChange{Limits: model.Limits{Egress: 1e6}, Was: &model.Limits{}}); err != nil || e.ID != 7 {
		t.Errorf("limits: %v", err)
	}
	if e, err := client.SetVerbs(t.Context(), "c1", VerbsChange{Was: &model.VerbsEndpoint{}}); err != nil || e.ID != 7 {
		t.Errorf("verbs: %v", err)
	}
	const limits, verbs = "/v1/endpoints/c1/limits", "/v1/endpoints/c1/verbs"
	if want := []string{limits, limits, verbs, verbs}; !reflect.DeepEqual(*asked, want) {
		t.Errorf("asked %v, want %v", *asked, want)
	}
}
