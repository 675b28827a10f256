package api

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// TraceRequest asks what becomes of a TCP connection.
type TraceRequest struct {
	// From is the name of an endpoint of the agent's node, To the name of one of any node, or an
	// address; Port is the destination's.
	From string `json:"from"`
	To   string `json:"to"`
	Port uint16 `json:"port"`
}

// Validate checks the request's form. The error is an *Error.
func (r TraceRequest) Validate() error {
	if err := ValidateEndpointName("from", r.From); err != nil {
		return err
	}
	if _, err := netip.ParseAddr(r.To); err != nil {
		if err := ValidateEndpointName("to", r.To); err != nil {
			return err
		}
	}
	if r.Port == 0 {
		return &Error{Code: CodeInvalid, Field: "port", Message: "is missing", Remedy: "give the destination's port"}
	}
	return nil
}

// Ports gives the port as policy is asked about it.
func (r TraceRequest) Ports() (policy.Ports, error) { return ParseExplainPort(fmt.Sprint(r.Port)) }

// Trace is what became of a connection, and what is known of why.
type Trace struct {
	// Policy is what the rules say of it.
	Policy Explanation `json:"policy"`
	// Way is the path that it would take; nil: the agent does not say, being of an earlier version.
	Way   *Way        `json:"way,omitempty"`
	Steps []TraceStep `json:"steps"`
	// Flow is what the node told of the try; nil: nothing, within a second.
	Flow *flow.Flow `json:"flow,omitempty"`
	// Connected: the other end answered.
	Connected bool `json:"connected"`
}

// Way is the path that a new connection would take.
type Way struct {
	// Path is empty if the connection would come to nothing, or if it is not known before.
	Path model.Path `json:"path,omitempty"`
	// Reason is why it is not the best path: the name of a Reason.
	Reason string `json:"reason,omitempty"`
	// Why says it to people.
	Why string `json:"why"`
	// Stack runs the TCP of the endpoint's programs, if not the kernel: the try is the kernel's.
	Stack string `json:"stack,omitempty"`
}

// TraceStep is a part of a trace.
type TraceStep struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took_ns"`
	// Error is why it failed; empty: it did not.
	Error string `json:"error,omitempty"`
}

// trace answers POST /v1/trace.
func (s *server) trace(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	var req TraceRequest
	if err := decodeStrict(r.Body, MaxRequestBytes, &req); err != nil {
		return err
	}
	if err := req.Validate(); err != nil {
		return err
	}
	t, err := s.agent.Trace(r.Context(), req)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return s.write(w, t)
}

// Trace tries a connection; see Agent.
func (c *Client) Trace(ctx context.Context, req TraceRequest) (Trace, error) {
	var t Trace
	if err := req.Validate(); err != nil {
		return t, err
	}
	err := c.call(ctx, http.MethodPost, "/v1/trace", req, &t)
	return t, err
}
