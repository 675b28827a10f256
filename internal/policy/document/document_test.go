package document

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/policy"
)

const native = `# comment
apiVersion: heddle.dev/v1
kind: Policy
name: web
subject:
  labels: {app: web}
  namespace: {name: shop}
ingress:
  default: deny
  deny: drop
  rules:
  - name: clients
    action: allow
    peers:
    - endpoints: {labels: {app: client}, expressions: [{key: tier, operator: not_in, values: [x, y]}]}
    - prefix: 192.0.2.0/24
      except: [192.0.2.1/32]
    - entity: node
    ports: [tcp/80, tcp/8000-8080, udp/53, icmp]
  - {action: deny, deny: reject, peers: [{entity: outside}]}
egress:
  rules: [{action: deny, ports: [tcp/25]}]
---
---
kind: Namespace
apiVersion: v1
metadata: {name: shop, labels: {team: a}, creationTimestamp: null}
spec: {finalizers: [kubernetes]}
`

// networkPolicy is the example of Kubernetes' documentation, as kubectl prints it.
const networkPolicy = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: test-network-policy
  namespace: default
  annotations: {kubectl.kubernetes.io/last-applied-configuration: "{}"}
  creationTimestamp: "2026-01-01T00:00:00Z"
  generation: 1
  resourceVersion: "12"
  uid: 0c1d
spec:
  podSelector:
    matchLabels:
      role: db
  policyTypes:
  - Ingress
  - Egress
  ingress:
  - from:
    - ipBlock:
        cidr: 172.17.0.0/16
        except:
        - 172.17.1.0/24
    - namespaceSelector:
        matchLabels:
          project: myproject
    - podSelector:
        matchLabels:
          role: frontend
    ports:
    - protocol: TCP
      port: 6379
  egress:
  - to:
    - ipBlock:
        cidr: 10.0.0.0/24
    ports:
    - port: 32000
      endPort: 32768
