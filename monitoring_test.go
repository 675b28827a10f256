package heddle_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// What is installed for Prometheus and Grafana.
const (
	alertsFile    = "packaging/monitoring/heddle-alerts.yaml"
	dashboardFile = "packaging/monitoring/heddle-dashboard.json"
)

// promtool runs Prometheus' own checker.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Skip("promtool is not installed (`make test-packages` does)")
	}
	if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// metricLabels gives the labels of every metric that heddled and heddle-kube have, by the documents
// that other tests hold to the programs, and of those that Prometheus and Go's library add.
func metricLabels(t *testing.T) map[string][]string {
	t.Helper()
	texts := documents(t)
	all := map[string][]string{"up": nil, "process_cpu_seconds_total": nil, "process_resident_memory_bytes": nil}
	name := regexp.MustCompile("`([a-z_]+)`")
	for _, path := range []string{"docs/protocols/agent-api.md", "docs/howto/kubernetes.md"} {
		for line := range strings.Lines(texts[path]) {
			if !strings.HasPrefix(line, "| `heddle_") {
				continue
			}
			cells := strings.Split(line, "|")
			var metrics, labels []string
			for i, cell := range cells[1:3] {
				for _, m := range name.FindAllStringSubmatch(cell, -1) {
					if strings.HasPrefix(m[1], "heddle_") {
						metrics = append(metrics, m[1])
					} else if i == 0 || path == "docs/protocols/agent-api.md" {
						labels = append(labels, m[1]) // some are values of labels, which does no harm
					}
				}
			}
			for _, m := range metrics {
				all[m] = labels
			}
		}
	}
	if len(all) < 80 {
		t.Fatalf("the documents have %d metrics", len(all))
	}
	return all
}

