package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/testutil"
)

// waitTimeout bounds every wait for something that takes milliseconds on an idle machine.
const waitTimeout = 30 * time.Second

func decodeLease(r io.Reader) (*coordinationv1.Lease, error) {
	var l coordinationv1.Lease
	return &l, json.NewDecoder(r).Decode(&l)
}

// agent is an agent that keeps what it is told.
type agent struct {
	mu         sync.Mutex
	down       bool
	turnedAway int // edits that came while it was down
	policies   map[string]*policy.Policy
	namespaces map[string]policy.Namespace
	edits      []api.PolicyEdit
	tooMuch    string // a policy of this name is more than the store takes, unless it has no rules
	never      string // one of this name whatever it has
	endpoints  map[string]model.Endpoint
	asked      map[string]int // questions, by name
}

func newAgent() *agent {
	return &agent{policies: map[string]*policy.Policy{}, namespaces: map[string]policy.Namespace{}, endpoints: map[string]model.Endpoint{}, asked: map[string]int{}}
}

var errDown = errors.New("the agent is away")

func (a *agent) Policies(context.Context) (docs api.PolicyDocuments, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.down {
		return docs, errDown
	}
	docs.Policies, docs.Namespaces = slices.Collect(maps.Values(a.policies)), slices.Collect(maps.Values(a.namespaces))
	return docs, nil
}

func (a *agent) EditPolicies(_ context.Context, e api.PolicyEdit) (out []api.PolicyOutcome, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.down {
		a.turnedAway++
		return nil, errDown
	}
	if err := e.Validate(); err != nil {
		return nil, err
	}
	for _, p := range e.Policies {
		if p.Name == a.tooMuch && p.RuleCount() > 0 || p.Name == a.never {
			return nil, &api.Error{Code: api.CodeExhausted, Message: "too much"}
		}
	}
	for _, name := range e.Delete {
		if a.policies[name] == nil {
			return nil, &api.Error{Code: api.CodeNotFound, Message: name}
		}
	}
	for _, name := range e.DeleteNamespaces {
		if _, there := a.namespaces[name]; !there {
			return nil, &api.Error{Code: api.CodeNotFound, Message: name}
		}
	}
	a.edits = append(a.edits, e)
	for _, p := range e.Policies {
		a.policies[p.Name] = p
	}
	for _, n := range e.Namespaces {
		a.namespaces[n.Name] = n
	}
	for _, name := range e.Delete {
		if a.policies[name].Source == e.Source {
			delete(a.policies, name)
		}
	}
	for _, name := range e.DeleteNamespaces {
		if a.namespaces[name].Source == e.Source {
			delete(a.namespaces, name)
		}
	}
	return out, nil
}

func (a *agent) Status(context.Context) (st api.Status, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked["status"]++
	if a.down {
		return st, errDown
	}
	st.Store.Healthy = true
	return st, nil
}

func (a *agent) Endpoints(context.Context) ([]model.Endpoint, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked["endpoints"]++
	if a.down {
		return nil, errDown
	}
	return slices.Collect(maps.Values(a.endpoints)), nil
}

func (a *agent) LabelEndpoint(_ context.Context, name string, req api.LabelRequest) (e model.Endpoint, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.down {
		return e, errDown
	}
	if err := req.Validate(); err != nil {
		return e, err
	}
	e, there := a.endpoints[name]
	if !there {
		return e, api.ErrNotFound
	}
	e.Labels = maps.Clone(e.Labels)
	maps.Copy(e.Labels, req.Set)
	for _, k := range req.Remove {
		delete(e.Labels, k)
	}
	a.endpoints[name] = e
	return e, nil
}

func (a *agent) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// has says whether the store has exactly these documents: policies by name, namespaces as
// name{labels}.
func (a *agent) has(want ...string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	have := slices.Collect(maps.Keys(a.policies))
	for _, n := range a.namespaces {
		have = append(have, fmt.Sprintf("%s%v", n.Name, n.Labels))
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		return fmt.Errorf("the store has %v, want %v", have, want)
	}
	return nil
}

