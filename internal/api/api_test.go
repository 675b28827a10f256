package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

func TestRoundTrip(t *testing.T) {
	agent := newFakeAgent()
	agent.conns = []model.Connection{{
		Endpoint: 1, Name: "n1/c1", State: "ESTABLISHED",
		Local: netip.MustParseAddrPort("10.244.1.2:40000"), Remote: netip.MustParseAddrPort("10.244.2.2:80"),
		NodeLocal: netip.MustParseAddrPort("192.0.2.1:40000"), NodeRemote: netip.MustParseAddrPort("192.0.2.2:17440"),
		Path: names.PathDirect, BytesSent: 1 << 40, BytesReceived: 7, Cookie: 1<<63 + 1,
	}, {Endpoint: 1, Name: "n1/c1", State: "LISTEN", Path: model.PathListen}}
	client, ctx := serve(t, agent), t.Context()

	want := testStatus()
	want.FaultReasons = nil // the agent's own
	if st, err := client.Status(ctx); err != nil || !reflect.DeepEqual(st, want) {
		t.Errorf("status %+v (%v), want %+v", st, err, want)
	}
	if list, err := client.Endpoints(ctx); err != nil || list == nil || len(list) != 0 {
		t.Errorf("endpoints of an empty node: %#v, %v, want an empty list", list, err)
	}
	req := EndpointRequest{Name: "n1/c1", NetnsPath: "/run/netns/c1", Intercepted: true,
		Addr: netip.MustParseAddr("10.244.1.2"), Labels: map[string]string{"app": "web ü"}}
	made, err := client.CreateEndpoint(ctx, req)
	if err != nil || made.Name != "n1/c1" || made.Addr4() != req.Addr || made.Labels["app"] != "web ü" || !made.Created.Equal(started) {
		t.Errorf("created %+v, %v", made, err)
	}
	if !reflect.DeepEqual(agent.requests, []EndpointRequest{req}) {
		t.Errorf("the agent saw %+v, want %+v", agent.requests, req)
	}
	if list, err := client.Endpoints(ctx); err != nil || !reflect.DeepEqual(list, []model.Endpoint{made}) {
		t.Errorf("endpoints %+v, %v, want %+v", list, err, made)
	}
	if list, err := client.Nodes(ctx); err != nil || !reflect.DeepEqual(list, []Node{testNodeState()}) {
		t.Errorf("nodes %+v, %v", list, err)
	}
	if err := client.ForgetNode(ctx, "n2"); err != nil {
		t.Errorf("forget n2: %v", err)
	}
	if err := client.ForgetNode(ctx, "n3"); !errors.Is(err, ErrNotFound) {
		t.Errorf("forget n3: %v", err)
	}
	if err := client.ForgetNode(ctx, "No/Name"); !errors.Is(err, &Error{Code: CodeInvalid}) {
		t.Errorf("forget a name that is none: %v", err)
	}
	if list, err := client.Traffic(ctx); err != nil || !reflect.DeepEqual(list, []model.Traffic{testTraffic()}) {
		t.Errorf("traffic %+v, %v", list, err)
	}
	filter := ConnectionFilter{Endpoint: "n1/c1", Listeners: true}
	if list, err := client.Connections(ctx, filter); err != nil || !reflect.DeepEqual(list, agent.conns) {
		t.Errorf("connections %+v, %v, want %+v", list, err, agent.conns)
	}
	if _, err := client.Connections(ctx, ConnectionFilter{}); err != nil {
		t.Error(err)
	}
	if !reflect.DeepEqual(agent.filters, []ConnectionFilter{filter, {}}) {
		t.Errorf("the agent saw filters %+v", agent.filters)
	}
	if err := client.DeleteEndpoint(ctx, "n1/c1"); err != nil {
		t.Errorf("delete a name with a slash: %v", err)
	}
	if err := client.DeleteEndpoint(ctx, "n1/c1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("delete twice: %v, want ErrNotFound", err)
	}
}

