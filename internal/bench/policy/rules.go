package policy

import (
	"context"
	"fmt"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/policy"
)

// The rules of the scale experiment.
const (
	scalePolicyRules = 100 // of a policy
	maxScaleRules    = 150000
	scaleStep        = 60 // policies in one request: below what a request and the store take at once
	scaleLabel       = "bench-measured"
	scaleAppLabel    = "bench-app" // of made-up endpoints, in groups of ten: "a0", "a1", ...
	scaleAppSize     = 10
	scaleToggle      = "bench-scale-toggle"
	scaleWatchPort   = 20990 // what the toggle denies, or lets be, between n1/c1 and n2/c1
	scaleOtherPort   = 20991 // what it denies instead
)

// measured selects the measured containers.
func measured() policy.Selector {
	return policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{scaleLabel: "yes"}}}
}

func scaleName(i int) string { return fmt.Sprintf("bench-scale-%04d", i) }

// scalePolicy is number i of the experiment's policies: the measured containers may talk to each
// other, and to each of 99 apps on a port of its own; in turns it is about what they receive and
// what they send. Shifted, every port is another.
func scalePolicy(i, apps int, shifted bool) *policy.Policy {
	self := measured()
	d := &policy.Direction{Default: policy.DefaultDeny, Rules: []policy.Rule{{Action: policy.Allow, Peers: []policy.Peer{{Endpoints: &self}}}}}
	for r := 1; r < scalePolicyRules; r++ {
		app := (i*(scalePolicyRules-1) + r) % apps
		peer := policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{scaleAppLabel: fmt.Sprintf("a%d", app)}}}
		port := uint16(1000 + r)
		if shifted {
			port += scalePolicyRules
		}
		d.Rules = append(d.Rules, policy.Rule{Action: policy.Allow, Peers: []policy.Peer{{Endpoints: &peer}}, Ports: tcp(port)})
	}
	p := &policy.Policy{Name: scaleName(i), Subject: policy.Subject{Selector: measured()}}
	if i%2 == 0 {
		p.Ingress = d
	} else {
		p.Egress = d
	}
	return p
}

// togglePolicy is one rule: the measured containers take no connections from each other on port.
func togglePolicy(port uint16) *policy.Policy {
	self := measured()
	return &policy.Policy{Name: scaleToggle, Subject: policy.Subject{Selector: measured()}, Ingress: &policy.Direction{
		Rules: []policy.Rule{{Action: policy.Block, Peers: []policy.Peer{{Endpoints: &self}}, Ports: tcp(port)}}}}
}

func tcp(port uint16) []policy.Ports {
	ports, err := policy.ParsePorts(fmt.Sprintf("tcp/%d", port))
	if err != nil {
		panic(err) // the port is one of the constants'
	}
	return []policy.Ports{ports}
}

func (r *scaleRun) apps() int { return max(r.options.Endpoints/scaleAppSize, 1) }

// bring puts as many rules in force as asked for: more than before.
func (r *scaleRun) bring(ctx context.Context, rules int) error {
	for at := r.applied / scalePolicyRules; at < rules/scalePolicyRules; {
		var edit api.PolicyEdit
		for i := at; i < min(rules/scalePolicyRules, at+scaleStep); i++ {
			edit.Policies = append(edit.Policies, scalePolicy(i, r.apps(), false))
		}
		at += len(edit.Policies)
		r.applied = at * scalePolicyRules // also what may be there
		if err := r.edit(ctx, edit); err != nil {
			return err
		}
	}
	if rules > 0 && !r.toggled {
		return r.toggle(ctx, api.PolicyEdit{}, false)
	}
	return nil
}

// edit asks n1's agent for a change, and returns when it is in force there.
func (r *scaleRun) edit(ctx context.Context, edit api.PolicyEdit) error {
	_, err := r.agents[0].EditPolicies(ctx, edit)
	return err
}

// toggle makes edit, and with it denies connects to the watched port or lets them be. Among rules
// it is one rule that changes; where there is none, one that comes and goes.
func (r *scaleRun) toggle(ctx context.Context, edit api.PolicyEdit, deny bool) error {
	switch {
	case deny:
		edit.Policies = append(edit.Policies, togglePolicy(scaleWatchPort))
	case r.applied > 0:
		edit.Policies = append(edit.Policies, togglePolicy(scaleOtherPort))
	default:
		edit.Delete = append(edit.Delete, scaleToggle)
	}
	r.toggled = deny || r.applied > 0
	return r.edit(ctx, edit)
}

// clear takes away every rule that is there.
func (r *scaleRun) clear(ctx context.Context) error {
	var edit api.PolicyEdit
	for i := range r.applied / scalePolicyRules {
		edit.Delete = append(edit.Delete, scaleName(i))
	}
	if r.toggled {
		edit.Delete = append(edit.Delete, scaleToggle)
	}
	if len(edit.Delete) == 0 {
		return nil
	}
	if err := r.edit(ctx, edit); err != nil {
		return fmt.Errorf("remove rules: %w", err)
	}
	r.applied, r.toggled = 0, false
	return nil
}