var (
	metricName = regexp.MustCompile(`\b(heddle_[a-z_]+|up|process_[a-z_]+)\b`)
	selector   = regexp.MustCompile(`\b([a-z_]+)\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`([a-z_]+) *(?:=~|!~|!=|=) *"`)
)

// checkMetrics complains of an expression that asks for what nobody measures: it would show nothing
// and never alert.
func checkMetrics(t *testing.T, what, expr string, known map[string][]string) {
	t.Helper()
	found := metricName.FindAllString(regexp.MustCompile(`"[^"]*"`).ReplaceAllString(expr, `""`), -1)
	if len(found) == 0 {
		t.Errorf("%s: %s asks for no metric", what, expr)
	}
	for _, m := range found {
		if _, ok := known[m]; !ok {
			t.Errorf("%s: there is no metric %s", what, m)
		}
	}
	for _, s := range selector.FindAllStringSubmatch(expr, -1) {
		for _, label := range matcher.FindAllStringSubmatch(s[2], -1) {
			if l := label[1]; l != "instance" && l != "job" && !slices.Contains(known[s[1]], l) {
				t.Errorf("%s: %s has no label %s", what, s[1], l)
			}
		}
	}
}

// alertCases has series by which each alert of the file is to fire, and others by which it is not.
// Values are Prometheus' own notation: first value, then what is added each minute, how often.
var alertCases = []struct {
	name         string
	fires, quiet []string
}{
	{"HeddleAgentDown", []string{`up{job="heddle",instance="n1"} 0x60`}, []string{`up{job="heddle",instance="n1"} 1x60`, `up{job="other",instance="n1"} 0x60`}},
	{"HeddleAgentRestarts", []string{`heddle_agent_start_time_seconds{instance="n1"} 1+1x60`}, []string{`heddle_agent_start_time_seconds{instance="n1"} 1x30 2x30`}},
	{"HeddleStoreUnhealthy", []string{`heddle_store_healthy{instance="n1"} 0x60`}, []string{`heddle_store_healthy{instance="n1"} 1x58 0 0`}},
	{"HeddlePeersAway", []string{`heddle_peers_away{instance="n1"} 2x60`}, []string{`heddle_peers_away{instance="n1"} 0x60`}},
	{"HeddleFault", []string{`heddle_faults{instance="n1",reason="verbs_router"} 1x60`}, []string{`heddle_faults{instance="n1",reason="verbs_router"} 0x60`}},
	{"HeddleInterceptFailing", []string{`heddle_intercept_failed_total{instance="n1",cause="answer"} 0+60x60`},
		[]string{`heddle_intercept_failed_total{instance="n1",cause="caller_gone"} 0+60x60`, `heddle_intercept_failed_total{instance="n1",cause="answer"} 5x60`}},
	{"HeddleSocketsNearLimit", []string{`heddle_endpoint_sockets{instance="n1",endpoint="c"} 95x60`, `heddle_endpoint_socket_limit{instance="n1"} 100x60`},
		[]string{`heddle_endpoint_sockets{instance="n1",endpoint="c"} 95x60`, `heddle_endpoint_socket_limit{instance="n1"} 1000x60`, `heddle_endpoint_socket_limit{instance="n2"} 100x60`}},
	{"HeddlePortsNearLimit", []string{`heddle_endpoint_ports{instance="n1",endpoint="c"} 95x60`, `heddle_endpoint_port_limit{instance="n1"} 100x60`},
		[]string{`heddle_endpoint_ports{instance="n1",endpoint="c"} 95x60`, `heddle_endpoint_port_limit{instance="n1"} 0x60`}},
	{"HeddlePolicyUnhealthy", []string{`heddle_policy_healthy{instance="n1"} 0x60`}, []string{`heddle_policy_healthy{instance="n1"} 1x60`}},
	{"HeddleDenied", []string{`heddle_flows_total{instance="n1",event="deny",path="none"} 0+600x60`},
		[]string{`heddle_flows_total{instance="n1",event="deny",path="none"} 0+60x60`, `heddle_flows_total{instance="n1",event="open",path="direct"} 0+600x60`}},
	{"HeddleDirectPathsFail", []string{`heddle_direct_paths{instance="n1",state="blocked"} 1x60`}, []string{`heddle_direct_paths{instance="n1",state="direct"} 1x60`, `heddle_direct_paths{instance="n1",state="blocked"} 0x60`}},
	{"HeddleFallbacks", []string{`heddle_flows_total{instance="n1",event="fallback",path="overlay"} 0+600x60`, `heddle_flows_total{instance="n1",event="open",path="direct"} 0+60x60`},
		[]string{`heddle_flows_total{instance="n1",event="fallback",path="overlay"} 0+600x60`, `heddle_flows_total{instance="n1",event="open",path="direct"} 0+6000x60`}},
	{"HeddleDrops", []string{`heddle_reason_total{instance="n1",kind="drop",reason="drop_spoofed"} 0+6000x60`}, []string{`heddle_reason_total{instance="n1",kind="path",reason="connect_direct"} 0+6000x60`}},
	{"HeddleEncryptionFails", []string{`heddle_encryption_peers{instance="n1",state="no_handshake"} 1x60`}, []string{`heddle_encryption_peers{instance="n1",state="idle"} 1x60`}},
	{"HeddleConnectsFail", []string{`heddle_endpoint_connect_failed_total{instance="n1",endpoint="c",cause="refused"} 0+60x60`, `heddle_endpoint_opened_total{instance="n1",endpoint="c"} 0+60x60`},
		[]string{`heddle_endpoint_connect_failed_total{instance="n1",endpoint="c",cause="refused"} 0+60x60`, `heddle_endpoint_opened_total{instance="n1",endpoint="c"} 0+6000x60`}},
	{"HeddleConnectionsBreak", []string{`heddle_endpoint_broken_total{instance="n1",endpoint="c"} 0+60x60`, `heddle_endpoint_closed_total{instance="n1",endpoint="c"} 0+60x60`},
		[]string{`heddle_endpoint_broken_total{instance="n1",endpoint="c"} 0+60x60`, `heddle_endpoint_closed_total{instance="n1",endpoint="c"} 0+600x60`}},
	{"HeddleRDMARouterEnds", []string{`heddle_rdma_router_ended_total{instance="n1"} 0x30 1x30`}, []string{`heddle_rdma_router_ended_total{instance="n1"} 1x60`}},
	{"HeddleRDMANearLimit", []string{`heddle_rdma_objects{instance="n1",endpoint="c",object="qps"} 95x60`, `heddle_rdma_object_limit{instance="n1",endpoint="c",object="qps"} 100x60`},
		[]string{`heddle_rdma_objects{instance="n1",endpoint="c",object="qps"} 95x60`, `heddle_rdma_object_limit{instance="n1",endpoint="c",object="mrs"} 100x60`}},
	{"HeddleStackModuleDown", []string{`heddle_stack_module_up{instance="n1",stack="smoltcp"} 0x60`}, []string{`heddle_stack_module_up{instance="n1",stack="smoltcp"} 1x60`}},
	{"HeddleFlowsLost", []string{`heddle_reason_total{instance="n1",kind="lost",reason="lost_flow_event"} 0+1x60`}, []string{`heddle_reason_total{instance="n1",kind="lost",reason="lost_flow_event"} 7x60`}},
	{"HeddleFlowsNotExported", []string{`heddle_flows_export_lost_total{instance="n1",reason="refused"} 0+1x60`}, []string{`heddle_flows_export_lost_total{instance="n1",reason="refused"} 7x60`}},
	{"HeddleKubeNotSynced", []string{`heddle_kube_synced{instance="n1"} 0x60`}, []string{`heddle_kube_synced{instance="n1"} 1x60`}},
	{"HeddleKubeRefused", []string{`heddle_kube_refused{instance="n1",kind="policy"} 1x60`}, []string{`heddle_kube_refused{instance="n1",kind="policy"} 0x60`}},
	{"HeddleKubeFailing", []string{`heddle_kube_failures_total{instance="n1",kind="policy"} 0+1x60`}, []string{`heddle_kube_failures_total{instance="n1",kind="policy"} 3x60`}},
}

// TestAlerts: Prometheus takes the rules; each asks for metrics that there are, fires when it is
// to, and is quiet when it is not.
func TestAlerts(t *testing.T) {
	raw, err := os.ReadFile(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	known := metricLabels(t)
	var names []string
	for _, rule := range strings.Split(string(raw), "- alert: ")[1:] {
		name, _, _ := strings.Cut(rule, "\n")
		names = append(names, name)
		_, expr, _ := strings.Cut(rule, "expr: ")
		expr, _, _ = strings.Cut(expr, "labels:")
		expr = regexp.MustCompile(`(?m)^ *for: .*$`).ReplaceAllString(expr, "")
		checkMetrics(t, name, expr, known)
		if !strings.Contains(rule, "summary: ") || !strings.Contains(rule, "description: ") || !strings.Contains(rule, "severity: ") {
			t.Errorf("%s lacks a severity, summary or description", name)
		}
	}
	promtool(t, "check", "rules", alertsFile)
	type series struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	type promTest struct {
		Interval string           `json:"interval"`
		Input    []series         `json:"input_series"`
		Expr     []map[string]any `json:"promql_expr_test"`
	}
	var tests []promTest
	for _, c := range alertCases {
		if !slices.Contains(names, c.name) {
			t.Errorf("%s is no alert of %s", c.name, alertsFile)
		}
		names = slices.DeleteFunc(names, func(n string) bool { return n == c.name })
		for fires, list := range map[bool][]string{true: c.fires, false: c.quiet} {
			one := promTest{Interval: "1m"}
			for _, s := range list {
				name, values, _ := strings.Cut(s, "} ")
				one.Input = append(one.Input, series{name + "}", values})
			}
			samples := []map[string]any{}
			if fires {
				samples = append(samples, map[string]any{"labels": "{}", "value": 1})
			}
			one.Expr = []map[string]any{{"expr": fmt.Sprintf(`count(ALERTS{alertname=%q,alertstate="firing"})`, c.name), "eval_time": "59m", "exp_samples": samples}}
			tests = append(tests, one)
		}
	}
	if len(names) > 0 {
		t.Errorf("no test has these alerts fire: %s", names)
	}
	rules, err := filepath.Abs(alertsFile)
	if err != nil {
		t.Fatal(err)
	}
	// What is JSON is YAML, too.
	text, err := json.Marshal(map[string]any{"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": tests})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "test", "rules", path)
}

// TestDashboard: Grafana's own types take the dashboard, without a field that they do not know;
// every panel asks, in Prometheus' language, for metrics that there are, and is explained.
func TestDashboard(t *testing.T) {
	raw, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	plugins.RegisterDefaultPlugins()
	//lint:ignore SA1019 what may take its place is for Grafana 12 and later
	var d dashboard.Dashboard
	var faults cog.BuildErrors // an empty list of them is no error
	if err := d.UnmarshalJSONStrict(raw); err != nil && (!errors.As(err, &faults) || len(faults) > 0) {
		t.Fatalf("no dashboard of Grafana: %v", err)
	}
	if err := d.Validate(); err != nil {
		t.Errorf("not by Grafana's schema: %v", err)
	}
	var plain struct {
		Panels []struct {
			ID                       int
			Type, Title, Description string
			GridPos                  struct{ X, Y, W, H int }
			Targets                  []struct{ Expr, RefID string }
		}
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	if err := json.Unmarshal(raw, &plain); err != nil {
		t.Fatal(err)
	}
	known := metricLabels(t)
	variables := regexp.MustCompile(`\$(\w+|\{\w+\})`)
	rules := "groups:\n- name: dashboard\n  rules:\n"
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range plain.Panels {
		if ids[p.ID] {
			t.Errorf("panel %q has the id of another", p.Title)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("panel %q lies over %q, or outside", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q is not explained, or asks for nothing", p.Title)
		}
		for i, target := range p.Targets {
			for _, v := range variables.FindAllString(target.Expr, -1) {
				if v != "$instance" && v != "$endpoint" && v != "$__rate_interval" {
					t.Errorf("panel %q: there is no variable %s", p.Title, v)
				}
			}
			expr := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*", "$endpoint", ".*").Replace(target.Expr)
			checkMetrics(t, p.Title, expr, known)
			rules += fmt.Sprintf("  - record: panel_%d_%d\n    expr: %q\n", p.ID, i, expr)
		}
	}
	for _, v := range plain.Templating.List {
		if v.Definition != "" {
			checkMetrics(t, "variable "+v.Name, v.Definition, known)
		}
	}
	path := filepath.Join(t.TempDir(), "panels.yaml")
	if err := os.WriteFile(path, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", path)
}
