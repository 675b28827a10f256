package document

import (
	"cmp"
	"math"
	"strconv"

	"go.yaml.in/yaml/v3"

	"heddle.dev/heddle/internal/stack"
)

// ParseStacks reads files of stack profiles, all or none of them. The error is an *Error.
func ParseStacks(files ...File) ([]*stack.Profile, error) {
	p := parser{seen: make(map[string]string), wantStacks: true}
	for _, f := range files {
		if err := p.file(f); err != nil {
			return nil, err
		}
	}
	return p.stacks, nil
}

// stackProfile reads a StackProfile of heddle.dev/v1.
func (p *parser) stackProfile(r reader, f fields) (err error) {
	s := &stack.Profile{}
	if s.Name, err = f.take("name").text(); err != nil {
		return err
	}
	if s.Priority, err = f.take("priority").optionalNumber(); err != nil {
		return err
	}
	selector := f.take("selector")
	if !selector.there() {
		return selector.fail("write selector: {} if every endpoint is meant", "is missing")
	}
	inner, err := selector.object()
	if err != nil {
		return err
	}
	if s.Selector, err = readSelector(inner); err != nil {
		return err
	}
	if err := inner.rest(); err != nil {
		return err
	}
	kind, err := f.take("stack").text()
	if err != nil {
		return err
	}
	s.Stack = stack.Kind(kind)
	fallback, err := f.take("fallback").optional()
	if err != nil {
		return err
	}
	s.Fallback = stack.Fallback(fallback)
	if s.Settings, err = readSettings(f.take("settings")); err != nil {
		return err
	}
	changeable, err := f.take("changeable").texts()
	if err != nil {
		return err
	}
	for _, name := range changeable {
		s.Changeable = append(s.Changeable, stack.Setting(name))
	}
	if err := f.rest(); err != nil {
		return err
	}
	if err := cmp.Or(s.Validate(), s.Stack.Check(s.Settings)); err != nil {
		return r.locate(err, nil)
	}
	if err := p.unique(r, "stack profile "+s.Name); err != nil {
		return err
	}
	p.stacks = append(p.stacks, s)
	return nil
}

func readSettings(r reader) (s stack.Settings, err error) {
	if !r.there() {
		return s, nil
	}
	f, err := r.object()
	if err != nil {
		return s, err
	}
	if s.Congestion, err = f.take("congestion").optional(); err != nil {
		return s, err
	}
	for _, n := range []struct {
		name string
		to   *uint32
	}{
		{"initial_window", &s.InitialWindow},
		{"receive_buffer", &s.ReceiveBuffer},
		{"send_buffer", &s.SendBuffer},
		{"notsent_lowat", &s.NotsentLowat},
		{"mss", &s.MSS},
		{"connections", &s.Connections},
	} {
		if err := readCount(f.take(n.name), n.to); err != nil {
			return s, err
		}
	}
	if rate := f.take("pacing_rate"); rate.there() {
		text, err := rate.text()
		if err != nil {
			return s, err
		}
		if err := s.PacingRate.UnmarshalText([]byte(text)); err != nil {
			return s, rate.fail("", "%v", err)
		}
	}
	if s.Keepalive, err = readKeepalive(f.take("keepalive")); err != nil {
		return s, err
	}
	if s.UserTimeout, err = f.take("user_timeout").duration(); err != nil {
		return s, err
	}
	if s.DelayedACK, err = f.take("delayed_ack").duration(); err != nil {
		return s, err
	}
	if s.ECN, err = f.take("ecn").boolean(); err != nil {
		return s, err
	}
	if s.Queues, err = f.take("queues").boolean(); err != nil {
		return s, err
	}
	if s.Processors, err = f.take("processors").float(); err != nil {
		return s, err
	}
	memory := f.take("memory")
	n, err := memory.optionalNumber()
	if err != nil || n < 0 || memory.there() && n == 0 {
		return s, memory.fail("", "want a number of bytes above 0")
	}
	s.Memory = uint64(n)
	return s, f.rest()
}

// readCount reads a number above 0 that may be missing.
func readCount(r reader, to *uint32) error {
	n, err := r.optionalNumber()
	if err != nil {
		return err
	}
	if n < 0 || n > math.MaxUint32 || r.there() && n == 0 {
		return r.fail("leave it out to have it as the node has it", "%d: want a number above 0", n)
	}
	*to = uint32(n)
	return nil
}

func readKeepalive(r reader) (*stack.KeepaliveTimes, error) {
	if !r.there() {
		return nil, nil
	}
	f, err := r.object()
	if err != nil {
		return nil, err
	}
	k := &stack.KeepaliveTimes{}
	for _, t := range []struct {
		name string
		to   *stack.Duration
	}{{"idle", &k.Idle}, {"interval", &k.Interval}} {
		d := f.take(t.name)
		if !d.there() {
			return nil, d.missing()
		}
		if *t.to, err = d.duration(); err != nil {
			return nil, err
		}
	}
	count := f.take("count")
	if !count.there() {
		return nil, count.missing()
	}
	if err := readCount(count, &k.Count); err != nil {
		return nil, err
	}
	return k, f.rest()
}

func (r reader) optionalNumber() (int, error) {
	if !r.there() {
		return 0, nil
	}
	return r.number()
}

// duration reads a time such as "30s" that may be missing.
func (r reader) duration() (d stack.Duration, err error) {
	if !r.there() {
		return 0, nil
	}
	text, err := r.text()
	if err != nil {
		return 0, err
	}
	if err := d.UnmarshalText([]byte(text)); err != nil {
		return 0, r.fail("", "%v", err)
	}
	if d <= 0 {
		return 0, r.fail("leave it out to have it as the node has it", "%s: want a time above 0", text)
	}
	return d, nil
}

func (r reader) boolean() (bool, error) {
	if !r.there() {
		return false, nil
	}
	if r.node.Kind == yaml.ScalarNode && r.node.Tag == "!!bool" {
		if b, err := strconv.ParseBool(r.node.Value); err == nil {
			return b, nil
		}
	}
	return false, r.fail("", "want true or false, not %s", describe(r.node))
}

// float reads a number above 0 that may be missing.
func (r reader) float() (float64, error) {
	if !r.there() {
		return 0, nil
	}
	if r.node.Kind == yaml.ScalarNode && (r.node.Tag == "!!float" || r.node.Tag == "!!int") {
		if v, err := strconv.ParseFloat(r.node.Value, 64); err == nil && v > 0 && !math.IsInf(v, 0) {
			return v, nil
		}
	}
	return 0, r.fail("", "want a number above 0, not %s", describe(r.node))
}
