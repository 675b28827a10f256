package policy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits of policies. They keep one document from holding up agents; see docs/howto/policy.md.
const (
	MaxName        = 180    // bytes of a policy's name
	MaxRules       = 10000  // of one policy, both directions together
	MaxPerRule     = 1000   // peers of a rule, ports of a rule, exceptions of a prefix
	MaxPerSelector = 64     // labels, expressions and values of an expression
	MaxPolicies    = 20000  // of a network
	MaxTotalRules  = 200000 // of a network
	ClosingRoom    = 10000  // policies beyond MaxPolicies, for those without rules: what has no room can be held closed
	maxSource      = 40     // bytes
	maxLabelKey    = 317
	maxLabelValue  = 256
)

// FieldError says which field of a policy is at fault, and why.
type FieldError struct {
	Path   string // such as "ingress.rules[3].peers[0].prefix"
	Reason string
	Remedy string // may be empty
}

// Error implements error.
func (e *FieldError) Error() string {
	s := e.Path + ": " + e.Reason
	if e.Remedy != "" {
		s += ": " + e.Remedy
	}
	return s
}

func fault(path, remedy, reason string, args ...any) error {
	return &FieldError{Path: path, Reason: fmt.Sprintf(reason, args...), Remedy: remedy}
}

// ValidateName checks a policy's name: one or two parts joined by '/', each of a-z, 0-9, '-' and
// '.', beginning and ending with a letter or digit; at most MaxName bytes. Policies that came as
// Kubernetes objects have two, namespace and name.
func ValidateName(name string) error {
	parts := strings.Split(name, "/")
	if name == "" || len(name) > MaxName || len(parts) > 2 {
		return fault("name", "", "%.60q: want 1 to %d bytes in one part, or two joined by '/'", name, MaxName)
	}
	for _, part := range parts {
		if !isDNSName(part) {
			return fault("name", "use a-z, 0-9, '-' and '.', first and last a letter or digit", "%.60q is no name", name)
		}
	}
	return nil
}

// ValidateNamespace checks a namespace's name: a DNS label of at most 63 bytes.
func ValidateNamespace(name string) error {
	if len(name) > 63 || !isDNSName(name) || strings.Contains(name, ".") {
		return fault("namespace", "use 1 to 63 of a-z, 0-9 and '-', first and last a letter or digit", "%.60q is no namespace's name", name)
	}
	return nil
}

func validateSource(source string) error {
	if source != "" && (len(source) > maxSource || !isDNSName(source)) {
		return fault("source", "leave it out", "%.60q: want at most %d of a-z, 0-9, '-' and '.'", source, maxSource)
	}
	return nil
}

func isDNSName(s string) bool {
	alnum := func(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }
	if s == "" || !alnum(s[0]) || !alnum(s[len(s)-1]) {
		return false
	}
	for i := range len(s) {
		if !alnum(s[i]) && s[i] != '-' && s[i] != '.' {
			return false
		}
	}
	return true
}

// Validate reports the first field that no policy may have: a *FieldError.
func (p *Policy) Validate() error {
	if err := ValidateName(p.Name); err != nil {
		return err
	}
	if err := validateSource(p.Source); err != nil {
		return err
	}
	if err := p.Subject.validate("subject"); err != nil {
		return err
	}
	if p.Ingress == nil && p.Egress == nil {
		return fault("ingress", "add ingress or egress", "the policy says nothing: it has neither ingress nor egress")
	}
	if n := p.RuleCount(); n > MaxRules {
		return fault("rules", "use several policies", "%d rules, at most %d are taken in one policy", n, MaxRules)
	}
	for path, d := range map[string]*Direction{"ingress": p.Ingress, "egress": p.Egress} {
		if d == nil {
			continue
		}
		if err := d.validate(path); err != nil {
			return err
		}
	}
	return nil
}

