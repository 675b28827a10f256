package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/plane/tcp/names"
)

func TestMetrics(t *testing.T) {
	h := NewHandler(newFakeAgent(), nil, slog.New(slog.DiscardHandler))
	status, text := rawRequest(h, http.MethodGet, "/metrics", "")
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	lines := map[string]bool{}
	for line := range strings.Lines(text) {
		lines[strings.TrimSpace(line)] = true
	}
	want := []string{
		"heddle_endpoints 2", "heddle_peers 1", "heddle_store_healthy 1", "heddle_store_revision 17",
		"heddle_intercept_listeners 3", "heddle_intercept_readers 4", "heddle_intercept_answered_total 100", "heddle_intercept_continued_total 20",
		`heddle_intercept_failed_total{cause="caller_gone"} 1`, `heddle_intercept_premade_total{result="hit"} 90`,
		`heddle_intercept_premade_total{result="miss"} 10`,
		"heddle_peers_away 1", "heddle_intercept_unguarded 0", "heddle_endpoint_socket_limit 65536", "heddle_endpoint_port_limit 0",
		`heddle_endpoint_cap_bits_per_second{direction="egress",endpoint="n1/c1"} 1e+08`, `heddle_endpoint_capped_bytes_total{direction="egress",endpoint="n1/c1"} 1`,
		`heddle_endpoint_capped_dropped_total{direction="egress",endpoint="n1/c1"} 3`, `heddle_endpoint_capped_backlog_bytes{direction="egress",endpoint="n1/c1"} 4`,
		"heddle_intercept_batches_total 5", "heddle_intercept_batch_sockets_total 320", "heddle_intercept_crates_total 5", "heddle_intercept_crated_sockets_total 320", `heddle_feature{feature="bpf_btf"} 1`,
		`heddle_endpoint_opened_total{endpoint="n1/c1"} 7`, `heddle_endpoint_accepted_total{endpoint="n1/c1"} 6`,
		`heddle_endpoint_connect_failed_total{cause="refused",endpoint="n1/c1"} 5`,
		`heddle_endpoint_connect_failed_total{cause="timed_out",endpoint="n1/c1"} 4`,
		`heddle_endpoint_connect_failed_total{cause="other",endpoint="n1/c1"} 3`,
		`heddle_endpoint_closed_total{endpoint="n1/c1"} 12`, `heddle_endpoint_broken_total{endpoint="n1/c1"} 2`,
		`heddle_endpoint_connections{endpoint="n1/c1",path="direct"} 1`, `heddle_endpoint_sent_bytes_total{endpoint="n1/c1"} 1001`,
		`heddle_endpoint_received_bytes_total{endpoint="n1/c1"} 1002`, `heddle_endpoint_retransmits_total{endpoint="n1/c1"} 9`,
		`heddle_flows_total{event="open",path="direct"} 7`, `heddle_flows_total{event="deny",path="none"} 3`,
		"heddle_flows_kept 10", "heddle_flow_followers 2", "heddle_flows_unread_total 1", "heddle_flows_exported_total 8",
		`heddle_flows_export_lost_total{reason="queue_full"} 2`, `heddle_flows_export_lost_total{reason="refused"} 0`,
		"heddle_policies 3", "heddle_policy_rules 8", "heddle_policy_healthy 0", "heddle_policy_revision 16",
		"heddle_policy_update_seconds 1.5", "heddle_policy_pairs 6", "heddle_policy_cut_total 11",
		`heddle_faults{reason="endpoint_not_restored"} 2`, `heddle_faults{reason="limits_not_restored"} 1`, `heddle_faults{reason="limits_tighter"} 0`,
		`heddle_stack_module_up{stack="smoltcp"} 1`, `heddle_stack_module_ended_total{stack="smoltcp"} 1`, `heddle_stack_module_processor_seconds_total{stack="smoltcp"} 1.5`,
		`heddle_stack_module_endpoint_processor_seconds_total{endpoint="n1/c1",profile="wan",stack="smoltcp"} 0.25`,
		`heddle_stack_module_retransmits_total{stack="smoltcp"} 3`, `heddle_stack_module_dropped_total{stack="smoltcp"} 4`, `heddle_stack_module_refused_total{stack="smoltcp"} 5`,
		`heddle_stack_module_endpoints{profile="wan",stack="smoltcp"} 2`, `heddle_stack_module_memory_bytes{profile="wan",stack="smoltcp"} 11`,
		`heddle_stack_module_connections{profile="wan",stack="smoltcp"} 3`, `heddle_stack_module_queued_bytes{direction="send",profile="wan",stack="smoltcp"} 6`,
		`heddle_stack_module_queued_bytes{direction="receive",profile="wan",stack="smoltcp"} 7`,
		`heddle_feature{feature="bpf_lsm"} 0`, `heddle_agent_info{node="n1",version="0.1.0"} 1`,
	}
	for i, r := range names.Reasons {
		want = append(want, fmt.Sprintf("heddle_reason_total{kind=%q,reason=%q} %d", r.Kind, r.Name, i*10))
	}
	for _, line := range want {
		if !lines[line] {
			t.Errorf("no line %s", line)
		}
	}
	if n := strings.Count(text, "\nheddle_reason_total{"); n != len(names.Reasons) {
		t.Errorf("%d series of heddle_reason_total, want one for each of %d reasons", n, len(names.Reasons))
	}
}

