// Package uitest is, for tests, an agent of a network of thousands of nodes that do not exist.
package uitest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// Network answers for all of its nodes. Counts are those of questions to nodes.
type Network struct {
	api.Agent // nil: what is not here is not asked
	nodes     []api.Node
	endpoints model.Endpoints
	// Answer, if not nil, answers for a node, when that would; nil: it answers as all do.
	Answer func(ctx context.Context, node, target string) (*http.Response, error)

	mu      sync.Mutex // guards what follows
	asked   map[string]int
	now     int // questions under way
	most    int
	bytes   int
	started time.Time
}

// New makes a network of so many nodes with so many endpoints each.
func New(nodes, each int) *Network {
	n := &Network{asked: make(map[string]int), started: time.Now()}
	var all []model.Endpoint
	for i := range nodes {
		name := Node(i)
		n.nodes = append(n.nodes, api.Node{Node: model.Node{Name: name, Underlay: netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}),
			Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)}},
			Presence: api.Presence{State: api.NodeLive, Since: n.started, Endpoints: each}})
		for k := range each {
			all = append(all, n.endpoint(i, k, each))
		}
	}
	n.endpoints = model.EndpointsOf(all...)
	return n
}

// Node is the name of the one with a number.
func Node(i int) string { return fmt.Sprintf("n%04d", i) }

func (n *Network) endpoint(node, k, each int) model.Endpoint {
	i := node*each + k
	return model.Endpoint{ID: model.EndpointID(k + 1), Name: fmt.Sprintf("shop/pod-%06d", i), Node: Node(node),
		Addrs:  []netip.Addr{netip.AddrFrom4([4]byte{10, byte(node >> 8), byte(node), byte(k + 2)})},
		Labels: map[string]string{"app": fmt.Sprint("app-", i%1000), "tier": fmt.Sprint(i % 3)}, Planes: model.EndpointPlanes{TCP: model.TCPEndpoint{Intercepted: true}}}
}

// SetState says how a node is.
func (n *Network) SetState(node int, state api.NodeState) { n.nodes[node].State = state }

// Asked says how often nodes were asked for a path, how many at most at the same time, and how many
// bytes they answered in all.
func (n *Network) Asked(path string) (times, most, size int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked[path], n.most, n.bytes
}

// Nodes implements api.Agent.
func (n *Network) Nodes(context.Context) ([]api.Node, error) { return n.nodes, nil }

// NetworkEndpoints implements api.Agent.
func (n *Network) NetworkEndpoints(_ context.Context, q api.EndpointQuery) (api.EndpointPage, error) {
	return q.Page(n.endpoints), nil
}

// Policies implements api.Agent.
func (n *Network) Policies(context.Context) (api.PolicyDocuments, error) {
	return api.PolicyDocuments{}, nil
}

// AskNode implements api.Agent.
func (n *Network) AskNode(ctx context.Context, node, target string) (*http.Response, error) {
	path, query, _ := strings.Cut(target, "?")
	n.mu.Lock()
	n.asked[path]++
	n.now++
	n.most = max(n.most, n.now)
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		n.now--
		n.mu.Unlock()
	}()
	if n.Answer != nil {
		if resp, err := n.Answer(ctx, node, target); resp != nil || err != nil {
			return resp, err
		}
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return nil, err
	}
	body, err := n.answer(node, path, values)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.bytes += len(body)
	n.mu.Unlock()
	return Respond(http.StatusOK, body), nil
}

// Respond makes an answer.
func Respond(status int, body []byte) *http.Response {
	return &http.Response{StatusCode: status, Status: fmt.Sprintf("%d %s", status, http.StatusText(status)),
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body))}
}

