// Package stack says who runs the TCP of which endpoints, and how (NetKernel, HotNets '17): the
// profiles that an operator writes, which of several holds for an endpoint, and the congestion
// controls that profiles may name. It does no I/O. What profiles mean is written for operators in
// docs/howto/stacks.md.
package stack

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// Profile is one document: for the endpoints that it selects, which stack runs their TCP, and with
// what settings. One profile holds for an endpoint: see Choose.
type Profile struct {
	// Name is unique in the network: see ValidateName.
	Name string `json:"name"`
	// Priority decides between profiles that select the same endpoint: the greater one holds.
	Priority int `json:"priority,omitempty"`
	// Selector says whose TCP the profile is about, as a policy's subject does.
	Selector policy.Selector `json:"selector"`
	Stack    Kind            `json:"stack"`
	// Fallback says what holds on a node that cannot serve the profile as it stands.
	Fallback Fallback `json:"fallback,omitempty"`
	Settings Settings `json:"settings,omitzero"`
	// Changeable are the settings that the container's programs may change by setsockopt(); what
	// they set of others of the profile's is taken and has no effect. Settings that the profile
	// does not have are theirs in any case.
	Changeable []Setting `json:"changeable,omitempty"`
}

// Kind is a TCP implementation, a network stack module of the paper's.
type Kind string

// The stacks.
const (
	Kernel   Kind = "kernel"   // the node's
	Netstack Kind = "netstack" // gVisor's, a process of the node
	Smoltcp  Kind = "smoltcp"  // smoltcp, in Heddle's module host
	// SharedMemory is the node's TCP, but for connections with endpoints of the same node whose
	// profile says so, too: their bytes go through memory that the two containers share.
	SharedMemory Kind = "shared-memory"
)

// IsKernels reports whether the node's kernel has the connections of such endpoints, with the
// settings of a profile.
func (k Kind) IsKernels() bool { return k == Kernel || k == SharedMemory }

// Kinds lists them all, but for those of the operator's own (ModuleKind).
var Kinds = []Kind{Kernel, Netstack, Smoltcp, SharedMemory}

// modulePrefix begins the names of stacks that modules of the operator's own run.
const modulePrefix = "module/"

// ModuleKind gives the stack that the operator's own module of that name runs.
func ModuleKind(name string) Kind { return Kind(modulePrefix + name) }

// Module gives the name of the operator's own module that runs the stack; false: none does.
func (k Kind) Module() (name string, ok bool) { return strings.CutPrefix(string(k), modulePrefix) }

// Fallback says what becomes of an endpoint whose profile its node cannot serve.
type Fallback string

// Fallbacks. ToKernel is what holds where a profile says none.
const (
	ToKernel Fallback = "kernel" // the node's kernel runs its TCP, with those settings that it can
	Refuse   Fallback = "refuse" // its programs get no TCP sockets
)

// Setting names a setting of a profile.
type Setting string

// Settings by name, as documents write them.
const (
	Congestion    Setting = "congestion"
	InitialWindow Setting = "initial_window"
	ReceiveBuffer Setting = "receive_buffer"
	SendBuffer    Setting = "send_buffer"
	PacingRate    Setting = "pacing_rate"
	Keepalive     Setting = "keepalive"
	UserTimeout   Setting = "user_timeout"
	NotsentLowat  Setting = "notsent_lowat"
	ECN           Setting = "ecn"
	DelayedACK    Setting = "delayed_ack"
	MSS           Setting = "mss"
	Processors    Setting = "processors"
	Memory        Setting = "memory"
	Connections   Setting = "connections"
	Queues        Setting = "queues"
)

