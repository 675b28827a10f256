package api

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	"heddle.dev/heddle/internal/model"
)

// ValidateLimits checks limits. The error is an *Error that names the field.
func ValidateLimits(l model.Limits) error { return validateLimits("", l) }

// validateLimits is ValidateLimits for limits that are a part of something: under goes before the
// field.
func validateLimits(under string, l model.Limits) error {
	var wrong *model.LimitError
	if err := l.Validate(); errors.As(err, &wrong) {
		return &Error{Code: CodeInvalid, Field: under + wrong.Field, Message: wrong.Message, Remedy: "leave the field out for no limit"}
	}
	return nil
}

// LimitsChange is what SetLimits is asked for.
type LimitsChange struct {
	model.Limits
	// Was, if not nil, are the limits that these were made of: if the endpoint has others by now,
	// nothing changes.
	Was *model.Limits `json:"was,omitempty"`
}

// decodeLimits reads and checks the body of PUT /v1/endpoints/NAME/limits.
func decodeLimits(body io.Reader) (LimitsChange, error) {
	var l LimitsChange
	if err := decodeStrict(body, MaxRequestBytes, &l); err != nil {
		return LimitsChange{}, err
	}
	return l, ValidateLimits(l.Limits)
}

// changedField is the field of an error that says that something is not what a change of it was
// made of.
const changedField = "was"

// withWas asks by change, which is told whether to say what the change was made of. An agent of an
// earlier version refuses that field: it is asked again without, as that version's clients asked,
// and replaces whatever there is.
func withWas(change func(say bool) error) error {
	err := change(true)
	var e *Error
	if errors.As(err, &e) && e.Code == CodeInvalid && e.Field == changedField {
		return change(false)
	}
	return err
}

// HasChanged is that error, about what.
func HasChanged(what string) error {
	return &Error{Code: CodeConflict, Field: changedField, Message: what + " are others by now", Remedy: "read them again"}
}

// IsChanged reports whether an error is that one.
func IsChanged(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == CodeConflict && e.Field == changedField
}

// changeTries bounds how often UntilUnchanged tries.
const changeTries = 20

// UntilUnchanged makes a change that is made of what is read before, again if somebody else has
// changed that meanwhile.
func UntilUnchanged(change func() error) (err error) {
	for range changeTries {
		if err = change(); !IsChanged(err) {
			return err
		}
	}
	return err
}

// limitList is the answer to GET /v1/limits.
type limitList struct {
	Limits []model.LimitUse `json:"limits"`
}

func (s *server) limits(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	list, err := s.agent.LimitUse(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, limitList{orEmpty(list)})
}

func (s *server) setLimits(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	limits, err := decodeLimits(r.Body)
	if err != nil {
		return err
	}
	e, err := s.agent.SetLimits(r.Context(), name, limits)
	if err != nil {
		return fmt.Errorf("set limits of %s: %w", name, err)
	}
	return s.write(w, e)
}
