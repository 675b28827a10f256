package policy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func endpoint(node string, id model.EndpointID, name, addr string, labels ...string) model.Endpoint {
	e := model.Endpoint{Node: node, ID: id, Name: name, Labels: map[string]string{},
		Addrs: model.OverlayAddrs(netip.MustParsePrefix("fd48:6464:1::/96"), netip.MustParseAddr(addr))}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		e.Labels[k] = v
	}
	return e
}

func testState(policies ...*Policy) *State {
	return &State{
		Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, Prefix6: netip.MustParsePrefix("fd48:6464:1::/96"),
		Nodes: []Node{
			{"n1", []netip.Addr{netip.MustParseAddr("172.31.0.1"), netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("fd48:6464:1::af4:101")}},
			{"n2", []netip.Addr{netip.MustParseAddr("172.31.0.2"), netip.MustParseAddr("10.244.2.1")}},
		},
		Endpoints: model.EndpointsOf(
			endpoint("n1", 1, "shop/web", "10.244.1.2", "app=web"),
			endpoint("n1", 2, "shop/db", "10.244.1.3", "app=db"),
			endpoint("n2", 1, "lab/client", "10.244.2.2", "app=client"),
			endpoint("n2", 2, "other", "10.244.2.3", "app=db", NamespaceLabel+"=lab"),
		),
		Namespaces: []Namespace{{Name: "lab", Labels: map[string]string{"team": "a"}}},
		Policies:   policies,
	}
}

func labels(k, v string) Requirements { return Requirements{Labels: map[string]string{k: v}} }

func subject(k, v string) Subject { return Subject{Selector: Selector{Requirements: labels(k, v)}} }

func prefix(s string) Peer { return Peer{Prefix: netip.MustParsePrefix(s)} }

// ports reads several ranges.
func ports(list ...string) (out []Ports) {
	for _, s := range list {
		p, err := ParsePorts(s)
		if err != nil {
			panic(err)
		}
		out = append(out, p)
	}
	return out
}

