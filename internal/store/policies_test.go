package store

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/policy"
)

func testPolicy(name string, rules int) *policy.Policy {
	p := &policy.Policy{Name: name, Ingress: &policy.Direction{Default: policy.DefaultDeny}}
	for i := range rules {
		p.Ingress.Rules = append(p.Ingress.Rules, policy.Rule{Name: fmt.Sprint("rule ", i), Action: policy.Allow})
	}
	return p
}

func TestPoliciesAreReadAsTheyAreWritten(t *testing.T) {
	k := KeysOf(1)
	p := testPolicy("shop/web", 2)
	value, err := EncodePolicy(p)
	if err != nil {
		t.Fatal(err)
	}
	v := NewView(k, slog.New(slog.DiscardHandler), func() { t.Error("a value was skipped") })
	v.Set(k.Policy(p.Name), value, 1)
	v.Set(k.Policy("a"), []byte(`{"name":"a","subject":{},"egress":{"default":"allow"}}`), 2)
	v.Set(k.Namespace("shop"), []byte(`{"name":"shop","labels":{"Team":"x"},"later":1}`), 3)
	s := v.State(3)
	if len(s.Policies) != 2 || s.Policies[0].Name != "a" || s.Policies[1].RuleCount() != 2 || len(s.Namespaces) != 1 || s.Namespaces[0].Labels["Team"] != "x" {
		t.Errorf("%+v", s)
	}
	if again := v.State(4); again.Policies[1] != s.Policies[1] {
		t.Error("a policy that did not change is another pointer")
	}
	v.Delete(k.Policy("a"))
	v.Delete(k.Namespace("shop"))
	if s := v.State(5); len(s.Policies) != 1 || len(s.Namespaces) != 0 {
		t.Errorf("%+v", s)
	}
}

// TestBrokenPoliciesClose: a stored policy that is not understood as a whole closes its subject,
// and is reported; the others stay in force.
func TestBrokenPoliciesClose(t *testing.T) {
	k := KeysOf(1)
	const closed, ignored = "held closed", "NOT in force"
	for value, want := range map[string]string{
		`{"name":"p","subject":{"labels":{"a":"b"}},"ingress":{"rules":[{"action":"allow","unless":"x"}]}}`: closed,
		`{"name":"p","subject":{"labels":{"a":"b"}},"ingress":{"default":"maybe"}}`:                         closed,
		`{"name":"p","subject":{"labels":{"a":"b"}},"schedule":{}}`:                                         closed,
		`{"name":"q","subject":{"labels":{"a":"b"}},"ingress":{"default":"allow"}}`:                         closed,
		`{"name":"p","subject":{"newer":1},"ingress":{"default":"allow"}}`:                                  ignored,
		`{"name":"p"}`:                          ignored,
		`{"name":"p","name":"p","subject":{}}`:  ignored,
		`[]`:                                    ignored,
		`{"name":"p","subject":{}`:              ignored,
		strings.Repeat(" ", 1<<20) + `{}`:       ignored,
		"{\"name\":\"p\",\"subject\":\"\xff\"}": ignored,
	} {
		skipped := 0
		v := NewView(k, slog.New(slog.DiscardHandler), func() { skipped++ })
		v.Set(k.Policy("ok"), []byte(`{"name":"ok","subject":{},"ingress":{"default":"allow"}}`), 1)
		v.Set(k.Policy("p"), []byte(value), 1)
		s := v.State(1)
		if skipped != 1 || len(s.PolicyFaults) != 1 || !strings.Contains(s.PolicyFaults[0], want) || len(s.Policies) == 0 || s.Policies[0].Name != "ok" {
			t.Errorf("%.80s: %d skipped, %q", value, skipped, s.PolicyFaults)
			continue
		}
		if want == ignored {
			if len(s.Policies) != 1 {
				t.Errorf("%.80s: in force", value)
			}
			continue
		}
		p := s.Policies[1]
		if p.Subject.Labels["a"] != "b" || p.Ingress.Rules[0].Action != policy.Block || p.Egress.Rules[0].Action != policy.Block {
			t.Errorf("%.80s: %+v", value, p)
		}
		v.Set(k.Policy("p"), []byte(`{"name":"p","subject":{},"ingress":{"default":"allow"}}`), 1)
		if s := v.State(2); len(s.PolicyFaults) != 0 || s.Policies[1].Egress != nil {
			t.Errorf("%.80s: repaired, and still %+v", value, s)
		}
	}
}

