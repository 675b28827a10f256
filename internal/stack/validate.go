package stack

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// Limits of profiles. Those of settings are the kernel's own, or what no connection has use for.
const (
	MaxName        = 63 // bytes of a profile's name
	MaxProfiles    = 1000
	MaxPriority    = 1_000_000
	maxWindow      = 1000    // segments; more than 1.4 MB at once
	maxBuffer      = 1 << 30 // bytes; the kernel doubles it, in 31 bits
	minBuffer      = 4096
	minMSS, maxMSS = 88, 32767 // TCP_MIN_MSS, MAX_TCP_WINDOW
	maxKeepSeconds = 32767     // MAX_TCP_KEEPIDLE, MAX_TCP_KEEPINTVL
	maxKeepCount   = 127
	maxUserTimeout = 24 * time.Hour
	minDelayedACK  = 20 * time.Millisecond  // two ticks of the slowest clock that kernels are built with
	maxDelayedACK  = 200 * time.Millisecond // TCP_DELACK_MAX
	maxPacing      = 34_000_000_000         // bits a second: the kernel has 32 bits for bytes
	maxProcessors  = 1024
	minMemory      = 1 << 20
)

// MaxCongestionName is the bytes of a congestion control's name: TCP_CA_NAME_MAX with its end.
const MaxCongestionName = 15

// MaxModuleName is the bytes of the name of a module of the operator's own.
const MaxModuleName = 32

func fault(path, remedy, reason string, args ...any) error {
	return &policy.FieldError{Path: path, Reason: fmt.Sprintf(reason, args...), Remedy: remedy}
}

// ValidateName checks a profile's name: 1 to MaxName of a-z, 0-9, '-' and '.', beginning and ending
// with a letter or digit.
func ValidateName(name string) error {
	ends := func(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }
	bad := strings.ContainsFunc(name, func(r rune) bool { return !(r < 128 && ends(byte(r))) && r != '-' && r != '.' })
	if name == "" || len(name) > MaxName || bad || !ends(name[0]) || !ends(name[len(name)-1]) {
		return fault("name", "", "%.80q: want 1 to %d of a-z, 0-9, '-' and '.', first and last a letter or digit", name, MaxName)
	}
	return nil
}

// ValidateCongestion checks the name of a congestion control: 1 to MaxCongestionName of a-z, A-Z,
// 0-9, '_' and '-'.
func ValidateCongestion(name string) error {
	bad := strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-'
	})
	if name == "" || len(name) > MaxCongestionName || bad {
		return fault("congestion", "", "%.40q: want 1 to %d of a-z, A-Z, 0-9, '_' and '-'", name, MaxCongestionName)
	}
	return nil
}

// Validate reports the first thing that is wrong with a profile by itself: a *policy.FieldError.
// Whether a node can serve it is not known here.
func (p *Profile) Validate() error {
	if err := ValidateName(p.Name); err != nil {
		return err
	}
	if p.Priority < -MaxPriority || p.Priority > MaxPriority {
		return fault("priority", "", "%d: want %d to %d", p.Priority, -MaxPriority, MaxPriority)
	}
	if err := p.Selector.Validate("selector"); err != nil {
		return err
	}
	if err := p.Stack.validate(); err != nil {
		return err
	}
	if p.Fallback != "" && p.Fallback != ToKernel && p.Fallback != Refuse {
		return fault("fallback", "write kernel or refuse", "%.40q is not known", p.Fallback)
	}
	if err := p.Settings.validate(); err != nil {
		return err
	}
	if p.Settings.Queues && p.Stack == SharedMemory {
		return fault("settings.queues", "leave it out, or take another stack", "queues do not lead to memory that neighbours share")
	}
	if p.Stack.IsKernels() {
		for _, name := range userSpaceOnly {
			if p.Settings.Has(name) {
				return fault("settings."+string(name), "leave it out, or take a stack in user space; `heddle limit` and --endpoint-sockets hold for the kernel's TCP",
					"the kernel's TCP has no such share for each endpoint")
			}
		}
	}
	return p.validateChangeable()
}

func (k Kind) validate() error {
	if name, own := k.Module(); own {
		return ValidateModule(name)
	}
	if !slices.Contains(Kinds, k) {
		return fault("stack", "write kernel, shared-memory, netstack, smoltcp, or module/NAME for one of your own", "%.40q is no stack", k)
	}
	return nil
}

