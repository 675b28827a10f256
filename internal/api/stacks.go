package api

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"time"

	"heddle.dev/heddle/internal/stack"
)

// MaxStackBytes bounds the body of a request that changes stack profiles.
const MaxStackBytes = 2 << 20

// Stacks is what an agent says of who runs the TCP of its endpoints.
type Stacks struct {
	// Profiles are the network's, sorted by name.
	Profiles []*stack.Profile `json:"profiles"`
	// Congestion are the congestion controls that the network has of its own, as this node has
	// them.
	Congestion []CongestionControl `json:"congestion"`
	// Endpoints are those of this node that a profile selects, by name.
	Endpoints []EndpointStack `json:"endpoints"`
	// Modules are the node's stack modules that an endpoint has wanted.
	Modules []StackModule `json:"modules,omitempty"`
	// Faults are profiles and congestion controls in the store that this agent does not understand.
	Faults []string `json:"faults,omitempty"`
	// Behind names nodes whose agents are of an earlier build, which does not know stack profiles.
	Behind []string `json:"behind,omitempty"`
}

// CongestionControl is one that was loaded with `heddle stack load`.
type CongestionControl struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
	// State is that on this node.
	State CongestionState `json:"state"`
	// Error is why State is CongestionFailed: what the kernel said, with the last lines of the
	// verifier's log.
	Error string `json:"error,omitempty"`
}

// CongestionState is what a node has made of a congestion control.
type CongestionState string

// The states.
const (
	// CongestionRegistered: sockets of the node may have it.
	CongestionRegistered CongestionState = "registered"
	// CongestionUnused: no profile names it, so that the kernel does not have it.
	CongestionUnused CongestionState = "unused"
	// CongestionFailed: the kernel refuses it.
	CongestionFailed CongestionState = "failed"
)

// EndpointStack is by which profile an endpoint has its TCP.
type EndpointStack struct {
	Endpoint string `json:"endpoint"`
	Profile  string `json:"profile"`
	// Stack runs the endpoint's TCP; empty: none does, and its programs get no TCP sockets.
	Stack stack.Kind `json:"stack"`
	// Settings are those in force, as text.
	Settings string `json:"settings,omitempty"`
	// Fault is why the node cannot serve the profile as it stands.
	Fault string `json:"fault,omitempty"`
	// Intercepted: the settings are those of the container's sockets. Otherwise it has Own alone.
	Intercepted bool `json:"intercepted"`
	// Own is what the container's own stack has of the settings, which runs the TCP of programs
	// that are not intercepted; nil: the kernel does not run the endpoint's TCP.
	Own *OwnStack `json:"own,omitempty"`
}

// OwnStack is what a container's own stack has of a profile.
type OwnStack struct {
	// Settings are those that it has, as text.
	Settings string `json:"settings,omitempty"`
	// Lacks says of the others why not.
	Lacks map[stack.Setting]string `json:"lacks,omitempty"`
}

// StackModule is a process that runs the TCP of endpoints, and what it uses.
type StackModule struct {
	Stack stack.Kind `json:"stack"`
	PID   int        `json:"pid"`   // 0: it does not run
	Ended uint64     `json:"ended"` // how many before it did, since the agent has run
	// Drain says that another build is installed, which takes its place.
	Drain *StackDrain `json:"drain,omitempty"`
	StackUse
	Tenants []StackTenant `json:"tenants"` // by name
}

// StackDrain is how long a module stays that is to be replaced: until no connection lives by it.
type StackDrain struct {
	// Until is when it is ended if some do still; nil: never.
	Until *time.Time `json:"until,omitempty"`
}

// StackTenant is what a module uses for one endpoint.
type StackTenant struct {
	Endpoint string `json:"endpoint"`
	Profile  string `json:"profile,omitempty"` // empty: it has another one by now
	StackUse
}

