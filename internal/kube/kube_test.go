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
	"k8s.io/apimachinery/pkg/types"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/podlabels"
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

func pod(name, uid string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(uid), Labels: labels}, Spec: corev1.PodSpec{NodeName: "n1"}}
}

func startPods(t *testing.T, s *apiServer, a *agent) *pods {
	t.Helper()
	c, err := connect(s.config())
	if err != nil {
		t.Fatal(err)
	}
	m, log := newMetrics(), testLog(t)
	p := newPods(c, "n1", a, newObjects(c.core, "n1", m, log), m, log)
	p.again = 10 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { p.informer.RunWithContext(ctx) })
	all.Go(func() { p.run(ctx) })
	t.Cleanup(func() {
		cancel()
		all.Wait()
	})
	return p
}

func TestPodLabels(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	// The pod's author would like to be of another namespace.
	s.put("pods", pod("web-1", "u1", map[string]string{"app": "web", policy.NamespaceLabel: "kube-system", "io.heddle.other": "x"}))
	p := startPods(t, s, a)
	labels, err := p.lookup(t.Context(), podlabels.Question{Namespace: "shop", Name: "web-1", UID: "u1"})
	want := map[string]string{"app": "web", policy.NamespaceLabel: "shop", podlabels.Pod: "web-1", podlabels.UID: "u1"}
	if err != nil || !maps.Equal(labels, want) {
		t.Fatalf("labels %v, %v; want %v", labels, err, want)
	}
	a.set(func() {
		a.endpoints["n/c1/eth0"] = model.Endpoint{Name: "n/c1/eth0", Labels: labels}
		a.endpoints["n/c2/eth0"] = model.Endpoint{Name: "n/c2/eth0", Labels: map[string]string{"app": "other", policy.NamespaceLabel: "shop", podlabels.Pod: "web-1"}}
		a.endpoints["n/c3/eth0"] = model.Endpoint{Name: "n/c3/eth0", Labels: map[string]string{"app": "was", policy.NamespaceLabel: "shop", podlabels.Pod: "web-1", podlabels.UID: "u0"}}
	})
	s.put("pods", pod("web-1", "u1", map[string]string{"tier": "front"}))
	testutil.EventuallyNil(t, "changed labels", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if got := a.endpoints["n/c1/eth0"].Labels; got["tier"] != "front" || got["app"] != "" || got[policy.NamespaceLabel] != "shop" {
			return fmt.Errorf("labels %v", got)
		}
		return nil
	})
	if a.endpoints["n/c2/eth0"].Labels["app"] != "other" || a.endpoints["n/c3/eth0"].Labels["app"] != "was" {
		t.Error("endpoints of no pod, or of an earlier one of the name, were changed")
	}
	// Changes that were missed are found by the first comparison.
	a.set(func() { a.endpoints["n/c1/eth0"] = model.Endpoint{Name: "n/c1/eth0", Labels: labels} })
	startPods(t, s, a)
	testutil.EventuallyNil(t, "labels after a restart", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if got := a.endpoints["n/c1/eth0"].Labels; got["tier"] != "front" || got["app"] != "" {
			return fmt.Errorf("labels %v", got)
		}
		return nil
	})
}

// TestLabelsWhileAnEndpointIsMade: a change of labels after heddle-cni has asked for them reaches the
// endpoint, however long it takes to be made; then nobody looks for it any more.
func TestLabelsWhileAnEndpointIsMade(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	s.put("pods", pod("web-1", "u1", map[string]string{"tier": "a"}))
	p := startPods(t, s, a)
	labels, err := p.lookup(t.Context(), podlabels.Question{Namespace: "shop", Name: "web-1", UID: "u1"})
	if err != nil {
		t.Fatal(err)
	}
	s.put("pods", pod("web-1", "u1", map[string]string{"tier": "b"}))
	testutil.EventuallyNil(t, "the change, and looks after it", func() error {
		if got := p.get("shop", "web-1").Labels["tier"]; got != "b" {
			return fmt.Errorf("tier %s", got)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if n := a.asked["endpoints"]; n < 5 {
			return fmt.Errorf("looked %d times", n)
		}
		return nil
	})
	a.set(func() { a.endpoints["n/c1/eth0"] = model.Endpoint{Name: "n/c1/eth0", Labels: labels} })
	testutil.EventuallyNil(t, "the endpoint's labels", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if got := a.endpoints["n/c1/eth0"].Labels["tier"]; got != "b" {
			return fmt.Errorf("tier %s", got)
		}
		return nil
	})
	testutil.EventuallyNil(t, "no further looks", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.awaited) > 0 {
			return fmt.Errorf("%d are awaited", len(p.awaited))
		}
		return nil
	})
}

