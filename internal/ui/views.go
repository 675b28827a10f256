package ui

import (
	"cmp"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// filtered checks the filters of a query, and gives it without others' keys.
func filtered(query url.Values, others ...string) (url.Values, error) {
	filter := make(url.Values)
	for key, list := range query {
		if !slices.Contains(others, key) {
			filter[key] = list
		}
	}
	f, err := flow.ParseFilter(filter)
	if err == nil {
		_, err = f.Since.Start(time.Now())
	}
	return filter, api.FlowError(err)
}

// summary answers GET /api/summary: who talks to whom, by the label `by`, in the whole network.
func (s *server) summary(r *http.Request) (any, error) {
	query := r.URL.Query()
	filter, err := filtered(query, "by")
	if err != nil {
		return nil, err
	}
	filter.Set("by", cmp.Or(query.Get("by"), "app"))
	var out SummaryAnswer
	err = s.look(r.Context(), s.rounds.round("/v1/flows/summary?"+filter.Encode(), newSummaries), func(g gather, p Progress) {
		out = g.(*summaries).answer()
		out.Progress = p
	})
	return out, err
}

// flows answers GET /api/flows: the latest of all nodes.
func (s *server) flows(r *http.Request) (any, error) {
	filter, err := filtered(r.URL.Query(), "last")
	if err != nil {
		return nil, err
	}
	nodes, err := s.nodeList(r.Context())
	if err != nil {
		return nil, err
	}
	each := eachNode(len(nodes))
	filter.Set("last", strconv.Itoa(each))
	var out FlowsAnswer
	err = s.look(r.Context(), s.rounds.round("/v1/flows?"+filter.Encode(), func(gather) gather { return &latest{each: each} }), func(g gather, p Progress) {
		out = g.(*latest).answer()
		out.Progress = p
	})
	return out, err
}

func (s *server) faults(r *http.Request) (any, error) {
	var out FaultsAnswer
	err := s.look(r.Context(), s.rounds.round(briefStatus, newStatuses), func(g gather, p Progress) {
		out = g.(*statuses).answer()
		out.Progress = p
	})
	return out, err
}

// pageOf reads which page is wanted, from 0, and cuts it out of a list.
func pageOf[T any](query url.Values, list []T) ([]T, error) {
	n, err := pageNumber(query)
	if err != nil {
		return nil, err
	}
	from := min(n*pageRows, len(list))
	return list[from:min(from+pageRows, len(list))], nil
}

func pageNumber(query url.Values) (int, error) {
	n, err := strconv.ParseUint(cmp.Or(query.Get("page"), "0"), 10, 20)
	if err != nil {
		return 0, &api.Error{Code: api.CodeInvalid, Field: "page", Message: "is no page", Remedy: "give a number from 0"}
	}
	return int(n), nil
}

// nodesPage answers GET /api/nodes: a page of those whose name has a text in it and whose state is
// as wanted, with what they say of themselves.
func (s *server) nodesPage(r *http.Request) (any, error) {
	nodes, err := s.nodeList(r.Context())
	if err != nil {
		return nil, err
	}
	query := r.URL.Query()
	out := NodesAnswer{List: []NodeAnswer{}, States: make(map[api.NodeState]int), Paths: []PathAnswer{}}
	var chosen []api.Node
	for _, n := range nodes {
		out.States[n.State]++
		if strings.Contains(n.Name, query.Get("name")) && (query.Get("state") == "" || string(n.State) == query.Get("state")) {
			chosen = append(chosen, n)
		}
	}
	out.Total = len(chosen)
	page, err := pageOf(query, chosen)
	if err != nil {
		return nil, err
	}
	err = s.look(r.Context(), s.rounds.round(briefStatus, newStatuses), func(g gather, p Progress) {
		out.Progress = p
		for _, n := range page {
			row := NodeAnswer{Node: n}
			if d, there := g.(*statuses).nodes[n.Name]; there {
				row.Digest = &d
				for _, path := range d.paths[:min(len(d.paths), shownRows-len(out.Paths))] {
					out.Paths = append(out.Paths, PathAnswer{n.Name, path})
				}
			}
			out.List = append(out.List, row)
		}
	})
	return out, err
}

// EndpointAnswer is an endpoint, with what its sockets did if its node says so.
type EndpointAnswer struct {
	model.Endpoint
	Traffic *model.Traffic
}

// MarshalJSON writes the members of both in one object.
func (e EndpointAnswer) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		model.EndpointMembers
		Traffic *model.Traffic `json:"traffic,omitempty"`
	}{e.Members(), e.Traffic})
}

// EndpointsAnswer is the answer to /api/endpoints: a page.
type EndpointsAnswer struct {
	List  []EndpointAnswer `json:"list"`
	Total int              `json:"total"` // on all pages
	Progress
}

// endpoints answers GET /api/endpoints: a page of the network's, by node, name and label. The
// agent knows them; what they did is asked of the nodes of the page alone.
func (s *server) endpoints(r *http.Request) (any, error) {
	query := r.URL.Query()
	n, err := pageNumber(query)
	if err != nil {
		return nil, err
	}
	filter := make(url.Values)
	for key, of := range map[string]string{"name": "from", "label": "label"} {
		if v := query.Get(key); v != "" {
			filter[of] = query[key]
		}
	}
	q := api.EndpointQuery{Node: query.Get("node"), Offset: n * pageRows, Limit: pageRows}
	if q.Filter, err = flow.ParseFilter(filter); err != nil {
		return nil, api.FlowError(err)
	}
	page, err := s.Agent.NetworkEndpoints(r.Context(), q)
	if err != nil {
		return nil, err
	}
	out := EndpointsAnswer{List: make([]EndpointAnswer, len(page.Endpoints)), Total: page.Total}
	for i, e := range page.Endpoints {
		out.List[i].Endpoint = e
	}
	s.addTraffic(r, &out)
	return out, nil
}

// addTraffic asks the nodes of a page what its endpoints did.
func (s *server) addTraffic(r *http.Request, out *EndpointsAnswer) {
	of := make(map[string][]int) // rows, by node
	for i, e := range out.List {
		of[e.Node] = append(of[e.Node], i)
	}
	out.Nodes, out.Silent = len(of), make(map[string]string)
	var mu sync.Mutex // guards out
	var wg sync.WaitGroup
	for node, rows := range of {
		if s.pace.take(r.Context()) != nil {
			break
		}
		wg.Go(func() {
			defer s.pace.give()
			var said struct{ Traffic []model.Traffic }
			body, err := s.ask(r.Context(), node, "/v1/traffic")
			if err == nil {
				err = json.Unmarshal(body, &said)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.without(node, err)
				return
			}
			out.Answered++
			for _, i := range rows {
				if k := slices.IndexFunc(said.Traffic, func(t model.Traffic) bool { return t.Endpoint == out.List[i].ID }); k >= 0 {
					out.List[i].Traffic = &said.Traffic[k]
				}
			}
		})
	}
	wg.Wait()
	out.Whole = out.Answered == out.Nodes
}

// PoliciesAnswer is the answer to /api/policies.
type PoliciesAnswer struct {
	Names []string `json:"names"`
	Total int      `json:"total"`
}

func (s *server) policies(r *http.Request) (any, error) {
	all, err := s.Agent.Policies(r.Context())
	if err != nil {
		return nil, err
	}
	out := PoliciesAnswer{Names: []string{}, Total: len(all.Policies)}
	for _, p := range all.Policies[:min(len(all.Policies), shownRows)] {
		out.Names = append(out.Names, p.Name)
	}
	return out, nil
}
