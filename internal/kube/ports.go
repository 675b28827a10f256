package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/tools/cache"

	"heddle.dev/heddle/internal/podlabels"
)

// namedPort is a port of a container that has a name. Pods may give one name different numbers.
type namedPort struct {
	protocol corev1.Protocol // TCP or UDP
	name     string
}

// label is the label by which a pod's endpoint has the number of the port.
func (p namedPort) label() string {
	return podlabels.Port + strings.ToLower(string(p.protocol)) + "/" + p.name
}

// portsOf gives the named ports of a pod. Of two with one name the first counts, as in Kubernetes.
func portsOf(pod *corev1.Pod) map[namedPort]int32 {
	if pod.Spec.HostNetwork {
		return nil // it has no endpoint
	}
	ports := make(map[namedPort]int32)
	add := func(c corev1.Container) {
		for _, p := range c.Ports {
			n := namedPort{cmp.Or(p.Protocol, corev1.ProtocolTCP), p.Name}
			if _, there := ports[n]; there || p.Name == "" || n.protocol == corev1.ProtocolSCTP {
				continue
			}
			ports[n] = p.ContainerPort
		}
	}
	for _, c := range pod.Spec.Containers {
		add(c)
	}
	for _, c := range pod.Spec.InitContainers { // those that stay beside the others
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c)
		}
	}
	return ports
}

// podPorts knows the numbers that the cluster's pods give to named ports. It follows the pods from
// the first time that it is asked: most clusters' policies name no port, and need no pod.
type podPorts struct {
	pods   cache.SharedIndexInformer
	synced bool // of the goroutine that asks
	// changed is told of a port that has a number which no pod of the namespace gave it before, or
	// has one less.
	changed func(namedPort)

	mu   sync.Mutex
	have map[string][]numbered // by the pod's namespace/name
	uses map[numbered]int      // how many pods
}

type numbered struct {
	namespace string
	port      namedPort
	number    int32
}

func newPodPorts(c *cluster, m *metrics, log *slog.Logger, changed func(namedPort)) *podPorts {
	p := &podPorts{changed: changed, have: make(map[string][]numbered), uses: make(map[numbered]int)}
	p.pods = informer[*corev1.Pod](c.core, "pods", &corev1.Pod{}, func(*metav1.ListOptions) {}, m, log, func(pod *corev1.Pod) {
		p.look(pod.Namespace + "/" + pod.Name)
	})
	utilruntime.Must(p.pods.SetTransform(trim)) // fails only once it runs
	return p
}

// ready follows the pods until ctx ends, and waits until the API server has told of all. False: ctx
// has ended. One goroutine asks.
func (p *podPorts) ready(ctx context.Context) bool {
	if p.synced {
		return true
	}
	go p.pods.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), p.pods.HasSynced) {
		return false
	}
	for _, key := range p.pods.GetStore().ListKeys() { // the informer may not have told of it yet
		p.look(key)
	}
	p.synced = true
	return true
}

// look counts the ports of a pod as they are now.
func (p *podPorts) look(key string) {
	for _, n := range p.count(key) {
		p.changed(n)
	}
}

// count gives the ports that have another set of numbers now.
func (p *podPorts) count(key string) (changed []namedPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, _, _ := p.pods.GetStore().GetByKey(key) // with mu: who comes last has seen the last
	var now []numbered
	if pod, ok := o.(*corev1.Pod); ok {
		for n, number := range portsOf(pod) {
			now = append(now, numbered{pod.Namespace, n, number})
		}
	}
	before := p.have[key]
	if p.have[key] = now; len(now) == 0 {
		delete(p.have, key)
	}
	for _, n := range now {
		if p.uses[n]++; p.uses[n] == 1 {
			changed = append(changed, n.port)
		}
	}
	for _, n := range before {
		if p.uses[n]--; p.uses[n] == 0 {
			delete(p.uses, n)
			changed = append(changed, n.port)
		}
	}
	return changed
}

