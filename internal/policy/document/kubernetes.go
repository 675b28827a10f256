package document

import (
	"fmt"
	"slices"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// DenyAnnotation on a NetworkPolicy says what denied senders are told: "reject", as without it, or
// "drop". Kubernetes leaves that open.
const DenyAnnotation = "heddle.dev/deny"

// HostRule is the name of the rule that stands for what Kubernetes always allows: traffic between
// an endpoint and the node it runs on.
const HostRule = "kubernetes: own node"

// metadata is what Heddle reads of an object's. What else Kubernetes keeps there has no influence
// on traffic.
type metadata struct {
	name, namespace string
	labels          map[string]string
	deny            policy.Deny
	denyAt          reader
}

func readMetadata(r reader) (m metadata, err error) {
	f, err := r.object()
	if err != nil {
		return m, err
	}
	if m.name, err = f.take("name").text(); err != nil {
		return m, err
	}
	if m.namespace, err = f.take("namespace").optional(); err != nil {
		return m, err
	}
	if m.labels, err = f.take("labels").labels(); err != nil {
		return m, err
	}
	annotations := f.take("annotations")
	values, err := annotations.labels()
	if err != nil {
		return m, err
	}
	m.deny, m.denyAt = policy.Deny(values[DenyAnnotation]), annotations
	if m.deny != "" && m.deny != policy.Reject && m.deny != policy.Drop {
		return m, annotations.fail("", "annotation %s is %.40q: want reject or drop", DenyAnnotation, m.deny)
	}
	f.ignore("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName", "generation",
		"managedFields", "ownerReferences", "resourceVersion", "selfLink", "uid")
	return m, f.rest()
}

// namespace reads a Namespace: its labels.
func (p *parser) namespace(r reader, f fields) error {
	m, err := readMetadata(f.take("metadata"))
	if err != nil {
		return err
	}
	f.ignore("spec", "status")
	if err := f.rest(); err != nil {
		return err
	}
	ns := policy.Namespace{Name: m.name, Labels: m.labels}
	if err := ns.Validate(); err != nil {
		return r.locate(err, map[string]string{"namespace": "metadata.name", "labels": "metadata.labels"})
	}
	if err := p.unique(r, "namespace "+ns.Name); err != nil {
		return err
	}
	p.set.Namespaces = append(p.set.Namespaces, ns)
	return nil
}

// networkPolicy reads a NetworkPolicy of networking.k8s.io/v1.
func (p *parser) networkPolicy(r reader, f fields) error {
	m, err := readMetadata(f.take("metadata"))
	if err != nil {
		return err
	}
	ns := m.namespace
	if ns == "" {
		ns = policy.DefaultNamespace
	}
	f.ignore("status")
	spec, err := f.take("spec").object()
	if err != nil {
		return err
	}
	if err := f.rest(); err != nil {
		return err
	}
	pol := &policy.Policy{Name: ns + "/" + m.name}
	if pol.Subject.Requirements, err = readLabelSelector(spec.take("podSelector")); err != nil {
		return err
	}
	pol.Subject.Namespace = &policy.NamespaceSelector{Name: ns}
	root := pathOf(r, "")
	c := converter{namespace: ns, deny: m.deny, places: map[string]string{
		"name": root + "metadata.name", "subject": root + "spec.podSelector", "subject.namespace": root + "metadata.namespace"}}
	ingress, err := c.direction("ingress", "from", spec.take("ingress"))
	if err != nil {
		return err
	}
	egressAt := spec.take("egress")
	egress, err := c.direction("egress", "to", egressAt)
	if err != nil {
		return err
	}
	isIngress, isEgress, err := policyTypes(spec.take("policyTypes"), egressAt)
	if err != nil {
		return err
	}
	if err := spec.rest(); err != nil {
		return err
	}
	if isIngress {
		pol.Ingress = ingress
	}
	if isEgress {
		pol.Egress = egress
	}
	return p.add(r, pol, c.places)
}

func pathOf(r reader, name string) string {
	if r.path == "" {
		return name
	}
	return r.path + "." + name
}

// policyTypes says which directions a policy speaks of. By default that is ingress, and egress if
// there are egress rules.
func policyTypes(r, egress reader) (isIngress, isEgress bool, err error) {
	types, err := r.texts()
	if err != nil {
		return false, false, err
	}
	if len(types) == 0 {
		rules, err := egress.list()
		return true, len(rules) > 0, err
	}
	for _, t := range types {
		if t != "Ingress" && t != "Egress" {
			return false, false, r.fail("", "%.40q: want Ingress or Egress", t)
		}
	}
	return slices.Contains(types, "Ingress"), slices.Contains(types, "Egress"), nil
}

// converter makes directions of a NetworkPolicy's rules. places maps the fields of what it makes to
// the document's.
type converter struct {
	namespace string
	deny      policy.Deny
	places    map[string]string
}

func (c converter) direction(name, peersField string, r reader) (*policy.Direction, error) {
	items, err := r.list()
	if err != nil {
		return nil, err
	}
	d := &policy.Direction{Default: policy.DefaultDeny, Deny: c.deny}
	c.places[name] = r.path
	for i, item := range items {
		at := fmt.Sprintf("%s.rules[%d]", name, i)
		c.places[at] = item.path
		rule, err := c.rule(at, peersField, item)
		if err != nil {
			return nil, err
		}
		d.Rules = append(d.Rules, rule)
	}
	d.Rules = append(d.Rules, policy.Rule{Name: HostRule, Action: policy.Allow, Peers: []policy.Peer{{Entity: policy.EntityHost}}})
	return d, nil
}

// rule reads one rule. Without peers, or with an empty list of them, it is about every peer; ports
// likewise.
func (c converter) rule(at, peersField string, r reader) (rule policy.Rule, err error) {
	rule.Action = policy.Allow
	f, err := r.object()
	if err != nil {
		return rule, err
	}
	peers, err := f.take(peersField).list()
	if err != nil {
		return rule, err
	}
	for i, item := range peers {
		c.places[fmt.Sprintf("%s.peers[%d]", at, i)] = item.path
		p, err := c.peer(item)
		if err != nil {
			return rule, err
		}
		rule.Peers = append(rule.Peers, p)
	}
	ports, err := f.take("ports").list()
	if err != nil {
		return rule, err
	}
	for i, item := range ports {
		c.places[fmt.Sprintf("%s.ports[%d]", at, i)] = item.path
		p, err := readNetworkPolicyPort(item)
		if err != nil {
			return rule, err
		}
		rule.Ports = append(rule.Ports, p)
	}
	return rule, f.rest()
}

func (c converter) peer(r reader) (p policy.Peer, err error) {
	f, err := r.object()
	if err != nil {
		return p, err
	}
	block, pods, namespaces := f.take("ipBlock"), f.take("podSelector"), f.take("namespaceSelector")
	if err := f.rest(); err != nil {
		return p, err
	}
	switch {
	case block.there() && (pods.there() || namespaces.there()):
		return p, r.fail("use two peers", "ipBlock cannot stand beside a selector")
	case block.there():
		b, err := block.object()
		if err != nil {
			return p, err
		}
		if p.Prefix, err = b.take("cidr").prefix(true); err != nil {
			return p, err
		}
		if p.Except, err = b.take("except").prefixes(true); err != nil {
			return p, err
		}
		return p, b.rest()
	case !pods.there() && !namespaces.there():
		return p, r.fail("write podSelector: {} for every pod of the namespace", "says nothing: want podSelector, namespaceSelector or ipBlock")
	}
	s := policy.Selector{Namespace: &policy.NamespaceSelector{}}
	if s.Requirements, err = readLabelSelector(pods); err != nil {
		return p, err
	}
	if !namespaces.there() {
		s.Namespace.Name = c.namespace
	} else if s.Namespace.Requirements, err = readLabelSelector(namespaces); err != nil {
		return p, err
	}
	p.Endpoints = &s
	return p, nil
}

var labelOperators = map[string]policy.Operator{"In": policy.In, "NotIn": policy.NotIn, "Exists": policy.Exists, "DoesNotExist": policy.NotExists}

// readLabelSelector reads a LabelSelector of Kubernetes; one that is missing or empty selects
// everything.
func readLabelSelector(r reader) (q policy.Requirements, err error) {
	if !r.there() {
		return q, nil
	}
	f, err := r.object()
	if err != nil {
		return q, err
	}
	if q.Labels, err = f.take("matchLabels").labels(); err != nil {
		return q, err
	}
	items, err := f.take("matchExpressions").list()
	if err != nil {
		return q, err
	}
	for _, item := range items {
		x, err := item.object()
		if err != nil {
			return q, err
		}
		var e policy.Expression
		if e.Key, err = x.take("key").text(); err != nil {
			return q, err
		}
		at := x.take("operator")
		name, err := at.text()
		if err != nil {
			return q, err
		}
		operator, known := labelOperators[name]
		if !known {
			return q, at.fail("", "%.40q: want In, NotIn, Exists or DoesNotExist", name)
		}
		e.Operator = operator
		if e.Values, err = x.take("values").texts(); err != nil {
			return q, err
		}
		if err := x.rest(); err != nil {
			return q, err
		}
		q.Expressions = append(q.Expressions, e)
	}
	return q, f.rest()
}

// readNetworkPolicyPort reads a NetworkPolicyPort.
func readNetworkPolicyPort(r reader) (p policy.Ports, err error) {
	f, err := r.object()
	if err != nil {
		return p, err
	}
	at := f.take("protocol")
	protocol, err := at.optional()
	if err != nil {
		return p, err
	}
	switch protocol {
	case "", "TCP":
		p.Protocol = model.ProtocolTCP
	case "UDP":
		p.Protocol = model.ProtocolUDP
	case "SCTP":
		return p, at.fail("remove the port", "SCTP is not supported: Heddle does not tell it from other protocols")
	default:
		return p, at.fail("", "%.40q: want TCP or UDP", protocol)
	}
	port, end := f.take("port"), f.take("endPort")
	if err := f.rest(); err != nil {
		return p, err
	}
	if !port.there() {
		if end.there() {
			return p, end.fail("add port, the first of the range", "has no port before it")
		}
		p.Last = 1<<16 - 1
		return p, nil
	}
	if port.isText() {
		return p, port.fail("write the port's number", "named ports are not supported in a file: only heddle-kube knows the names of pods' ports")
	}
	first, err := port.number()
	if err != nil {
		return p, err
	}
	last := first
	if end.there() {
		if last, err = end.number(); err != nil {
			return p, err
		}
	}
	if first < 1 || last > 1<<16-1 || last < first {
		return p, r.fail("", "ports %d-%d: want 1 <= port <= endPort <= 65535", first, last)
	}
	p.First, p.Last = uint16(first), uint16(last)
	return p, nil
}
