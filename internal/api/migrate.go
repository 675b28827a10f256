package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"heddle.dev/heddle/internal/model"
)

// MigrateRequest asks that an endpoint's address go to another node.
type MigrateRequest struct {
	// To is the name of that node.
	To string `json:"to"`
}

// Validate checks the request's form. The error is an *Error that names the field.
func (r MigrateRequest) Validate() error {
	if err := model.ValidateName("to", r.To); err != nil {
		return &Error{Code: CodeInvalid, Field: "to", Message: err.Error(), Remedy: "give the name of another node: heddle status lists them"}
	}
	return nil
}

// Migration is what became of a request to migrate.
type Migration struct {
	Move Move `json:"move"`
	// Steps are what was done now, in this order; none if all had been done before.
	Steps []MigrationStep `json:"steps"`
}

// MigrationStep is one step of a migration.
type MigrationStep struct {
	// Name says what was done: StepCut, StepStore, StepDetach or StepRedirect.
	Name string `json:"name"`
	// Took is how long it took, in nanoseconds.
	Took time.Duration `json:"took_ns"`
}

// The steps of a migration on the node that gives the endpoint up: its last sockets are ended; the
// store gives the address to the other node; devices and programs are taken away. StepRedirect
// stands for the one step of a migration that nobody has taken up and that is given to another
// node.
const (
	StepCut      = "end what is left of its connections"
	StepStore    = "give the address to the node in the store"
	StepDetach   = "take devices and routes away"
	StepRedirect = "give the address to another node in the store"
)

// Move is an address that lives on a node in whose prefixes it need not be.
type Move struct {
	model.Move
	// Waiting says that no endpoint there has taken it up.
	Waiting bool `json:"waiting"`
}

type moveList struct {
	Moves []Move `json:"moves"`
}

// decodeMigrateRequest reads and checks the body of POST /v1/endpoints/{name}/migrate.
func decodeMigrateRequest(body io.Reader) (req MigrateRequest, err error) {
	if err := decodeStrict(body, MaxRequestBytes, &req); err != nil {
		return MigrateRequest{}, err
	}
	return req, req.Validate()
}

func (s *server) migrate(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	req, err := decodeMigrateRequest(r.Body)
	if err != nil {
		return err
	}
	m, err := s.agent.Migrate(r.Context(), name, req)
	if err != nil {
		return fmt.Errorf("migrate endpoint %s: %w", name, err)
	}
	m.Steps = orEmpty(m.Steps)
	return s.write(w, m)
}

func (s *server) moves(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	list, err := s.agent.Moves(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, moveList{orEmpty(list)})
}

// Migrate gives an endpoint's address to another node; see Agent.
func (c *Client) Migrate(ctx context.Context, name string, req MigrateRequest) (m Migration, err error) {
	if err := ValidateEndpointName("name", name); err != nil {
		return m, err
	}
	if err := req.Validate(); err != nil {
		return m, err
	}
	err = c.call(ctx, http.MethodPost, "/v1/endpoints/"+url.PathEscape(name)+"/migrate", req, &m)
	return m, err
}

// Moves lists the addresses that have moved.
func (c *Client) Moves(ctx context.Context) ([]Move, error) {
	var list moveList
	err := c.call(ctx, http.MethodGet, "/v1/moves", nil, &list)
	return list.Moves, err
}
