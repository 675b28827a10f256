package ui

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/ui/uitest"
)

// The network that the page is to bear.
const manyNodes, endpointsEach = 5_000, 20

// sizes are the most bytes that the page is answered, whatever the network.
var sizes = map[string]int{
	"/api/summary": 200 << 10, "/api/flows": 1400 << 10, "/api/nodes": 250 << 10, "/api/faults": 200 << 10, "/api/endpoints": 250 << 10, "/api/endpoints?page=499": 250 << 10,
	"/api/endpoints?name=*9999&label=tier=0": 250 << 10, "/api/nodes?name=4999&state=live": 60 << 10, "/api/policies": 100,
}

// TestManyNodes: a page in front of 5,000 nodes asks no more of them at a time and a second than it
// may, however many look, and is answered at once, in bounded size.
func TestManyNodes(t *testing.T) {
	network := uitest.New(manyNodes, endpointsEach)
	h := before(t, network, "").handler()
	began := time.Now()
	var wg sync.WaitGroup
	for target, most := range sizes {
		for range 3 { // who look at the same
			wg.Go(func() {
				w := ask(h, target, nil)
				var said Progress
				if err := json.Unmarshal(w.Body.Bytes(), &said); err != nil || w.Code != http.StatusOK || w.Body.Len() > most || w.Body.Len() < 20 {
					t.Errorf("%s: %d, %d bytes, want %d at most: %v", target, w.Code, w.Body.Len(), most, err)
				}
				if said.Whole && said.Answered+len(said.Silent)+said.More < said.Nodes { // a slow machine may have asked all by now
					t.Errorf("%s: %d of %d nodes are said to be all", target, said.Answered, said.Nodes)
				}
				t.Logf("%s: %d bytes, %d of %d nodes", target, w.Body.Len(), said.Answered, said.Nodes)
			})
		}
		wg.Wait()
	}
	took := time.Since(began)
	all, most := 0, 0
	for _, path := range []string{"/v1/flows/summary", "/v1/flows", "/v1/status", "/v1/traffic"} {
		var n int
		n, most, _ = network.Asked(path)
		all += n
	}
	t.Logf("%d questions within %s, %d at a time", all, took, most)
	if limit := int(askASecond*(took.Seconds()+1)) + askAtOnce; all > limit || most > askAtOnce {
		t.Errorf("%d questions within %s, %d at a time; want at most %d and %d", all, took, most, limit, askAtOnce)
	}
}

// heap gives what is in use, collected.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestGathersAreBounded: what is kept of the answers of 5,000 nodes is so much and no more, also if
// each service talks to others than all other ones. Five nodes each say the same.
func TestGathersAreBounded(t *testing.T) {
	const different = manyNodes / 5
	network := uitest.New(different, endpointsEach)
	before := heap()
	list := &latest{each: eachNode(manyNodes)}
	sum, sts := newSummaries(nil).(*summaries), newStatuses(nil).(*statuses)
	for i := range different {
		for target, g := range map[string]gather{"/v1/flows/summary?by=nobody-has-it": sum, fmt.Sprint("/v1/flows?last=", list.each): list, briefStatus: sts} {
			resp, err := network.AskNode(t.Context(), uitest.Node(i), target)
			testutil.NoError(t, err)
			body, err := io.ReadAll(resp.Body)
			testutil.NoError(t, err)
			add, err := g.read(body)
			testutil.NoError(t, err)
			for k := range manyNodes / different {
				add(uitest.Node(i + k*different))
			}
		}
	}
	_, _, size := network.Asked("")
	kept := heap() - before
	t.Logf("%d MiB of %d MiB of answers", kept>>20, size>>20)
	if kept > 48<<20 {
		t.Errorf("%d bytes are kept", kept)
	}
	s, f, w := sum.answer(), list.answer(), sts.answer()
	if len(s.Edges) != shownEdges || s.Total != keptEdges || s.LeftOut == 0 || s.Flows != manyNodes*100 || s.Live != manyNodes*60 {
		t.Errorf("%d of %d edges, %d of %d flows left out, %d live", len(s.Edges), s.Total, s.LeftOut, s.Flows, s.Live)
	}
	if len(f.Flows) != shownFlows || f.Full != manyNodes || f.Flows[0].Time.Before(f.Flows[1].Time) {
		t.Errorf("%d flows, %d nodes have more", len(f.Flows), f.Full)
	}
	if len(w.Faults) != shownRows || w.Total != manyNodes/10 || len(w.Checks) != 1 || w.Checks[0].Count != manyNodes || len(w.Counters) != 20 || w.Counters[0].Node != uitest.Node(different-1) {
		t.Errorf("%d of %d faults, checks %+v, %d counters", len(w.Faults), w.Total, w.Checks, len(w.Counters))
	}
	runtime.KeepAlive(network)
}

