package api

import (
	"errors"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

func testEdit() PolicyEdit {
	return PolicyEdit{Policies: []*policy.Policy{{Name: "a/b", Ingress: &policy.Direction{Default: policy.DefaultDeny,
		Rules: []policy.Rule{{Action: policy.Allow, Ports: []policy.Ports{{Protocol: model.ProtocolTCP, First: 1, Last: 2}}}}}}},
		Namespaces: []policy.Namespace{{Name: "a", Labels: map[string]string{"X": "y"}}}}
}

func TestPolicyRoundTrip(t *testing.T) {
	agent := newFakeAgent()
	client, ctx := serve(t, agent), t.Context()
	made, err := client.EditPolicies(ctx, testEdit())
	if err != nil || len(made) != 1 || made[0].Change != "created" || !reflect.DeepEqual(agent.edit, testEdit()) {
		t.Errorf("%+v, %v; the agent saw %+v", made, err, agent.edit)
	}
	if docs, err := client.Policies(ctx); err != nil || !reflect.DeepEqual(docs.Policies, testEdit().Policies) || !reflect.DeepEqual(docs.Namespaces, testEdit().Namespaces) {
		t.Errorf("%+v, %v", docs, err)
	}
	ports, err := ParseExplainPort("53/udp")
	if err != nil {
		t.Fatal(err)
	}
	x, err := client.ExplainPolicy(ctx, ExplainRequest{From: "n1/c1", To: "fd00::1", Ports: ports})
	if err != nil || x.Verdict != "n1/c1fd00::1" || x.Port != 53 || x.Protocol != "udp" {
		t.Errorf("%+v, %v", x, err)
	}
	agent.endpoints["n1/c1"] = model.Endpoint{Name: "n1/c1"}
	if e, err := client.LabelEndpoint(ctx, "n1/c1", LabelRequest{Set: map[string]string{"a": "b"}}); err != nil || e.Labels["a"] != "b" {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := client.LabelEndpoint(ctx, "n1/c2", LabelRequest{Remove: []string{"a"}}); !errors.Is(err, ErrNotFound) {
		t.Errorf("label of an absent endpoint: %v", err)
	}
}

// TestMalformedPolicyRequests: each is refused with the field at fault, and the agent hears
// nothing.
func TestMalformedPolicyRequests(t *testing.T) {
	const policies, label, explain = "/v1/policies", "/v1/endpoints/c/labels", "/v1/policies/explain"
	for _, c := range []struct{ method, target, body, field, says string }{
		{http.MethodPost, policies, ``, "", "empty"},
		{http.MethodPost, policies, `{}`, "", "nothing to change"},
		{http.MethodPost, policies, `{"policies":[null]}`, "policies[0]", "null"},
		{http.MethodPost, policies, `{"policies":[{"name":"a","subject":{},"ingress":{"default":"maybe"}}]}`, "policies[0].ingress.default", "want allow or deny"},
		{http.MethodPost, policies, `{"policies":[{"name":"a","subject":{},"ingress":{"rules":[{"action":"allow","ports":["tcp/x"]}]}}]}`, "", "ports"},
		{http.MethodPost, policies, `{"policies":[{"name":"a","subject":{},"until":1}]}`, "until", "unknown field"},
		{http.MethodPost, policies, `{"delete":["A"]}`, "delete[0].name", "no name"},
		{http.MethodPost, policies, `{"namespaces":[{"name":"a.b"}]}`, "namespaces[0].namespace", "no namespace"},
		{http.MethodPost, policies, `{"delete":["` + strings.Repeat("a", MaxPolicyBytes) + `"]}`, "", "exceeds"},
		{http.MethodPatch, label, `{}`, "", "nothing to change"},
		{http.MethodPatch, label, `{"set":{"a":"b"},"remove":["a"]}`, "remove", "set and removed"},
		{http.MethodPatch, label, `{"set":{"":"b"}}`, "labels", "key"},
		{http.MethodGet, explain + "?from=a&to=b", "", "port", "no single port"},
		{http.MethodGet, explain + "?from=a&to=b&port=1-2/tcp", "", "port", "no single port"},
		{http.MethodGet, explain + "?from=a&to=b&port=1&port=2", "", "port", "each once"},
		{http.MethodGet, explain + "?from=a&to=%20&port=1", "", "to", "no endpoint name"},
		{http.MethodGet, explain + "?from=a&to=b&port=1&x=1", "", "x", "each once"},
	} {
		agent := newFakeAgent()
		status, text := rawRequest(NewHandler(agent, nil, slog.New(slog.DiscardHandler)), c.method, c.target, c.body)
		if status != 400 && status != 413 || !strings.Contains(text, c.says) || c.field != "" && !strings.Contains(text, `"field":"`+c.field+`"`) {
			t.Errorf("%s %s %.80s: %d %s", c.method, c.target, c.body, status, text)
		}
		if !reflect.DeepEqual(agent.edit, PolicyEdit{}) {
			t.Errorf("%.80s reached the agent", c.body)
		}
	}
}

// FuzzDecodePolicyEdit: whatever bytes arrive, an *Error or an edit of valid documents.
func FuzzDecodePolicyEdit(f *testing.F) {
	f.Add(`{"policies":[{"name":"a","subject":{"labels":{"a":"b"},"prefixes":["10.0.0.0/8"]},"ingress":{"rules":[{"action":"deny","peers":[{"entity":"node"}],"ports":["tcp/1-2","icmp"]}]}}]}`)
	f.Add(`{"namespaces":[{"name":"a","labels":{"b":"c"}}],"delete":["x/y"],"delete_namespaces":["b"]}`)
	f.Fuzz(func(t *testing.T, body string) {
		var edit PolicyEdit
		err := decodeStrict(strings.NewReader(body), MaxPolicyBytes, &edit)
		if err == nil {
			err = edit.Validate()
		}
		var e *Error
		if err != nil {
			if !errors.As(err, &e) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		for _, p := range edit.Policies {
			if err := p.Validate(); err != nil {
				t.Fatalf("accepted: %v", err)
			}
		}
	})
}