func testLog(t *testing.T) *slog.Logger {
	w := &logWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.t = nil
	})
	return slog.New(slog.NewTextHandler(w, nil))
}

// logWriter logs to a test as long as it runs.
type logWriter struct {
	mu sync.Mutex
	t  *testing.T
}

func (w *logWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(strings.TrimSuffix(string(p), "\n"))
	}
	return len(p), nil
}

func namespace(name string, labels map[string]string) *corev1.Namespace {
	all := map[string]string{policy.NamespaceNameLabel: name}
	maps.Copy(all, labels)
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: all}}
}

// leading starts what a leader does, until the test ends or stop is called.
func leading(t *testing.T, s *apiServer, a *agent) (p *policies, stop func()) {
	t.Helper()
	c, err := connect(s.config())
	if err != nil {
		t.Fatal(err)
	}
	m, log := newMetrics(), testLog(t)
	p = newPolicies(c, a, newObjects(c.core, "n1", m, log), m, log)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { p.namespaces.RunWithContext(ctx) })
	all.Go(func() { p.networkPolicies.RunWithContext(ctx) })
	all.Go(func() { p.lead(ctx) })
	stop = func() {
		cancel()
		all.Wait()
	}
	t.Cleanup(stop)
	return p, stop
}

func TestPoliciesFollow(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	s.put("namespaces", namespace("shop", map[string]string{"tier": "a"}))
	s.put("networkpolicies", networkPolicy(t, "web", `{"podSelector":{}}`))
	// What is there from before: of Kubernetes, and applied by hand, of which one has the name of a
	// NetworkPolicy.
	for name, source := range map[string]string{"shop/old": policy.SourceKubernetes, "mine": "", "shop/hand": "", "shop/web": "", "other/theirs": "another"} {
		a.policies[name] = &policy.Policy{Name: name, Source: source}
	}
	a.namespaces["gone"] = policy.Namespace{Name: "gone", Source: policy.SourceKubernetes}
	a.namespaces["lab"] = policy.Namespace{Name: "lab"}
	hands := []string{"mine", "shop/hand", "other/theirs", "labmap[]"}
	has := func(want ...string) error { return a.has(append(want, hands...)...) }
	leading(t, s, a)
	testutil.EventuallyNil(t, "all of the API server, and nothing that went", func() error { return has("shop/web", "shopmap[tier:a]") })
	testutil.EventuallyNil(t, "the API server's in the place of one by hand", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if p := a.policies["shop/web"]; p.Source != policy.SourceKubernetes || p.Ingress == nil || a.namespaces["shop"].Source != policy.SourceKubernetes {
			return fmt.Errorf("policy %+v, namespace %+v", p, a.namespaces["shop"])
		}
		return nil
	})

	s.put("namespaces", namespace("shop", map[string]string{"tier": "b"}))
	s.put("networkpolicies", networkPolicy(t, "db", `{"podSelector":{"matchLabels":{"app":"db"}}}`))
	testutil.EventuallyNil(t, "changes", func() error { return has("shop/web", "shop/db", "shopmap[tier:b]") })
	s.put("networkpolicies", networkPolicy(t, "db", `{"podSelector":{"matchLabels":{"app":"db2"}}}`))
	testutil.EventuallyNil(t, "changed policy", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if got := a.policies["shop/db"].Subject.Labels["app"]; got != "db2" {
			return fmt.Errorf("selects app=%s", got)
		}
		return nil
	})
	before := 0
	a.set(func() { before = len(a.edits) })
	s.delete("networkpolicies", "shop/db")
	s.delete("namespaces", "/shop")
	testutil.EventuallyNil(t, "deletions", func() error { return has("shop/web") })
	// Somebody applies one by hand under the name of a NetworkPolicy that is then deleted.
	a.set(func() { a.policies["shop/web"] = &policy.Policy{Name: "shop/web"} })
	s.delete("networkpolicies", "shop/web")
	s.put("networkpolicies", networkPolicy(t, "last", `{"podSelector":{}}`))
	testutil.EventuallyNil(t, "a deletion of what somebody else keeps now", func() error { return has("shop/web", "shop/last") })
	a.mu.Lock()
	defer a.mu.Unlock()
	if !slices.ContainsFunc(a.edits, func(e api.PolicyEdit) bool { return slices.Contains(e.Delete, "shop/web") }) {
		t.Error("the deletion was not tried")
	}
	// Each change was written, and nothing else: not all policies at every one.
	for _, e := range a.edits[before : len(a.edits)-1] {
		if len(e.Policies)+len(e.Namespaces) > 0 {
			t.Errorf("a deletion also wrote %+v", e)
		}
	}
}

