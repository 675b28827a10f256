package cni

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"heddle.dev/heddle/internal/api"
)

// Error codes of this plugin; those below 100 are the specification's.
const (
	// codeFailed: the agent could not do it; its log has more.
	codeFailed uint = 100
	// codeExhausted: the node has no free address or endpoint id.
	codeExhausted uint = 101
	// codeConflict: the name, the address or the network namespace belongs to another endpoint.
	codeConflict uint = 102
	// codeChanged: what ADD made is not there as it was made.
	codeChanged uint = 103
)

func asType[T any](err error, target *T) bool { return errors.As(err, target) }

// invalid is the error for a field of the configuration that cannot be meant.
func invalid(field, message, remedy string) *types.Error {
	return types.NewError(types.ErrInvalidNetworkConfig, field+": "+message, remedy)
}

// unsupported is the error for a field that this plugin does not know; the specification asks for
// key and value.
func unsupported(field, value, remedy string) *types.Error {
	return types.NewError(types.ErrUnsupportedField, fmt.Sprintf("unsupported field %s: %.200s", field, value), remedy)
}

// repeatable is agentError for operations that may be repeated whatever has come of them: engines
// are told to.
func repeatable(doing, socket string, err error) *types.Error {
	e := agentError(doing, socket, err)
	if e.Code == codeFailed || e.Code == types.ErrIOFailure {
		e.Code = types.ErrTryAgainLater
	}
	return e
}

// agentError gives an agent's error, or that of reaching it, its code on CNI's side.
func agentError(doing, socket string, err error) *types.Error {
	var e *api.Error
	switch {
	case errors.Is(err, api.ErrNoAgent):
		return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("%s: the node's agent does not run: nobody answers on %s", doing, socket),
			"start heddled (systemctl status heddled, journalctl -u heddled), or correct the field socket of the network configuration")
	case errors.Is(err, api.ErrAgentEnded):
		return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("%s: %v", doing, err), "repeat it when the agent runs again; what was done is found then")
	case errors.Is(err, context.DeadlineExceeded):
		return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("%s: the node's agent did not answer in time: %v", doing, err),
			"look at the agent's log and at heddle status")
	case !errors.As(err, &e):
		return types.NewError(types.ErrIOFailure, fmt.Sprintf("%s: %v", doing, err), "")
	}
	message := doing + ": " + (&api.Error{Code: e.Code, Field: e.Field, Message: e.Message}).Error()
	switch e.Code {
	case api.CodeUnavailable:
		return types.NewError(types.ErrTryAgainLater, message, e.Remedy)
	case api.CodeExhausted:
		return types.NewError(codeExhausted, message, e.Remedy)
	case api.CodeConflict:
		return types.NewError(codeConflict, message, e.Remedy)
	case api.CodeInvalid:
		code := types.ErrInvalidNetworkConfig
		if e.Field == "netns_path" {
			code = types.ErrInvalidNetNS
		} else if e.Field == "name" || e.Field == "device" || e.Field == "cni" {
			code = types.ErrInvalidEnvironmentVariables // they are made of CNI_CONTAINERID and CNI_IFNAME
		}
		return types.NewError(code, message, e.Remedy)
	}
	return types.NewError(codeFailed, message, e.Remedy)
}
