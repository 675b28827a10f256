package api

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	"heddle.dev/heddle/internal/model"
)

// VerbsChange is what SetVerbs is asked for.
type VerbsChange struct {
	model.VerbsEndpoint
	// Was, if not nil, is what this was made of: if the endpoint has something else by now, nothing
	// changes.
	Was *model.VerbsEndpoint `json:"was,omitempty"`
}

// ValidateVerbs checks what an endpoint is to have of the verbs plane. The error is an *Error for
// the field verbs.
func ValidateVerbs(v model.VerbsEndpoint, intercepted bool) error {
	if err := v.Validate(intercepted); err != nil {
		return &Error{Code: CodeInvalid, Field: "verbs", Message: err.Error(),
			Remedy: fmt.Sprintf("give wanted, of an intercepted endpoint, with spin_us and outside, and at most %d for spin_us", model.MaxSpinMicros)}
	}
	return nil
}

func (s *server) setVerbs(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	var v VerbsChange
	if err := decodeStrict(r.Body, MaxRequestBytes, &v); err != nil {
		return err
	}
	e, err := s.agent.SetVerbs(r.Context(), name, v)
	if err != nil {
		return fmt.Errorf("set verbs of %s: %w", name, err)
	}
	return s.write(w, e)
}

// SetVerbs gives an endpoint an RDMA device, or takes it away; see Agent.
func (c *Client) SetVerbs(ctx context.Context, name string, change VerbsChange) (e model.Endpoint, err error) {
	if err := ValidateEndpointName("name", name); err != nil {
		return e, err
	}
	err = withWas(func(say bool) error {
		if !say {
			change.Was = nil
		}
		return c.call(ctx, http.MethodPut, "/v1/endpoints/"+url.PathEscape(name)+"/verbs", change, &e)
	})
	return e, err
}