// get gives what the page is answered.
func get[T any](t *testing.T, h http.Handler, target string) (out T) {
	t.Helper()
	w := ask(h, target, nil)
	if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil || w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s: %v", target, w.Code, w.Body, err)
	}
	return out
}

// rows are those of /api/endpoints as a browser reads them.
type rows struct {
	List []struct {
		ID      model.EndpointID
		Traffic *model.Traffic
	}
	Total int
	Progress
}

// TestRounds: what is shown is of all nodes once they have been asked, and the next round says what
// has come since.
func TestRounds(t *testing.T) {
	const nodes = 40
	network := uitest.New(nodes, 2)
	network.SetState(7, api.NodeDead)
	h := before(t, network, "").handler()
	testutil.Eventually(t, "a second round", func() (bool, string) {
		s := get[SummaryAnswer](t, h, "/api/summary")
		ok := s.Whole && s.Answered == nodes-1 && s.Nodes == nodes && strings.Contains(s.Silent[uitest.Node(7)], "neither") && s.Rates != nil && s.Rates.Sent > 0 && s.RTT > 0
		return ok, fmt.Sprintf("%+v", s.Progress)
	})
	if n := get[NodesAnswer](t, h, "/api/nodes?state=dead"); n.Total != 1 || len(n.List) != 1 || n.List[0].Name != uitest.Node(7) || n.States[api.NodeLive] != nodes-1 {
		t.Errorf("dead nodes: %+v", n)
	}
	testutil.Eventually(t, "nodes whose names have 01, and paths", func() (bool, string) {
		n := get[NodesAnswer](t, h, "/api/nodes?name=01")
		return n.Total == 11 && len(n.Paths) > 0, fmt.Sprintf("%d, %d paths", n.Total, len(n.Paths))
	})
	e := get[rows](t, h, "/api/endpoints?node=n0003")
	if e.Total != 2 || e.List[1].Traffic == nil || e.List[1].Traffic.Endpoint != e.List[1].ID || !e.Whole {
		t.Errorf("endpoints of a node: %+v", e)
	}
	times, _, _ := network.Asked("/v1/flows")
	if times != 0 {
		t.Errorf("%d questions that nobody has asked", times)
	}
}

// TestOldAgentAmongNewOnes: a node whose agent lacks a call, or answers with fewer members, or with
// what nobody understands, is named as such or shows what it has; the others show as ever.
func TestOldAgentAmongNewOnes(t *testing.T) {
	const old, garbled, fewer, huge = "n0001", "n0002", "n0003", "n0005"
	network := uitest.New(6, 2)
	network.Answer = func(_ context.Context, node, target string) (*http.Response, error) {
		path, query, _ := strings.Cut(target, "?")
		switch {
		case node == old && path == "/v1/status" && query != "":
			return uitest.Respond(http.StatusBadRequest, []byte(`{"error": {"code": "invalid", "message": "unknown query"}}`)), nil
		case node == old && path == "/v1/status":
			return uitest.Respond(http.StatusOK, []byte(`{"version": "0.1", "store": {"healthy": true}, "counters": [{"name": "drop_old", "kind": "drop", "value": 5}]}`)), nil
		case node == old:
			return uitest.Respond(http.StatusNotFound, []byte("404 page not found\n")), nil
		case node == garbled:
			return uitest.Respond(http.StatusOK, []byte("<html>")), nil
		case node == fewer:
			return uitest.Respond(http.StatusOK, []byte("{}")), nil
		case node == huge:
			return uitest.Respond(http.StatusOK, make([]byte, maxAnswer+1)), nil
		}
		return nil, nil
	}
	h := before(t, network, "").handler()
	for _, target := range []string{"/api/summary", "/api/flows", "/api/faults", "/api/nodes"} {
		var p Progress
		testutil.Eventually(t, target+" of all nodes", func() (bool, string) {
			p = get[Progress](t, h, target)
			return p.Whole, fmt.Sprintf("%+v", p)
		})
		knows := strings.Contains(target, "faults") || strings.Contains(target, "nodes") // the old one
		if p.Answered != 3+map[bool]int{true: 1}[knows] || !strings.Contains(p.Silent[garbled], "none that this version understands") || !strings.Contains(p.Silent[huge], "too long") ||
			knows != (p.Silent[old] == "") || !knows && !strings.Contains(p.Silent[old], "replace it") {
			t.Errorf("%s: %+v", target, p)
		}
	}
	nodes := get[NodesAnswer](t, h, "/api/nodes")
	w := ask(h, "/api/nodes", nil).Body.String()
	if len(nodes.List) != 6 || !strings.Contains(w, `"version":"0.1"`) || strings.Count(w, `"version":"1.0"`) != 2 {
		t.Errorf("nodes: %s", w)
	}
	if f := get[FaultsAnswer](t, h, "/api/faults"); len(f.Counters) != 21 {
		t.Errorf("%d counters, want those of the old agent, too", len(f.Counters))
	}
	e := get[rows](t, h, "/api/endpoints")
	figures := 0
	for _, row := range e.List {
		if row.Traffic != nil {
			figures++
		}
	}
	if len(e.List) != 12 || figures != 4 || !strings.Contains(e.Silent[old], "replace it") || e.Whole {
		t.Errorf("endpoints: %d, %d with figures, %+v", len(e.List), figures, e.Progress)
	}
}

