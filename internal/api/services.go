package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"heddle.dev/heddle/internal/model"
)

// MaxServiceBytes bounds the body of a request that changes services.
const MaxServiceBytes = 4 << 20

// ServiceEdit changes services of a node. What is put replaces what has the same address; what is
// not named stays. Deleting one that is not there is no error.
type ServiceEdit struct {
	Put    []model.Service     `json:"put,omitempty"`
	Delete []model.ServiceAddr `json:"delete,omitempty"`
}

// Validate reports the first thing that is wrong with an edit. The error is an *Error that names
// the field.
func (e ServiceEdit) Validate() error {
	if len(e.Put)+len(e.Delete) == 0 {
		return &Error{Code: CodeInvalid, Message: "nothing to change: no service is named"}
	}
	named := make(map[model.ServiceAddr]bool, len(e.Put)+len(e.Delete))
	twice := func(field string, a model.ServiceAddr) error {
		if named[a] {
			return &Error{Code: CodeInvalid, Field: field, Message: fmt.Sprintf("%s is named twice", a)}
		}
		named[a] = true
		return nil
	}
	for i, s := range e.Put {
		at := fmt.Sprintf("put[%d]", i)
		var wrong *model.ServiceError
		if err := s.Validate(); errors.As(err, &wrong) {
			return &Error{Code: CodeInvalid, Field: at + "." + wrong.Field, Message: wrong.Message}
		}
		if err := twice(at, s.Addr); err != nil {
			return err
		}
	}
	for i, a := range e.Delete {
		at := fmt.Sprintf("delete[%d]", i)
		if !a.IsValid() {
			return &Error{Code: CodeInvalid, Field: at, Message: "is no ADDRESS:PORT"}
		}
		if err := twice(at, a); err != nil {
			return err
		}
	}
	return nil
}

type serviceList struct {
	Services []model.Service `json:"services"`
}

func (s *server) services(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	list, err := s.agent.Services(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, serviceList{orEmpty(list)})
}

func (s *server) editServices(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	var edit ServiceEdit
	if err := decodeStrict(r.Body, MaxServiceBytes, &edit); err != nil {
		return err
	}
	if err := edit.Validate(); err != nil {
		return err
	}
	if err := s.agent.EditServices(r.Context(), edit); err != nil {
		return fmt.Errorf("change services: %w", err)
	}
	return s.write(w, struct{}{})
}

// Services lists the node's services.
func (c *Client) Services(ctx context.Context) ([]model.Service, error) {
	var list serviceList
	err := c.call(ctx, http.MethodGet, "/v1/services", nil, &list)
	return list.Services, err
}

// EditServices changes the node's services; see Agent.
func (c *Client) EditServices(ctx context.Context, edit ServiceEdit) error {
	if err := edit.Validate(); err != nil {
		return err
	}
	return c.call(ctx, http.MethodPost, "/v1/services", edit, nil)
}
