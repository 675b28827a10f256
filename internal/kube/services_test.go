package kube

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// serviceNode is an agent that keeps services.
type serviceNode struct {
	mu       sync.Mutex
	down     bool
	services map[model.ServiceAddr]model.Service
	edits    []api.ServiceEdit
}

func (n *serviceNode) Services(context.Context) (out []model.Service, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errDown
	}
	for _, s := range n.services {
		s.Backends = slices.Clone(s.Backends)
		slices.Reverse(s.Backends) // their order means nothing
		out = append(out, s)
	}
	return out, nil
}

func (n *serviceNode) EditServices(_ context.Context, e api.ServiceEdit) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return errDown
	}
	if err := e.Validate(); err != nil {
		return err
	}
	n.edits = append(n.edits, e)
	for _, a := range e.Delete {
		delete(n.services, a)
	}
	for _, s := range e.Put {
		n.services[s.Addr] = s
	}
	return nil
}

func (n *serviceNode) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

// has says whether the node has these services: "ADDR BACKEND... [affinity]". Those of UDP do not
// count if none is named.
func (n *serviceNode) has(want ...string) func() error {
	return func() error {
		n.mu.Lock()
		defer n.mu.Unlock()
		var have []string
		udp := slices.ContainsFunc(want, func(s string) bool { return strings.Contains(s, "/udp") })
		for _, s := range n.services {
			if s.Addr.UDP && !udp {
				continue
			}
			line := s.Addr.String()
			for _, b := range s.Backends {
				line += " " + b.String()
			}
			if s.Affinity > 0 {
				line += fmt.Sprint(" ", s.Affinity)
			}
			have = append(have, line)
		}
		slices.Sort(have)
		slices.Sort(want)
		if !slices.Equal(have, want) {
			return fmt.Errorf("the node has %q, want %q", have, want)
		}
		return nil
	}
}

func startServices(t *testing.T, s *apiServer, n *serviceNode) (stop func()) {
	t.Helper()
	c, err := connect(s.config())
	if err != nil {
		t.Fatal(err)
	}
	m, log := newMetrics(), testLog(t)
	all := newServices(c, "n1", n, newObjects(c.core, "n1", m, log), m, log)
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { all.services.RunWithContext(ctx) })
	wait.Go(func() { all.slices.RunWithContext(ctx) })
	wait.Go(func() { all.run(ctx) })
	stop = func() {
		cancel()
		wait.Wait()
	}
	t.Cleanup(stop)
	return stop
}

func ptr[T any](v T) *T { return &v }

func service(name string, ips ...string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: corev1.ServiceSpec{ClusterIPs: ips, Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}, {Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}}}}
}

