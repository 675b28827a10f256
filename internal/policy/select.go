package policy

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/model"
)

// NamespaceLabel is the label of an endpoint that names its namespace.
const NamespaceLabel = "io.heddle.namespace"

// NamespaceNameLabel is a label that every namespace has: its name.
const NamespaceNameLabel = "kubernetes.io/metadata.name"

// DefaultNamespace is that of endpoints which say nothing of theirs.
const DefaultNamespace = "default"

// NamespaceOf gives an endpoint's namespace: its label NamespaceLabel, or else the part of its name
// before the first '/', or else DefaultNamespace.
func NamespaceOf(e model.Endpoint) string {
	if ns := e.Labels[NamespaceLabel]; ns != "" {
		return ns
	}
	if ns, _, found := strings.Cut(e.Name, "/"); found {
		return ns
	}
	return DefaultNamespace
}

// Namespace is a group of endpoints that has labels of its own. Namespaces exist by their
// endpoints; one that nobody described has no label but NamespaceNameLabel.
type Namespace struct {
	Name   string            `json:"name"`
	Source string            `json:"source,omitempty"` // as a Policy's
	Labels map[string]string `json:"labels,omitempty"`
}

// Validate reports what is wrong with a namespace's description: a *FieldError.
func (n Namespace) Validate() error {
	if err := ValidateNamespace(n.Name); err != nil {
		return err
	}
	if err := validateSource(n.Source); err != nil {
		return err
	}
	if len(n.Labels) > MaxPerSelector {
		return fault("labels", "", "%d labels, at most %d are taken", len(n.Labels), MaxPerSelector)
	}
	for k, v := range n.Labels {
		if err := validateLabel("labels", k, v); err != nil {
			return err
		}
	}
	if v, ok := n.Labels[NamespaceNameLabel]; ok && v != n.Name {
		return fault("labels", "leave it out", "label %s=%.60s: it is always the namespace's name, %s", NamespaceNameLabel, v, n.Name)
	}
	return nil
}

// all gives the namespace's labels, its name's included.
func (n Namespace) all() map[string]string {
	out := maps.Clone(n.Labels)
	if out == nil {
		out = make(map[string]string, 1)
	}
	out[NamespaceNameLabel] = n.Name
	return out
}

func (e Expression) matches(labels map[string]string) bool {
	v, there := labels[e.Key]
	switch e.Operator {
	case In:
		return there && slices.Contains(e.Values, v)
	case NotIn:
		return !there || !slices.Contains(e.Values, v)
	case Exists:
		return there
	default:
		return !there
	}
}

func (r *Requirements) matches(labels map[string]string) bool {
	for k, v := range r.Labels {
		if have, there := labels[k]; !there || have != v {
			return false
		}
	}
	for _, e := range r.Expressions {
		if !e.matches(labels) {
			return false
		}
	}
	return true
}

// matches reports whether an endpoint with these labels, in ns, is selected.
func (s *Selector) matches(labels map[string]string, ns string, nsLabels map[string]string) bool {
	if n := s.Namespace; n != nil && (n.Name != "" && n.Name != ns || !n.Requirements.matches(nsLabels)) {
		return false
	}
	return s.Requirements.matches(labels)
}

// inPrefix reports whether p has one of forms, and no exception has it.
func inPrefix(p netip.Prefix, except []netip.Prefix, forms []netip.Addr) bool {
	return slices.ContainsFunc(forms, func(a netip.Addr) bool {
		return p.Contains(a) && !slices.ContainsFunc(except, func(x netip.Prefix) bool { return x.Contains(a) })
	})
}

// Matches reports whether the selector selects an endpoint. namespaces are those that somebody
// described.
func (s *Selector) Matches(e model.Endpoint, namespaces []Namespace) bool {
	ns := NamespaceOf(e)
	described := Namespace{Name: ns}
	if i := slices.IndexFunc(namespaces, func(n Namespace) bool { return n.Name == ns }); i >= 0 {
		described = namespaces[i]
	}
	return s.matches(e.Labels, ns, described.all())
}

// Validate reports what is wrong with a selector whose field is called path: a *FieldError.
func (s *Selector) Validate(path string) error { return s.validate(path) }
