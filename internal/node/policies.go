package node

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

// policies answers what the API asks of policy. It has no state of its own: the store has the
// policies, the enforcer what is in force.
type policies struct{ *host }

// Policies lists the network's policies and namespaces as this agent compiled them last.
func (ps *policies) Policies(context.Context) (api.PolicyDocuments, error) {
	_, state := ps.enforcer.snapshot()
	if state == nil {
		return api.PolicyDocuments{}, nil
	}
	return api.PolicyDocuments{Policies: slices.Clone(state.Policies), Namespaces: slices.Clone(state.Namespaces)}, nil
}

// EditPolicies changes policies in the store, and waits until this node enforces them.
func (ps *policies) EditPolicies(ctx context.Context, edit api.PolicyEdit) ([]api.PolicyOutcome, error) {
	limited, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	made, err := ps.store.EditPolicies(limited, store.PolicyEdit{
		Put: edit.Policies, PutNamespaces: edit.Namespaces, Delete: edit.Delete, DeleteNamespaces: edit.DeleteNamespaces, Source: edit.Source})
	if err != nil {
		return nil, policyError(err)
	}
	out := make([]api.PolicyOutcome, len(made))
	for i, o := range made {
		out[i] = api.PolicyOutcome(o)
	}
	return out, ps.awaitPolicies(limited, edit)
}

// awaitPolicies returns when this node enforces an edit that the store has, or something later.
func (ps *policies) awaitPolicies(ctx context.Context, edit api.PolicyEdit) error {
	var looked *policy.State
	for {
		news := ps.enforcer.news()
		status, state := ps.enforcer.snapshot()
		if status.Error == "" && state != nil && (looked == nil || !same(looked.Policies, state.Policies) || !same(looked.Namespaces, state.Namespaces)) {
			if holds(state, edit) {
				return nil
			}
			looked = state
		}
		select {
		case <-ctx.Done():
			return &api.Error{Code: api.CodeUnavailable, Message: "the store has the change, but it is not in force on this node: " + cmp.Or(status.Error, "no news from the store"),
				Remedy: "see heddle status"}
		case <-news:
		}
	}
}

// holds reports whether state has what an edit leads to.
func holds(state *policy.State, edit api.PolicyEdit) bool {
	policies := make(map[string]*policy.Policy, len(state.Policies))
	for _, p := range state.Policies {
		policies[p.Name] = p
	}
	namespaces := make(map[string]policy.Namespace, len(state.Namespaces))
	for _, n := range state.Namespaces {
		namespaces[n.Name] = n
	}
	for _, p := range edit.Policies {
		if have := policies[p.Name]; have == nil || !sameJSON(have, p) {
			return false
		}
	}
	for _, n := range edit.Namespaces {
		if have, there := namespaces[n.Name]; !there || !sameJSON(have, n) {
			return false
		}
	}
	for _, name := range edit.Delete {
		if p := policies[name]; p != nil && (edit.Source == "" || p.Source == edit.Source) {
			return false
		}
	}
	for _, name := range edit.DeleteNamespaces {
		if n, there := namespaces[name]; there && (edit.Source == "" || n.Source == edit.Source) {
			return false
		}
	}
	return true
}

func sameJSON(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// policyError gives a failed edit its code on the wire.
func policyError(err error) error {
	var unknown *store.UnknownPolicyError
	var limit *store.PolicyLimitError
	switch {
	case errors.As(err, &unknown):
		return &api.Error{Code: api.CodeNotFound, Field: "delete", Message: err.Error()}
	case errors.As(err, &limit):
		return &api.Error{Code: api.CodeExhausted, Message: err.Error()}
	}
	return storeError(err)
}

// ExplainPolicy says what the rules make of a connection. From and to are names of endpoints or
// addresses.
func (ps *policies) ExplainPolicy(_ context.Context, q api.ExplainRequest) (api.Explanation, error) {
	_, state := ps.enforcer.snapshot()
	if state == nil {
		return api.Explanation{}, &api.Error{Code: api.CodeUnavailable, Message: "the agent has not compiled policy yet", Remedy: "try again"}
	}
	from, err := ends("from", q.From, state)
	if err != nil {
		return api.Explanation{}, err
	}
	to, err := ends("to", q.To, state)
	if err != nil {
		return api.Explanation{}, err
	}
	probe := policy.Probe{Protocol: q.Ports.Protocol, Port: q.Ports.First}
	for _, probe.From = range from {
		for _, probe.To = range to {
			if probe.From.Is4() == probe.To.Is4() {
				return api.ExplanationOf(probe, policy.Explain(state, probe)), nil
			}
		}
	}
	return api.Explanation{}, &api.Error{Code: api.CodeInvalid, Field: "to", Message: fmt.Sprintf("%s and %s have no address family in common", q.From, q.To)}
}

// ends gives the addresses that a name or an address means.
func ends(field, s string, state *policy.State) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	var found []model.Endpoint
	for e := range state.Endpoints.All() {
		if e.Name == s {
			found = append(found, e)
		}
	}
	switch len(found) {
	case 0:
		return nil, &api.Error{Code: api.CodeNotFound, Field: field, Message: fmt.Sprintf("no endpoint %.80q in the network, and no address", s)}
	case 1:
		return found[0].Addrs, nil
	}
	return nil, &api.Error{Code: api.CodeInvalid, Field: field, Message: fmt.Sprintf("endpoint %s is on several nodes", s),
		Remedy: fmt.Sprintf("give an address, such as %s of node %s", found[0].Addr4(), found[0].Node)}
}