// TestBrowserGoesAway: when nobody looks any more, no node is asked any more, and nothing of the
// question is left; who looks then sees nothing of before.
func TestBrowserGoesAway(t *testing.T) {
	network := uitest.New(2000, 1)
	s := before(t, network, "")
	s.patience = 50 * time.Millisecond
	h := s.handler()
	base := runtime.NumGoroutine()
	for _, target := range []string{"/api/summary", "/api/flows", "/api/faults", "/api/endpoints"} {
		ctx, cancel := context.WithCancel(t.Context())
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, target, nil)
		time.AfterFunc(20*time.Millisecond, cancel) // in the middle of the answer
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	testutil.Eventually(t, "the rounds to end", func() (bool, string) {
		for _, r := range s.rounds.list {
			r.mu.Lock()
			running := r.now != nil || r.whole != nil
			r.mu.Unlock()
			if running {
				return false, r.target
			}
		}
		s.Agent.Close()
		n := runtime.NumGoroutine()
		return len(s.pace.turns) == 0 && n <= base+2, fmt.Sprintf("%d goroutines, %d before", n, base)
	})
	asked, _, _ := network.Asked("/v1/flows/summary")
	if asked >= 2000 {
		t.Errorf("%d nodes were asked for nobody", asked)
	}
	s.patience = nobodyLooks
	if p := get[Progress](t, h, "/api/summary"); p.Whole {
		t.Errorf("who looks then: %+v", p)
	}
	testutil.Eventually(t, "answers for who looks then", func() (bool, string) {
		p := get[Progress](t, h, "/api/summary")
		return p.Answered > 0, fmt.Sprintf("%+v", p)
	})
}

// TestManyQuestions: whoever asks ever more different questions ends the ones that nobody has looked
// at for longest, and who waits for one of those is told.
func TestManyQuestions(t *testing.T) {
	network := uitest.New(1000, 1)
	network.Answer = func(ctx context.Context, _, _ string) (*http.Response, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s := before(t, network, "")
	s.enough = testutil.WaitTimeout // whoever waits is to see no part of an answer before the question goes
	first := s.rounds.round("/v1/flows/summary?by=app", newSummaries)
	told := make(chan error, 1)
	go func() {
		told <- s.look(t.Context(), first, func(_ gather, p Progress) { t.Errorf("shown: %+v", p) })
	}()
	testutil.Eventually(t, "the first one to begin", func() (bool, string) {
		n, _, _ := network.Asked("/v1/flows/summary")
		return n > 0, ""
	})
	for i := range 3 * maxRounds {
		s.rounds.round(fmt.Sprintf("/v1/flows/summary?by=app&port=%d", i+1), newSummaries)
	}
	if n := len(s.rounds.list); n != maxRounds {
		t.Errorf("%d rounds", n)
	}
	if err := <-told; !errors.Is(err, api.ErrExhausted) {
		t.Errorf("who waits for a question that had to go: %v", err)
	}
}