// StackUse is what a module has used since it began, and has now.
type StackUse struct {
	Processor     time.Duration `json:"processor_ns"`
	Memory        uint64        `json:"memory_bytes"` // of buffers, as much as was used
	Sockets       uint64        `json:"sockets"`      // bound ones and listeners
	Connections   uint64        `json:"connections"`
	BytesSent     uint64        `json:"sent_bytes"`
	BytesReceived uint64        `json:"received_bytes"`
	Retransmits   uint64        `json:"retransmits"`
	// RTT is the mean of a tenant's connections, smoothed; 0: none was measured, or there are more
	// than 1,024.
	RTT          time.Duration `json:"rtt_ns,omitempty"`
	SendQueue    uint64        `json:"send_queue_bytes"`    // not acknowledged
	ReceiveQueue uint64        `json:"receive_queue_bytes"` // not yet in the program's socket
	Dropped      uint64        `json:"dropped"`             // packets that came
	Refused      uint64        `json:"refused"`             // what programs asked for
}

// StackEdit is a set of changes, made in one step or not at all. What is put replaces what has the
// same name.
type StackEdit struct {
	Profiles      []*stack.Profile `json:"profiles,omitempty"`
	Delete        []string         `json:"delete,omitempty"`
	Objects       [][]byte         `json:"objects,omitempty"` // BPF objects; the kernel's name for each is in it
	DeleteObjects []string         `json:"delete_objects,omitempty"`
}

// Validate reports the first thing that is wrong with an edit by itself. The error is an *Error.
func (e StackEdit) Validate() error {
	if len(e.Profiles)+len(e.Delete)+len(e.Objects)+len(e.DeleteObjects) == 0 {
		return &Error{Code: CodeInvalid, Message: "nothing to change: no profile and no congestion control is named"}
	}
	for i, p := range e.Profiles {
		at := fmt.Sprintf("profiles[%d]", i)
		if p == nil {
			return &Error{Code: CodeInvalid, Field: at, Message: "is null"}
		}
		if err := cmp.Or(p.Validate(), p.Stack.Check(p.Settings)); err != nil {
			return fieldError(at, err)
		}
	}
	for i, name := range e.Delete {
		if err := stack.ValidateName(name); err != nil {
			return fieldError(fmt.Sprintf("delete[%d]", i), err)
		}
	}
	for i, o := range e.Objects {
		if len(o) == 0 || len(o) > stack.MaxObject {
			return &Error{Code: CodeInvalid, Field: fmt.Sprintf("objects[%d]", i), Message: fmt.Sprintf("%d bytes: want 1 to %d", len(o), stack.MaxObject),
				Remedy: "strip it with llvm-strip -g"}
		}
	}
	for i, name := range e.DeleteObjects {
		if err := stack.ValidateCongestion(name); err != nil {
			return fieldError(fmt.Sprintf("delete_objects[%d]", i), err)
		}
	}
	return nil
}

func (s *server) stacks(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	st, err := s.agent.Stacks(r.Context())
	if err != nil {
		return err
	}
	st.Profiles, st.Congestion, st.Endpoints = orEmpty(st.Profiles), orEmpty(st.Congestion), orEmpty(st.Endpoints)
	return s.write(w, st)
}

func (s *server) editStacks(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	var edit StackEdit
	if err := decodeStrict(r.Body, MaxStackBytes, &edit); err != nil {
		return err
	}
	if err := edit.Validate(); err != nil {
		return err
	}
	made, err := s.agent.EditStacks(r.Context(), edit)
	if err != nil {
		return fmt.Errorf("change stack profiles: %w", err)
	}
	return s.write(w, outcomeList{orEmpty(made)})
}

// Stacks asks who runs the TCP of the agent's endpoints.
func (c *Client) Stacks(ctx context.Context) (st Stacks, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/stacks", nil, &st)
	return st, err
}

// EditStacks changes stack profiles and congestion controls; see Agent.
func (c *Client) EditStacks(ctx context.Context, edit StackEdit) ([]PolicyOutcome, error) {
	if err := edit.Validate(); err != nil {
		return nil, err
	}
	var list outcomeList
	err := c.call(ctx, http.MethodPost, "/v1/stacks", edit, &list)
	return list.Outcomes, err
}