// ValidateModule checks the name of a module of the operator's own: 1 to MaxModuleName of a-z, 0-9
// and '-', beginning and ending with a letter or digit. It is that of a file.
func ValidateModule(name string) error {
	bad := strings.ContainsFunc(name, func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' })
	if name == "" || len(name) > MaxModuleName || bad || name[0] == '-' || name[len(name)-1] == '-' {
		return fault("stack", "", "module/%.40s: want module/ and 1 to %d of a-z, 0-9 and '-', first and last a letter or digit", name, MaxModuleName)
	}
	return nil
}

func (p *Profile) validateChangeable() error {
	for i, name := range p.Changeable {
		at := fmt.Sprintf("changeable[%d]", i)
		switch {
		case !slices.Contains(changeable, name):
			return fault(at, "name one of "+names(changeable), "%.40q is no setting that programs can change", name)
		case slices.Contains(p.Changeable[:i], name):
			return fault(at, "remove one of the two", "%s stands there twice", name)
		case !p.Settings.Has(name):
			return fault(at, "remove it: what the profile does not set, programs may change anyway", "%s is not in settings", name)
		}
	}
	return nil
}

func names(list []Setting) string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return strings.Join(out, ", ")
}

// within refuses a value that is set and not in a range.
func within[T uint32 | uint64](name Setting, value, least, most T, unit string) error {
	if value != 0 && (value < least || value > most) {
		return fault("settings."+string(name), "", "%d: want %d to %d %s", value, least, most, unit)
	}
	return nil
}

func duration(name string, d Duration, least, most time.Duration, unit time.Duration) error {
	v := time.Duration(d)
	if v < least || v > most || v%unit != 0 {
		return fault("settings."+name, "", "%s: want %s to %s, in whole %s", v, least, most, map[time.Duration]string{time.Second: "seconds", time.Millisecond: "milliseconds"}[unit])
	}
	return nil
}

func (s *Settings) validate() error {
	if s.Congestion != "" {
		if err := ValidateCongestion(s.Congestion); err != nil {
			return fault("settings.congestion", "", "%s", err.(*policy.FieldError).Reason)
		}
	}
	for _, err := range []error{
		within(InitialWindow, s.InitialWindow, 1, maxWindow, "segments"),
		within(ReceiveBuffer, s.ReceiveBuffer, minBuffer, maxBuffer, "bytes"),
		within(SendBuffer, s.SendBuffer, minBuffer, maxBuffer, "bytes"),
		within(NotsentLowat, s.NotsentLowat, 1, maxBuffer, "bytes"),
		within(MSS, s.MSS, minMSS, maxMSS, "bytes"),
		within(Memory, s.Memory, minMemory, 1<<50, "bytes"),
		within(Connections, s.Connections, 1, 1<<24, "connections"),
		s.validateTimes(),
	} {
		if err != nil {
			return err
		}
	}
	if s.PacingRate != 0 {
		if err := model.Rate(s.PacingRate).Validate(); err != nil {
			return fault("settings.pacing_rate", "", "%v", err)
		}
		if s.PacingRate > maxPacing {
			return fault("settings.pacing_rate", "leave it out", "%s: want at most %s", s.PacingRate, Rate(maxPacing))
		}
	}
	if s.Processors != 0 && !(s.Processors >= 0.01 && s.Processors <= maxProcessors) {
		return fault("settings.processors", "", "%g: want 0.01 to %d", s.Processors, maxProcessors)
	}
	return nil
}

func (s *Settings) validateTimes() error {
	if s.UserTimeout != 0 {
		if err := duration("user_timeout", s.UserTimeout, time.Millisecond, maxUserTimeout, time.Millisecond); err != nil {
			return err
		}
	}
	if s.DelayedACK != 0 {
		if err := duration("delayed_ack", s.DelayedACK, minDelayedACK, maxDelayedACK, time.Millisecond); err != nil {
			return err
		}
	}
	k := s.Keepalive
	if k == nil {
		return nil
	}
	if err := duration("keepalive.idle", k.Idle, time.Second, maxKeepSeconds*time.Second, time.Second); err != nil {
		return err
	}
	if err := duration("keepalive.interval", k.Interval, time.Second, maxKeepSeconds*time.Second, time.Second); err != nil {
		return err
	}
	if k.Count < 1 || k.Count > maxKeepCount {
		return fault("settings.keepalive.count", "", "%d: want 1 to %d probes", k.Count, maxKeepCount)
	}
	return nil
}
