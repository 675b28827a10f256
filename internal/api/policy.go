package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// MaxPolicyBytes bounds the body of a request that changes policies.
const MaxPolicyBytes = 4 << 20

// Policy is what an agent says of the rules it enforces.
type Policy struct {
	Policies int `json:"policies"`
	Rules    int `json:"rules"`
	// Revision is the store revision that is in force on this node.
	Revision int64 `json:"revision"`
	// Addresses and Pairs are the sizes of the compiled tables: addresses and prefixes with a
	// class, and pairs of classes with a verdict of their own.
	Addresses int `json:"addresses"`
	Pairs     int `json:"pairs"`
	// Took is how long the last change took, from the store's news to the last forbidden
	// connection's end.
	Took time.Duration `json:"took_ns"`
	// Cut counts the connections ended since the agent's start because a change forbade them.
	Cut uint64 `json:"cut"`
	// Faults are policies in the store that this agent does not understand, and what became of
	// them.
	Faults []string `json:"faults,omitempty"`
	// Error is why what the store says is not in force; the tables before are.
	Error string `json:"error,omitempty"`
	// CutError is why connections that the policy in force forbids may be alive. They are tried
	// again every second.
	CutError string `json:"cut_error,omitempty"`
}

// PolicyDocuments are a network's policies and described namespaces, sorted by name.
type PolicyDocuments struct {
	Policies   []*policy.Policy   `json:"policies"`
	Namespaces []policy.Namespace `json:"namespaces"`
}

// PolicyEdit is a set of changes, made in one step or not at all. What is put replaces what has the
// same name.
type PolicyEdit struct {
	Policies         []*policy.Policy   `json:"policies,omitempty"`
	Namespaces       []policy.Namespace `json:"namespaces,omitempty"`
	Delete           []string           `json:"delete,omitempty"`
	DeleteNamespaces []string           `json:"delete_namespaces,omitempty"`
	// Source: only what has it is deleted; what somebody else keeps stays. Empty: whosoever it is.
	Source string `json:"source,omitempty"`
}

// PolicyOutcome says what became of one change of an edit.
type PolicyOutcome struct {
	Kind   string `json:"kind"` // "policy" or "namespace"
	Name   string `json:"name"`
	Change string `json:"change"` // "created", "changed", "unchanged" or "deleted"
}

// Validate reports the first thing that is wrong with an edit by itself. The error is an *Error.
func (e PolicyEdit) Validate() error {
	if len(e.Policies)+len(e.Namespaces)+len(e.Delete)+len(e.DeleteNamespaces) == 0 {
		return &Error{Code: CodeInvalid, Message: "nothing to change: no policy and no namespace is named"}
	}
	for i, p := range e.Policies {
		at := fmt.Sprintf("policies[%d]", i)
		if p == nil {
			return &Error{Code: CodeInvalid, Field: at, Message: "is null"}
		}
		if err := p.Validate(); err != nil {
			return fieldError(at, err)
		}
	}
	for i, n := range e.Namespaces {
		if err := n.Validate(); err != nil {
			return fieldError(fmt.Sprintf("namespaces[%d]", i), err)
		}
	}
	for i, name := range e.Delete {
		if err := policy.ValidateName(name); err != nil {
			return fieldError(fmt.Sprintf("delete[%d]", i), err)
		}
	}
	for i, name := range e.DeleteNamespaces {
		if err := policy.ValidateNamespace(name); err != nil {
			return fieldError(fmt.Sprintf("delete_namespaces[%d]", i), err)
		}
	}
	return nil
}

// fieldError gives what package policy says of a field the form that travels.
func fieldError(at string, err error) error {
	var f *policy.FieldError
	if errors.As(err, &f) {
		return &Error{Code: CodeInvalid, Field: at + "." + f.Path, Message: f.Reason, Remedy: f.Remedy}
	}
	return &Error{Code: CodeInvalid, Field: at, Message: err.Error()}
}

// ExplainRequest asks what the rules make of a connection.
type ExplainRequest struct {
	// From and To are names of endpoints, on any node, or addresses.
	From, To string
	// Ports is a protocol with one destination port; ICMP has none.
	Ports policy.Ports
}

// Explanation is the verdict on a connection, and how it came about.
type Explanation struct {
	From     netip.Addr `json:"from"`
	To       netip.Addr `json:"to"`
	Protocol string     `json:"protocol"`
	Port     uint16     `json:"port,omitempty"`
	Verdict  string     `json:"verdict"` // "allow", "reject" or "drop"
	// Itself: both ends are one endpoint, and no rule is asked.
	Itself  bool        `json:"itself,omitempty"`
	Egress  ExplainSide `json:"egress"`
	Ingress ExplainSide `json:"ingress"`
}

// ExplainSide is what the rules of one end say.
type ExplainSide struct {
	Endpoint string   `json:"endpoint,omitempty"` // empty: no endpoint, so no rules
	Verdict  string   `json:"verdict"`
	Policies []string `json:"policies,omitempty"` // all that speak of it
	Policy   string   `json:"policy,omitempty"`   // the one that decided
	Rule     *int     `json:"rule,omitempty"`     // its rule, from 0; absent: its default
	RuleName string   `json:"rule_name,omitempty"`
	Text     string   `json:"text"` // all this in a sentence
}

// ExplanationOf gives x the form that travels.
func ExplanationOf(p policy.Probe, x policy.Explanation) Explanation {
	side := func(s policy.Side) ExplainSide {
		out := ExplainSide{Endpoint: s.Endpoint, Verdict: s.Verdict.String(), Policies: s.Policies, Policy: s.Policy, RuleName: s.RuleName, Text: s.String()}
		if s.Policy != "" && s.Rule >= 0 {
			out.Rule = &s.Rule
		}
		return out
	}
	return Explanation{From: p.From, To: p.To, Protocol: policy.ProtocolName(p.Protocol), Port: p.Port, Verdict: x.Verdict.String(),
		Itself: x.Itself, Egress: side(x.Egress), Ingress: side(x.Ingress)}
}