func TestErrorsKeepTheirCode(t *testing.T) {
	agent := newFakeAgent()
	client := serve(t, agent)
	for code := range statusByCode {
		cause := &Error{Code: code, Field: "addr", Message: "is taken", Remedy: "choose another"}
		agent.err = fmt.Errorf("lease: %w", cause)
		_, err := client.CreateEndpoint(t.Context(), EndpointRequest{Name: "c", NetnsPath: "/n"})
		want := &Error{Code: code, Field: "addr", Message: "create endpoint c: lease: is taken", Remedy: "choose another"}
		var got *Error
		if !errors.As(err, &got) || *got != *want {
			t.Errorf("%s: got %#v, want %#v", code, got, want)
		}
		if !errors.Is(err, &Error{Code: code}) || errors.Is(err, &Error{Code: "other"}) {
			t.Errorf("%s: errors.Is does not go by the code", code)
		}
	}
	agent.err = errors.New("disk on fire")
	_, err := client.Status(t.Context())
	var got *Error
	if !errors.As(err, &got) || got.Code != CodeInternal || got.Message != "disk on fire" {
		t.Errorf("plain error arrived as %#v", err)
	}
}

func TestStatusesDiffer(t *testing.T) {
	seen := map[int]Code{}
	for code, status := range statusByCode {
		if other, ok := seen[status]; ok {
			t.Errorf("%s and %s share status %d", code, other, status)
		}
		seen[status] = code
	}
	if got := (&Error{Code: "from the future"}).Status(); got != http.StatusInternalServerError {
		t.Errorf("unknown code has status %d", got)
	}
}

// rawRequest sends what a client would not.
func rawRequest(h http.Handler, method, target, body string) (status int, answer string) {
	req := httptest.NewRequest(method, target, strings.NewReader(body))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w.Code, w.Body.String()
}

