package api

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// Bounds of answers about what a network has many of.
const (
	// MaxEdges is how many edges a node's summary of flows has.
	MaxEdges = 1000
	// MaxPage is how many endpoints a page has.
	MaxPage = 1000
	// maxBy bounds the key of a label.
	maxBy = MaxLabelKey
)

// NodeSummary is what a node's flows amount to, and what its endpoints' sockets did in all.
type NodeSummary struct {
	flow.SummaryText
	Traffic model.Traffic `json:"traffic"`
}

// flowSummary answers GET /v1/flows/summary: the kept flows that a filter chooses, by services. It
// is made as flows are read, so that none are kept for it.
func (s *server) flowSummary(w http.ResponseWriter, r *http.Request) error {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return &Error{Code: CodeInvalid, Message: "malformed query: " + err.Error()}
	}
	by := values["by"]
	if len(by) != 1 || by[0] == "" || len(by[0]) > maxBy || !printable(by[0]) {
		return &Error{Code: CodeInvalid, Field: "by", Message: "want the key of one label", Remedy: "give by=app"}
	}
	delete(values, "by")
	filter, err := flow.ParseFilter(values)
	if err != nil {
		return FlowError(err)
	}
	now, sum := time.Now(), flow.NewSummary(by[0], MaxEdges)
	err = s.agent.Flows(r.Context(), FlowRequest{Filter: filter}, func(line FlowLine) error {
		if !line.Since.IsZero() {
			sum.Reach(line.Since, now)
		}
		if line.Flow != nil {
			sum.Add(line.Flow, now)
		}
		return nil
	})
	if err != nil {
		return err
	}
	traffic, err := s.agent.Traffic(r.Context())
	if err != nil {
		return err
	}
	out := NodeSummary{SummaryText: sum.Text(MaxEdges), Traffic: model.Traffic{Live: make(map[model.Path]uint64)}}
	for _, t := range traffic {
		out.Traffic.Add(t)
	}
	return s.write(w, out)
}

// EndpointQuery chooses endpoints of the network, and a page of them.
type EndpointQuery struct {
	// Node keeps those of one node; "" those of all.
	Node string
	// Filter has what names and addresses (From) and labels have to be.
	Filter flow.Filter
	// Offset is how many are left out before the page, Limit how many it has at most.
	Offset, Limit int
}

// EndpointPage is a part of the network's endpoints, by node and id, and how many there are in all.
type EndpointPage struct {
	Endpoints []model.Endpoint `json:"endpoints"`
	Total     int              `json:"total"`
}

// Page gives what a query chooses.
func (q EndpointQuery) Page(all model.Endpoints) EndpointPage {
	out := EndpointPage{Endpoints: []model.Endpoint{}}
	if q.Node != "" {
		all = model.Endpoints{all.Of(q.Node)}
	}
	everyone := len(q.Filter.From)+len(q.Filter.Labels) == 0
	for _, group := range all {
		if everyone && out.Total+len(group) <= q.Offset {
			out.Total += len(group)
			continue
		}
		for i := range group {
			if !everyone && !q.matches(&group[i]) {
				continue
			}
			if out.Total >= q.Offset && len(out.Endpoints) < q.Limit {
				out.Endpoints = append(out.Endpoints, group[i])
			}
			out.Total++
		}
	}
	return out
}

// matches asks the filter about a connection from each of the endpoint's addresses.
func (q EndpointQuery) matches(e *model.Endpoint) bool {
	return slices.ContainsFunc(e.Addrs, func(a netip.Addr) bool {
		return q.Filter.Match(&flow.Flow{From: flow.Peer{Endpoint: e.Name, Addr: a, Labels: e.Labels}})
	})
}

// networkEndpoints answers GET /v1/network/endpoints.
func (s *server) networkEndpoints(w http.ResponseWriter, r *http.Request) error {
	q, err := decodeEndpointQuery(r.URL.RawQuery)
	if err != nil {
		return err
	}
	page, err := s.agent.NetworkEndpoints(r.Context(), q)
	if err != nil {
		return err
	}
	return s.write(w, page)
}

