package etcd

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

func testPolicies(n, rules int) (out []*policy.Policy) {
	for i := range n {
		p := &policy.Policy{Name: fmt.Sprintf("ns/p%d", i), Ingress: &policy.Direction{Default: policy.DefaultDeny}}
		for j := range rules {
			p.Ingress.Rules = append(p.Ingress.Rules, policy.Rule{Name: fmt.Sprint(j), Action: policy.Allow})
		}
		out = append(out, p)
	}
	return out
}

// TestEditPolicies: an edit of more documents than etcd takes operations in a transaction arrives
// in one step; doing it again changes nothing; one that fails leaves everything as it was.
func TestEditPolicies(t *testing.T) {
	t.Parallel()
	a := embedded(t, EmbeddedConfig{})
	b := connect(t, a)
	if _, err := a.EditPolicies(t.Context(), store.PolicyEdit{Put: testPolicies(1, 1)}); !errors.Is(err, store.ErrNoNetwork) {
		t.Errorf("before there is a network: %v", err)
	}
	initNetwork(t, a, store.Network{})
	states := watch(t, b)
	before := (<-states).Revision
	const many = 300
	edit := store.PolicyEdit{Put: testPolicies(many, 3), PutNamespaces: []policy.Namespace{{Name: "ns", Labels: map[string]string{"a": "b"}}}}
	outcomes, err := a.EditPolicies(t.Context(), edit)
	if err != nil || len(outcomes) != many+1 || outcomes[0].Change != "created" {
		t.Fatalf("%d outcomes, %v", len(outcomes), err)
	}
	s := await(t, states, "policies", func(s store.State) bool { return len(s.Policies) > 0 })
	if len(s.Policies) != many || len(s.Namespaces) != 1 || s.Revision != before+1 {
		t.Errorf("%d policies, %d namespaces at revision %d after %d: not in one step", len(s.Policies), len(s.Namespaces), s.Revision, before)
	}
	if outcomes, err = b.EditPolicies(t.Context(), edit); err != nil || outcomes[many/2].Change != "unchanged" {
		t.Errorf("again: %+v, %v", outcomes[many/2], err)
	}
	var unknown *store.UnknownPolicyError
	if _, err = b.EditPolicies(t.Context(), store.PolicyEdit{Put: testPolicies(1, 9), Delete: []string{"ns/p1", "no"}}); !errors.As(err, &unknown) || unknown.Name != "no" {
		t.Errorf("deleting what is not there: %v", err)
	}
	var limit *store.PolicyLimitError
	if _, err = b.EditPolicies(t.Context(), store.PolicyEdit{Put: testPolicies(10, 9000)}); !errors.As(err, &limit) {
		t.Errorf("more than etcd takes: %v", err)
	}
	if _, err = b.EditPolicies(t.Context(), store.PolicyEdit{Delete: []string{"ns/p1"}, DeleteNamespaces: []string{"ns"}}); err != nil {
		t.Fatal(err)
	}
	s = await(t, states, "one policy less", func(s store.State) bool { return len(s.Policies) == many-1 })
	if len(s.Namespaces) != 0 || s.Revision != before+2 || s.Policies[0].RuleCount() != 3 {
		t.Errorf("revision %d after %d, %d namespaces, %d rules", s.Revision, before, len(s.Namespaces), s.Policies[0].RuleCount())
	}
	// As much as is promised passes etcd's limit of a request.
	big := testPolicies(2, 10000)
	big = append(big, testPolicies(1, 1)[0])
	big[2].Name = "small"
	if _, err := a.EditPolicies(t.Context(), store.PolicyEdit{Put: big}); err != nil {
		t.Errorf("%v", err)
	}
}

// TestEditPoliciesCounts: the size of all policies is kept whatever edits there are, of few
// documents and of many, and counted anew if it is lost or spoilt.
func TestEditPoliciesCounts(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	totals := func() (string, int) {
		got, err := s.get(t.Context(), s.keys.PolicyTotals())
		if err != nil {
			t.Fatal(err)
		}
		all, err := s.get(t.Context(), s.keys.Policies(), clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		counted := store.CountPolicies(byName(s.keys.Policies(), all.Kvs))
		if len(got.Kvs) == 0 {
			t.Fatal("no totals")
		}
		if have, err := store.ParsePolicyTotals(got.Kvs[0].Value); err != nil || have != counted {
			t.Errorf("totals %s, want %+v (%v)", got.Kvs[0].Value, counted, err)
		}
		return string(got.Kvs[0].Value), counted.Rules
	}
	edit := func(e store.PolicyEdit) {
		t.Helper()
		if _, err := s.EditPolicies(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		totals()
	}
	edit(store.PolicyEdit{Put: testPolicies(3, 2)})
	edit(store.PolicyEdit{Put: testPolicies(2, 5)})
	edit(store.PolicyEdit{Put: testPolicies(mostNamed+50, 3)})
	edit(store.PolicyEdit{Put: testPolicies(mostNamed+50, 3)[7:8], Delete: []string{"ns/p3", "ns/p4"}})
	for _, spoilt := range []clientv3.Op{clientv3.OpDelete(s.keys.PolicyTotals()), clientv3.OpPut(s.keys.PolicyTotals(), "x"), clientv3.OpPut(s.keys.PolicyTotals(), `{"policies":-1}`)} {
		if _, err := s.client.Do(t.Context(), spoilt); err != nil {
			t.Fatal(err)
		}
		edit(store.PolicyEdit{Put: testPolicies(1, 1)})
		edit(store.PolicyEdit{Put: testPolicies(1, 4)})
	}
	// Edits that know nothing of each other.
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			p := testPolicies(1, 1+i)[0]
			p.Name = fmt.Sprint("own", i)
			if _, err := s.EditPolicies(t.Context(), store.PolicyEdit{Put: []*policy.Policy{p}}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if text, rules := totals(); rules != (mostNamed+48)*3+1+36 {
		t.Errorf("%s; %d rules are there", text, rules)
	}
}