func TestMetricsFailWithStatus(t *testing.T) {
	agent := newFakeAgent()
	agent.err = errors.New("datapath gone")
	h := NewHandler(agent, nil, slog.New(slog.DiscardHandler))
	if status, text := rawRequest(h, http.MethodGet, "/metrics", ""); status != 500 || !strings.Contains(text, "datapath gone") {
		t.Errorf("%d %s, want a failed scrape", status, text)
	}
}

// agent-api.md is normative: it must have each metric with the help text that is exported, each
// error code with its status, and each path.
func TestDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/protocols/agent-api.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	h := NewHandler(newFakeAgent(), nil, slog.New(slog.DiscardHandler))
	_, metrics := rawRequest(h, http.MethodGet, "/metrics", "")
	metrics += rdmaMetrics(t)
	exported := 0
	for line := range strings.Lines(metrics) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "# HELP ")
		if !ok {
			continue
		}
		exported++
		name, help, _ := strings.Cut(rest, " ")
		if row := lineWith(doc, "| `"+name+"` |"); !strings.Contains(row, "| "+help+" |") {
			t.Errorf("metric %s: row %q, want its help %q", name, row, help)
		}
	}
	if exported != len(descs) || strings.Count(doc, "\n| `heddle_") != len(descs) {
		t.Errorf("%d metrics exported, %d declared: want each exported and documented", exported, len(descs))
	}
	for code, status := range statusByCode {
		if row := lineWith(doc, "| `"+string(code)+"` |"); !strings.Contains(row, fmt.Sprintf("| %d |", status)) {
			t.Errorf("code %s: row %q, want status %d", code, row, status)
		}
	}
	for _, heading := range []string{"GET /v1/status", "GET /v1/endpoints", "POST /v1/endpoints",
		"DELETE /v1/endpoints/{name}", "GET /v1/nodes", "GET /v1/connections", "GET /v1/traffic",
		"PUT /v1/endpoints/{name}/limits", "GET /v1/limits",
		"GET /v1/rdma", "PUT /v1/endpoints/{name}/verbs", "GET /v1/services", "POST /v1/services", "PATCH /v1/endpoints/{name}/labels", "GET /v1/policies", "POST /v1/policies", "GET /v1/policies/explain", "GET /metrics"} {
		if lineWith(doc, "### "+heading) == "" {
			t.Errorf("no section %q", heading)
		}
	}
}

// rdmaMetrics are those of a node that has a verbs plane, without all others.
func rdmaMetrics(t *testing.T) (text string) {
	t.Helper()
	agent := newFakeAgent()
	agent.rdma = RDMA{
		Devices: []RDMADevice{{Endpoint: "n1/c1", Known: true, Used: map[string]uint64{"qps": 3}, Limits: map[string]uint64{"qps": 9},
			Traffic: map[RDMAPath]RDMATraffic{RDMAMemory: {Requests: 1, Served: 2, BytesSent: 3, BytesReceived: 4}}, Errors: 5}, {Endpoint: "n1/c2"}},
		QueuePairs: []QueuePair{{Endpoint: "n1/c1", State: "RTS"}, {Endpoint: "n1/c1", State: "RTS"}},
	}
	status := func(ctx context.Context) (Status, error) {
		st, err := agent.Status(ctx)
		st.Router = &Router{State: RouterRuns, Ended: 6}
		return st, err
	}
	_, all := rawRequest(NewHandler(statusAgent{agent, status}, nil, slog.New(slog.DiscardHandler)), http.MethodGet, "/metrics", "")
	for line := range strings.Lines(all) {
		if strings.Contains(line, "heddle_rdma_") {
			text += line
		}
	}
	for _, want := range []string{
		"heddle_rdma_router_up 1", "heddle_rdma_router_ended_total 6", `heddle_rdma_objects{endpoint="n1/c1",object="qps"} 3`,
		`heddle_rdma_object_limit{endpoint="n1/c1",object="qps"} 9`, `heddle_rdma_queue_pairs{endpoint="n1/c1",state="RTS"} 2`,
		`heddle_rdma_messages_total{endpoint="n1/c1",path="memory",role="requester"} 1`, `heddle_rdma_messages_total{endpoint="n1/c1",path="memory",role="responder"} 2`,
		`heddle_rdma_sent_bytes_total{endpoint="n1/c1",path="memory"} 3`, `heddle_rdma_received_bytes_total{endpoint="n1/c1",path="memory"} 4`,
		`heddle_rdma_errors_total{endpoint="n1/c1"} 5`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	return text
}

func lineWith(text, prefix string) string {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, prefix) {
			return line
		}
	}
	return ""
}

func TestCollectorGivesUp(t *testing.T) {
	// A status that never comes must not hold the scraper for ever: the collector's context has a
	// deadline.
	var bounded bool
	status := func(ctx context.Context) (Status, error) {
		_, bounded = ctx.Deadline()
		return Status{}, context.DeadlineExceeded
	}
	h := NewHandler(statusAgent{newFakeAgent(), status}, nil, slog.New(slog.DiscardHandler))
	if code, _ := rawRequest(h, http.MethodGet, "/metrics", ""); code != 500 || !bounded {
		t.Errorf("status %d, deadline %v", code, bounded)
	}
}

type statusAgent struct {
	*fakeAgent
	status func(context.Context) (Status, error)
}

func (a statusAgent) Status(ctx context.Context) (Status, error) { return a.status(ctx) }