func decodeEndpointQuery(query string) (q EndpointQuery, err error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return q, &Error{Code: CodeInvalid, Message: "malformed query: " + err.Error()}
	}
	q.Limit = MaxPage
	filter := make(url.Values)
	for key, list := range values {
		switch key {
		case "name":
			filter["from"] = list
			continue
		case "label":
			filter["label"] = list
			continue
		}
		if len(list) != 1 {
			return q, &Error{Code: CodeInvalid, Field: key, Message: "given more than once"}
		}
		switch key {
		case "node":
			if q.Node = list[0]; model.ValidateName("node", q.Node) != nil {
				return q, &Error{Code: CodeInvalid, Field: key, Message: fmt.Sprintf("%.60q is no node's name", q.Node)}
			}
		case "offset":
			q.Offset, err = number(key, list[0], 0, 1<<30)
		case "limit":
			q.Limit, err = number(key, list[0], 1, MaxPage)
		default:
			return q, &Error{Code: CodeInvalid, Field: fmt.Sprintf("%.60q", key), Message: "unknown parameter", Remedy: "use node, name, label, offset, limit"}
		}
		if err != nil {
			return q, err
		}
	}
	if q.Filter, err = flow.ParseFilter(filter); err != nil {
		said := FlowError(err).(*Error) // ParseFilter gives no other
		if said.Field == "from" {
			said.Field = "name"
		}
		return q, said
	}
	return q, nil
}

func number(field, text string, least, most int) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, &Error{Code: CodeInvalid, Field: field, Message: fmt.Sprintf("%.40q is no number from %d to %d", text, least, most)}
	}
	return n, nil
}

// values gives the query as it travels.
func (q EndpointQuery) values() url.Values {
	values := url.Values{"offset": {strconv.Itoa(q.Offset)}, "limit": {strconv.Itoa(q.Limit)}}
	if q.Node != "" {
		values.Set("node", q.Node)
	}
	filter := q.Filter.Values()
	for from, to := range map[string]string{"from": "name", "label": "label"} {
		if list, there := filter[from]; there {
			values[to] = list
		}
	}
	return values
}

// NetworkEndpoints lists a page of the network's endpoints; see Agent.
func (c *Client) NetworkEndpoints(ctx context.Context, q EndpointQuery) (EndpointPage, error) {
	var page EndpointPage
	err := c.call(ctx, http.MethodGet, "/v1/network/endpoints?"+q.values().Encode(), nil, &page)
	return page, err
}

// decodeMost reads the query of GET /v1/status; 0: all is wanted.
func decodeMost(query string) (int, error) {
	values, err := url.ParseQuery(query)
	list, there := values["most"]
	switch {
	case err != nil:
		return 0, &Error{Code: CodeInvalid, Message: "malformed query: " + err.Error()}
	case len(values) == 0:
		return 0, nil
	case !there || len(values) > 1 || len(list) != 1:
		return 0, &Error{Code: CodeInvalid, Field: "query", Message: fmt.Sprintf("unknown query %.80q", query), Remedy: "give most=20, or nothing"}
	}
	return number("most", list[0], 1, MaxPage)
}

// brief gives a status that is as large whatever the network: of what is as it should be it says
// nothing, and its lists have so many entries at most. Omitted has how many are missing.
func (st Status) brief(most int) Status {
	omitted := make(map[string]int)
	st.Counters = slices.DeleteFunc(slices.Clone(st.Counters), func(c Counter) bool { return c.Value == 0 })
	st.Features = slices.DeleteFunc(slices.Clone(st.Features), func(c Check) bool { return c.Status == CheckOK })
	st.PeersAway = first(st.PeersAway, most, "peers_away", omitted)
	st.Direct.Overlay = first(st.Direct.Overlay, most, "direct_paths.overlay", omitted)
	st.Direct.Silent = first(st.Direct.Silent, most, "direct_paths.silent", omitted)
	st.Faults = first(st.Faults, most, "faults", omitted)
	st.Policy.Faults = first(st.Policy.Faults, most, "policy.faults", omitted)
	st.Interception.Unguarded = first(st.Interception.Unguarded, most, "interception.unguarded", omitted)
	if st.Encryption != nil {
		e := *st.Encryption
		e.Peers, e.Waits = first(e.Peers, most, "encryption.peers", omitted), first(e.Waits, most, "encryption.waits", omitted)
		st.Encryption = &e
	}
	st.Omitted = omitted
	return st
}

func first[T any](list []T, most int, name string, omitted map[string]int) []T {
	if len(list) <= most {
		return list
	}
	omitted[name] = len(list) - most
	return list[:most]
}