// Settings are what a profile sets. The zero value of each leaves it as the node, or the module,
// has it.
type Settings struct {
	// Congestion is the name of a congestion control: TCP_CONGESTION.
	Congestion string `json:"congestion,omitempty"`
	// InitialWindow is how many segments a connection sends before the first acknowledgement.
	InitialWindow uint32 `json:"initial_window,omitempty"`
	// ReceiveBuffer and SendBuffer are bytes, as SO_RCVBUF and SO_SNDBUF take them: the kernel
	// doubles them for its own needs, and no longer tunes the buffer.
	ReceiveBuffer uint32 `json:"receive_buffer,omitempty"`
	SendBuffer    uint32 `json:"send_buffer,omitempty"`
	// PacingRate bounds how fast one connection sends: SO_MAX_PACING_RATE.
	PacingRate Rate `json:"pacing_rate,omitempty"`
	// Keepalive turns keepalive on, with these times.
	Keepalive *KeepaliveTimes `json:"keepalive,omitempty"`
	// UserTimeout is how long sent data may stay without an acknowledgement: TCP_USER_TIMEOUT.
	UserTimeout Duration `json:"user_timeout,omitempty"`
	// NotsentLowat is how many bytes may wait unsent before a socket stops being writable:
	// TCP_NOTSENT_LOWAT.
	NotsentLowat uint32 `json:"notsent_lowat,omitempty"`
	// ECN asks for ECN (RFC 3168) in connections that the endpoint opens.
	ECN bool `json:"ecn,omitempty"`
	// DelayedACK is the longest that an acknowledgement is put off.
	DelayedACK Duration `json:"delayed_ack,omitempty"`
	// MSS is the largest segment, in bytes: TCP_MAXSEG.
	MSS uint32 `json:"mss,omitempty"`
	// Processors is how many processors the module may use for one endpoint, such as 0.5; Memory
	// how many bytes, Connections how many connections it may have there. Only stacks in user space
	// have them.
	Processors  float64 `json:"processors,omitempty"`
	Memory      uint64  `json:"memory,omitempty"`
	Connections uint32  `json:"connections,omitempty"`
	// Queues has programs with the guest library send by queues to a service of the node, which
	// sends for them.
	Queues bool `json:"queues,omitempty"`
}

// KeepaliveTimes are the parameters of keepalive: TCP_KEEPIDLE, TCP_KEEPINTVL and TCP_KEEPCNT.
type KeepaliveTimes struct {
	Idle     Duration `json:"idle"`
	Interval Duration `json:"interval"`
	Count    uint32   `json:"count"`
}

// Rate is a speed in bits a second that documents write as "12mbit"; 0: no bound.
type Rate model.Rate

// MarshalText implements encoding.TextMarshaler.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rate) UnmarshalText(text []byte) error {
	parsed, err := model.ParseRate(string(text))
	*r = Rate(parsed)
	return err
}

// String gives the form that documents have.
func (r Rate) String() string { return model.Rate(r).String() }

// Duration is a time that documents write as "30s" or "40ms".
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%.40q is no duration: write a number and ms, s, m or h", text)
	}
	*d = Duration(parsed)
	return nil
}

// String gives the form that documents have.
func (d Duration) String() string { return time.Duration(d).String() }

// userSpaceOnly are the settings that the kernel's TCP has not.
var userSpaceOnly = []Setting{Processors, Memory, Connections}

// changeable are the settings that programs have a socket option for.
var changeable = []Setting{Congestion, ReceiveBuffer, SendBuffer, PacingRate, Keepalive, UserTimeout, NotsentLowat, MSS}

// Text lists the settings that are set, by name and with their values, in a fixed order.
func (s Settings) Text() (out []SettingText) {
	add := func(name Setting, set bool, value any) {
		if set {
			out = append(out, SettingText{name, fmt.Sprint(value)})
		}
	}
	add(Congestion, s.Congestion != "", s.Congestion)
	add(InitialWindow, s.InitialWindow != 0, s.InitialWindow)
	add(ReceiveBuffer, s.ReceiveBuffer != 0, s.ReceiveBuffer)
	add(SendBuffer, s.SendBuffer != 0, s.SendBuffer)
	add(PacingRate, s.PacingRate != 0, s.PacingRate)
	if k := s.Keepalive; k != nil {
		add(Keepalive, true, fmt.Sprintf("%s/%s/%d", k.Idle, k.Interval, k.Count))
	}
	add(UserTimeout, s.UserTimeout != 0, s.UserTimeout)
	add(NotsentLowat, s.NotsentLowat != 0, s.NotsentLowat)
	add(ECN, s.ECN, s.ECN)
	add(DelayedACK, s.DelayedACK != 0, s.DelayedACK)
	add(MSS, s.MSS != 0, s.MSS)
	add(Processors, s.Processors != 0, strconv.FormatFloat(s.Processors, 'g', -1, 64))
	add(Memory, s.Memory != 0, s.Memory)
	add(Connections, s.Connections != 0, s.Connections)
	add(Queues, s.Queues, s.Queues)
	return out
}

// SettingText is a setting and its value.
type SettingText struct {
	Name  Setting
	Value string
}

// Has reports whether a setting is set.
func (s Settings) Has(name Setting) bool {
	return slices.ContainsFunc(s.Text(), func(t SettingText) bool { return t.Name == name })
}

// String lists what is set, as "congestion=bbr,mss=1400".
func (s Settings) String() string {
	var parts []string
	for _, t := range s.Text() {
		parts = append(parts, string(t.Name)+"="+t.Value)
	}
	return strings.Join(parts, ",")
}
