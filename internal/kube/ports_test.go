package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/testutil"
)

// podWith is a pod with a container for each of ports, such as "http=80" or "dns=53/UDP".
func podWith(namespace, name string, labels map[string]string, ports ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels, UID: "uid-of-a"}}
	for _, port := range ports {
		what, protocol, _ := strings.Cut(port, "/")
		portName, number, _ := strings.Cut(what, "=")
		c := corev1.ContainerPort{Name: portName, Protocol: corev1.Protocol(protocol)}
		if _, err := fmt.Sscan(number, &c.ContainerPort); err != nil {
			panic(err)
		}
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Ports: []corev1.ContainerPort{c}})
	}
	return p
}

func TestPortsOfPod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	pod := podWith("shop", "a", nil, "http=80", "http=81", "dns=53/UDP", "dns=5353", "s=1/SCTP", "=9")
	pod.Spec.InitContainers = []corev1.Container{
		{Ports: []corev1.ContainerPort{{Name: "gone", ContainerPort: 1}}},
		{Ports: []corev1.ContainerPort{{Name: "side", ContainerPort: 2}}, RestartPolicy: &always},
	}
	const want = "map[{TCP dns}:5353 {TCP http}:80 {TCP side}:2 {UDP dns}:53]"
	if got := fmt.Sprint(portsOf(pod)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	trimmed, err := trim(pod)
	if got := fmt.Sprint(portsOf(trimmed.(*corev1.Pod))); got != want || err != nil {
		t.Errorf("what is kept has %s, %v", got, err)
	}
	pod.Spec.HostNetwork = true
	if got := portsOf(pod); got != nil {
		t.Errorf("a pod without endpoint has %v", got)
	}
}

// A pod whose labels have no room for its ports has those that there is room for.
func TestPortsBeyondLabels(t *testing.T) {
	labels := make(map[string]string)
	for i := range api.MaxLabels - 4 {
		labels[fmt.Sprint("k", i)] = "v"
	}
	got, leftOut := labelsOf(podWith("shop", "a", labels, "b=2", "a=1"))
	if len(got) != api.MaxLabels || got["io.heddle.port.tcp/a"] != "1" || len(leftOut) != 1 || !strings.Contains(leftOut[0], `"b"`) {
		t.Errorf("%d labels, left out %q", len(got), leftOut)
	}
}

// cluster is a State with these pods' endpoints and the policies that NetworkPolicies lead to.
func clusterOf(t *testing.T, pods []*corev1.Pod, specs ...string) (s *policy.State, at map[string]netip.Addr, refused []string) {
	t.Helper()
	at = make(map[string]netip.Addr)
	ports := &podPorts{uses: make(map[numbered]int)}
	s = &policy.State{Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, Self: "n1"}
	var endpoints []model.Endpoint
	for i, pod := range pods {
		for n, number := range portsOf(pod) {
			ports.uses[numbered{pod.Namespace, n, number}]++
		}
		labels, _ := labelsOf(pod)
		at[pod.Name] = netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		endpoints = append(endpoints, model.Endpoint{Name: pod.Name, Node: "n1", ID: model.EndpointID(i + 1), Addrs: []netip.Addr{at[pod.Name]}, Labels: labels})
	}
	s.Endpoints = model.EndpointsOf(endpoints...)
	for i, spec := range specs {
		np := networkPolicy(t, fmt.Sprint("p", i), spec)
		whole, parts, why := byNumber(np, ports.numbers)
		p, more := convert(whole)
		refused = append(append(refused, why...), more...)
		s.Policies = append(s.Policies, p)
		for _, x := range parts {
			x.policy.Name = partPrefix("shop", np.Name) + x.suffix
			p, why := convertPart(x.policy)
			if refused = append(refused, why...); p != nil {
				s.Policies = append(s.Policies, p)
			}
		}
	}
	for _, p := range s.Policies {
		if err := p.Validate(); err != nil {
			t.Fatalf("%s: %v", p.Name, err)
		}
	}
	return s, at, refused
}