// TestDeletedIsRefusedNoMore: the metric of objects that cannot be honoured falls when they go.
func TestDeletedIsRefusedNoMore(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	many := map[string]string{}
	for i := range api.MaxLabels + 1 {
		many[fmt.Sprint("k", i)] = "v"
	}
	s.put("pods", pod("web-1", "u1", many))
	a.endpoints["n/c1/eth0"] = model.Endpoint{Name: "n/c1/eth0", Labels: map[string]string{policy.NamespaceLabel: "shop", podlabels.Pod: "web-1", podlabels.UID: "u1"}}
	p := startPods(t, s, a)
	s.put("services", service("bad", "10.96.0.1"))
	s.put("endpointslices", slice("bad-1", "bad", 80, "127.0.0.1"))
	c, err := connect(s.config())
	if err != nil {
		t.Fatal(err)
	}
	svc := newServices(c, "n1", &serviceNode{services: map[model.ServiceAddr]model.Service{}}, newObjects(c.core, "n1", p.m, p.log), p.m, p.log)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, f := range []func(context.Context){svc.services.RunWithContext, svc.slices.RunWithContext, svc.run} {
		all.Go(func() { f(ctx) })
	}
	t.Cleanup(func() {
		cancel()
		all.Wait()
	})
	testutil.EventuallyNil(t, "a pod that is refused", refused(t, p.m, "Pod", 1))
	testutil.EventuallyNil(t, "a Service that is refused", refused(t, p.m, "Service", 1))
	a.set(func() { clear(a.endpoints) }) // kubelet calls DEL before the pod goes
	s.delete("pods", "shop/web-1")
	s.delete("services", "shop/bad")
	testutil.EventuallyNil(t, "the pod is gone", refused(t, p.m, "Pod", 0))
	testutil.EventuallyNil(t, "the Service is gone", refused(t, p.m, "Service", 0))
	for _, o := range []*objects{p.objects, svc.objects} {
		o.mu.Lock()
		if len(o.told) > 0 {
			t.Errorf("told of what is gone: %v", o.told)
		}
		o.mu.Unlock()
	}
}

// A pod that the API server tells of late is waited for; one it does not tell of gets no labels.
func TestPodsThatAreNotThere(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	s.put("pods", pod("db-0", "old", nil))
	static := pod("static", "mirror", map[string]string{"app": "dns"})
	static.Annotations = map[string]string{configHash: "hash"}
	s.put("pods", static)
	p := startPods(t, s, a)
	answer := make(chan error, 1)
	go func() {
		labels, err := p.lookup(t.Context(), podlabels.Question{Namespace: "shop", Name: "db-0", UID: "new"})
		if err == nil && labels["app"] != "db" {
			err = fmt.Errorf("labels %v", labels)
		}
		answer <- err
	}()
	if labels, err := p.lookup(t.Context(), podlabels.Question{Namespace: "shop", Name: "static", UID: "hash"}); err != nil || labels["app"] != "dns" {
		t.Errorf("static pod: %v, %v", labels, err)
	}
	s.put("pods", pod("db-0", "new", map[string]string{"app": "db"}))
	select {
	case err := <-answer:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(waitTimeout):
		t.Error("the pod's coming is not seen")
	}
	s.setAway(true)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if labels, err := p.lookup(short, podlabels.Question{Namespace: "shop", Name: "nobody"}); !errors.Is(err, podlabels.ErrUnknown) {
		t.Errorf("a pod nobody told of has labels %v, %v", labels, err)
	}
	if _, err := p.lookup(t.Context(), podlabels.Question{Namespace: "shop", Name: "db-0", UID: "new"}); err != nil {
		t.Errorf("a known pod while the API server is away: %v", err)
	}
}

