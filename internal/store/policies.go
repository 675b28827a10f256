package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"heddle.dev/heddle/internal/policy"
)

// Limits of policies in the store. etcd takes 1.5 MiB in one request.
const (
	maxPolicyBytes = 1 << 20
	maxEditBytes   = 1300 << 10
	maxEditChanges = 3600
)

// PolicyEdit is a set of changes. What is put replaces what is there under the same name.
type PolicyEdit struct {
	Put              []*policy.Policy
	PutNamespaces    []policy.Namespace
	Delete           []string
	DeleteNamespaces []string
	// Source: only what has it is deleted; what somebody else keeps stays, and its outcome is
	// "unchanged". Empty: whosoever it is.
	Source string
}

// PolicyOutcome says what became of one change of an edit.
type PolicyOutcome struct {
	Kind   string `json:"kind"` // "policy" or "namespace"
	Name   string `json:"name"`
	Change string `json:"change"` // "created", "changed", "unchanged" or "deleted"
}

// PolicyLimitError says that an edit, or what it would lead to, is too much.
type PolicyLimitError struct {
	What   string // "rules in the network"
	Have   int
	Most   int
	Remedy string
}

// Error implements error.
func (e *PolicyLimitError) Error() string {
	return fmt.Sprintf("%d %s, at most %d are taken: %s", e.Have, e.What, e.Most, e.Remedy)
}

// UnknownPolicyError says that something to delete is not there.
type UnknownPolicyError struct{ Kind, Name string }

// Error implements error.
func (e *UnknownPolicyError) Error() string {
	return fmt.Sprintf("%s %s is not there: nothing was deleted", e.Kind, e.Name)
}

// EncodePolicy gives the value stored for p, or why p is no valid policy.
func EncodePolicy(p *policy.Policy) ([]byte, error) {
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("policy %.60q: %w", p.Name, err)
	}
	b, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode policy %s: %w", p.Name, err)
	}
	if len(b) > maxPolicyBytes {
		return nil, &PolicyLimitError{"bytes in policy " + p.Name, len(b), maxPolicyBytes, "split it into several"}
	}
	return b, nil
}

// ParsePolicy reads the value stored for the policy called name. Unlike other values it is refused
// for a member that is not known: what is not understood might be what narrows an allow.
func ParsePolicy(name string, value []byte) (*policy.Policy, error) {
	p := &policy.Policy{}
	if err := decodeStrictly(value, p); err != nil {
		return nil, fmt.Errorf("policy %s: %w", name, err)
	}
	if p.Name != name {
		return nil, fmt.Errorf("policy %s: its value says name %.60q", name, p.Name)
	}
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("policy %s: %w", name, err)
	}
	return p, nil
}

func decodeStrictly(value []byte, v any) error {
	if err := checkObject(value, maxPolicyBytes); err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(value))
	d.DisallowUnknownFields()
	return d.Decode(v)
}

// closedPolicy gives the policy that stands for one of which only the name and the subject can be
// read: nothing may reach or leave the subject.
func closedPolicy(name string, value []byte) (*policy.Policy, bool) {
	var members struct {
		Subject json.RawMessage `json:"subject"`
	}
	if checkObject(value, maxPolicyBytes) != nil || json.Unmarshal(value, &members) != nil || members.Subject == nil {
		return nil, false
	}
	closed := &policy.Direction{Rules: []policy.Rule{{Name: "not understood: closed", Action: policy.Block}}}
	p := &policy.Policy{Name: name, Source: sourceOf(value), Ingress: closed, Egress: closed}
	if decodeStrictly(members.Subject, &p.Subject) != nil || p.Validate() != nil {
		return nil, false
	}
	return p, true
}

// sourceOf gives the source that a stored policy or namespace says, also one that is not understood
// as a whole.
func sourceOf(value []byte) string {
	var members struct {
		Source string `json:"source"`
	}
	if json.Unmarshal(value, &members) != nil || (policy.Namespace{Name: "any", Source: members.Source}).Validate() != nil {
		return ""
	}
	return members.Source
}

// EncodeNamespace gives the value stored for n, or why n is no valid namespace.
func EncodeNamespace(n policy.Namespace) ([]byte, error) {
	if err := n.Validate(); err != nil {
		return nil, fmt.Errorf("namespace %.60q: %w", n.Name, err)
	}
	return encode(n)
}

// ParseNamespace reads the value stored for the namespace called name.
func ParseNamespace(name string, value []byte) (policy.Namespace, error) {
	var n policy.Namespace
	if err := decode(value, &n); err != nil {
		return n, fmt.Errorf("namespace %s: %w", name, err)
	}
	if n.Name != name {
		return n, fmt.Errorf("namespace %s: its value says name %.60q", name, n.Name)
	}
	if err := n.Validate(); err != nil {
		return n, fmt.Errorf("namespace %s: %w", name, err)
	}
	return n, nil
}

// PolicyTotals is the size of all policies of a network together. It is kept beside them, so that
// an edit need not read them all to know whether the network holds more.
type PolicyTotals struct {
	Policies int `json:"policies"`
	Rules    int `json:"rules"`
}

// ParsePolicyTotals reads the value of the key PolicyTotals.
func ParsePolicyTotals(value []byte) (t PolicyTotals, err error) {
	if err := decode(value, &t); err != nil {
		return t, fmt.Errorf("policy totals: %w", err)
	}
	if t.Policies < 0 || t.Rules < 0 {
		return t, fmt.Errorf("policy totals: %d policies, %d rules", t.Policies, t.Rules)
	}
	return t, nil
}

// CountPolicies counts them from the values of all policies.
func CountPolicies(policies map[string][]byte) (t PolicyTotals) {
	for _, value := range policies {
		t.add(value, 1)
	}
	return t
}