func TestPlanEdit(t *testing.T) {
	k := KeysOf(1)
	value, err := EncodePolicy(testPolicy("a", 1))
	if err != nil {
		t.Fatal(err)
	}
	have := map[string][]byte{"a": value, "gone": value}
	writes, outcomes, err := PlanEdit(k, PolicyEdit{
		Put:           []*policy.Policy{testPolicy("a", 1), testPolicy("b", 1)},
		PutNamespaces: []policy.Namespace{{Name: "shop"}},
		Delete:        []string{"gone"},
	}, have, map[string][]byte{"shop": []byte("{}")}, CountPolicies(have))
	want := "[{policy a unchanged} {policy b created} {namespace shop changed} {policy gone deleted}]"
	if err != nil || fmt.Sprint(outcomes) != want || len(writes) != 4 || string(writes[3].Value) != `{"policies":2,"rules":2}` || writes[2].Value != nil || writes[0].Key != k.Policy("b") {
		t.Errorf("%v %v %v", outcomes, writes, err)
	}
	if n := countRules(value); n != 1 {
		t.Errorf("%d rules are counted in %s", n, value)
	}
	full, err := EncodePolicy(testPolicy("full", policy.MaxRules))
	if err != nil {
		t.Fatal(err)
	}
	many := map[string][]byte{}
	for i := range policy.MaxTotalRules / policy.MaxRules {
		many[fmt.Sprint("p", i)] = full
	}
	var tooMany *PolicyLimitError
	if _, _, err := PlanEdit(k, PolicyEdit{Put: []*policy.Policy{testPolicy("c", 1)}}, many, nil, CountPolicies(many)); !errors.As(err, &tooMany) || tooMany.Have != policy.MaxTotalRules+1 {
		t.Errorf("one rule too many: %v", err)
	}
	over := PolicyTotals{Policies: 30000, Rules: policy.MaxTotalRules + 7} // as something else left it
	if _, _, err := PlanEdit(k, PolicyEdit{Delete: []string{"gone"}}, have, nil, over); err != nil {
		t.Errorf("less than before, and still too much: %v", err)
	}
	var unknown *UnknownPolicyError
	var limit *PolicyLimitError
	for name, c := range map[string]struct {
		edit PolicyEdit
		err  any
	}{
		"absent":          {PolicyEdit{Delete: []string{"a", "x"}}, &unknown},
		"absent ns":       {PolicyEdit{DeleteNamespaces: []string{"x"}}, &unknown},
		"invalid":         {PolicyEdit{Put: []*policy.Policy{testPolicy("A", 1)}}, new(*policy.FieldError)},
		"many bytes":      {PolicyEdit{Put: []*policy.Policy{testPolicy("x", 9000), testPolicy("y", 9000), testPolicy("z", 9000), testPolicy("u", 9000)}}, &limit},
		"invalid and not": {PolicyEdit{Put: []*policy.Policy{testPolicy("c", 1), testPolicy("d", policy.MaxRules+1)}}, new(*policy.FieldError)},
	} {
		if writes, _, err := PlanEdit(k, c.edit, have, nil, PolicyTotals{}); !errors.As(err, c.err) || writes != nil {
			t.Errorf("%s: %d writes, %v", name, len(writes), err)
		}
	}
	if _, _, err := PlanEdit(k, PolicyEdit{Put: []*policy.Policy{testPolicy("c", 1)}, Delete: []string{"c"}}, have, nil, PolicyTotals{}); err == nil {
		t.Error("put and deleted at once")
	}
}

// TestPlanEditOfSource: who deletes in the name of a source deletes nothing that somebody else
// keeps.
func TestPlanEditOfSource(t *testing.T) {
	k := KeysOf(1)
	own := testPolicy("own", 1)
	own.Source = policy.SourceKubernetes
	policies, namespaces := map[string][]byte{"unread": []byte(`{"name":"unread","source":"kubernetes","subject":{},"later":1}`)}, map[string][]byte{}
	for _, p := range []*policy.Policy{own, testPolicy("hand", 1)} {
		value, err := EncodePolicy(p)
		if err != nil {
			t.Fatal(err)
		}
		policies[p.Name] = value
	}
	for _, n := range []policy.Namespace{{Name: "own", Source: policy.SourceKubernetes}, {Name: "hand"}} {
		value, err := EncodeNamespace(n)
		if err != nil {
			t.Fatal(err)
		}
		namespaces[n.Name] = value
	}
	edit := PolicyEdit{Delete: []string{"own", "hand", "unread"}, DeleteNamespaces: []string{"own", "hand"}, Source: policy.SourceKubernetes}
	writes, outcomes, err := PlanEdit(k, edit, policies, namespaces, PolicyTotals{3, 2})
	want := "[{policy own deleted} {policy hand unchanged} {policy unread deleted} {namespace own deleted} {namespace hand unchanged}]"
	if err != nil || fmt.Sprint(outcomes) != want || len(writes) != 4 || string(writes[3].Value) != `{"policies":1,"rules":1}` {
		t.Errorf("%v, %v, %v", outcomes, writes, err)
	}
	edit.Source = ""
	if _, outcomes, err := PlanEdit(k, edit, policies, namespaces, PolicyTotals{3, 2}); err != nil || strings.Contains(fmt.Sprint(outcomes), "unchanged") {
		t.Errorf("an operator: %v, %v", outcomes, err)
	}
	for _, source := range []string{"A", "a b", strings.Repeat("a", 41)} {
		own.Source = source
		if _, err := EncodePolicy(own); err == nil {
			t.Errorf("source %q is taken", source)
		}
	}
}

// TestRoomToClose: where the network has all the policies that it may have, and all the rules,
// subjects can still be held closed.
func TestRoomToClose(t *testing.T) {
	k := KeysOf(1)
	full := PolicyTotals{Policies: policy.MaxPolicies, Rules: policy.MaxTotalRules}
	one := func(rules int) PolicyEdit { return PolicyEdit{Put: []*policy.Policy{testPolicy("c", rules)}} }
	var limit *PolicyLimitError
	if _, _, err := PlanEdit(k, one(1), nil, nil, PolicyTotals{Policies: policy.MaxPolicies}); !errors.As(err, &limit) {
		t.Errorf("one policy too many: %v", err)
	}
	if _, _, err := PlanEdit(k, one(0), nil, nil, full); err != nil {
		t.Errorf("one without rules: %v", err)
	}
	full.Policies += policy.ClosingRoom
	if _, _, err := PlanEdit(k, one(0), nil, nil, full); !errors.As(err, &limit) {
		t.Errorf("one without rules too many: %v", err)
	}
}