// LabelRequest changes labels of an endpoint.
type LabelRequest struct {
	Set    map[string]string `json:"set,omitempty"`
	Remove []string          `json:"remove,omitempty"`
}

// Validate checks the request's form.
func (r LabelRequest) Validate() error {
	if len(r.Set)+len(r.Remove) == 0 {
		return &Error{Code: CodeInvalid, Message: "nothing to change: no label is named"}
	}
	for _, k := range r.Remove {
		if _, both := r.Set[k]; both {
			return &Error{Code: CodeInvalid, Field: "remove", Message: fmt.Sprintf("label %.80q is to be set and removed", k)}
		}
	}
	return EndpointRequest{Labels: r.Set}.validateLabels()
}

func (s *server) policies(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	docs, err := s.agent.Policies(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, PolicyDocuments{orEmpty(docs.Policies), orEmpty(docs.Namespaces)})
}

type outcomeList struct {
	Outcomes []PolicyOutcome `json:"outcomes"`
}

func (s *server) editPolicies(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	var edit PolicyEdit
	if err := decodeStrict(r.Body, MaxPolicyBytes, &edit); err != nil {
		return err
	}
	if err := edit.Validate(); err != nil {
		return err
	}
	made, err := s.agent.EditPolicies(r.Context(), edit)
	if err != nil {
		return fmt.Errorf("change policies: %w", err)
	}
	return s.write(w, outcomeList{orEmpty(made)})
}

func (s *server) explainPolicy(w http.ResponseWriter, r *http.Request) error {
	q, err := decodeExplain(r.URL.RawQuery)
	if err != nil {
		return err
	}
	x, err := s.agent.ExplainPolicy(r.Context(), q)
	if err != nil {
		return fmt.Errorf("explain: %w", err)
	}
	return s.write(w, x)
}

func decodeExplain(raw string) (q ExplainRequest, err error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, &Error{Code: CodeInvalid, Message: "query: " + err.Error()}
	}
	for name, list := range values {
		if !slices.Contains([]string{"from", "to", "port"}, name) || len(list) != 1 {
			return q, &Error{Code: CodeInvalid, Field: name, Message: "want from, to and port, each once"}
		}
	}
	q.From, q.To = values.Get("from"), values.Get("to")
	for field, s := range map[string]string{"from": q.From, "to": q.To} {
		if _, err := netip.ParseAddr(s); err == nil {
			continue
		}
		if err := ValidateEndpointName(field, s); err != nil {
			return q, err
		}
	}
	q.Ports, err = ParseExplainPort(values.Get("port"))
	return q, err
}

// ParseExplainPort reads "80", "80/udp", "tcp/80" or "icmp": a protocol with one port. TCP is meant
// without one.
func ParseExplainPort(s string) (policy.Ports, error) {
	text := s
	if port, protocol, found := strings.Cut(s, "/"); found && port != "" && port[0] >= '0' && port[0] <= '9' {
		text = protocol + "/" + port
	} else if !found && s != "icmp" {
		text = "tcp/" + s
	}
	p, err := policy.ParsePorts(text)
	if err != nil || p.Protocol.HasPorts() && p.First != p.Last {
		return p, &Error{Code: CodeInvalid, Field: "port", Message: fmt.Sprintf("%.40q is no single port", s), Remedy: "write 80, 80/tcp, 53/udp or icmp"}
	}
	return p, nil
}

func (s *server) labelEndpoint(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	var req LabelRequest
	if err := decodeStrict(r.Body, MaxRequestBytes, &req); err != nil {
		return err
	}
	if err := req.Validate(); err != nil {
		return err
	}
	e, err := s.agent.LabelEndpoint(r.Context(), name, req)
	if err != nil {
		return fmt.Errorf("label endpoint %s: %w", name, err)
	}
	return s.write(w, e)
}

// Policies lists the network's policies and namespaces.
func (c *Client) Policies(ctx context.Context) (PolicyDocuments, error) {
	var docs PolicyDocuments
	err := c.call(ctx, http.MethodGet, "/v1/policies", nil, &docs)
	return docs, err
}

// EditPolicies changes policies; see Agent.
func (c *Client) EditPolicies(ctx context.Context, edit PolicyEdit) ([]PolicyOutcome, error) {
	if err := edit.Validate(); err != nil {
		return nil, err
	}
	var list outcomeList
	err := c.call(ctx, http.MethodPost, "/v1/policies", edit, &list)
	return list.Outcomes, err
}

// ExplainPolicy asks what the rules make of a connection.
func (c *Client) ExplainPolicy(ctx context.Context, q ExplainRequest) (Explanation, error) {
	query := url.Values{"from": {q.From}, "to": {q.To}, "port": {q.Ports.String()}}
	var x Explanation
	err := c.call(ctx, http.MethodGet, "/v1/policies/explain?"+query.Encode(), nil, &x)
	return x, err
}

// LabelEndpoint changes labels of an endpoint; see Agent.
func (c *Client) LabelEndpoint(ctx context.Context, name string, req LabelRequest) (e model.Endpoint, err error) {
	if err := ValidateEndpointName("name", name); err != nil {
		return e, err
	}
	if err := req.Validate(); err != nil {
		return e, err
	}
	err = c.call(ctx, http.MethodPatch, "/v1/endpoints/"+url.PathEscape(name)+"/labels", req, &e)
	return e, err
}
