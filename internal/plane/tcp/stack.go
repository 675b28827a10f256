package tcp

import (
	"errors"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/tcp/congestion"
	"heddle.dev/heddle/internal/stack"
)

// SetCongestion registers the congestion controls of the network's own that are used, has the
// kernel verify the others, and says what became of each.
func (p *Plane) SetCongestion(all []*stack.Object, used map[string]bool) []api.CongestionControl {
	out := make([]api.CongestionControl, 0, len(all))
	for _, o := range all {
		c := api.CongestionControl{Name: o.Name, SHA256: o.SHA256, Bytes: len(o.Object), State: api.CongestionUnused}
		var s congestion.State
		if used[o.Name] {
			s = p.stacks.Register(o)
		} else {
			s = p.stacks.Verify(o)
		}
		switch {
		case s.Err != nil:
			c.State, c.Error = api.CongestionFailed, s.Err.Error()
		case s.Registered && used[o.Name]:
			c.State = api.CongestionRegistered
		}
		out = append(out, c)
	}
	return out
}

// KeepCongestion unregisters those that are not in keep. Connections that have one go on with it.
func (p *Plane) KeepCongestion(keep map[string]bool) error { return p.stacks.Keep(keep) }

// CheckCongestion has the kernel verify an object, and gives the name of the congestion control in
// it.
func (p *Plane) CheckCongestion(object []byte) (string, error) {
	name, err := congestion.Check(object)
	if err == nil && (name == "reno" || name == "cubic" || name == "bbr") {
		err = errors.New(name + " is the name of a congestion control of Linux's: give yours another name")
	}
	return name, err
}