func TestMalformedRequests(t *testing.T) {
	agent := newFakeAgent()
	h := NewHandler(agent, nil, slog.New(slog.DiscardHandler))
	post := func(body string) [3]string { return [3]string{http.MethodPost, "/v1/endpoints", body} }
	ok := `"name":"c","netns_path":"/n"`
	for _, tc := range []struct {
		request [3]string
		status  int
		want    string // part of the answer
	}{
		{post(""), 400, "empty"},
		{post("{"), 400, "malformed JSON"},
		{post("null"), 400, "no JSON object"},
		{post(`[{` + ok + `}]`), 400, "no JSON object"},
		{post(`{` + ok + `}{}`), 400, "data after"},
		{post(`{` + ok + `} x`), 400, "malformed JSON"},
		{post(`{` + ok + `,"netnspath":"/x"}`), 400, `"field":"netnspath"`},
		{post(`{` + ok + `,"intercepted":"yes"}`), 400, `"field":"intercepted"`},
		{post(`{` + ok + `,"addr":"10.0.0"}`), 400, `"field":"addr"`},
		{post(`{` + ok + `,"addr":"::ffff:10.0.0.1"}`), 400, `"field":"addr"`},
		{post(`{` + ok + `,"addr":"fe80::1%eth0"}`), 400, `"field":"addr"`},
		{post(`{` + ok + `,"addr":"0.0.0.0"}`), 400, `"field":"addr"`},
		{post(`{` + ok + `,"addr":"127.0.0.1"}`), 400, `"field":"addr"`},
		{post(`{` + ok + `,"labels":{"":"v"}}`), 400, `"field":"labels"`},
		{post(`{` + ok + `,"labels":{"k":"a\nb"}}`), 400, `"field":"labels"`},
		{post(`{` + ok + `,"labels":{"k":"` + "\xff" + `"}}`), 400, `"field":"labels"`},
		{post(`{` + ok + `,"labels":["k"]}`), 400, `"field":"labels"`},
		{post(`{` + ok + `,"device":"a/b"}`), 400, `"field":"device"`},
		{post(`{` + ok + `,"cni":{"network":"n","container_id":"../x"}}`), 400, `"field":"cni"`},
		{post(`{` + ok + `,"carried":{"prefixes":["10.88.0.1/16"]},"addr":"10.88.0.2"}`), 400, `"field":"carried"`},
		{post(`{` + ok + `,"carried":{"prefixes":[]}}`), 400, `"field":"addr"`},
		{post(`{"netns_path":"/n"}`), 400, `"field":"name"`},
		{post(`{"name":"../x","netns_path":"/n"}`), 400, `"field":"name"`},
		{post(`{"name":"a//b","netns_path":"/n"}`), 400, `"field":"name"`},
		{post(`{"name":"` + strings.Repeat("a", 201) + `","netns_path":"/n"}`), 400, `"field":"name"`},
		{post(`{"name":"c"}`), 400, `"field":"netns_path"`},
		{post(`{"name":"c","netns_path":"n"}`), 400, `"field":"netns_path"`},
		{post(`{"name":"c","netns_path":"/a/../b"}`), 400, `"field":"netns_path"`},
		{post(`{"name":"c","netns_path":"/a\u0000b"}`), 400, `"field":"netns_path"`},
		{post(`{` + ok + `,"labels":{"k":"` + strings.Repeat("v", MaxRequestBytes) + `"}}`), 413, "too_large"},
		{post(`{` + ok + `}` + strings.Repeat(" ", MaxRequestBytes)), 413, "too_large"},
		{[3]string{"PUT", "/v1/endpoints", ""}, 405, "method_not_allowed"},
		{[3]string{"GET", "/v1/endpoints/c", ""}, 405, "method_not_allowed"},
		{[3]string{"POST", "/metrics", ""}, 405, "method_not_allowed"},
		{[3]string{"GET", "/", ""}, 404, "not_found"},
		{[3]string{"GET", "/v2/status", ""}, 404, "not_found"},
		{[3]string{"DELETE", "/v1/endpoints/n1/c1", ""}, 404, "not_found"},
		{[3]string{"DELETE", "/v1/endpoints/n1%2Fc1", ""}, 404, "delete endpoint n1/c1: not found"},
		{[3]string{"DELETE", "/v1/endpoints/%2e%2e%2Fc1", ""}, 400, `"field":"name"`},
		{[3]string{"DELETE", "/v1/endpoints/c?force=1", ""}, 400, "unknown query"},
		{[3]string{"GET", "/v1/status?verbose", ""}, 400, "unknown query"},
		{[3]string{"GET", "/v1/connections?listener=true", ""}, 400, `"field":"listener"`},
		{[3]string{"GET", "/v1/connections?listeners=maybe", ""}, 400, `"field":"listeners"`},
		{[3]string{"GET", "/v1/connections?endpoint=", ""}, 400, `"field":"endpoint"`},
		{[3]string{"GET", "/v1/connections?endpoint=a&endpoint=b", ""}, 400, "more than once"},
		{[3]string{"GET", "/v1/connections?endpoint=%zz", ""}, 400, "malformed query"},
	} {
		status, answer := rawRequest(h, tc.request[0], tc.request[1], tc.request[2])
		if status != tc.status || !strings.Contains(answer, tc.want) || !strings.HasPrefix(answer, `{"error":{"code":`) {
			t.Errorf("%s %s %.80q: %d %s, want %d and %s", tc.request[0], tc.request[1], tc.request[2], status, answer, tc.status, tc.want)
		}
	}
	if len(agent.requests) != 0 || len(agent.filters) != 0 {
		t.Errorf("malformed requests reached the agent: %v %v", agent.requests, agent.filters)
	}
	if status, answer := rawRequest(h, "POST", "/v1/endpoints", " {"+ok+"}\n"); status != 200 {
		t.Errorf("well-formed request: %d %s", status, answer)
	}
}

func TestPanicIsAnswered(t *testing.T) {
	var log bytes.Buffer
	h := NewHandler(panicAgent{newFakeAgent()}, nil, slog.New(slog.NewTextHandler(&log, nil)))
	status, answer := rawRequest(h, "GET", "/v1/nodes", "")
	if status != 500 || !strings.Contains(answer, "internal") || strings.Contains(answer, "a bug: ") {
		t.Errorf("answer %d %s", status, answer)
	}
	if !strings.Contains(log.String(), "a bug: ") {
		t.Errorf("the log does not say what happened: %s", &log)
	}
}

