package api

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestOn: what is asked by way of one agent reaches the other as it was asked, and only what agents
// answer each other does.
func TestOn(t *testing.T) {
	client := serve(t, newFakeAgent())
	if _, err := client.On("n2").Connections(t.Context(), ConnectionFilter{Listeners: true}); err != nil {
		t.Errorf("ask another node: %v", err)
	}
	resp, err := client.AskNode(t.Context(), "n2", "/v1/connections?listeners=true")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body := make([]byte, 200)
	n, _ := resp.Body.Read(body)
	if said := string(body[:n]); !strings.Contains(said, `"/v1/connections?listeners=true"`) {
		t.Errorf("the other node was asked %s", said)
	}
	for _, tt := range []struct {
		what string
		err  error
		want error
	}{
		{"a node that is not there", second(client.On("n3").Status(t.Context())), ErrNotFound},
		{"a name that is none", second(client.On("N_3").Status(t.Context())), ErrInvalid},
		{"what agents do not answer", second(client.On("n2").Policies(t.Context())), ErrNotFound},
	} {
		if !errors.Is(tt.err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.what, tt.err, tt.want)
		}
	}
	if err := client.On("n2").DeleteEndpoint(t.Context(), "n2/c1"); err == nil {
		t.Error("deleted an endpoint of another node")
	}
}

func second[T any](_ T, err error) error { return err }

// TestForPeers: other agents change nothing, and read nothing but what is listed.
func TestForPeers(t *testing.T) {
	h := ForPeers(NewHandler(newFakeAgent(), nil, slog.New(slog.DiscardHandler)))
	for _, tt := range []struct {
		method, path string
		want         int
	}{
		{http.MethodGet, "/v1/status", http.StatusOK},
		{http.MethodGet, "/v1/connections?listeners=true", http.StatusOK},
		{http.MethodPost, "/v1/endpoints", http.StatusNotFound},
		{http.MethodGet, "/v1/nodes", http.StatusNotFound},
		{http.MethodGet, "/v1/nodes/n2/v1/status", http.StatusNotFound},
		{http.MethodGet, "/metrics", http.StatusNotFound},
		{http.MethodGet, "/v1/status/../nodes", http.StatusNotFound},
		{http.MethodDelete, "/v1/nodes/n2", http.StatusNotFound},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(tt.method, tt.path, nil))
		if w.Code != tt.want {
			t.Errorf("%s %s: %d, want %d", tt.method, tt.path, w.Code, tt.want)
		}
	}
}