// numbers gives those that pods of a namespace give to a port, or all pods for "", sorted.
func (p *podPorts) numbers(namespace string, port namedPort) (all []int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n := range p.uses {
		if n.port == port && (namespace == "" || n.namespace == namespace) {
			all = append(all, n.number)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// trim leaves of a pod what podPorts looks at: there may be 100,000.
func trim(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	ports := func(containers []corev1.Container) (out []corev1.Container) {
		for _, c := range containers {
			if len(c.Ports) > 0 {
				out = append(out, corev1.Container{Ports: c.Ports, RestartPolicy: c.RestartPolicy})
			}
		}
		return out
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion},
		Spec:       corev1.PodSpec{HostNetwork: pod.Spec.HostNetwork, Containers: ports(pod.Spec.Containers), InitContainers: ports(pod.Spec.InitContainers)},
	}, nil
}

// namedOf gives the port that a rule names, if it names one.
func namedOf(p networkingv1.NetworkPolicyPort) (namedPort, bool) {
	if p.Port == nil || p.Port.Type != intstr.String {
		return namedPort{}, false
	}
	n := namedPort{corev1.ProtocolTCP, p.Port.StrVal}
	if p.Protocol != nil {
		n.protocol = *p.Protocol
	}
	return n, n.protocol != corev1.ProtocolSCTP
}

// names gives the ports that a NetworkPolicy names.
func names(np *networkingv1.NetworkPolicy) map[namedPort]bool {
	all := make(map[namedPort]bool)
	add := func(ports []networkingv1.NetworkPolicyPort) {
		for _, p := range ports {
			if n, named := namedOf(p); named {
				all[n] = true
			}
		}
	}
	for _, r := range np.Spec.Ingress {
		add(r.Ports)
	}
	for _, r := range np.Spec.Egress {
		add(r.Ports)
	}
	return all
}

// part is what a NetworkPolicy says of those of its pods that give a port one number: a
// NetworkPolicy of its own, since a policy has one subject. It allows only: whom it selects, the
// whole one holds closed.
type part struct {
	suffix string
	policy *networkingv1.NetworkPolicy
}

// byNumber gives np with numbers instead of named ports. A port that a rule for ingress names is of
// the subject's pods: what such rules allow are parts. One that a rule for egress names is of the
// peers' pods, and becomes rules for those that give it one number.
func byNumber(np *networkingv1.NetworkPolicy, numbers func(namespace string, port namedPort) []int32) (whole *networkingv1.NetworkPolicy, parts []part, refused []string) {
	whole = np.DeepCopy()
	whole.Spec.PolicyTypes = policyTypes(np)
	whole.Spec.Ingress, whole.Spec.Egress = nil, nil
	for _, r := range np.Spec.Ingress {
		if ports, named := divide(r.Ports); len(ports) > 0 || len(named) == 0 {
			r.Ports = ports
			whole.Spec.Ingress = append(whole.Spec.Ingress, r)
		}
	}
	for i, r := range np.Spec.Egress {
		ports, named := divide(r.Ports)
		if len(ports) > 0 || len(named) == 0 {
			r.Ports = ports
			whole.Spec.Egress = append(whole.Spec.Egress, r)
		}
		for _, n := range named {
			peers, why := podPeers(fmt.Sprintf("spec.egress[%d]", i), n, r.To)
			refused = append(refused, why...)
			for _, number := range numbers("", n) {
				if rule, some := egressTo(peers, n, number); some {
					whole.Spec.Egress = append(whole.Spec.Egress, rule)
				}
			}
		}
	}
	for n := range names(&networkingv1.NetworkPolicy{Spec: networkingv1.NetworkPolicySpec{Ingress: np.Spec.Ingress}}) {
		for _, number := range numbers(np.Namespace, n) {
			parts = append(parts, partOf(np, n, number))
		}
	}
	slices.SortFunc(parts, func(a, b part) int { return strings.Compare(a.suffix, b.suffix) })
	return whole, parts, refused
}

// policyTypes is what a NetworkPolicy speaks of, also by default.
func policyTypes(np *networkingv1.NetworkPolicy) []networkingv1.PolicyType {
	if len(np.Spec.PolicyTypes) > 0 {
		return np.Spec.PolicyTypes
	}
	types := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	if len(np.Spec.Egress) > 0 {
		types = append(types, networkingv1.PolicyTypeEgress)
	}
	return types
}

// divide takes the named ports out of a rule's ports.
func divide(ports []networkingv1.NetworkPolicyPort) (others []networkingv1.NetworkPolicyPort, named []namedPort) {
	for _, p := range ports {
		if n, is := namedOf(p); is {
			named = append(named, n)
		} else {
			others = append(others, p)
		}
	}
	return others, named
}

// partOf gives the part of np for the pods that give the port this number.
func partOf(np *networkingv1.NetworkPolicy, port namedPort, number int32) part {
	p := np.DeepCopy()
	p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	p.Spec.Ingress, p.Spec.Egress = nil, nil
	p.Spec.PodSelector = *withPort(&p.Spec.PodSelector, port, number)
	for _, r := range np.Spec.Ingress {
		if _, named := divide(r.Ports); slices.Contains(named, port) {
			r.Ports = numberOf(port, number)
			p.Spec.Ingress = append(p.Spec.Ingress, r)
		}
	}
	return part{fmt.Sprintf("%s-%s-%d", strings.ToLower(string(port.protocol)), port.name, number), p}
}

func numberOf(port namedPort, number int32) []networkingv1.NetworkPolicyPort {
	n := intstr.FromInt32(number)
	return []networkingv1.NetworkPolicyPort{{Protocol: &port.protocol, Port: &n}}
}

// withPort narrows a selector to pods that give the port this number.
func withPort(s *metav1.LabelSelector, port namedPort, number int32) *metav1.LabelSelector {
	if s == nil {
		s = &metav1.LabelSelector{}
	}
	s = s.DeepCopy()
	if s.MatchLabels == nil {
		s.MatchLabels = make(map[string]string)
	}
	s.MatchLabels[port.label()] = strconv.Itoa(int(number))
	return s
}

// podPeers gives those of a rule's peers that are pods: others give no names to ports.
func podPeers(at string, port namedPort, peers []networkingv1.NetworkPolicyPeer) (pods []networkingv1.NetworkPolicyPeer, refused []string) {
	if len(peers) == 0 {
		return []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}, nil
	}
	for _, p := range peers {
		if p.IPBlock == nil {
			pods = append(pods, p)
			continue
		}
		refused = append(refused, fmt.Sprintf("%s: port %q of %s is left out: only pods name ports: write the port's number", at, port.name, p.IPBlock.CIDR))
	}
	return pods, refused
}

// egressTo is the rule for those of the peers that give the port this number. False: there are
// none, and a rule without peers would allow all.
func egressTo(peers []networkingv1.NetworkPolicyPeer, port namedPort, number int32) (rule networkingv1.NetworkPolicyEgressRule, some bool) {
	rule.Ports = numberOf(port, number)
	for _, p := range peers {
		if p.PodSelector == nil && p.NamespaceSelector == nil {
			continue // the reader refuses it: an empty peer must not become all pods of the namespace
		}
		p.PodSelector = withPort(p.PodSelector, port, number)
		rule.To = append(rule.To, p)
	}
	return rule, len(rule.To) > 0
}