// While the API server is away nothing changes, and what went meanwhile goes once it is back,
// whether the watch goes on or everything is listed anew.
func TestAPIServerAway(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	for _, name := range []string{"a", "b", "c"} {
		s.put("networkpolicies", networkPolicy(t, name, `{"podSelector":{}}`))
	}
	leading(t, s, a)
	testutil.EventuallyNil(t, "all", func() error { return a.has("shop/a", "shop/b", "shop/c") })
	lists := s.listed("networkpolicies")
	s.setAway(true)
	s.delete("networkpolicies", "shop/b")
	s.put("networkpolicies", networkPolicy(t, "d", `{"podSelector":{}}`))
	s.forget() // no watch can go on where it was
	if err := a.has("shop/a", "shop/b", "shop/c"); err != nil {
		t.Error(err)
	}
	s.setAway(false)
	testutil.EventuallyNil(t, "what changed meanwhile", func() error { return a.has("shop/a", "shop/c", "shop/d") })
	if got := s.listed("networkpolicies"); got == lists {
		t.Errorf("listed %d times before and after: the test shows nothing", got)
	}
}

func TestAgentAway(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	s.put("networkpolicies", networkPolicy(t, "a", `{"podSelector":{}}`))
	_, stop := leading(t, s, a)
	testutil.EventuallyNil(t, "all", func() error { return a.has("shop/a") })
	a.set(func() { a.down = true })
	s.put("networkpolicies", networkPolicy(t, "b", `{"podSelector":{}}`))
	s.delete("networkpolicies", "shop/a")
	testutil.EventuallyNil(t, "a try that fails", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.turnedAway == 0 {
			return errors.New("none")
		}
		return nil
	})
	stranger := &policy.Policy{Name: "shop/stranger", Source: policy.SourceKubernetes}
	a.set(func() { a.policies["shop/stranger"] = stranger })
	a.set(func() { a.down = false })
	s.put("networkpolicies", networkPolicy(t, "c", `{"podSelector":{}}`))
	testutil.EventuallyNil(t, "what changed meanwhile", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.policies["shop/a"] != nil || a.policies["shop/b"] == nil || a.policies["shop/c"] == nil {
			return fmt.Errorf("the store has %v", slices.Collect(maps.Keys(a.policies)))
		}
		return nil
	})
	// The next one finds nothing to change but what others wrote.
	stop()
	a.set(func() { a.edits = nil; a.policies["shop/stranger"] = stranger })
	leading(t, s, a)
	testutil.EventuallyNil(t, "the next leader's comparison", func() error { return a.has("shop/b", "shop/c") })
	if n := len(a.edits); n != 1 || len(a.edits[0].Policies) != 0 || !slices.Equal(a.edits[0].Delete, []string{"shop/stranger"}) {
		t.Errorf("it changed %+v", a.edits)
	}
}

