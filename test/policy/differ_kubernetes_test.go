package policy

import (
	"net/netip"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/policy/generate"
)

// object is a part of a document.
type object = map[string]any

// networkPolicy gives a random NetworkPolicy as Kubernetes writes it, and what it means, both made
// here: so that what is read of it is compared as well.
func networkPolicy(g *generate.Generator, namespace, name string) (object, *policy.Policy) {
	labels, selector := labelSelector(g)
	means := &policy.Policy{Name: namespace + "/" + name,
		Subject: policy.Subject{Selector: policy.Selector{Requirements: labels, Namespace: &policy.NamespaceSelector{Name: namespace}}}}
	spec := object{"podSelector": selector}
	types := [][]string{{"Ingress"}, {"Egress"}, {"Ingress", "Egress"}}[g.Intn(3)]
	spec["policyTypes"] = types
	for _, t := range types {
		d, rules := networkRules(g, namespace, map[string]string{"Ingress": "from", "Egress": "to"}[t])
		if t == "Ingress" {
			means.Ingress, spec["ingress"] = d, rules
		} else {
			means.Egress, spec["egress"] = d, rules
		}
	}
	metadata := object{"name": name, "namespace": namespace}
	if g.Intn(3) == 0 {
		metadata["annotations"] = object{"heddle.dev/deny": "drop"}
		for _, d := range []*policy.Direction{means.Ingress, means.Egress} {
			if d != nil {
				d.Deny = policy.Drop
			}
		}
	}
	return object{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}, means
}

// networkRules are the rules of one direction: all is denied but what they allow, and what the own
// node does.
func networkRules(g *generate.Generator, namespace, field string) (*policy.Direction, []object) {
	d := &policy.Direction{Default: policy.DefaultDeny,
		Rules: []policy.Rule{{Action: policy.Allow, Peers: []policy.Peer{{Entity: policy.EntityHost}}}}}
	rules := []object{}
	for range g.Intn(3) {
		rule, means := object{}, policy.Rule{Action: policy.Allow}
		var peers, ports []object
		for range g.Intn(3) {
			doc, peer := networkPeer(g, namespace)
			peers, means.Peers = append(peers, doc), append(means.Peers, peer)
		}
		for range g.Intn(3) {
			doc, p := networkPort(g)
			ports, means.Ports = append(ports, doc), append(means.Ports, p)
		}
		if peers != nil {
			rule[field] = peers
		}
		if ports != nil {
			rule["ports"] = ports
		}
		rules, d.Rules = append(rules, rule), append(d.Rules, means)
	}
	return d, rules
}

func networkPeer(g *generate.Generator, namespace string) (object, policy.Peer) {
	labels, selector := labelSelector(g)
	switch g.Intn(4) {
	case 0:
		return object{"podSelector": selector}, policy.Peer{Endpoints: &policy.Selector{Requirements: labels, Namespace: &policy.NamespaceSelector{Name: namespace}}}
	case 1:
		return object{"namespaceSelector": selector}, policy.Peer{Endpoints: &policy.Selector{Namespace: &policy.NamespaceSelector{Requirements: labels}}}
	case 2:
		others, pods := labelSelector(g)
		return object{"namespaceSelector": selector, "podSelector": pods},
			policy.Peer{Endpoints: &policy.Selector{Requirements: others, Namespace: &policy.NamespaceSelector{Requirements: labels}}}
	}
	a := g.Addrs[g.Intn(len(g.Addrs))]
	block := netip.PrefixFrom(a, a.BitLen()-8*g.Intn(3)).Masked()
	doc, means := object{"cidr": block.String()}, policy.Peer{Prefix: block}
	if !block.IsSingleIP() && g.Intn(2) == 0 {
		means.Except = []netip.Prefix{netip.PrefixFrom(a, a.BitLen())}
		doc["except"] = []string{means.Except[0].String()}
	}
	return object{"ipBlock": doc}, means
}

func networkPort(g *generate.Generator) (object, policy.Ports) {
	first := g.Ports[g.Intn(len(g.Ports))]
	last := g.Ports[g.Intn(len(g.Ports))]
	first, last = min(first, last), max(first, last)
	switch g.Intn(4) {
	case 0:
		return object{"port": first}, policy.Ports{Protocol: model.ProtocolTCP, First: first, Last: first}
	case 1:
		return object{"protocol": "UDP", "port": first, "endPort": last}, policy.Ports{Protocol: model.ProtocolUDP, First: first, Last: last}
	case 2:
		return object{"protocol": "UDP"}, policy.Ports{Protocol: model.ProtocolUDP, Last: 1<<16 - 1}
	}
	return object{"protocol": "TCP", "port": first, "endPort": last}, policy.Ports{Protocol: model.ProtocolTCP, First: first, Last: last}
}

// labelSelector is one of what endpoints and namespaces have, or of all.
func labelSelector(g *generate.Generator) (policy.Requirements, object) {
	key, value := policyLabels[g.Intn(3)], []string{"x", "y", "z"}[g.Intn(3)]
	switch g.Intn(4) {
	case 0:
		return policy.Requirements{}, object{}
	case 1:
		return policy.Requirements{Expressions: []policy.Expression{{Key: key, Operator: policy.NotIn, Values: []string{value}}}},
			object{"matchExpressions": []object{{"key": key, "operator": "NotIn", "values": []string{value}}}}
	case 2:
		return policy.Requirements{Expressions: []policy.Expression{{Key: key, Operator: policy.Exists}}},
			object{"matchExpressions": []object{{"key": key, "operator": "Exists"}}}
	}
	return policy.Requirements{Labels: map[string]string{key: value}}, object{"matchLabels": object{key: value}}
}