func (d *Direction) validate(path string) error {
	switch d.Default {
	case DefaultNone, DefaultAllow, DefaultDeny:
	default:
		return fault(path+".default", "", "%.40q: want allow or deny, or leave it out", d.Default)
	}
	if err := d.Deny.validate(path + ".deny"); err != nil {
		return err
	}
	if d.Default == DefaultNone && len(d.Rules) == 0 {
		return fault(path, "add a default or rules, or leave it out", "says nothing")
	}
	seen := make(map[string]int, len(d.Rules))
	for i, r := range d.Rules {
		if err := r.validate(fmt.Sprintf("%s.rules[%d]", path, i)); err != nil {
			return err
		}
		matched, err := json.Marshal([]any{r.Peers, r.Ports})
		if err != nil {
			return fault(fmt.Sprintf("%s.rules[%d]", path, i), "", "%v", err)
		}
		if j, again := seen[string(matched)]; !again {
			seen[string(matched)] = i
		} else if d.Rules[j].Action != r.Action {
			return fault(fmt.Sprintf("%s.rules[%d]", path, i), "remove one of the two",
				"contradicts %s.rules[%d]: the same peers and ports are allowed by one and denied by the other", path, j)
		}
	}
	return nil
}

func (d Deny) validate(path string) error {
	if d != "" && d != Reject && d != Drop {
		return fault(path, "", "%.40q: want reject or drop", d)
	}
	return nil
}

func (r Rule) validate(path string) error {
	if len(r.Name) > MaxName || !printable(r.Name) {
		return fault(path+".name", "", "want printable text of at most %d bytes", MaxName)
	}
	if r.Action != Allow && r.Action != Block {
		return fault(path+".action", "", "%.40q: want allow or deny", r.Action)
	}
	if r.Action == Allow && r.Deny != "" {
		return fault(path+".deny", "leave it out, or make the action deny", "contradicts action allow")
	}
	if err := r.Deny.validate(path + ".deny"); err != nil {
		return err
	}
	if len(r.Peers) > MaxPerRule || len(r.Ports) > MaxPerRule {
		return fault(path, "use several rules", "%d peers and %d ports, at most %d of each are taken", len(r.Peers), len(r.Ports), MaxPerRule)
	}
	for i, p := range r.Peers {
		if err := p.validate(fmt.Sprintf("%s.peers[%d]", path, i)); err != nil {
			return err
		}
	}
	for i, p := range r.Ports {
		if again, err := ParsePorts(p.String()); err != nil || again != p {
			return fault(fmt.Sprintf("%s.ports[%d]", path, i), "", "want tcp/80, udp/1000-2000, tcp, udp or icmp")
		}
	}
	return nil
}

func (p Peer) validate(path string) error {
	set := 0
	for _, is := range []bool{p.Endpoints != nil, p.Prefix != netip.Prefix{}, p.Entity != ""} {
		if is {
			set++
		}
	}
	if set != 1 {
		return fault(path, "set one of endpoints, prefix and entity", "%d of endpoints, prefix and entity are set", set)
	}
	switch {
	case p.Endpoints != nil:
		if err := p.Endpoints.validate(path + ".endpoints"); err != nil {
			return err
		}
	case p.Entity != "":
		if !slices.Contains([]Entity{EntityNodes, EntityHost, EntityEndpoints, EntityOutside}, p.Entity) {
			return fault(path+".entity", "", "%.40q: want node, host, endpoints or outside", p.Entity)
		}
	default:
		if err := validatePrefix(path+".prefix", p.Prefix); err != nil {
			return err
		}
	}
	if len(p.Except) > 0 && p.Prefix == (netip.Prefix{}) {
		return fault(path+".except", "", "exceptions belong to a prefix")
	}
	if len(p.Except) > MaxPerRule {
		return fault(path+".except", "", "%d exceptions, at most %d are taken", len(p.Except), MaxPerRule)
	}
	for i, x := range p.Except {
		at := fmt.Sprintf("%s.except[%d]", path, i)
		if err := validatePrefix(at, x); err != nil {
			return err
		}
		if x.Bits() <= p.Prefix.Bits() || !p.Prefix.Contains(x.Addr()) {
			return fault(at, "", "%s is not a part of %s", x, p.Prefix)
		}
	}
	return nil
}

