package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

func TestFlowSummary(t *testing.T) {
	agent := newFakeAgent()
	f := flow.Flow{Time: time.Now(), Event: flow.End, Verdict: flow.Allowed, SeenBy: flow.SideFrom, RTT: time.Millisecond, BytesSent: 7,
		From: flow.Peer{Endpoint: "n1/c1", Labels: map[string]string{"app": "web"}}, To: flow.Peer{Endpoint: "n2/c1", Port: 80}}
	agent.flowLines = []FlowLine{{Flow: &f}, {Lost: 3}, {Flow: &f}}
	h := NewHandler(agent, nil, slog.New(slog.DiscardHandler))
	status, text := rawRequest(h, http.MethodGet, "/v1/flows/summary?by=app&from=n1/*", "")
	var got NodeSummary
	if err := json.Unmarshal([]byte(text), &got); err != nil || status != http.StatusOK {
		t.Fatal(status, text, err)
	}
	if len(got.Edges) != 1 || got.Edges[0].From != "web" || got.Edges[0].To != "n2/c1" || got.Edges[0].Sent != 14 || got.Flows != 2 || got.Traffic.Opened != testTraffic().Opened || got.Lately.Median() == 0 {
		t.Errorf("%s", text)
	}
	if n := len(agent.flowRequests); n != 1 || agent.flowRequests[0].Follow || agent.flowRequests[0].Filter.String() != "from=n1%2F%2A" {
		t.Errorf("asked %+v", agent.flowRequests)
	}
	for query, field := range map[string]string{"": "by", "by=": "by", "by=a&by=b": "by", "by=%01": "by", "by=app&follow=true": "follow", "by=app&port=0": "port", "by=app&%zz": ""} {
		if status, text := rawRequest(h, http.MethodGet, "/v1/flows/summary?"+query, ""); status != http.StatusBadRequest || !strings.Contains(text, field) {
			t.Errorf("%q: %d %s", query, status, text)
		}
	}
}

// manyEndpoints are of 50 nodes, 40 each.
func manyEndpoints() model.Endpoints {
	var all []model.Endpoint
	for i := range 2000 {
		all = append(all, model.Endpoint{ID: model.EndpointID(i%40 + 1), Name: fmt.Sprintf("pod-%04d", i), Node: fmt.Sprintf("n%02d", i/40),
			Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i / 40), byte(i % 40)})}, Labels: map[string]string{"app": fmt.Sprint(i % 7)}})
	}
	return model.EndpointsOf(all...)
}

func TestEndpointPage(t *testing.T) {
	all := manyEndpoints()
	for query, want := range map[string]string{
		"limit=2":                             "2000 pod-0000 pod-0001",
		"offset=1999&limit=2":                 "2000 pod-1999",
		"offset=77&limit=1":                   "2000 pod-0077",
		"offset=2000":                         "2000",
		"node=n03&limit=1&offset=5":           "40 pod-0125",
		"node=n99":                            "0",
		"name=pod-00*&limit=1&offset=99":      "100 pod-0099",
		"name=10.0.3.5":                       "1 pod-0125",
		"name=10.0.3.0/24&offset=39":          "40 pod-0159",
		"label=app=6&offset=284":              "285 pod-1994",
		"label=app=6&name=pod-1*&offset=1000": "143",
	} {
		q, err := decodeEndpointQuery(query)
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		page := q.Page(all)
		got := fmt.Sprint(page.Total)
		for _, e := range page.Endpoints {
			got += " " + e.Name
		}
		if got != want {
			t.Errorf("%s: %s, want %s", query, got, want)
		}
		if again, err := decodeEndpointQuery(q.values().Encode()); err != nil || fmt.Sprint(again) != fmt.Sprint(q) {
			t.Errorf("%s travels as %+v, %v", query, again, err)
		}
	}
	q, err := decodeEndpointQuery("")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(q.Page(all).Endpoints); n != MaxPage {
		t.Errorf("%d endpoints of a page that nobody has bounded", n)
	}
	for query, field := range map[string]string{"offset=-1": "offset", "limit=0": "limit", "limit=1001": "limit", "name=10.0.0.1/8": "name", "label==": "label", "node=N_1": "node", "nme=a": `"nme"`, "limit=1&limit=2": "limit"} {
		_, err := decodeEndpointQuery(query)
		if e := asError(err); err == nil || e.Code != CodeInvalid || e.Field != field {
			t.Errorf("%s: %v, want the field %s", query, err, field)
		}
	}
	agent := newFakeAgent()
	agent.endpoints["n1/c1"] = model.Endpoint{ID: 1, Name: "n1/c1", Node: "n1"}
	if page, err := serve(t, agent).NetworkEndpoints(t.Context(), EndpointQuery{Limit: 5}); err != nil || page.Total != 1 || len(page.Endpoints) != 1 {
		t.Errorf("by the socket: %+v, %v", page, err)
	}
}

