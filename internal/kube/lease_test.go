package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"heddle.dev/heddle/internal/testutil"
)

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