// What a named port means is decided by each pod that is connected to.
func TestNamedPorts(t *testing.T) {
	app := func(name string) map[string]string { return map[string]string{"app": name} }
	pods := []*corev1.Pod{
		podWith("shop", "old", app("web"), "http=80", "admin=9000"),
		podWith("shop", "new", app("web"), "http=8080", "http=8080/UDP"),
		podWith("shop", "bare", app("web")),
		podWith("shop", "client", app("client")),
		podWith("else", "far", app("web"), "http=8081"),
	}
	for _, c := range []struct {
		name, spec string
		allowed    []string // "FROM TO PORT" of those from client, bare and far to every pod
		refused    string
	}{
		{"ingress", `{"podSelector":{"matchLabels":{"app":"web"}},"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"client"}}}],"ports":[{"port":"http"}]}]}`,
			[]string{"client old 80", "client new 8080"}, ""},
		{"beside a number", `{"podSelector":{"matchLabels":{"app":"web"}},"ingress":[{"ports":[{"port":"http"},{"port":9000}]}]}`,
			[]string{"client old 80", "client new 8080", "client old 9000", "client new 9000", "client bare 9000",
				"far old 80", "far new 8080", "far old 9000", "far new 9000", "far bare 9000", "bare old 80", "bare new 8080", "bare old 9000", "bare new 9000"}, ""},
		{"nobody has it", `{"podSelector":{},"ingress":[{"ports":[{"port":"htpp"}]}]}`, nil, ""},
		{"of another protocol", `{"podSelector":{},"ingress":[{"ports":[{"port":"admin","protocol":"UDP"}]}]}`, nil, ""},
		{"egress", `{"podSelector":{"matchLabels":{"app":"client"}},"policyTypes":["Egress"],"egress":[{"to":[{"podSelector":{}}],"ports":[{"port":"http"}]}]}`,
			[]string{"client old 80", "client new 8080"}, ""},
		{"egress to whomever", `{"podSelector":{"matchLabels":{"app":"client"}},"policyTypes":["Egress"],"egress":[{"ports":[{"port":"http"}]}]}`,
			[]string{"client old 80", "client new 8080", "client far 8081"}, ""},
		{"egress to addresses", `{"podSelector":{"matchLabels":{"app":"client"}},"policyTypes":["Egress"],"egress":[{"to":[{"ipBlock":{"cidr":"10.0.0.0/16"}}],"ports":[{"port":"http"},{"port":80}]}]}`,
			[]string{"client old 80", "client new 80", "client bare 80", "client far 80", "client client 80"}, "10.0.0.0/16"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, at, refused := clusterOf(t, pods, c.spec)
			if c.refused == "" != (len(refused) == 0) || c.refused != "" && !strings.Contains(refused[0], c.refused) {
				t.Errorf("refused %q, want %q", refused, c.refused)
			}
			egress := strings.Contains(c.spec, "Egress")
			for _, from := range []string{"client", "bare", "far"} {
				for _, to := range pods {
					if from == to.Name || egress && from != "client" || !egress && to.Labels["app"] == "client" || !egress && to.Namespace == "else" {
						continue
					}
					for _, port := range []uint16{80, 8080, 8081, 9000} {
						what := fmt.Sprint(from, " ", to.Name, " ", port)
						verdict := policy.Decide(s, policy.Probe{From: at[from], To: at[to.Name], Protocol: model.ProtocolTCP, Port: port})
						if (verdict == model.VerdictAllow) != slices.Contains(c.allowed, what) {
							t.Errorf("%s: %v", what, verdict)
						}
					}
				}
			}
		})
	}
}

// A subject that has no room for one more label is no reason to speak of others.
func TestPartBeyondLabels(t *testing.T) {
	labels := make([]string, policy.MaxPerSelector)
	for i := range labels {
		labels[i] = fmt.Sprintf(`"k%d":"v"`, i)
	}
	spec := `{"podSelector":{"matchLabels":{` + strings.Join(labels, ",") + `}},"ingress":[{"ports":[{"port":"http"}]}]}`
	s, _, refused := clusterOf(t, []*corev1.Pod{podWith("shop", "a", nil, "http=80")}, spec)
	if len(s.Policies) != 1 || len(s.Policies[0].Subject.Labels) != policy.MaxPerSelector || !strings.Contains(strings.Join(refused, ""), "left out") {
		t.Errorf("%s, refused %q", asJSON(s.Policies), refused)
	}
}

