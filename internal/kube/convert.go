package kube

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/policy/document"
)

// convert makes the policy of a NetworkPolicy, as `heddle policy apply` does. What Heddle cannot
// honour allows nothing: rules of NetworkPolicies only allow, so one that is left out forbids more
// than was asked, never less. refused says what was left out, and why.
func convert(np *networkingv1.NetworkPolicy) (p *policy.Policy, refused []string) {
	n := &networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: shortName(np.Namespace, np.Name), Namespace: np.Namespace},
		Spec:       *np.Spec.DeepCopy(),
	}
	if deny, there := np.Annotations[document.DenyAnnotation]; there {
		n.Annotations = map[string]string{document.DenyAnnotation: deny}
		if deny != string(policy.Reject) && deny != string(policy.Drop) {
			n.Annotations = nil
			refused = append(refused, fmt.Sprintf("annotation %s is %.40q: want reject or drop", document.DenyAnnotation, deny))
		}
	}
	if p, err := parse(n); err == nil {
		return p, refused
	}
	n.Spec.PolicyTypes = policyTypes(n) // what it is by default, before rules are left out
	rules := n.Spec
	n.Spec.Ingress, n.Spec.Egress = nil, nil
	_, err := parse(n)
	if err != nil { // not even whom it is about can be said
		n.Spec.PodSelector = metav1.LabelSelector{}
		refused = append(refused, reason(err)+": the whole namespace is held closed")
		p, err = parse(n)
		if err != nil {
			return nil, append(refused, reason(err))
		}
		return p, refused
	}
	refused = append(refused, keepRules(n, rules)...)
	if p, err = parse(n); err != nil { // too much of what is in order by itself
		n.Spec.Ingress, n.Spec.Egress = nil, nil
		refused = append(refused, reason(err)+": its subject is held closed")
		if p, err = parse(n); err != nil {
			return nil, append(refused, reason(err))
		}
	}
	return p, refused
}

// convertPart makes the policy of a part. What Heddle cannot honour of it is left out; nil if that
// is all.
func convertPart(np *networkingv1.NetworkPolicy) (p *policy.Policy, refused []string) {
	n := &networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: np.Name, Namespace: np.Namespace},
		Spec:       *np.Spec.DeepCopy(),
	}
	rules := n.Spec
	n.Spec.Ingress = nil
	refused = keepRules(n, rules)
	if len(n.Spec.Ingress) == 0 {
		return nil, refused
	}
	p, err := parse(n)
	if err != nil {
		return nil, append(refused, reason(err)+": its named ports are left out")
	}
	return p, refused
}

// keepRules adds those of rules to n that are understood. refused names the others.
func keepRules(n *networkingv1.NetworkPolicy, rules networkingv1.NetworkPolicySpec) (refused []string) {
	understood := func(at string, ingress []networkingv1.NetworkPolicyIngressRule, egress []networkingv1.NetworkPolicyEgressRule) bool {
		alone := *n
		alone.Spec.Ingress, alone.Spec.Egress = ingress, egress
		_, err := parse(&alone)
		if err != nil {
			refused = append(refused, at+" is left out: "+reason(err))
		}
		return err == nil
	}
	for i, r := range rules.Ingress {
		at := fmt.Sprintf("spec.ingress[%d]", i)
		some, why := knownPorts(at, &r.Ports)
		refused = append(refused, why...)
		if some && understood(at, []networkingv1.NetworkPolicyIngressRule{r}, nil) {
			n.Spec.Ingress = append(n.Spec.Ingress, r)
		}
	}
	for i, r := range rules.Egress {
		at := fmt.Sprintf("spec.egress[%d]", i)
		some, why := knownPorts(at, &r.Ports)
		refused = append(refused, why...)
		if some && understood(at, nil, []networkingv1.NetworkPolicyEgressRule{r}) {
			n.Spec.Egress = append(n.Spec.Egress, r)
		}
	}
	return refused
}

// knownPorts takes SCTP out of a rule's ports. some: there is something left for the rule to allow;
// a rule without ports would allow all.
func knownPorts(at string, ports *[]networkingv1.NetworkPolicyPort) (some bool, refused []string) {
	if len(*ports) == 0 {
		return true, nil
	}
	*ports = slices.DeleteFunc(slices.Clone(*ports), func(p networkingv1.NetworkPolicyPort) bool {
		sctp := p.Protocol != nil && *p.Protocol == corev1.ProtocolSCTP
		if sctp {
			refused = append(refused, at+": SCTP is left out: it is not supported")
		}
		return sctp
	})
	return len(*ports) > 0, refused
}

// parse gives the object to the reader that files go through, so that both mean the same.
func parse(n *networkingv1.NetworkPolicy) (*policy.Policy, error) {
	raw, err := json.Marshal(n)
	if err != nil {
		return nil, err
	}
	set, err := document.Parse(document.File{Name: "object", Data: raw})
	if err != nil {
		return nil, err
	}
	set.Policies[0].Source = policy.SourceKubernetes
	return set.Policies[0], nil
}

// closed gives the policy that selects and speaks of the same, and allows nothing, the own node
// included. It has no rules: the store has room for more such policies than for others.
func closed(p *policy.Policy) *policy.Policy {
	c := &policy.Policy{Name: p.Name, Source: p.Source, Subject: p.Subject}
	close := func(d *policy.Direction) *policy.Direction {
		if d == nil {
			return nil
		}
		return &policy.Direction{Default: policy.DefaultDeny, Deny: d.Deny}
	}
	c.Ingress, c.Egress = close(p.Ingress), close(p.Egress)
	return c
}

// reason leaves the place in a file out of an error: there is no file.
func reason(err error) string {
	var e *document.Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	s := e.Reason
	if e.Path != "" {
		s = e.Path + ": " + s
	}
	if e.Remedy != "" {
		s += ": " + e.Remedy
	}
	return s
}

// shortName gives a name that a policy can have together with its namespace: objects' names may be
// longer.
func shortName(namespace, name string) string { return shorten(namespace, name, policy.MaxName) }

func shorten(namespace, name string, most int) string {
	if len(namespace)+1+len(name) <= most {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	digest := "-" + hex.EncodeToString(sum[:8])
	return name[:most-1-len(namespace)-len(digest)] + digest
}

// partPrefix begins the names of the policies of a NetworkPolicy's parts, and of no other policy:
// no object's name has two dots in a row.
func partPrefix(namespace, name string) string {
	return shorten(namespace, name, policy.MaxName-maxSuffix) + ".."
}

// maxSuffix is the length of "..tcp-", a port's name, "-" and a number.
const maxSuffix = 6 + 15 + 1 + 5

// policyName is the name of a NetworkPolicy's policy.
func policyName(namespace, name string) string { return namespace + "/" + shortName(namespace, name) }

// describe makes the description of a namespace. An error means that it cannot be: then what was
// known before holds.
func describe(ns *corev1.Namespace) (policy.Namespace, error) {
	n := policy.Namespace{Name: ns.Name, Source: policy.SourceKubernetes}
	for k, v := range ns.Labels {
		if k == policy.NamespaceNameLabel && v == ns.Name {
			continue // every namespace has it
		}
		if n.Labels == nil {
			n.Labels = make(map[string]string, len(ns.Labels))
		}
		n.Labels[k] = v
	}
	return n, n.Validate()
}