// Objects that cannot be honoured have an Event each, and do not hold up others.
func TestRefusedObjects(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	a.tooMuch, a.never = "shop/much", "shop/never"
	s.put("networkpolicies", networkPolicy(t, "sctp", `{"podSelector":{},"ingress":[{"ports":[{"protocol":"SCTP","port":80}]}]}`))
	s.put("networkpolicies", networkPolicy(t, "much", `{"podSelector":{"matchLabels":{"app":"db"}},"ingress":[{}],"policyTypes":["Ingress","Egress"]}`))
	s.put("networkpolicies", networkPolicy(t, "never", `{"podSelector":{}}`))
	s.put("networkpolicies", networkPolicy(t, "good", `{"podSelector":{}}`))
	many := map[string]string{}
	for i := range policy.MaxPerSelector + 1 {
		many[fmt.Sprint("k", i)] = "v"
	}
	s.put("namespaces", namespace("many", many))
	p, _ := leading(t, s, a)
	testutil.EventuallyNil(t, "the others", func() error { return a.has("shop/sctp", "shop/good", "shop/much") })
	// What the store does not take is held closed, in both directions and also to the own node.
	a.set(func() {
		deny := &policy.Direction{Default: policy.DefaultDeny}
		want := &policy.Policy{Name: "shop/much", Source: policy.SourceKubernetes, Ingress: deny, Egress: deny, Subject: policy.Subject{Selector: policy.Selector{
			Requirements: policy.Requirements{Labels: map[string]string{"app": "db"}}, Namespace: &policy.NamespaceSelector{Name: "shop"}}}}
		if got := a.policies["shop/much"]; asJSON(got) != asJSON(want) {
			t.Errorf("too much for the store:\n%s\nwant\n%s", asJSON(got), asJSON(want))
		}
	})
	testutil.EventuallyNil(t, "events", func() error {
		got := map[string]string{}
		for _, e := range s.events() {
			if e.Reason != "NotSupported" || e.Type != corev1.EventTypeWarning || e.InvolvedObject.UID == "" {
				t.Errorf("event %+v", e)
			}
			got[e.InvolvedObject.Kind+" "+e.InvolvedObject.Name] += e.Message
		}
		for what, word := range map[string]string{"NetworkPolicy sctp": "SCTP", "NetworkPolicy much": "too much: its rules are left out and its subject is held closed",
			"NetworkPolicy never": "NOT in force", "Namespace many": "labels"} {
			if !strings.Contains(got[what], word) {
				return fmt.Errorf("%s: %q does not say %s", what, got[what], word)
			}
		}
		if len(got) != 4 {
			t.Errorf("events of %v", got)
		}
		return nil
	})
	// Comparing again says and writes nothing new.
	edits, told := 0, len(s.events())
	a.set(func() { edits = len(a.edits) })
	p.dirty.all()
	s.put("networkpolicies", networkPolicy(t, "seen", `{"podSelector":{}}`))
	testutil.EventuallyNil(t, "another comparison", func() error { return a.has("shop/sctp", "shop/good", "shop/much", "shop/seen") })
	if now := len(s.events()); now != told {
		t.Errorf("%d events, were %d", now, told)
	}
	a.set(func() {
		for _, e := range a.edits[edits:] {
			if len(e.Policies) != 1 || e.Policies[0].Name != "shop/seen" {
				t.Errorf("written again: %s", asJSON(e))
			}
		}
	})
	// Repaired: it is told of no more, and the metric falls.
	s.put("networkpolicies", networkPolicy(t, "sctp", `{"podSelector":{},"ingress":[{"ports":[{"port":80}]}]}`))
	s.delete("networkpolicies", "shop/much")
	s.delete("networkpolicies", "shop/never")
	testutil.EventuallyNil(t, "metric of refused objects", refused(t, p.m, "NetworkPolicy", 0))
}

// value gives a metric's value: that with this label, if it has one.
func value(t *testing.T, m *metrics, name, label string) float64 {
	t.Helper()
	all, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		for _, v := range f.Metric {
			if f.GetName() == name && (label == "" || v.Label[0].GetValue() == label) {
				return v.GetGauge().GetValue() + v.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// refused says whether so many objects of a kind are not honoured, by the metric.
func refused(t *testing.T, m *metrics, kind string, want float64) func() error {
	return func() error {
		if got := value(t, m, "heddle_kube_refused", kind); got != want {
			return fmt.Errorf("%v objects of kind %s are refused, want %v", got, kind, want)
		}
		return nil
	}
}
