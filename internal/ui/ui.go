// Package ui serves the page that shows a network: who talks to whom, by which path, what was
// denied and why. It reads, by way of one agent that asks the others, and changes nothing. The page
// itself (assets) is plain HTML, CSS and JavaScript modules, without a build step, and fetches
// nothing from elsewhere.
package ui

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/policy"
)

//go:embed assets
var assets embed.FS

// Bounds of one question to all nodes.
const (
	askAtOnce  = 64               // nodes asked at the same time
	askTimeout = 15 * time.Second // for all of them
	maxAnswer  = 64 << 20         // bytes of a node's
)

// cookie holds the token once it was in the address.
const cookie = "heddle_ui"

// Config is what a page is served with.
type Config struct {
	// Agent is asked, and passes on what other nodes are asked.
	Agent *api.Client
	// Token is what a browser has to show; "": nothing, because who reaches the socket may.
	Token string
	// Secure: the page is served by TLS alone.
	Secure bool
	Log    *slog.Logger
}

type server struct{ Config }

// Handler serves the page and what it asks for.
func Handler(c Config) http.Handler {
	s := &server{c}
	mux := http.NewServeMux()
	files, err := fs.Sub(assets, "assets")
	if err != nil {
		panic(err) // the name is above
	}
	mux.Handle("GET /", s.enter(http.FileServerFS(files)))
	mux.Handle("GET /api/nodes", s.answer(s.nodes))
	mux.Handle("GET /api/policies", s.answer(s.policies))
	mux.Handle("GET /api/explain", s.answer(s.explain))
	mux.Handle("GET /api/all/{what}", s.answer(s.all))
	return headers(mux)
}

// headers has browsers run and load what is this page's only, and show it in no other.
func headers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// enter takes the token out of the address, where it would stay in the browser's history.
func (s *server) enter(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		token := query.Get("token")
		if token == "" {
			next.ServeHTTP(w, r)
			return
		}
		query.Del("token")
		http.SetCookie(w, &http.Cookie{Name: cookie, Value: token, Path: "/", HttpOnly: true, Secure: s.Secure, SameSite: http.SameSiteStrictMode})
		// Not a path of the request's: "//elsewhere" would lead there.
		http.Redirect(w, r, "/?"+query.Encode(), http.StatusSeeOther)
	})
}

// allowed reports whether a request shows the token.
func (s *server) allowed(r *http.Request) bool {
	if s.Token == "" {
		return true
	}
	shown, isBearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if c, err := r.Cookie(cookie); err == nil && !isBearer {
		shown = c.Value
	}
	want, got := sha256.Sum256([]byte(s.Token)), sha256.Sum256([]byte(shown))
	return subtle.ConstantTimeCompare(want[:], got[:]) == 1
}

// answer serves what a question gives, as JSON.
func (s *server) answer(question func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.allowed(r) {
			s.fail(w, http.StatusUnauthorized, &api.Error{Code: "unauthorized", Message: "the token is missing or another one",
				Remedy: "open the address that `heddle ui` has printed"})
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), askTimeout)
		defer cancel()
		v, err := question(r.WithContext(ctx))
		if err != nil {
			var said *api.Error
			if !errors.As(err, &said) {
				said = &api.Error{Code: api.CodeUnavailable, Message: err.Error()}
			}
			s.fail(w, said.Status(), said)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(v); err != nil {
			s.Log.Debug("the browser went away", "err", err)
		}
	})
}

func (s *server) fail(w http.ResponseWriter, status int, e *api.Error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(map[string]*api.Error{"error": e}); err != nil {
		s.Log.Debug("the browser went away", "err", err)
	}
}

func (s *server) nodes(r *http.Request) (any, error) {
	nodes, err := s.Agent.Nodes(r.Context())
	return map[string][]api.Node{"nodes": nodes}, err
}

func (s *server) policies(r *http.Request) (any, error) { return s.Agent.Policies(r.Context()) }

// explain says what the rules make of a TCP connection: from, to and port are in the query.
func (s *server) explain(r *http.Request) (any, error) {
	q := r.URL.Query()
	if port, err := strconv.ParseUint(q.Get("port"), 10, 16); err != nil || port == 0 {
		return nil, &api.Error{Code: api.CodeInvalid, Field: "port", Message: "is no port", Remedy: "give 1 to 65535"}
	}
	ports, err := policy.ParsePorts("tcp/" + q.Get("port"))
	if err != nil {
		return nil, &api.Error{Code: api.CodeInvalid, Field: "port", Message: err.Error()}
	}
	return s.Agent.ExplainPolicy(r.Context(), api.ExplainRequest{From: q.Get("from"), To: q.Get("to"), Ports: ports})
}

// questions are what all nodes can be asked.
var questions = []string{"connections", "endpoints", "flows", "status", "traffic"}

// Answers are those of all nodes, by node.
type Answers struct {
	Nodes map[string]json.RawMessage `json:"nodes"`
	// Silent says of the others why there is none.
	Silent map[string]string `json:"silent"`
}

// all asks all nodes the same, with the query as it is. Those of which only lines of JSON come give
// a list of them.
func (s *server) all(r *http.Request) (any, error) {
	what := r.PathValue("what")
	if !slices.Contains(questions, what) {
		return nil, &api.Error{Code: api.CodeNotFound, Message: "there is no such question"}
	}
	nodes, err := s.Agent.Nodes(r.Context())
	if err != nil {
		return nil, err
	}
	target := "/v1/" + what
	if r.URL.RawQuery != "" {
		target += "?" + r.URL.RawQuery
	}
	out := Answers{Nodes: map[string]json.RawMessage{}, Silent: map[string]string{}}
	var mu sync.Mutex // guards out
	var wg sync.WaitGroup
	turns := make(chan struct{}, askAtOnce)
	for _, n := range nodes {
		wg.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			said, err := s.ask(r.Context(), n.Name, target)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Silent[n.Name] = err.Error()
				return
			}
			out.Nodes[n.Name] = said
		})
	}
	wg.Wait()
	return out, nil
}

// ask puts one question to one node.
func (s *server) ask(ctx context.Context, node, target string) (json.RawMessage, error) {
	resp, err := s.Agent.AskNode(ctx, node, target)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // it has been read
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxAnswer {
		return nil, errors.New("its answer is too long: choose less")
	}
	if resp.StatusCode != http.StatusOK {
		var said struct{ Error *api.Error }
		if json.Unmarshal(body, &said) == nil && said.Error != nil {
			return nil, said.Error
		}
		return nil, errors.New(resp.Status)
	}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/x-ndjson") {
		return body, nil
	}
	lines := slices.DeleteFunc(strings.Split(string(body), "\n"), func(l string) bool { return l == "" })
	return json.RawMessage("[" + strings.Join(lines, ",") + "]"), nil
}