// TestBriefStatus: however large the network, what a page asks each node for is small, and says
// what it leaves out.
func TestBriefStatus(t *testing.T) {
	agent := crowd{newFakeAgent(), 5000}
	h := NewHandler(agent, nil, slog.New(slog.DiscardHandler))
	_, whole := rawRequest(h, http.MethodGet, "/v1/status", "")
	status, text := rawRequest(h, http.MethodGet, "/v1/status?most=20", "")
	var st Status
	if err := json.Unmarshal([]byte(text), &st); err != nil || status != http.StatusOK {
		t.Fatal(status, err)
	}
	t.Logf("%d of %d bytes", len(text), len(whole))
	if len(text) > 64<<10 || len(whole) < 20*len(text) {
		t.Errorf("%d bytes, the whole status has %d", len(text), len(whole))
	}
	if len(st.PeersAway) != 20 || len(st.Direct.Overlay) != 20 || len(st.Faults) != 20 || st.Omitted["peers_away"] != 4981 || st.Omitted["direct_paths.overlay"] != 4981 || st.Omitted["faults"] != 4983 {
		t.Errorf("%d, %d, %d, omitted %v", len(st.PeersAway), len(st.Direct.Overlay), len(st.Faults), st.Omitted)
	}
	for _, c := range st.Counters {
		if c.Value == 0 {
			t.Errorf("counter %s is 0", c.Name)
		}
	}
	for _, query := range []string{"most=0", "most=1001", "most=x", "most=1&most=2", "least=1", "most=1&a=b"} {
		if status, _ := rawRequest(h, http.MethodGet, "/v1/status?"+query, ""); status != http.StatusBadRequest {
			t.Errorf("%s: %d", query, status)
		}
	}
}

// TestPassingIsBounded: who asks ever more nodes is told that it is too many, and when these have
// answered, the next ones are asked.
func TestPassingIsBounded(t *testing.T) {
	s := &server{agent: newFakeAgent(), log: slog.New(slog.DiscardHandler), mux: http.NewServeMux()}
	s.handle("/v1/nodes/{name}/{target...}", methods{http.MethodGet: s.askNode})
	s.passing.Store(maxPassing)
	if status, text := rawRequest(s, http.MethodGet, "/v1/nodes/n2/v1/status", ""); status != http.StatusInsufficientStorage || !strings.Contains(text, string(CodeExhausted)) {
		t.Errorf("one more: %d %s", status, text)
	}
	s.passing.Add(-1)
	for range 3 {
		if status, text := rawRequest(s, http.MethodGet, "/v1/nodes/n2/v1/status", ""); status != http.StatusOK {
			t.Errorf("after one has ended: %d %s", status, text)
		}
	}
	if n := s.passing.Load(); n != maxPassing-1 {
		t.Errorf("%d are under way", n)
	}
}

// TestPassedOnFollowerGoesAway: when who follows another node's flows by way of this agent hangs up
// in the middle, the question to that node ends, and nothing of it is left.
func TestPassedOnFollowerGoesAway(t *testing.T) {
	there := &stream{closed: make(chan struct{})}
	s := &server{agent: following{newFakeAgent(), there}, log: slog.New(slog.DiscardHandler), mux: http.NewServeMux()}
	s.handle("/v1/nodes/{name}/{target...}", methods{http.MethodGet: s.askNode})
	front := httptest.NewServer(s)
	defer front.Close()
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, front.URL+"/v1/nodes/n2/v1/flows?follow=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		there.closed = make(chan struct{})
		resp, err := front.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 100)); err != nil || s.passing.Load() != 1 {
			t.Fatalf("%v, %d under way", err, s.passing.Load())
		}
		cancel()
		_ = resp.Body.Close()
		<-there.closed
	}
	front.CloseClientConnections()
	testutil.Eventually(t, "nothing to be under way", func() (bool, string) {
		n := s.passing.Load()
		return n == 0, fmt.Sprint(n)
	})
}

// following answers for another node by a stream.
type following struct {
	*fakeAgent
	body io.ReadCloser
}

func (f following) AskNode(context.Context, string, string) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: f.body}, nil
}

// stream has no end, until it is closed.
type stream struct{ closed chan struct{} }

func (s *stream) Read(p []byte) (int, error) { return copy(p, "{}\n"), nil }

func (s *stream) Close() error {
	close(s.closed)
	return nil
}