// add counts a policy's value times n; nil is none.
func (t *PolicyTotals) add(value []byte, n int) {
	if value != nil {
		t.Policies, t.Rules = t.Policies+n, t.Rules+n*countRules(value)
	}
}

// Names gives how many documents an edit names.
func (e PolicyEdit) Names() int {
	return len(e.Put) + len(e.PutNamespaces) + len(e.Delete) + len(e.DeleteNamespaces)
}

// PlanEdit decides what an edit writes, given the values of those policies and namespaces that it
// names, by name, and how much there is in all.
func PlanEdit(keys Keys, edit PolicyEdit, policies, namespaces map[string][]byte, totals PolicyTotals) ([]Written, []PolicyOutcome, error) {
	plan := plan{source: edit.Source}
	after := totals
	for _, p := range edit.Put {
		value, err := EncodePolicy(p)
		if err == nil {
			_, err = plan.change("policy", p.Name, keys.Policy(p.Name), value, policies)
		}
		if err != nil {
			return nil, nil, err
		}
		after.add(policies[p.Name], -1)
		after.add(value, 1)
	}
	for _, n := range edit.PutNamespaces {
		value, err := EncodeNamespace(n)
		if err == nil {
			_, err = plan.change("namespace", n.Name, keys.Namespace(n.Name), value, namespaces)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	for _, name := range edit.Delete {
		deleted, err := plan.change("policy", name, keys.Policy(name), nil, policies)
		if err != nil {
			return nil, nil, err
		}
		if deleted {
			after.add(policies[name], -1)
		}
	}
	for _, name := range edit.DeleteNamespaces {
		if _, err := plan.change("namespace", name, keys.Namespace(name), nil, namespaces); err != nil {
			return nil, nil, err
		}
	}
	after = PolicyTotals{max(after.Policies, 0), max(after.Rules, 0)} // if something else wrote policies
	if err := checkLimits(edit, len(plan.writes), plan.size, totals, after); err != nil {
		return nil, nil, err
	}
	if len(plan.writes) > 0 {
		value, err := encode(after)
		if err != nil {
			return nil, nil, err
		}
		// With every change: edits that know nothing of each other meet here.
		plan.writes = append(plan.writes, Written{keys.PolicyTotals(), value})
	}
	return plan.writes, plan.outcomes, nil
}

func checkLimits(edit PolicyEdit, changes, size int, before, after PolicyTotals) error {
	const steps = "apply the files in several steps"
	most := policy.MaxPolicies
	if !slices.ContainsFunc(edit.Put, func(p *policy.Policy) bool { return p.RuleCount() > 0 }) {
		most += policy.ClosingRoom
	}
	switch {
	case changes > maxEditChanges:
		return &PolicyLimitError{"changed documents in one step", changes, maxEditChanges, steps}
	case size > maxEditBytes:
		return &PolicyLimitError{"bytes of changed documents in one step", size, maxEditBytes, steps}
	case after.Policies > most && after.Policies > before.Policies:
		return &PolicyLimitError{"policies in the network", after.Policies, most, "delete some"}
	case after.Rules > policy.MaxTotalRules && after.Rules > before.Rules:
		return &PolicyLimitError{"rules in the network", after.Rules, policy.MaxTotalRules, "delete some"}
	}
	return nil
}

// countRules counts the rules of a stored policy without reading it: every rule has this member
// once. A label of that name counts, too: the limit is a guard, no account.
func countRules(value []byte) int { return bytes.Count(value, []byte(`"action":`)) }

// policies is the part of a View that is about them.
type policies struct {
	byName     map[string]*policy.Policy
	faults     map[string]string // by name
	namespaces map[string]policy.Namespace
	// The last state's; nil after a change.
	sortedPolicies   []*policy.Policy
	sortedNamespaces []policy.Namespace
	sortedFaults     []string
}

func (v *policies) reset() {
	*v = policies{byName: make(map[string]*policy.Policy), faults: make(map[string]string), namespaces: make(map[string]policy.Namespace)}
}

// setPolicy takes in a value. One that is not understood closes its subject, so that a mistake or a
// newer version of the schema opens nothing; where not even the subject can be read, there is
// nothing to close.
func (v *policies) setPolicy(name string, value []byte) error {
	v.deletePolicy(name)
	p, err := ParsePolicy(name, value)
	if err == nil {
		v.byName[name] = p
		return nil
	}
	if p, ok := closedPolicy(name, value); ok {
		v.byName[name] = p
		v.faults[name] = err.Error() + ": its subject is held closed"
	} else {
		v.faults[name] = err.Error() + ": NOT in force, for not even its subject can be read"
	}
	return err
}

func (v *policies) deletePolicy(name string) {
	delete(v.byName, name)
	delete(v.faults, name)
	v.sortedPolicies = nil
}

func (v *policies) setNamespace(n policy.Namespace) {
	v.namespaces[n.Name], v.sortedNamespaces = n, nil
}

func (v *policies) deleteNamespace(name string) {
	delete(v.namespaces, name)
	v.sortedNamespaces = nil
}

func (v *policies) addTo(s *State) {
	if v.sortedPolicies == nil {
		v.sortedPolicies, v.sortedFaults = inOrder(v.byName), inOrder(v.faults)
	}
	if v.sortedNamespaces == nil {
		v.sortedNamespaces = inOrder(v.namespaces)
	}
	s.Policies, s.Namespaces, s.PolicyFaults = v.sortedPolicies, v.sortedNamespaces, v.sortedFaults
}

// inOrder gives the values of m by the order of their keys.
func inOrder[V any](m map[string]V) []V {
	out := make([]V, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[k])
	}
	return out
}