func validatePrefix(path string, p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return fault(path, "write ADDRESS/LENGTH", "is no prefix")
	case p.Addr().Is4In6():
		return fault(path, "write it as IPv4", "%s is IPv4 written as IPv6", p)
	case p != p.Masked():
		return fault(path, "write "+p.Masked().String(), "%s has bits beyond its length", p)
	}
	return nil
}

func (s *Subject) validate(path string) error {
	if len(s.Prefixes) > MaxPerRule {
		return fault(path+".prefixes", "", "%d prefixes, at most %d are taken", len(s.Prefixes), MaxPerRule)
	}
	for i, p := range s.Prefixes {
		if err := validatePrefix(fmt.Sprintf("%s.prefixes[%d]", path, i), p); err != nil {
			return err
		}
	}
	return s.Selector.validate(path)
}

func (s *Selector) validate(path string) error {
	if n := s.Namespace; n != nil {
		if n.Name != "" {
			if err := ValidateNamespace(n.Name); err != nil {
				return fault(path+".namespace.name", "", "%.60q is no namespace's name", n.Name)
			}
		}
		if err := n.Requirements.validate(path + ".namespace"); err != nil {
			return err
		}
	}
	return s.Requirements.validate(path)
}

func (r *Requirements) validate(path string) error {
	if len(r.Labels) > MaxPerSelector || len(r.Expressions) > MaxPerSelector {
		return fault(path, "", "%d labels and %d expressions, at most %d of each are taken", len(r.Labels), len(r.Expressions), MaxPerSelector)
	}
	for k, v := range r.Labels {
		if err := validateLabel(path+".labels", k, v); err != nil {
			return err
		}
	}
	for i, e := range r.Expressions {
		at := fmt.Sprintf("%s.expressions[%d]", path, i)
		if err := validateLabel(at+".key", e.Key, ""); err != nil {
			return err
		}
		switch e.Operator {
		case In, NotIn:
			if len(e.Values) == 0 || len(e.Values) > MaxPerSelector {
				return fault(at+".values", "", "%d values, want 1 to %d with operator %s", len(e.Values), MaxPerSelector, e.Operator)
			}
		case Exists, NotExists:
			if len(e.Values) != 0 {
				return fault(at+".values", "leave them out", "operator %s takes no values", e.Operator)
			}
		default:
			return fault(at+".operator", "", "%.40q: want in, not_in, exists or not_exists", e.Operator)
		}
		for j, v := range e.Values {
			if err := validateLabel(fmt.Sprintf("%s.values[%d]", at, j), e.Key, v); err != nil {
				return err
			}
		}
	}
	return r.contradiction(path)
}

// contradiction finds requirements that no set of labels meets.
func (r *Requirements) contradiction(path string) error {
	for i, e := range r.Expressions {
		at := fmt.Sprintf("%s.expressions[%d]", path, i)
		v, named := r.Labels[e.Key]
		if !named {
			continue
		}
		if !e.matches(map[string]string{e.Key: v}) {
			return fault(at, "remove one of the two", "contradicts label %s=%s beside it: nothing can meet both", e.Key, v)
		}
	}
	for i, e := range r.Expressions {
		for j, f := range r.Expressions[:i] {
			if e.Key == f.Key && (e.Operator == Exists && f.Operator == NotExists || e.Operator == NotExists && f.Operator == Exists) {
				return fault(fmt.Sprintf("%s.expressions[%d]", path, i), "remove one of the two",
					"contradicts expressions[%d]: %s cannot be there and not be there", j, e.Key)
			}
		}
	}
	return nil
}

func validateLabel(path, k, v string) error {
	if k == "" || len(k) > maxLabelKey || !printable(k) {
		return fault(path, "", "label %.60q: want a key of 1 to %d bytes of printable text", k, maxLabelKey)
	}
	if len(v) > maxLabelValue || !printable(v) {
		return fault(path, "", "value of label %.60q: want at most %d bytes of printable text", k, maxLabelValue)
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
