package kube

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/policy/document"
)

func networkPolicy(t testing.TB, name, spec string) *networkingv1.NetworkPolicy {
	t.Helper()
	np := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
	if err := json.Unmarshal([]byte(spec), &np.Spec); err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	return np
}

// What is in order means the same as from a file.
func TestConvertAsFromFiles(t *testing.T) {
	for _, spec := range []string{
		`{"podSelector":{}}`,
		`{"podSelector":{"matchLabels":{"app":"db"}},"policyTypes":["Ingress","Egress"],
		  "ingress":[{"from":[{"podSelector":{"matchExpressions":[{"key":"app","operator":"In","values":["web","x"]}]},"namespaceSelector":{"matchLabels":{"tier":"a"}}},
		  {"ipBlock":{"cidr":"10.0.0.0/8","except":["10.1.0.0/16"]}}],"ports":[{"port":80},{"protocol":"UDP","port":1000,"endPort":2000},{"protocol":"TCP"}]}],
		  "egress":[{}]}`,
	} {
		np := networkPolicy(t, "p", spec)
		got, refused := convert(np)
		if len(refused) > 0 {
			t.Fatalf("%s: refused: %v", spec, refused)
		}
		set, err := document.Parse(document.File{Name: "f", Data: []byte(`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"namespace":"shop","name":"p"},"spec":` + spec + `}`)})
		if err != nil {
			t.Fatal(err)
		}
		set.Policies[0].Source = policy.SourceKubernetes
		if a, b := asJSON(got), asJSON(set.Policies[0]); a != b {
			t.Errorf("got %s\nwant %s", a, b)
		}
	}
}

