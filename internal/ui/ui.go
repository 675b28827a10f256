// Package ui serves the page that shows a network: who talks to whom, by which path, what was
// denied and why. It reads, by way of one agent that asks the others, and changes nothing. The page
// itself (assets) is plain HTML, CSS and JavaScript modules, without a build step, and fetches
// nothing from elsewhere.
package ui

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
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

// Bounds of /api/all.
const (
	allTimeout = 15 * time.Second
	allBytes   = 64 << 20
)

// nodesEvery is how often the agent is asked which nodes there are. A list as old as nodesOld is
// not shown, however long the agent takes for a new one.
const (
	nodesEvery = 2 * time.Second
	nodesOld   = time.Minute
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

type server struct {
	Config
	ctx    context.Context // of what is asked whoever waits for it
	pace   *pace
	rounds rounds
	// patience is how long after the last look a round ends; enough, how long a browser waits for
	// more than there is.
	patience, enough time.Duration

	mu       sync.Mutex // guards the rest
	nodes    []api.Node
	since    time.Time
	asking   chan struct{} // closed once the agent has said which nodes there are; nil: it is not asked
	nodesErr error         // of the last time
}

// Handler serves the page and what it asks for, until ctx ends.
func Handler(ctx context.Context, c Config) http.Handler { return newServer(ctx, c).handler() }

func newServer(ctx context.Context, c Config) *server {
	return &server{Config: c, ctx: ctx, pace: newPace(), patience: nobodyLooks, enough: firstAnswer}
}

func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	files, err := fs.Sub(assets, "assets")
	if err != nil {
		panic(err) // the name is above
	}
	mux.Handle("GET /", s.enter(http.FileServerFS(files)))
	mux.Handle("GET /api/summary", s.answer(s.summary))
	mux.Handle("GET /api/flows", s.answer(s.flows))
	mux.Handle("GET /api/endpoints", s.answer(s.endpoints))
	mux.Handle("GET /api/nodes", s.answer(s.nodesPage))
	mux.Handle("GET /api/faults", s.answer(s.faults))
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
		ctx, cancel := context.WithTimeout(r.Context(), allTimeout)
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

// nodeList gives the nodes of the network, as the agent said a moment ago. Nobody waits for long if
// there is a list: for thousands of nodes a busy machine takes longer than a browser waits.
func (s *server) nodeList(ctx context.Context) ([]api.Node, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	age := time.Since(s.since)
	if age < nodesEvery {
		return s.nodes, nil
	}
	if s.asking == nil {
		s.asking = make(chan struct{})
		go s.askNodes(s.asking)
	}
	asking, wait := s.asking, make(<-chan time.Time)
	if age < nodesOld {
		wait = time.After(s.enough)
	}
	s.mu.Unlock()
	said, err := false, error(nil)
	select {
	case <-asking:
		said = true
	case <-wait:
	case <-ctx.Done():
		err = ctx.Err()
	}
	s.mu.Lock()
	if said {
		err = s.nodesErr
	}
	return s.nodes, err
}

// askNodes asks the agent, for all who wait.
func (s *server) askNodes(said chan struct{}) {
	ctx, cancel := context.WithTimeout(s.ctx, nodesOld)
	defer cancel()
	nodes, err := s.Agent.Nodes(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asking, s.nodesErr = nil, err; err == nil {
		s.nodes, s.since = nodes, time.Now()
	}
	close(said)
}

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

// all asks all nodes the same, or those that are named, with the rest of the query as it is. Those
// of which only lines of JSON come give a list of them. It is for other programs than the page.
func (s *server) all(r *http.Request) (any, error) {
	what := r.PathValue("what")
	if !slices.Contains(questions, what) {
		return nil, &api.Error{Code: api.CodeNotFound, Message: "there is no such question"}
	}
	nodes, err := s.nodeList(r.Context())
	if err != nil {
		return nil, err
	}
	query := r.URL.Query()
	names := query["node"]
	query.Del("node")
	target := "/v1/" + what
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	out := Answers{Nodes: map[string]json.RawMessage{}, Silent: map[string]string{}}
	var mu sync.Mutex // guards out and size
	size := 0
	var wg sync.WaitGroup
	for _, n := range nodes {
		if len(names) > 0 && !slices.Contains(names, n.Name) {
			continue
		}
		err := s.pace.take(r.Context())
		mu.Lock()
		if err == nil && size > allBytes {
			s.pace.give()
			err = errTooMuch
		}
		if err != nil {
			out.Silent[n.Name] = err.Error()
		}
		mu.Unlock()
		if err != nil {
			continue
		}
		wg.Go(func() {
			defer s.pace.give()
			said, err := s.ask(r.Context(), n.Name, target)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Silent[n.Name] = err.Error()
				return
			}
			if what == "flows" {
				said = slices.Concat([]byte("["), bytes.ReplaceAll(bytes.TrimSpace(said), []byte("\n"), []byte(",")), []byte("]"))
			}
			size += len(said)
			out.Nodes[n.Name] = said
		})
	}
	wg.Wait()
	return out, nil
}

// errTooMuch is why a node is not asked.
var errTooMuch = fmt.Errorf("the answer has %d MiB without it: choose less, or nodes with node=NAME", allBytes>>20)
