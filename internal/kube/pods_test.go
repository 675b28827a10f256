package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/podlabels"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/testutil"
)

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
