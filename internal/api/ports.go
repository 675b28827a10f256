package api

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	"heddle.dev/heddle/internal/model"
)

// PortsRequest is the body of PUT /v1/endpoints/{name}/ports.
type PortsRequest struct {
	Ports []model.PortRequest `json:"ports"`
}

// Validate checks the form of all ports. The error is an *Error for the field ports.
func (r PortsRequest) Validate() error { return validatePorts(r.Ports) }

func validatePorts(ports []model.PortRequest) error {
	refuse := func(message string) error {
		return &Error{Code: CodeInvalid, Field: "ports", Message: message, Remedy: "give host_port, port and protocol (tcp, udp), and host_addr for one address of the node"}
	}
	if len(ports) > model.MaxPublishedPorts {
		return refuse(fmt.Sprintf("%d ports, at most %d are taken", len(ports), model.MaxPublishedPorts))
	}
	for _, p := range ports {
		if err := p.Validate(); err != nil {
			return refuse(err.Error())
		}
	}
	return nil
}

func (s *server) setPorts(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	var req PortsRequest
	if err := decodeStrict(r.Body, MaxRequestBytes, &req); err != nil {
		return err
	}
	if err := req.Validate(); err != nil {
		return err
	}
	e, err := s.agent.SetPorts(r.Context(), name, req.Ports)
	if err != nil {
		return fmt.Errorf("publish ports of %s: %w", name, err)
	}
	return s.write(w, e)
}

// SetPorts publishes ports of an endpoint; see Agent.
func (c *Client) SetPorts(ctx context.Context, name string, ports []model.PortRequest) (e model.Endpoint, err error) {
	if err := ValidateEndpointName("name", name); err != nil {
		return e, err
	}
	err = c.call(ctx, http.MethodPut, "/v1/endpoints/"+url.PathEscape(name)+"/ports", PortsRequest{ports}, &e)
	return e, err
}