status: {}
`

func one(t *testing.T, text string) *policy.Policy {
	t.Helper()
	s, err := Parse(File{"f", []byte(text)})
	if err != nil || len(s.Policies) != 1 {
		t.Fatalf("%d policies, %v", len(s.Policies), err)
	}
	return s.Policies[0]
}

func TestNative(t *testing.T) {
	s, err := Parse(File{"f", []byte(native)})
	if err != nil || len(s.Policies) != 1 || len(s.Namespaces) != 1 || s.Namespaces[0].Labels["team"] != "a" {
		t.Fatalf("%+v, %v", s, err)
	}
	// What was read is written as JSON in the same terms, and is read again as the same.
	raw, err := json.Marshal(s.Policies[0])
	if err != nil {
		t.Fatal(err)
	}
	again := one(t, `{"apiVersion":"heddle.dev/v1","kind":"Policy",`+string(raw[1:]))
	if second, err := json.Marshal(again); err != nil || string(second) != string(raw) {
		t.Errorf("%v\n%s\n%s", err, raw, second)
	}
	want := `{"name":"web","subject":{"labels":{"app":"web"},"namespace":{"name":"shop"}},"ingress":{"default":"deny","deny":"drop","rules":[` +
		`{"name":"clients","action":"allow","peers":[{"endpoints":{"labels":{"app":"client"},"expressions":[{"key":"tier","operator":"not_in","values":["x","y"]}]}},` +
		`{"prefix":"192.0.2.0/24","except":["192.0.2.1/32"]},{"entity":"node"}],"ports":["tcp/80","tcp/8000-8080","udp/53","icmp"]},` +
		`{"action":"deny","deny":"reject","peers":[{"entity":"outside"}]}]},"egress":{"rules":[{"action":"deny","ports":["tcp/25"]}]}}`
	if string(raw) != want {
		t.Errorf("got  %s\nwant %s", raw, want)
	}
}

func TestNetworkPolicy(t *testing.T) {
	raw, err := json.Marshal(one(t, networkPolicy))
	want := `{"name":"default/test-network-policy","subject":{"labels":{"role":"db"},"namespace":{"name":"default"}},` +
		`"ingress":{"default":"deny","rules":[{"action":"allow","peers":[{"prefix":"172.17.0.0/16","except":["172.17.1.0/24"]},` +
		`{"endpoints":{"namespace":{"labels":{"project":"myproject"}}}},{"endpoints":{"labels":{"role":"frontend"},"namespace":{"name":"default"}}}],` +
		`"ports":["tcp/6379"]},{"name":"kubernetes: own node","action":"allow","peers":[{"entity":"host"}]}]},` +
		`"egress":{"default":"deny","rules":[{"action":"allow","peers":[{"prefix":"10.0.0.0/24"}],"ports":["tcp/32000-32768"]},` +
		`{"name":"kubernetes: own node","action":"allow","peers":[{"entity":"host"}]}]}}`
	if err != nil || string(raw) != want {
		t.Errorf("%v\ngot  %s\nwant %s", err, raw, want)
	}
}

// TestNetworkPolicyDefaults: what Kubernetes means by fields that are missing or empty.
func TestNetworkPolicyDefaults(t *testing.T) {
	const head = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a}\nspec:\n"
	for name, c := range map[string]struct {
		spec              string
		ingress, egress   bool
		peers, ports, num int // of the first rule, and the number of rules without the node's
	}{
		"deny all ingress":        {"  podSelector: {}\n  policyTypes: [Ingress]", true, false, 0, 0, 0},
		"no types: ingress":       {"  podSelector: {}", true, false, 0, 0, 0},
		"no types, egress rules":  {"  podSelector: {}\n  egress: [{}]", true, true, 0, 0, 0},
		"no types, empty egress":  {"  podSelector: {}\n  egress: []", true, false, 0, 0, 0},
		"egress only":             {"  podSelector: {}\n  policyTypes: [Egress]\n  ingress: [{}]", false, true, 0, 0, 0},
		"allow all":               {"  podSelector: {}\n  ingress: [{}]", true, false, 0, 0, 1},
		"from is empty: all":      {"  podSelector: {}\n  ingress: [{from: [], ports: []}]", true, false, 0, 0, 1},
		"every pod of namespace":  {"  podSelector: {}\n  ingress: [{from: [{podSelector: {}}]}]", true, false, 1, 0, 1},
		"protocol without a port": {"  podSelector: {}\n  ingress: [{ports: [{protocol: UDP}, {}]}]", true, false, 0, 2, 1},
	} {
		p := one(t, head+c.spec)
		if (p.Ingress != nil) != c.ingress || (p.Egress != nil) != c.egress {
			t.Errorf("%s: ingress %v, egress %v", name, p.Ingress, p.Egress)
			continue
		}
		if p.Ingress == nil {
			continue
		}
		rules := p.Ingress.Rules
		if p.Ingress.Default != policy.DefaultDeny || len(rules) != c.num+1 || rules[c.num].Name != HostRule {
			t.Errorf("%s: %+v", name, p.Ingress)
		} else if c.num > 0 && (len(rules[0].Peers) != c.peers || len(rules[0].Ports) != c.ports) {
			t.Errorf("%s: %+v", name, rules[0])
		}
	}
}

// TestRefusals: each is refused as a whole, at the line and the field that are at fault.
func TestRefusals(t *testing.T) {
	const head = "apiVersion: heddle.dev/v1\nkind: Policy\n"
	const k8s = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  podSelector: {}\n  ingress:\n"
	deep := strings.Repeat("[", 40) + strings.Repeat("]", 40)
	for name, c := range map[string]struct {
		text, path string
		line       int
		says       string
	}{
		"empty file":         {"", "", 0, "no document"},
		"no text":            {"\x00\x01", "", 0, "no YAML"},
		"broken":             {"a: [", "", 0, "no YAML"},
		"a list":             {"- a", "", 1, "want an object"},
		"unknown kind":       {"apiVersion: v1\nkind: Pod", "", 1, "not known"},
		"no kind":            {"apiVersion: v1", "kind", 0, "missing"},
		"unknown field":      {head + "name: a\nsubject: {}\nfoo: 1\ningress: {default: deny}", "", 5, `"foo" is not known`},
		"unknown, deeper":    {head + "name: a\nsubject: {}\ningress:\n  default: deny\n  rules:\n  - action: allow\n    port: [tcp/1]", "ingress.rules[0]", 9, `"port" is not known`},
		"twice":              {head + "name: a\nname: b", "", 4, "twice"},
		"no subject":         {head + "name: a\ningress: {default: deny}", "subject", 0, "missing"},
		"no name":            {head + "subject: {}\ningress: {default: deny}", "name", 0, "missing"},
		"bad name":           {head + "name: A b\nsubject: {}\ningress: {default: deny}", "name", 3, "no name"},
		"says nothing":       {head + "name: a\nsubject: {}", "ingress", 1, "says nothing"},
		"empty direction":    {head + "name: a\nsubject: {}\ningress: {}", "ingress", 5, "says nothing"},
		"bad port":           {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, ports: [tcp/0]}]}", "ingress.rules[0].ports[0]", 5, "1..65535"},
		"range backwards":    {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, ports: [tcp/9-8]}]}", "ingress.rules[0].ports[0]", 5, "before it begins"},
		"icmp has no ports":  {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, ports: [icmp/8]}]}", "ingress.rules[0].ports[0]", 5, "no ports"},
		"empty ports":        {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, ports: []}]}", "ingress.rules[0].ports", 5, "empty list"},
		"empty peers":        {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, peers: []}]}", "ingress.rules[0].peers", 5, "empty list"},
		"two in a peer":      {head + "name: a\nsubject: {}\ningress:\n  rules:\n  - action: allow\n    peers:\n    - {entity: node, prefix: 10.0.0.0/8}", "ingress.rules[0].peers[0]", 9, "2 of"},
		"unmasked":           {head + "name: a\nsubject: {prefixes: [10.0.0.1/8]}\ningress: {default: deny}", "subject.prefixes[0]", 4, "beyond its length"},
		"except outside":     {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, peers: [{prefix: 10.0.0.0/8, except: [11.0.0.0/16]}]}]}", "ingress.rules[0].peers[0].except[0]", 5, "not a part"},
		"contradictory rule": {head + "name: a\nsubject: {}\ningress:\n  rules:\n  - {action: allow, ports: [tcp/1]}\n  - {action: deny, ports: [tcp/1]}", "ingress.rules[1]", 8, "contradicts ingress.rules[0]"},
		"allow with drop":    {head + "name: a\nsubject: {}\ningress: {rules: [{action: allow, deny: drop}]}", "ingress.rules[0].deny", 5, "contradicts"},
		"contradictory label": {head + "name: a\nsubject:\n  labels: {a: b}\n  expressions: [{key: a, operator: not_exists}]\ningress: {default: deny}",
			"subject.expressions[0]", 6, "contradicts label a=b"},
		"a number for text":  {head + "name: 12\nsubject: {}\ningress: {default: deny}", "name", 3, "number 12"},
		"an anchor":          {head + "name: &x a\nsubject: {}\ningress: {default: deny}", "", 3, "anchors"},
		"deep":               {deep, "", 1, "deep"},
		"described twice":    {strings.Repeat(head+"name: a\nsubject: {}\ningress: {default: deny}\n---\n", 2), "", 7, "described twice: also at f:1"},
		"k8s named port":     {k8s + "  - ports: [{port: http}]", "spec.ingress[0].ports[0].port", 7, "named ports are not supported"},
		"k8s SCTP":           {k8s + "  - ports: [{port: 1, protocol: SCTP}]", "spec.ingress[0].ports[0].protocol", 7, "SCTP"},
		"k8s endPort":        {k8s + "  - ports: [{port: 10, endPort: 9}]", "spec.ingress[0].ports[0]", 7, "10-9"},
		"k8s endPort alone":  {k8s + "  - ports: [{endPort: 9}]", "spec.ingress[0].ports[0].endPort", 7, "no port before it"},
		"k8s empty peer":     {k8s + "  - from: [{}]", "spec.ingress[0].from[0]", 7, "says nothing"},
		"k8s block and pods": {k8s + "  - from: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]", "spec.ingress[0].from[0]", 7, "beside a selector"},
		"k8s except":         {k8s + "  - from:\n    - ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/8]}", "spec.ingress[0].from[0]", 8, "not a part"},
		"k8s from, not to":   {k8s + "  - to: []", "spec.ingress[0]", 7, `"to" is not known`},
		"k8s type":           {k8s + "  policyTypes: [Both]", "spec.policyTypes", 7, "want Ingress or Egress"},
		"in a list": {"apiVersion: v1\nkind: List\nitems:\n- " + strings.ReplaceAll(head+"name: a\nsubject: {}\ningress: {default: maybe}", "\n", "\n  "),
			"items[0].ingress.default", 8, "want allow or deny"},
		"huge": {strings.Repeat("# x\n", MaxBytes/4+1), "", 0, "at most 1048576"},
	} {
		s, err := Parse(File{"ok", []byte(native)}, File{"f", []byte(c.text)})
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if len(s.Policies) != 0 || e.File != "f" || e.Path != c.path || e.Line != c.line || !strings.Contains(e.Error(), c.says) {
			t.Errorf("%s: path %q line %d: %v; want %q, %d, %q", name, e.Path, e.Line, err, c.path, c.line, c.says)
		}
	}
}

// FuzzParse: whatever is accepted is valid, and can be written and read again as the same.
func FuzzParse(f *testing.F) {
	f.Add(native)
	f.Add(networkPolicy)
	f.Add(`{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"a","labels":{"b":"c"}}}]}`)
	f.Add("a: &a [*a]\n---\n? {}\n: b\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(File{"f", []byte(text)})
		var e *Error
		if err != nil && (!errors.As(err, &e) || e.Reason == "") {
			t.Fatalf("%v", err)
		}
		for _, p := range s.Policies {
			if err := p.Validate(); err != nil {
				t.Fatalf("accepted: %v", err)
			}
			raw, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Parse(File{"again", []byte(`{"apiVersion":"heddle.dev/v1","kind":"Policy",` + string(raw[1:]))})
			if err != nil {
				t.Fatalf("%s: %v", raw, err)
			}
			if second, err := json.Marshal(again.Policies[0]); err != nil || string(second) != string(raw) {
				t.Fatalf("%v\n%s\n%s", err, raw, second)
			}
		}
	})
}