// slice makes an EndpointSlice of a Service; each endpoint is ADDRESS, and what else is so:
// "10.1.0.1 ending", "10.1.0.1 unready", "10.1.0.1 n2" for its node.
func slice(name, of string, port int32, endpoints ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: of}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr(int32(53))}, {Name: ptr("http"), Protocol: ptr(corev1.ProtocolTCP), Port: &port}}}
	for _, text := range endpoints {
		address, is, _ := strings.Cut(text, " ")
		e := discoveryv1.Endpoint{Addresses: []string{address}, NodeName: ptr("n1"), Conditions: discoveryv1.EndpointConditions{Ready: ptr(true)}}
		switch is {
		case "n2":
			e.NodeName = &is
		case "unready":
			e.Conditions = discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(false)}
		case "ending":
			e.Conditions = discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(true), Terminating: ptr(true)}
		}
		if strings.Contains(address, ":") {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func TestServicesFollow(t *testing.T) {
	s, n := newAPIServer(t), &serviceNode{services: map[model.ServiceAddr]model.Service{}}
	stale := model.ServiceAddr{AddrPort: netip.MustParseAddrPort("10.96.9.9:1"), UDP: true}
	n.services[stale] = model.Service{Addr: stale}
	s.put("services", service("web", "10.96.0.1", "fd00::1"))
	s.put("services", service("headless", "None"))
	s.put("endpointslices", slice("web-1", "web", 8080, "10.1.0.1", "10.1.0.2 unready", "10.1.0.3 ending"))
	s.put("endpointslices", slice("web-6", "web", 8080, "fd00:1::1"))
	stop := startServices(t, s, n)
	testutil.EventuallyNil(t, "all, and nothing stale", n.has("10.96.0.1:80 10.1.0.1:8080", "[fd00::1]:80 [fd00:1::1]:8080",
		"10.96.0.1:53/udp 10.1.0.1:53", "[fd00::1]:53/udp [fd00:1::1]:53"))

	s.put("endpointslices", slice("web-2", "web", 8080, "10.1.0.9", "10.1.0.1"))
	testutil.EventuallyNil(t, "a second slice", n.has("10.96.0.1:80 10.1.0.1:8080 10.1.0.9:8080", "[fd00::1]:80 [fd00:1::1]:8080"))
	s.delete("endpointslices", "shop/web-2")
	s.delete("endpointslices", "shop/web-6")
	s.put("endpointslices", slice("web-1", "web", 8081, "10.1.0.2 unready", "10.1.0.3 ending"))
	testutil.EventuallyNil(t, "none is ready: those that end and serve", n.has("10.96.0.1:80 10.1.0.3:8081", "[fd00::1]:80"))

	local := service("web", "10.96.0.1")
	local.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	local.Spec.InternalTrafficPolicy = ptr(corev1.ServiceInternalTrafficPolicyLocal)
	s.put("services", local)
	s.put("endpointslices", slice("web-1", "web", 8080, "10.1.0.1", "10.2.0.1 n2"))
	testutil.EventuallyNil(t, "those of the node, with affinity", n.has("10.96.0.1:80 10.1.0.1:8080 10800", "10.96.0.1:53/udp 10.1.0.1:53"))
	local.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr(int32(7))}}
	s.put("services", local)
	testutil.EventuallyNil(t, "affinity's time", n.has("10.96.0.1:80 10.1.0.1:8080 7"))

	// While the agent is away; then a new heddle-kube, which has nothing to change.
	n.set(func() { n.down = true })
	s.put("services", service("other", "10.96.0.2"))
	s.delete("services", "shop/web")
	n.set(func() { n.down = false })
	s.put("services", service("last", "10.96.0.3"))
	testutil.EventuallyNil(t, "what changed meanwhile", n.has("10.96.0.2:80", "10.96.0.3:80"))
	stop()
	n.set(func() { n.edits = nil })
	startServices(t, s, n)
	s.put("endpointslices", slice("last-1", "last", 1, "10.1.0.7"))
	testutil.EventuallyNil(t, "the next one", n.has("10.96.0.2:80", "10.96.0.3:80 10.1.0.7:1"))
	if len(n.edits) != 1 || len(n.edits[0].Put) != 2 || len(n.edits[0].Delete) != 0 {
		t.Errorf("it changed %+v", n.edits)
	}
}

// A Service that cannot be is left to kube-proxy, and named; the others are not held up.
func TestRefusedService(t *testing.T) {
	s, n := newAPIServer(t), &serviceNode{services: map[model.ServiceAddr]model.Service{}}
	s.put("services", service("bad", "10.96.0.1"))
	s.put("endpointslices", slice("bad-1", "bad", 80, "127.0.0.1"))
	s.put("services", service("good", "10.96.0.2"))
	startServices(t, s, n)
	testutil.EventuallyNil(t, "the other", n.has("10.96.0.2:80"))
	testutil.EventuallyNil(t, "event", func() error {
		for _, e := range s.events() {
			if e.InvolvedObject.Kind == "Service" && e.InvolvedObject.Name == "bad" && strings.Contains(e.Message, "loopback") {
				return nil
			}
		}
		return errors.New("none")
	})
}