func TestClientChecksBeforeSending(t *testing.T) {
	client := Dial(filepath.Join(t.TempDir(), "nobody.sock"))
	if _, err := client.CreateEndpoint(t.Context(), EndpointRequest{Name: "c"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("request without a namespace: %v", err)
	}
	if err := client.DeleteEndpoint(t.Context(), ".."); !errors.Is(err, ErrInvalid) {
		t.Errorf("delete \"..\": %v", err)
	}
}

func TestNoAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	client := Dial(socket)
	if _, err := client.Status(t.Context()); !errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), socket) {
		t.Errorf("no socket: %v", err)
	}
	leaveStale(t, socket)
	if _, err := client.Status(t.Context()); !errors.Is(err, ErrNoAgent) {
		t.Errorf("stale socket: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*readyInterval)
	defer cancel()
	if err := client.WaitReady(ctx); !errors.Is(err, ErrNoAgent) {
		t.Errorf("WaitReady without an agent: %v", err)
	}
}

// leaveStale leaves a socket as an agent that was killed does.
func leaveStale(t *testing.T, socket string) {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestStrangeAnswer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	ln, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/status":
			http.Error(w, "I am a teapot", http.StatusTeapot)
		case "/v1/nodes":
			http.Redirect(w, r, "/v1/elsewhere", http.StatusFound)
		default:
			_, _ = io.WriteString(w, "hello") // the recorder of a failing test is its client
		}
	}))
	srv.Listener = ln
	srv.Start()
	t.Cleanup(srv.Close)
	client := Dial(socket)
	if _, err := client.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "teapot") {
		t.Errorf("answer of no agent: %v", err)
	}
	if _, err := client.Nodes(t.Context()); err == nil || !strings.Contains(err.Error(), "302") {
		t.Errorf("redirection: %v", err)
	}
	if _, err := client.Endpoints(t.Context()); err == nil || !strings.Contains(err.Error(), "decode answer") {
		t.Errorf("answer that is not JSON: %v", err)
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "deep", "er", "api.sock")
	ln, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(socket)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket's mode %v (%v), want 0600", fi.Mode(), err)
	}
	if _, err := Listen(socket); !errors.Is(err, ErrInUse) {
		t.Errorf("second agent on the same socket: %v, want ErrInUse", err)
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket after the agent's end: %v", err)
	}
	leaveStale(t, socket)
	ln, err = Listen(socket)
	if err != nil {
		t.Fatalf("stale socket was not replaced: %v", err)
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(file); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("listen on a regular file: %v", err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("the file in the way was touched: %q, %v", b, err)
	}
	for _, bad := range []string{"relative.sock", "", "/" + strings.Repeat("a", maxSocketPath)} {
		if _, err := Listen(bad); err == nil {
			t.Errorf("Listen(%.20q): no error", bad)
		}
	}
}

// slowAgent answers Nodes only when told to.
type slowAgent struct {
	*fakeAgent
	entered, release chan struct{}
}

func (a slowAgent) Nodes(ctx context.Context) ([]Node, error) {
	close(a.entered)
	<-a.release
	return a.fakeAgent.Nodes(ctx)
}

func TestServeFinishesRunningRequests(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	agent := slowAgent{newFakeAgent(), make(chan struct{}), make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, socket, NewHandler(agent, nil, slog.New(slog.DiscardHandler))) }()
	client := Dial(socket)
	ready, stop := context.WithTimeout(t.Context(), 5*time.Second)
	defer stop()
	if err := client.WaitReady(ready); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := client.Nodes(t.Context())
		answered <- err
	}()
	<-agent.entered
	cancel()
	// The listener is closed at once; the request that runs is not.
	for ready.Err() == nil {
		c, err := net.Dial("unix", socket)
		if err != nil {
			if !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("dial during shutdown: %v", err)
			}
			break
		}
		_ = c.Close() // not shut down yet
	}
	close(agent.release)
	if err := <-answered; err != nil {
		t.Errorf("request during shutdown: %v", err)
	}
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
}
