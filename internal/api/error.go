package api

import (
	"errors"
	"net/http"
)

// Code classes errors on the wire. Clients decide by it, never by the message.
type Code string

// The codes.
const (
	CodeInvalid     Code = "invalid"            // the request is malformed or a field is out of range
	CodeNotFound    Code = "not_found"          // no such endpoint or path
	CodeMethod      Code = "method_not_allowed" // the path knows other methods only
	CodeConflict    Code = "conflict"           // the name or address is taken by another endpoint
	CodeTooLarge    Code = "too_large"          // the request body exceeds MaxRequestBytes
	CodeExhausted   Code = "exhausted"          // no free address or id
	CodeUnsupported Code = "unsupported"        // this node's kernel or configuration cannot
	CodeUnavailable Code = "unavailable"        // the store or the agent is not ready: try again
	CodeInternal    Code = "internal"           // everything else
)

// statusByCode is the one place that ties codes to HTTP statuses.
var statusByCode = map[Code]int{
	CodeInvalid:     http.StatusBadRequest,
	CodeNotFound:    http.StatusNotFound,
	CodeMethod:      http.StatusMethodNotAllowed,
	CodeConflict:    http.StatusConflict,
	CodeTooLarge:    http.StatusRequestEntityTooLarge,
	CodeExhausted:   http.StatusInsufficientStorage,
	CodeUnsupported: http.StatusNotImplemented,
	CodeUnavailable: http.StatusServiceUnavailable,
	CodeInternal:    http.StatusInternalServerError,
}

// Error is an error as it travels: what is wrong, with which field, and what to do about it.
type Error struct {
	Code Code `json:"code"`
	// Field is the request's field at fault by its JSON name, or empty.
	Field string `json:"field,omitempty"`
	// Message says what is wrong.
	Message string `json:"message"`
	// Remedy says what to do about it, or is empty.
	Remedy string `json:"remedy,omitempty"`
}

// Error gives "field: message (remedy)", leaving out what is empty.
func (e *Error) Error() string {
	s := e.Message
	if s == "" {
		s = string(e.Code)
	}
	if e.Field != "" {
		s = e.Field + ": " + s
	}
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s
}

// Is makes errors.Is compare codes, so that errors.Is(err, ErrNotFound) holds for every error with
// that code, whatever its message.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Status gives the HTTP status of the error's code; 500 for a code this version does not know.
func (e *Error) Status() int {
	if s, ok := statusByCode[e.Code]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// Errors to compare with errors.Is; see Error.Is. ErrNotFound may be returned by an Agent as it is.
var (
	ErrNotFound    error = &Error{Code: CodeNotFound, Message: "not found"}
	ErrConflict    error = &Error{Code: CodeConflict, Message: "conflict"}
	ErrExhausted   error = &Error{Code: CodeExhausted, Message: "exhausted"}
	ErrUnavailable error = &Error{Code: CodeUnavailable, Message: "unavailable"}
	ErrInvalid     error = &Error{Code: CodeInvalid, Message: "invalid"}
)

// ErrNoAgent is wrapped by every client error that means that no agent answers on the socket.
var ErrNoAgent = errors.New("no agent answers")

// ErrAgentEnded is wrapped by client errors that mean that the agent ended before it had answered.
// What was asked for may have been done, in part or whole.
var ErrAgentEnded = errors.New("the agent ended before it answered")

// asError gives the form of err that travels. The context that was wrapped around an *Error becomes
// part of the message, so that nothing of it is lost.
func asError(err error) *Error {
	var e *Error
	if !errors.As(err, &e) {
		return &Error{Code: CodeInternal, Message: err.Error()}
	}
	if err == error(e) {
		return e
	}
	return &Error{Code: e.Code, Field: e.Field, Message: wrapped(err, e), Remedy: e.Remedy}
}

// wrapped gives the message of err, in which the text of e (message, field and remedy) appears as
// its message alone: the field and the remedy travel on their own.
func wrapped(err error, e *Error) string {
	text, inner := err.Error(), e.Error()
	bare := (&Error{Code: e.Code, Message: e.Message}).Error()
	if n := len(text) - len(inner); n >= 0 && text[n:] == inner {
		return text[:n] + bare
	}
	return text
}
