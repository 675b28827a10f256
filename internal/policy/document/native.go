package document

import "heddle.dev/heddle/internal/policy"

// native reads a Policy of heddle.dev/v1.
func (p *parser) native(r reader, f fields) (err error) {
	pol := &policy.Policy{}
	if pol.Name, err = f.take("name").text(); err != nil {
		return err
	}
	subject := f.take("subject")
	if !subject.there() {
		return subject.fail("write subject: {} if every endpoint is meant", "is missing")
	}
	if pol.Subject, err = readSubject(subject); err != nil {
		return err
	}
	if pol.Ingress, err = readDirection(f.take("ingress")); err != nil {
		return err
	}
	if pol.Egress, err = readDirection(f.take("egress")); err != nil {
		return err
	}
	if err := f.rest(); err != nil {
		return err
	}
	return p.add(r, pol, nil)
}

func readSubject(r reader) (s policy.Subject, err error) {
	f, err := r.object()
	if err != nil {
		return s, err
	}
	if s.Selector, err = readSelector(f); err != nil {
		return s, err
	}
	if s.Prefixes, err = f.take("prefixes").prefixes(false); err != nil {
		return s, err
	}
	return s, f.rest()
}

func readSelector(f fields) (s policy.Selector, err error) {
	if s.Requirements, err = readRequirements(f); err != nil {
		return s, err
	}
	r := f.take("namespace")
	if !r.there() {
		return s, nil
	}
	ns, err := r.object()
	if err != nil {
		return s, err
	}
	s.Namespace = &policy.NamespaceSelector{}
	if s.Namespace.Name, err = ns.take("name").optional(); err != nil {
		return s, err
	}
	if s.Namespace.Requirements, err = readRequirements(ns); err != nil {
		return s, err
	}
	return s, ns.rest()
}

func readRequirements(f fields) (q policy.Requirements, err error) {
	if q.Labels, err = f.take("labels").labels(); err != nil {
		return q, err
	}
	items, err := f.take("expressions").list()
	if err != nil {
		return q, err
	}
	for _, item := range items {
		e, err := readExpression(item)
		if err != nil {
			return q, err
		}
		q.Expressions = append(q.Expressions, e)
	}
	return q, nil
}

func readExpression(r reader) (e policy.Expression, err error) {
	f, err := r.object()
	if err != nil {
		return e, err
	}
	if e.Key, err = f.take("key").text(); err != nil {
		return e, err
	}
	operator, err := f.take("operator").text()
	if err != nil {
		return e, err
	}
	e.Operator = policy.Operator(operator)
	if e.Values, err = f.take("values").texts(); err != nil {
		return e, err
	}
	return e, f.rest()
}

func readDirection(r reader) (*policy.Direction, error) {
	if !r.there() {
		return nil, nil
	}
	f, err := r.object()
	if err != nil {
		return nil, err
	}
	d := &policy.Direction{}
	byDefault, err := f.take("default").optional()
	if err != nil {
		return nil, err
	}
	d.Default = policy.Default(byDefault)
	deny, err := f.take("deny").optional()
	if err != nil {
		return nil, err
	}
	d.Deny = policy.Deny(deny)
	items, err := f.take("rules").list()
	if err != nil {
		return nil, err
	}
	for _, item := range items {
		rule, err := readRule(item)
		if err != nil {
			return nil, err
		}
		d.Rules = append(d.Rules, rule)
	}
	return d, f.rest()
}

func readRule(r reader) (rule policy.Rule, err error) {
	f, err := r.object()
	if err != nil {
		return rule, err
	}
	if rule.Name, err = f.take("name").optional(); err != nil {
		return rule, err
	}
	action, err := f.take("action").text()
	if err != nil {
		return rule, err
	}
	rule.Action = policy.Action(action)
	deny, err := f.take("deny").optional()
	if err != nil {
		return rule, err
	}
	rule.Deny = policy.Deny(deny)
	peers := f.take("peers")
	items, err := peers.list()
	if err != nil {
		return rule, err
	}
	if peers.there() && len(items) == 0 {
		return rule, peers.fail("leave it out if any peer is meant", "is an empty list")
	}
	for _, item := range items {
		peer, err := readPeer(item)
		if err != nil {
			return rule, err
		}
		rule.Peers = append(rule.Peers, peer)
	}
	if rule.Ports, err = readPorts(f.take("ports")); err != nil {
		return rule, err
	}
	return rule, f.rest()
}

func readPorts(r reader) (ports []policy.Ports, err error) {
	items, err := r.list()
	if err != nil {
		return nil, err
	}
	if r.there() && len(items) == 0 {
		return nil, r.fail("leave it out if any port is meant", "is an empty list")
	}
	for _, item := range items {
		s, err := item.text()
		if err != nil {
			return nil, err
		}
		p, err := policy.ParsePorts(s)
		if err != nil {
			return nil, item.fail("", "%v", err)
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func readPeer(r reader) (p policy.Peer, err error) {
	f, err := r.object()
	if err != nil {
		return p, err
	}
	if e := f.take("endpoints"); e.there() {
		inner, err := e.object()
		if err != nil {
			return p, err
		}
		s, err := readSelector(inner)
		if err != nil {
			return p, err
		}
		if err := inner.rest(); err != nil {
			return p, err
		}
		p.Endpoints = &s
	}
	if prefix := f.take("prefix"); prefix.there() {
		if p.Prefix, err = prefix.prefix(false); err != nil {
			return p, err
		}
	}
	if p.Except, err = f.take("except").prefixes(false); err != nil {
		return p, err
	}
	entity, err := f.take("entity").optional()
	if err != nil {
		return p, err
	}
	p.Entity = policy.Entity(entity)
	return p, f.rest()
}
