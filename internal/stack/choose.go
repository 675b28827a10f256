package stack

import (
	"cmp"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// Choose gives the profile that holds for an endpoint, nil if none selects it. Of several it is the
// one with the greatest priority, and of those with the same the one whose name sorts first, so
// that all nodes choose alike. namespaces are those that somebody described.
func Choose(profiles []*Profile, e model.Endpoint, namespaces []policy.Namespace) (chosen *Profile) {
	for _, p := range profiles {
		if (chosen == nil || p.before(chosen)) && p.Selector.Matches(e, namespaces) {
			chosen = p
		}
	}
	return chosen
}

// before reports whether p holds where both select an endpoint.
func (p *Profile) before(q *Profile) bool {
	return cmp.Or(cmp.Compare(q.Priority, p.Priority), cmp.Compare(p.Name, q.Name)) < 0
}

// Choice is by which profile an endpoint has its TCP on its node, as the node can serve it. The
// zero Choice is that of an endpoint without a profile: the kernel's TCP as the node has it.
type Choice struct {
	// Profile is the one that holds; nil: none.
	Profile *Profile
	// Stack is what runs the endpoint's TCP: that of the profile, or Kernel if the node cannot
	// serve it and the profile says so; Kernel without a profile. Empty: nothing does, and the
	// endpoint's programs get no TCP sockets.
	Stack Kind
	// Settings are those of the profile that Stack applies.
	Settings Settings
	// Fault is why the node cannot serve the profile as it stands; nil if it can.
	Fault error
}

// Refused reports whether the endpoint's programs get no TCP sockets.
func (c Choice) Refused() bool { return c.Profile != nil && c.Stack == "" }

// Serve gives the choice for a profile. serves reports whether, and why not, the node can give
// endpoints the stack and the settings of a profile.
func Serve(p *Profile, serves func(Kind, Settings) error) Choice {
	if p == nil {
		return Choice{Stack: Kernel}
	}
	c := Choice{Profile: p, Stack: p.Stack, Settings: p.Settings}
	if c.Fault = serves(p.Stack, p.Settings); c.Fault == nil {
		return c
	}
	if p.Fallback == Refuse {
		c.Stack, c.Settings = "", Settings{}
		return c
	}
	c.Stack = Kernel
	c.Settings.Processors, c.Settings.Memory, c.Settings.Connections = 0, 0, 0
	c.Settings = servable(c.Settings, func(s Settings) error { return serves(Kernel, s) })
	return c
}

// servable gives the settings without those that the kernel cannot serve here: what depends on the
// node, one by one.
func servable(s Settings, serves func(Settings) error) Settings {
	for _, one := range []struct {
		only  Settings
		clear func(*Settings)
	}{
		{Settings{Congestion: s.Congestion}, func(s *Settings) { s.Congestion = "" }},
		{Settings{ReceiveBuffer: s.ReceiveBuffer}, func(s *Settings) { s.ReceiveBuffer = 0 }},
		{Settings{SendBuffer: s.SendBuffer}, func(s *Settings) { s.SendBuffer = 0 }},
		{Settings{Queues: s.Queues}, func(s *Settings) { s.Queues = false }},
	} {
		if serves(one.only) != nil {
			one.clear(&s)
		}
	}
	return s
}
