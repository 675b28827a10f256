package api

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"heddle.dev/heddle/internal/model"
)

// PeerPaths are what agents answer each other: what they know, and nothing that changes anything.
var PeerPaths = []string{"/v1/connections", "/v1/encryption/accepted", "/v1/endpoints", "/v1/flows", "/v1/flows/summary", "/v1/limits", "/v1/rdma", "/v1/services", "/v1/stacks", "/v1/status", "/v1/traffic"}

// maxPassing bounds how many questions an agent passes on at a time, flows that are followed
// included: each has a connection of its own.
const maxPassing = 1024

// ForPeers serves PeerPaths of handler, and nothing else of it.
func ForPeers(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || !slices.Contains(PeerPaths, r.URL.Path) {
			http.NotFound(w, r)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

// askNode passes a question on to another node's agent, and its answer back as it comes.
func (s *server) askNode(w http.ResponseWriter, r *http.Request) error {
	name, target := r.PathValue("name"), "/"+r.PathValue("target")
	if err := model.ValidateName("name", name); err != nil {
		return &Error{Code: CodeInvalid, Field: "name", Message: err.Error()}
	}
	if !slices.Contains(PeerPaths, target) {
		return &Error{Code: CodeNotFound, Message: fmt.Sprintf("%.200q is nothing that agents answer each other", target)}
	}
	if r.URL.RawQuery != "" {
		target += "?" + r.URL.RawQuery
	}
	if s.passing.Add(1) > maxPassing {
		s.passing.Add(-1)
		return &Error{Code: CodeExhausted, Message: fmt.Sprintf("%d questions to other nodes are under way already", maxPassing), Remedy: "end some that follow flows, or ask fewer nodes at a time"}
	}
	defer s.passing.Add(-1)
	answer, err := s.agent.AskNode(r.Context(), name, target)
	if err != nil {
		return fmt.Errorf("ask node %s: %w", name, err)
	}
	defer func() { _ = answer.Body.Close() }() // what was read of it has been passed on
	// The server's own limit is for requests, and this one has been read: flows that are followed
	// last longer.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	w.Header().Set("Content-Type", answer.Header.Get("Content-Type"))
	w.WriteHeader(answer.StatusCode)
	if _, err := io.Copy(flushed{http.NewResponseController(w), w}, answer.Body); err != nil {
		s.log.Debug("an answer of another node broke off", "node", name, "err", err)
		panic(http.ErrAbortHandler) // the client must not take it for whole
	}
	return nil
}

// flushed passes on each part of an answer at once: some have no end.
type flushed struct {
	control *http.ResponseController
	w       io.Writer
}

// Write implements io.Writer.
func (f flushed) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if ferr := f.control.Flush(); err == nil && !errors.Is(ferr, http.ErrNotSupported) {
		err = ferr
	}
	return n, err
}