// answer is what a node says.
func (n *Network) answer(node, path string, query url.Values) ([]byte, error) {
	i, err := strconv.Atoi(node[1:])
	if err != nil {
		return nil, err
	}
	switch path {
	case "/v1/flows":
		var lines bytes.Buffer
		last, err := strconv.Atoi(query.Get("last"))
		if err != nil {
			return nil, err
		}
		for k := range last {
			f := n.flow(i, k)
			if err := json.NewEncoder(&lines).Encode(api.FlowLine{Flow: &f}); err != nil {
				return nil, err
			}
		}
		return lines.Bytes(), nil
	case "/v1/flows/summary":
		sum := flow.NewSummary(query.Get("by"), api.MaxEdges)
		for k := range 100 {
			f := n.flow(i, k)
			sum.Add(&f, time.Now())
		}
		return json.Marshal(api.NodeSummary{SummaryText: sum.Text(api.MaxEdges), Traffic: n.traffic(0, 20)})
	case "/v1/traffic":
		list := make([]model.Traffic, len(n.endpoints.Of(node)))
		for k := range list {
			list[k] = n.traffic(k+1, 1)
		}
		return json.Marshal(map[string]any{"traffic": list})
	case "/v1/status":
		return json.Marshal(n.status(i))
	}
	return json.Marshal(map[string]any{"error": api.Error{Code: api.CodeNotFound, Message: "no such path"}})
}

// flow is the k-th latest of a node: of its endpoints to those of others.
func (n *Network) flow(node, k int) flow.Flow {
	group := n.endpoints.Of(Node(node))
	from := group[k%len(group)]
	other := n.endpoints[(node*31+k*17+1)%len(n.endpoints)]
	to := other[k%len(other)]
	f := flow.Flow{Time: time.Now().Add(-time.Duration(k) * 50 * time.Millisecond), Node: from.Node, Event: flow.End, Verdict: flow.Allowed, Protocol: "tcp", SeenBy: flow.SideFrom, Path: "direct",
		From: flow.Peer{Endpoint: from.Name, Node: from.Node, Addr: from.Addrs[0], Port: uint16(30000 + k), Labels: from.Labels},
		To:   flow.Peer{Endpoint: to.Name, Node: to.Node, Addr: to.Addrs[0], Port: 8080, Labels: to.Labels}, BytesSent: 1000, BytesReceived: 20_000, RTT: time.Duration(100+k) * time.Microsecond}
	if k%10 == 0 {
		f.Event, f.Verdict, f.Path, f.Reason = flow.Deny, flow.Denied, "", "refuse_policy_rejected"
	} else if k%2 == 0 {
		f.Event = flow.Open
	}
	return f
}

// traffic grows with time.
func (n *Network) traffic(id int, weight uint64) model.Traffic {
	ticks := weight * uint64(time.Since(n.started)/time.Millisecond)
	return model.Traffic{Endpoint: model.EndpointID(id), Opened: ticks, Accepted: ticks, BytesSent: 1000 * ticks, BytesReceived: 2000 * ticks, Live: map[model.Path]uint64{"direct": 3 * weight}}
}

// status is that of a node which a few others cannot reach directly, and with something amiss.
func (n *Network) status(i int) api.Status {
	st := api.Status{Node: n.nodes[i].Node, Version: "1.0", Store: api.Store{Kind: "etcd", Healthy: true}, Endpoints: n.nodes[i].Endpoints, Peers: len(n.nodes) - 1}
	for k := range 20 {
		st.Direct.Overlay = append(st.Direct.Overlay, model.PeerPath{Node: Node(k), Underlay: n.nodes[k%len(n.nodes)].Underlay, State: model.PeerBlocked, Reason: "fallback_blocked", Detail: "of 4 ports 0 refuse the option, 4 are silent"})
		st.Counters = append(st.Counters, api.Counter{Name: fmt.Sprint("drop_", k), Kind: model.KindDrop, Help: "packets that were dropped for the reason with this number", Value: uint64(i + k)})
	}
	st.Features = []api.Check{{Name: "bpf_lsm", Status: api.CheckDegraded, Detail: "EPERM", Cost: "a lock", Remedy: "another kernel"}}
	if i%10 == 0 {
		st.Faults = []api.Fault{{Reason: api.FaultEndpoint, Endpoint: fmt.Sprintf("shop/pod-%06d", i), Error: "no room", Since: n.started}}
	}
	st.Omitted = map[string]int{"direct_paths.overlay": max(len(n.nodes)-21, 0)}
	return st
}