// TestDecide goes through the semantics that docs/howto/policy.md promises, one by one.
func TestDecide(t *testing.T) {
	const (
		web, db, client, other = "10.244.1.2", "10.244.1.3", "10.244.2.2", "10.244.2.3"
		web6, client6          = "fd48:6464:1::af4:102", "fd48:6464:1::af4:202"
		gateway, node2, out    = "10.244.1.1", "172.31.0.2", "192.0.2.9"
	)
	toWeb := func(d Direction) *Policy { return &Policy{Name: "web", Subject: subject("app", "web"), Ingress: &d} }
	allow := func(peers []Peer, p ...string) Rule { return Rule{Action: Allow, Peers: peers, Ports: ports(p...)} }
	deny := func(peers []Peer, p ...string) Rule { return Rule{Action: Block, Peers: peers, Ports: ports(p...)} }
	selected := func(s Selector) []Peer { return []Peer{{Endpoints: &s}} }
	closed := Direction{Default: DefaultDeny}
	fromWeb := func(e Entity) *Policy {
		return &Policy{Name: "from", Subject: subject("app", "web"), Egress: &Direction{Rules: []Rule{deny([]Peer{{Entity: e}})}}}
	}
	for name, c := range map[string]struct {
		policies []*Policy
		from, to string
		port     string
		want     model.Verdict
	}{
		"no policy":                     {nil, client, web, "tcp/80", model.VerdictAllow},
		"default deny":                  {[]*Policy{toWeb(closed)}, client, web, "tcp/80", model.VerdictReject},
		"default deny, drop":            {[]*Policy{toWeb(Direction{Default: DefaultDeny, Deny: Drop})}, client, web, "icmp", model.VerdictDrop},
		"the other direction is open":   {[]*Policy{toWeb(closed)}, web, client, "tcp/80", model.VerdictAllow},
		"another subject is open":       {[]*Policy{toWeb(closed)}, client, db, "tcp/80", model.VerdictAllow},
		"itself":                        {[]*Policy{toWeb(closed)}, web, web6, "tcp/80", model.VerdictAllow},
		"from the node":                 {[]*Policy{toWeb(closed)}, gateway, web, "tcp/80", model.VerdictReject},
		"from outside":                  {[]*Policy{toWeb(closed)}, out, web, "udp/80", model.VerdictReject},
		"allow beats default":           {[]*Policy{toWeb(Direction{Default: DefaultDeny, Rules: []Rule{allow(nil, "tcp/80-90")}})}, client, web, "tcp/90", model.VerdictAllow},
		"another port":                  {[]*Policy{toWeb(Direction{Default: DefaultDeny, Rules: []Rule{allow(nil, "tcp/80-90")}})}, client, web, "tcp/91", model.VerdictReject},
		"another protocol":              {[]*Policy{toWeb(Direction{Default: DefaultDeny, Rules: []Rule{allow(nil, "tcp/80")}})}, client, web, "udp/80", model.VerdictReject},
		"deny beats allow":              {[]*Policy{toWeb(Direction{Rules: []Rule{allow(nil), deny(nil, "tcp/80")}})}, client, web, "tcp/80", model.VerdictReject},
		"allow of another policy":       {[]*Policy{toWeb(closed), {Name: "b", Subject: Subject{}, Ingress: &Direction{Rules: []Rule{allow(nil, "tcp")}}}}, client, web, "tcp/80", model.VerdictAllow},
		"default deny beats allow":      {[]*Policy{toWeb(closed), {Name: "b", Ingress: &Direction{Default: DefaultAllow}}}, client, web, "tcp/80", model.VerdictReject},
		"drop beats reject":             {[]*Policy{toWeb(closed), {Name: "b", Ingress: &Direction{Default: DefaultDeny, Deny: Drop}}}, client, web, "tcp/80", model.VerdictDrop},
		"rule's own denial":             {[]*Policy{toWeb(Direction{Rules: []Rule{{Action: Block, Deny: Drop}}})}, client, web, "tcp/80", model.VerdictDrop},
		"egress of the source":          {[]*Policy{{Name: "c", Subject: subject("app", "client"), Egress: &Direction{Default: DefaultDeny, Rules: []Rule{allow(nil, "tcp/443")}}}}, client, web, "tcp/80", model.VerdictReject},
		"both sides have to allow":      {[]*Policy{toWeb(closed), {Name: "c", Subject: subject("app", "client"), Egress: &Direction{Default: DefaultAllow}}}, client, web, "tcp/80", model.VerdictReject},
		"by label":                      {[]*Policy{toWeb(Direction{Rules: []Rule{deny(selected(Selector{Requirements: labels("app", "client")}))}})}, client6, web6, "tcp/80", model.VerdictReject},
		"by another label":              {[]*Policy{toWeb(Direction{Rules: []Rule{deny(selected(Selector{Requirements: labels("app", "x")}))}})}, client, web, "tcp/80", model.VerdictAllow},
		"by namespace's label":          {[]*Policy{toWeb(Direction{Rules: []Rule{deny(selected(Selector{Namespace: &NamespaceSelector{Requirements: labels("team", "a")}}))}})}, other, web, "tcp/80", model.VerdictReject},
		"by namespace's name":           {[]*Policy{toWeb(Direction{Rules: []Rule{deny(selected(Selector{Namespace: &NamespaceSelector{Name: "shop"}}))}})}, db, web, "tcp/80", model.VerdictReject},
		"by namespace's name label":     {[]*Policy{toWeb(Direction{Rules: []Rule{deny(selected(Selector{Namespace: &NamespaceSelector{Requirements: labels(NamespaceNameLabel, "shop")}}))}})}, client, web, "tcp/80", model.VerdictAllow},
		"prefix":                        {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{prefix("192.0.2.0/24")})}})}, out, web, "tcp/80", model.VerdictReject},
		"prefix has the other family":   {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{prefix("10.244.2.2/32")})}})}, client6, web6, "tcp/80", model.VerdictReject},
		"and the other way round":       {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{prefix("fd48:6464:1::/96")})}})}, client, web, "tcp/80", model.VerdictReject},
		"exception":                     {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Prefix: netip.MustParsePrefix("10.244.0.0/16"), Except: []netip.Prefix{netip.MustParsePrefix("10.244.2.2/32")}}})}})}, client6, web, "tcp/80", model.VerdictAllow},
		"endpoints":                     {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityEndpoints}})}})}, client, web, "tcp/80", model.VerdictReject},
		"endpoints: not the node":       {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityEndpoints}})}})}, gateway, web, "tcp/80", model.VerdictAllow},
		"node":                          {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityNodes}})}})}, node2, web, "tcp/80", model.VerdictReject},
		"host: not another node":        {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityHost}})}})}, node2, web, "tcp/80", model.VerdictAllow},
		"host":                          {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityHost}})}})}, gateway, web, "tcp/80", model.VerdictReject},
		"outside":                       {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityOutside}})}})}, out, web, "tcp/80", model.VerdictReject},
		"outside: not the overlay":      {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityOutside}})}})}, "10.244.7.7", web, "tcp/80", model.VerdictAllow},
		"outside: not a node":           {[]*Policy{toWeb(Direction{Rules: []Rule{deny([]Peer{{Entity: EntityOutside}})}})}, node2, web, "tcp/80", model.VerdictAllow},
		"link: the host's":              {[]*Policy{fromWeb(EntityHost)}, web, "255.255.255.255", "udp/80", model.VerdictReject},
		"link: a node's":                {[]*Policy{fromWeb(EntityNodes)}, web, "224.0.0.251", "udp/80", model.VerdictReject},
		"link: of IPv6":                 {[]*Policy{fromWeb(EntityHost)}, web6, "ff02::fb", "udp/80", model.VerdictReject},
		"link: of IPv6, not multicast":  {[]*Policy{fromWeb(EntityHost)}, web6, "fe80::1", "udp/80", model.VerdictReject},
		"link: not outside":             {[]*Policy{fromWeb(EntityOutside)}, web, "255.255.255.255", "udp/80", model.VerdictAllow},
		"link: by prefix, too":          {[]*Policy{{Name: "l", Subject: subject("app", "web"), Egress: &Direction{Rules: []Rule{deny([]Peer{prefix("224.0.0.0/3")})}}}}, web, "224.0.0.251", "udp/80", model.VerdictReject},
		"subject by prefix":             {[]*Policy{{Name: "p", Subject: Subject{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.2/31")}}, Ingress: &closed}}, client6, web6, "tcp/80", model.VerdictReject},
		"subject by prefix, and label":  {[]*Policy{{Name: "p", Subject: Subject{Selector: Selector{Requirements: labels("app", "db")}, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.2/31")}}, Ingress: &closed}}, client, web, "tcp/80", model.VerdictAllow},
		"a rule says nothing otherwise": {[]*Policy{toWeb(Direction{Rules: []Rule{allow(nil, "tcp/1")}})}, client, web, "tcp/80", model.VerdictAllow},
	} {
		for _, p := range c.policies {
			if err := p.Validate(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		p := ports(c.port)[0]
		probe := Probe{netip.MustParseAddr(c.from), netip.MustParseAddr(c.to), p.Protocol, p.First}
		if got := Decide(testState(c.policies...), probe); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestExplainNamesTheRule(t *testing.T) {
	s := testState(
		&Policy{Name: "a", Subject: subject("app", "web"), Ingress: &Direction{Default: DefaultDeny,
			Rules: []Rule{{Action: Allow, Ports: ports("tcp/1")}, {Name: "evil", Action: Block, Deny: Drop, Ports: ports("tcp/80")}}}},
		&Policy{Name: "b", Subject: subject("app", "client"), Egress: &Direction{Default: DefaultAllow}})
	x := Explain(s, Probe{netip.MustParseAddr("10.244.2.2"), netip.MustParseAddr("10.244.1.2"), model.ProtocolTCP, 80})
	if got := x.Ingress.String(); got != "shop/web: drop by rule 1 (evil) of policy a" {
		t.Error(got)
	}
	if got := x.Egress.String(); got != "lab/client: allow by the default of policy b" || x.Verdict != model.VerdictDrop {
		t.Error(got, x.Verdict)
	}
	x = Explain(s, Probe{netip.MustParseAddr("10.244.1.3"), netip.MustParseAddr("192.0.2.1"), model.ProtocolICMP, 0})
	if got := x.Egress.String(); got != "shop/db: allow: no policy selects it" || x.Ingress.Endpoint != "" {
		t.Error(got, x.Ingress)
	}
}

func TestLimits(t *testing.T) {
	many := &Policy{Name: "many", Ingress: &Direction{Rules: make([]Rule, MaxRules+1)}}
	var f *FieldError
	if err := many.Validate(); !errors.As(err, &f) || f.Path != "rules" {
		t.Errorf("%v", err)
	}
	for _, name := range []string{"", "a/b/c", "a/", "A", "-a", strings.Repeat("a", MaxName+1)} {
		if ValidateName(name) == nil {
			t.Errorf("name %q is accepted", name)
		}
	}
}