func asJSON(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

// What cannot be honoured allows nothing, and is named.
func TestConvertRefuses(t *testing.T) {
	long := strings.Repeat(`{"podSelector":{"matchLabels":{"a":"b"}}},`, policy.MaxPerRule)
	labels := ""
	for i := range policy.MaxPerSelector {
		labels += fmt.Sprintf(`"k%d":"v",`, i)
	}
	for _, c := range []struct {
		name, spec     string
		same           string // what has to come of it
		namespace, all bool   // the subject is the whole namespace; all rules are left out
		named          []string
	}{
		{name: "SCTP beside a number", spec: `{"podSelector":{},"ingress":[{"ports":[{"protocol":"SCTP","port":"http"},{"port":80}]}]}`,
			same: `{"podSelector":{},"ingress":[{"ports":[{"port":80}]}]}`, named: []string{"spec.ingress[0]", "SCTP"}},
		{name: "nothing but SCTP: the rule must not become one for every port", spec: `{"podSelector":{},"ingress":[{"ports":[{"protocol":"SCTP","port":1}]},{"ports":[{"port":81}]}]}`,
			same: `{"podSelector":{},"ingress":[{"ports":[{"port":81}]}]}`, named: []string{"SCTP"}},
		{name: "SCTP", spec: `{"podSelector":{},"policyTypes":["Egress"],"egress":[{"ports":[{"protocol":"SCTP","port":1}]}]}`,
			same: `{"podSelector":{},"policyTypes":["Egress"]}`, named: []string{"spec.egress[0]", "SCTP"}},
		{name: "egress rules speak of egress also when they are left out", spec: `{"podSelector":{},"egress":[{"ports":[{"protocol":"SCTP"}]}]}`,
			same: `{"podSelector":{},"policyTypes":["Ingress","Egress"]}`, named: []string{"spec.egress[0]"}},
		{name: "a peer that is wrong takes its rule with it", spec: `{"podSelector":{},"ingress":[{"from":[{}]},{"from":[{"podSelector":{}}]}]}`,
			same: `{"podSelector":{},"ingress":[{"from":[{"podSelector":{}}]}]}`, named: []string{"spec.ingress[0]", "left out"}},
		{name: "too many peers", spec: `{"podSelector":{},"ingress":[{"from":[` + long + `{"podSelector":{}}]}]}`,
			same: `{"podSelector":{},"policyTypes":["Ingress"]}`, named: []string{"at most 1000"}},
		{name: "subject of too many labels", spec: `{"podSelector":{"matchLabels":{` + labels + `"last":"v"}},"ingress":[{}],"egress":[{}]}`,
			same: `{"podSelector":{},"policyTypes":["Ingress","Egress"]}`, named: []string{"65 labels", "whole namespace is held closed"}},
		{name: "subject", spec: `{"podSelector":{"matchLabels":{"a":"b"},"matchExpressions":[{"key":"a","operator":"DoesNotExist"}]},"ingress":[{}]}`,
			same: `{"podSelector":{},"policyTypes":["Ingress"]}`, named: []string{"whole namespace is held closed"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, refused := convert(networkPolicy(t, "p", c.spec))
			want, none := convert(networkPolicy(t, "p", c.same))
			if len(none) > 0 || len(refused) == 0 {
				t.Fatalf("refused %q, and %q of what it is to be", refused, none)
			}
			if asJSON(got) != asJSON(want) {
				t.Errorf("got %s\nwant %s", asJSON(got), asJSON(want))
			}
			for _, word := range c.named {
				if !slices.ContainsFunc(refused, func(s string) bool { return strings.Contains(s, word) }) {
					t.Errorf("%q does not say %s", refused, word)
				}
			}
		})
	}
}

func TestConvertNames(t *testing.T) {
	long := strings.Repeat("a.", 120) + "b"
	got, refused := convert(networkPolicy(t, long, `{"podSelector":{}}`))
	if len(refused) > 0 || got == nil || len(got.Name) > policy.MaxName || got.Name != policyName("shop", long) {
		t.Errorf("%v, refused %v", got, refused)
	}
	other, _ := convert(networkPolicy(t, long+"b", `{"podSelector":{}}`))
	if other == nil || other.Name == got.Name {
		t.Errorf("two names become one: %v", other)
	}
	np := networkPolicy(t, "p", `{"podSelector":{}}`)
	np.Annotations = map[string]string{document.DenyAnnotation: "drop", "other": strings.Repeat("x", 10000)}
	if got, refused := convert(np); len(refused) > 0 || got.Ingress.Deny != policy.Drop {
		t.Errorf("%v, refused %v", got, refused)
	}
	np.Annotations[document.DenyAnnotation] = "shout"
	if got, refused := convert(np); len(refused) != 1 || got.Ingress.Deny != "" || got.Ingress.Default != policy.DefaultDeny {
		t.Errorf("%v, refused %v", got, refused)
	}
}

// FuzzConvert gives objects that an API server may hold: there is always a policy, in order, that
// has no more rules.
func FuzzConvert(f *testing.F) {
	f.Add(`{"podSelector":{},"ingress":[{"ports":[{"port":"http"},{"port":80,"endPort":79}]}]}`)
	f.Add(`{"podSelector":{"matchExpressions":[{"key":"a","operator":"In","values":["x"]}]},"policyTypes":["Egress"],"egress":[{"to":[{"ipBlock":{"cidr":"::/0"}}]}]}`)
	f.Fuzz(func(t *testing.T, spec string) {
		np := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}}
		if json.Unmarshal([]byte(spec), &np.Spec) != nil || slices.ContainsFunc(np.Spec.PolicyTypes, func(p networkingv1.PolicyType) bool {
			return p != networkingv1.PolicyTypeIngress && p != networkingv1.PolicyTypeEgress // the API server refuses it
		}) {
			return
		}
		whole, parts, _ := byNumber(np, func(string, namedPort) []int32 { return []int32{80} })
		p, _ := convert(whole)
		if p == nil {
			t.Fatalf("%s: no policy", spec)
		}
		if err := p.Validate(); err != nil {
			t.Fatalf("%s: %v", spec, err)
		}
		for _, x := range parts {
			if q, _ := convertPart(x.policy); q != nil && (q.Validate() != nil || q.Subject.Labels == nil || q.Egress != nil) {
				t.Errorf("%s: its part %s is %s", spec, x.suffix, asJSON(q))
			}
		}
		if len(names(np)) > 0 {
			return
		}
		if p.RuleCount() > len(np.Spec.Ingress)+len(np.Spec.Egress)+2 {
			t.Errorf("%s: more rules than it has", spec)
		}
	})
}