// One at a time leads; the next one does when it ends, and when it dies.
func TestLease(t *testing.T) {
	s := newAPIServer(t)
	c, err := connect(s.config())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	leads := map[string]bool{}
	run := func(ctx context.Context, name string) (ended chan struct{}) {
		l := &lease{client: c.coordination, namespace: "kube-system", name: "heddle-kube", identity: name, duration: 3 * time.Second, log: testLog(t)}
		ended = make(chan struct{})
		go func() {
			defer close(ended)
			l.run(ctx, func(ctx context.Context) {
				mu.Lock()
				leads[name] = true
				if len(leads) > 1 {
					t.Errorf("%v lead at a time", leads)
				}
				mu.Unlock()
				<-ctx.Done()
				mu.Lock()
				delete(leads, name)
				mu.Unlock()
			})
		}()
		return ended
	}
	led := func(name string) func() error {
		return func() error {
			mu.Lock()
			defer mu.Unlock()
			if !leads[name] {
				return fmt.Errorf("%v leads", leads)
			}
			return nil
		}
	}
	first, endFirst := context.WithCancel(t.Context())
	ended := run(first, "a")
	testutil.EventuallyNil(t, "a leads", led("a"))
	second, endSecond := context.WithCancel(t.Context())
	endedSecond := run(second, "b")
	endFirst()
	<-ended
	testutil.EventuallyNil(t, "b leads once a has ended", led("b"))
	endSecond()
	<-endedSecond
	// A holder that says nothing any more: its record stays, and no clock of its is asked.
	dead, now := "dead", metav1.NewMicroTime(time.Now().Add(time.Hour))
	s.put("leases", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "heddle-kube"},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &dead, RenewTime: &now}})
	third, endThird := context.WithCancel(t.Context())
	endedThird := run(third, "c")
	testutil.EventuallyNil(t, "c leads once the dead one's lease has run out", led("c"))
	endThird()
	<-endedThird
}

// keeping starts a node's part in keeping the policies, until the test ends or stop is called.
func keeping(t *testing.T, s *apiServer, name string, a *agent) (m *metrics, stop func()) {
	t.Helper()
	c, err := connect(s.config())
	if err != nil {
		t.Fatal(err)
	}
	m = newMetrics()
	log := testLog(t).With("node", name)
	p := newPolicies(c, a, newObjects(c.core, name, m, log), m, log)
	l := newLease(c, Config{LeaseNamespace: "kube-system", LeaseDuration: time.Second, Log: log}, name, p, m)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, f := range []func(context.Context){p.namespaces.RunWithContext, p.networkPolicies.RunWithContext, func(ctx context.Context) { l.run(ctx, p.lead) }} {
		all.Go(func() { f(ctx) })
	}
	stop = func() {
		cancel()
		all.Wait()
	}
	t.Cleanup(stop)
	return m, stop
}

// TestLeaseOfABrokenAgent: who holds the lease and whose agent takes no policies leaves it to another
// node, and asks for it again when its agent answers.
func TestLeaseOfABrokenAgent(t *testing.T) {
	s, broken, other := newAPIServer(t), newAgent(), newAgent()
	s.put("networkpolicies", networkPolicy(t, "a", `{"podSelector":{}}`))
	m, _ := keeping(t, s, "n1", broken)
	testutil.EventuallyNil(t, "n1 keeps the policies", func() error { return broken.has("shop/a") })
	_, stop := keeping(t, s, "n2", other)
	broken.set(func() { broken.down = true })
	s.put("networkpolicies", networkPolicy(t, "b", `{"podSelector":{}}`))
	testutil.EventuallyNil(t, "n2 keeps them", func() error { return other.has("shop/a", "shop/b") })
	if n := value(t, m, "heddle_kube_lease_given_up_total", ""); n != 1 || value(t, m, "heddle_kube_leader", "") != 0 {
		t.Errorf("n1 has given up %v times, and leads: %v", n, value(t, m, "heddle_kube_leader", ""))
	}
	stop()
	before := 0
	broken.set(func() { before = broken.asked["status"] })
	testutil.EventuallyNil(t, "n1 asks its agent", func() error {
		broken.mu.Lock()
		defer broken.mu.Unlock()
		if broken.asked["status"] < before+2 {
			return errors.New("not yet")
		}
		return nil
	})
	if value(t, m, "heddle_kube_leader", "") != 0 || value(t, m, "heddle_kube_lease_given_up_total", "") != 1 {
		t.Error("n1 has the lease, and its agent does not answer")
	}
	broken.set(func() { broken.down = false })
	testutil.EventuallyNil(t, "n1 keeps them again", func() error { return broken.has("shop/a", "shop/b") })
}
