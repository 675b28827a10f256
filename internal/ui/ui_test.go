package ui

import (
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// agent knows two nodes, of which one does not answer.
type agent struct{ api.Agent }

func (agent) Nodes(context.Context) ([]api.Node, error) {
	return []api.Node{{Node: model.Node{Name: "n1"}}, {Node: model.Node{Name: "n2"}}}, nil
}

func (agent) AskNode(_ context.Context, node, target string) (*http.Response, error) {
	if node == "n2" {
		return nil, &api.Error{Code: api.CodeUnavailable, Message: "does not answer"}
	}
	kind, body := "application/json", `{"asked": "`+target+`"}`
	if strings.HasPrefix(target, "/v1/flows") {
		kind, body = "application/x-ndjson", "{\"lost\":1}\n{\"lost\":2}\n"
	}
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(strings.NewReader(body))}, nil
}

func (agent) ExplainPolicy(_ context.Context, q api.ExplainRequest) (api.Explanation, error) {
	return api.Explanation{Verdict: "allow", Port: q.Ports.First}, nil
}

const token = "0123456789abcdef"

// page serves the page in front of an agent.
func page(t *testing.T, token string) http.Handler {
	t.Helper()
	return before(t, agent{}, token).handler()
}

// before gives what serves the page in front of an agent, which answers by its API.
func before(t *testing.T, a api.Agent, token string) *server {
	t.Helper()
	l, err := api.Listen(filepath.Join(t.TempDir(), "api.sock"))
	testutil.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	log := slog.New(slog.DiscardHandler)
	go func() { done <- api.ServeOn(ctx, l, api.NewHandler(a, nil, log)) }()
	client := api.Dial(l.Addr().String())
	t.Cleanup(func() {
		client.Close()
		cancel()
		testutil.NoError(t, <-done)
	})
	return newServer(ctx, Config{Agent: client, Token: token, Log: log})
}

func ask(h http.Handler, target string, change func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, target, nil)
	if change != nil {
		change(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func shown(token string) func(*http.Request) {
	return func(r *http.Request) { r.AddCookie(&http.Cookie{Name: cookie, Value: token}) }
}

// TestToken: nobody reads anything of the network without it, and the address does not keep it.
func TestToken(t *testing.T) {
	h := page(t, token)
	for _, target := range []string{"/api/nodes", "/api/summary", "/api/flows", "/api/faults", "/api/endpoints", "/api/all/status", "/api/explain?from=a&to=b&port=80", "/api/policies"} {
		for name, change := range map[string]func(*http.Request){
			"none": nil, "another": shown("x"), "empty": shown(""),
			"empty bearer": func(r *http.Request) { r.Header.Set("Authorization", "Bearer ") },
		} {
			if w := ask(h, target, change); w.Code != http.StatusUnauthorized {
				t.Errorf("%s with %s: %d", target, name, w.Code)
			}
		}
	}
	if w := ask(h, "/api/nodes", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }); w.Code != http.StatusOK {
		t.Errorf("with a bearer token: %d", w.Code)
	}
	w := ask(h, "/?view=flows&token="+token, nil)
	if got := w.Header().Get("Set-Cookie"); w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/?view=flows" || !strings.Contains(got, "HttpOnly") || !strings.Contains(got, "SameSite=Strict") {
		t.Errorf("the printed address: %d to %s, cookie %s", w.Code, w.Header().Get("Location"), got)
	}
	if got := ask(page(t, ""), "/api/nodes", nil).Code; got != http.StatusOK {
		t.Errorf("by the socket: %d", got)
	}
}

// TestAll: what nodes answer stands beside the names of those that do not.
func TestAll(t *testing.T) {
	h := page(t, token)
	var got Answers
	testutil.NoError(t, json.Unmarshal(ask(h, "/api/all/connections?listeners=true", shown(token)).Body.Bytes(), &got))
	if !strings.Contains(string(got.Nodes["n1"]), "/v1/connections?listeners=true") || !strings.Contains(got.Silent["n2"], "does not answer") {
		t.Errorf("connections: %s, silent %v", got.Nodes, got.Silent)
	}
	testutil.NoError(t, json.Unmarshal(ask(h, "/api/all/flows", shown(token)).Body.Bytes(), &got))
	if string(got.Nodes["n1"]) != `[{"lost":1},{"lost":2}]` {
		t.Errorf("lines: %s", got.Nodes["n1"])
	}
	for target, want := range map[string]int{
		"/api/flows?port=eighty": http.StatusBadRequest, "/api/summary?since=2100-01-01T00:00:00Z": http.StatusBadRequest, "/api/summary?follow=true": http.StatusBadRequest,
		"/api/nodes?page=-1": http.StatusBadRequest, "/api/endpoints?page=x": http.StatusBadRequest, "/api/endpoints?name=10.0.0.1/8": http.StatusBadRequest,
		"/api/all/nodes": http.StatusNotFound, "/api/explain?from=a&to=b": http.StatusBadRequest,
		"/api/explain?from=a&to=b&port=65536": http.StatusBadRequest, "/api/explain?from=a&to=b&port=80": http.StatusOK,
	} {
		if w := ask(h, target, shown(token)); w.Code != want {
			t.Errorf("%s: %d, want %d", target, w.Code, want)
		}
	}
	if w := ask(h, "/api/nodes", func(r *http.Request) { shown(token)(r); r.Method = http.MethodPost }); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
}

// elsewhere finds what a browser would fetch from another place, or a policy of ours forbids.
var elsewhere = regexp.MustCompile(`(?i)(src|href|import|from|url\()\s*[=(]?\s*["']?(https?:)?//|<script>|style="|onclick="|innerHTML|eval\(`)

// TestNothingFromElsewhere: the page is whole, and says so to browsers.
func TestNothingFromElsewhere(t *testing.T) {
	h := page(t, token)
	found := 0
	testutil.NoError(t, fs.WalkDir(assets, "assets", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		found++
		raw, err := fs.ReadFile(assets, p)
		if where := elsewhere.FindIndex(raw); where != nil && path.Dir(p) != "assets/vendor" {
			t.Errorf("%s: %s", p, raw[where[0]:min(where[1]+40, len(raw))])
		}
		w := ask(h, strings.TrimSuffix(strings.TrimPrefix(p, "assets"), "index.html"), nil)
		if w.Code != http.StatusOK || w.Body.Len() != len(raw) || !strings.Contains(w.Header().Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s: %d, %d of %d bytes, policy %s", p, w.Code, w.Body.Len(), len(raw), w.Header().Get("Content-Security-Policy"))
		}
		if path.Ext(p) == ".js" && !strings.HasPrefix(w.Header().Get("Content-Type"), "text/javascript") {
			t.Errorf("%s: served as %s", p, w.Header().Get("Content-Type"))
		}
		return err
	}))
	if found < 10 {
		t.Errorf("%d files", found)
	}
}