func TestPartNames(t *testing.T) {
	namespace, longest := strings.Repeat("n", 63), namedPort{corev1.ProtocolTCP, strings.Repeat("p", 15)}
	np := networkPolicy(t, strings.Repeat("a.", 120)+"b", `{"podSelector":{}}`)
	name := namespace + "/" + partPrefix(namespace, np.Name) + partOf(np, longest, 65535).suffix
	if err := policy.ValidateName(name); err != nil {
		t.Error(err)
	}
}

// Numbers that come and go with pods change what is in the store, and nothing else does.
func TestNamedPortsFollow(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	s.put("networkpolicies", networkPolicy(t, "plain", `{"podSelector":{}}`))
	a.policies["shop/web..tcp-http-1"] = &policy.Policy{Name: "shop/web..tcp-http-1", Source: policy.SourceKubernetes}
	leading(t, s, a)
	testutil.EventuallyNil(t, "a policy without names", func() error { return a.has("shop/plain") })
	if n := s.listed("pods"); n != 0 {
		t.Errorf("pods listed %d times for policies that name no port", n)
	}
	s.put("pods", podWith("shop", "a", nil, "http=80"))
	s.put("networkpolicies", networkPolicy(t, "web", `{"podSelector":{},"ingress":[{"ports":[{"port":"http"}]}]}`))
	testutil.EventuallyNil(t, "the number of a pod from before", func() error { return a.has("shop/plain", "shop/web", "shop/web..tcp-http-80") })
	s.put("pods", podWith("shop", "b", nil, "http=8080"))
	testutil.EventuallyNil(t, "another number", func() error {
		return a.has("shop/plain", "shop/web", "shop/web..tcp-http-80", "shop/web..tcp-http-8080")
	})
	before := 0
	a.set(func() { before = len(a.edits) })
	s.put("pods", podWith("shop", "c", nil, "http=8080", "other=1"))
	s.delete("pods", "shop/a")
	testutil.EventuallyNil(t, "a number that nobody has any more", func() error { return a.has("shop/plain", "shop/web", "shop/web..tcp-http-8080") })
	a.mu.Lock()
	for _, e := range a.edits[before:] {
		if len(e.Policies) > 0 || !slices.Equal(e.Delete, []string{"shop/web..tcp-http-80"}) {
			t.Errorf("a pod that went led to %+v", e)
		}
	}
	a.mu.Unlock()
	s.delete("networkpolicies", "shop/web")
	testutil.EventuallyNil(t, "a policy that went", func() error { return a.has("shop/plain") })
}

// A part that the store does not take holds up nothing, and leaves its subject closed.
func TestPartBeyondStore(t *testing.T) {
	s, a := newAPIServer(t), newAgent()
	a.tooMuch = "shop/web..tcp-http-80"
	s.put("pods", podWith("shop", "a", nil, "http=80"))
	s.put("networkpolicies", networkPolicy(t, "web", `{"podSelector":{},"ingress":[{"ports":[{"port":"http"}]}]}`))
	leading(t, s, a)
	testutil.EventuallyNil(t, "an event of the part", func() error {
		for _, e := range s.events() {
			if e.InvolvedObject.Name == "web" && strings.Contains(e.Message, "held closed") {
				return nil
			}
		}
		return fmt.Errorf("%v", s.events())
	})
	a.never = a.tooMuch
	s.put("networkpolicies", networkPolicy(t, "other", `{"podSelector":{}}`))
	testutil.EventuallyNil(t, "the others", func() error { return a.has("shop/web", "shop/web..tcp-http-80", "shop/other") })
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.policies["shop/web..tcp-http-80"]; p.RuleCount() > 0 || p.Subject.Labels["io.heddle.port.tcp/http"] != "80" {
		t.Errorf("%s", asJSON(p))
	}
}
