package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"heddle.dev/heddle/internal/model"
)

// The envelopes of lists: objects, so that later versions can add fields beside the list.
type (
	endpointList struct {
		Endpoints []model.Endpoint `json:"endpoints"`
	}
	nodeList struct {
		Nodes []Node `json:"nodes"`
	}
	connectionList struct {
		Connections []model.Connection `json:"connections"`
	}
	trafficList struct {
		Traffic []model.Traffic `json:"traffic"`
	}
	errorBody struct {
		Error *Error `json:"error"`
	}
)

// NewHandler serves agent over HTTP, and what registry gathers at /metrics. The agent registers
// NewCollector there, beside what it has of its own; a nil registry stands for one with
// NewCollector only.
func NewHandler(agent Agent, registry *prometheus.Registry, log *slog.Logger) http.Handler {
	if registry == nil {
		registry = prometheus.NewRegistry()
		registry.MustRegister(NewCollector(agent))
	}
	s := &server{agent: agent, log: log, mux: http.NewServeMux()}
	s.handle("/v1/status", methods{http.MethodGet: s.status})
	s.handle("/v1/endpoints", methods{http.MethodGet: s.endpoints, http.MethodPost: s.createEndpoint})
	s.handle("/v1/endpoints/{name}", methods{http.MethodDelete: s.deleteEndpoint})
	s.handle("/v1/endpoints/{name}/device", methods{http.MethodGet: s.endpointDevice})
	s.handle("/v1/endpoints/{name}/limits", methods{http.MethodPut: s.setLimits})
	s.handle("/v1/endpoints/{name}/verbs", methods{http.MethodPut: s.setVerbs})
	s.handle("/v1/endpoints/{name}/ports", methods{http.MethodPut: s.setPorts})
	s.handle("/v1/endpoints/{name}/migrate", methods{http.MethodPost: s.migrate})
	s.handle("/v1/moves", methods{http.MethodGet: s.moves})
	s.handle("/v1/endpoints/{name}/labels", methods{http.MethodPatch: s.labelEndpoint})
	s.handle("/v1/policies", methods{http.MethodGet: s.policies, http.MethodPost: s.editPolicies})
	s.handle("/v1/policies/explain", methods{http.MethodGet: s.explainPolicy})
	s.handle("/v1/stacks", methods{http.MethodGet: s.stacks, http.MethodPost: s.editStacks})
	s.handle("/v1/services", methods{http.MethodGet: s.services, http.MethodPost: s.editServices})
	s.handle("/v1/limits", methods{http.MethodGet: s.limits})
	s.handle("/v1/rdma", methods{http.MethodGet: s.rdma})
	s.handle("/v1/encryption/accepted", methods{http.MethodGet: s.acceptedKeys})
	s.handle("/v1/encryption/rotate", methods{http.MethodPost: s.rotateKey})
	s.handle("/v1/nodes", methods{http.MethodGet: s.nodes})
	s.handle("/v1/nodes/{name}", methods{http.MethodDelete: s.forgetNode})
	s.handle("/v1/nodes/{name}/{target...}", methods{http.MethodGet: s.askNode})
	s.handle("/v1/connections", methods{http.MethodGet: s.connections})
	s.handle("/v1/flows", methods{http.MethodGet: s.flows})
	s.handle("/v1/flows/summary", methods{http.MethodGet: s.flowSummary})
	s.handle("/v1/network/endpoints", methods{http.MethodGet: s.networkEndpoints})
	s.handle("/v1/trace", methods{http.MethodPost: s.trace})
	s.handle("/v1/traffic", methods{http.MethodGet: s.traffic})
	metrics := promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	})
	s.handle("/metrics", methods{http.MethodGet: func(w http.ResponseWriter, r *http.Request) error {
		metrics.ServeHTTP(w, r)
		return nil
	}})
	s.handle("/", nil)
	return s
}

// server is immutable after NewHandler; requests share nothing but the agent and a count.
type server struct {
	agent   Agent
	log     *slog.Logger
	mux     *http.ServeMux
	passing atomic.Int64 // questions to other nodes
}

// handlerFunc answers a request, or returns an error before it has written anything.
type handlerFunc func(w http.ResponseWriter, r *http.Request) error

type methods map[string]handlerFunc

// handle serves pattern: the mux is given no methods, so that a wrong method and an unknown path
// are answered with the API's own errors.
func (s *server) handle(pattern string, byMethod methods) {
	s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		h, ok := byMethod[r.Method]
		var err error
		switch {
		case ok:
			err = h(w, r)
		case len(byMethod) == 0:
			err = &Error{Code: CodeNotFound, Message: fmt.Sprintf("no such path %.200q", r.URL.Path)}
		default:
			for m := range byMethod {
				w.Header().Add("Allow", m)
			}
			err = &Error{Code: CodeMethod, Message: fmt.Sprintf("%.20q does not apply to %s", r.Method, pattern)}
		}
		if err != nil {
			s.fail(w, r, err)
		}
	})
}

// ServeHTTP logs the request and keeps a panicking handler from ending the agent without a trace.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	defer func() {
		if p := recover(); p != nil {
			if p == any(http.ErrAbortHandler) {
				panic(p)
			}
			s.log.Error("api handler panicked", "method", r.Method, "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
			s.fail(w, r, &Error{Code: CodeInternal, Message: "the agent met a bug; its log has the details"})
		}
		s.log.Debug("api request", "method", r.Method, "path", r.URL.Path, "took", time.Since(start))
	}()
	s.mux.ServeHTTP(w, r)
}

func (s *server) status(w http.ResponseWriter, r *http.Request) error {
	most, err := decodeMost(r.URL.RawQuery)
	if err != nil {
		return err
	}
	st, err := s.agent.Status(r.Context())
	if err != nil {
		return err
	}
	if most > 0 {
		st = st.brief(most)
	}
	return s.write(w, st)
}

func (s *server) endpoints(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	es, err := s.agent.Endpoints(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, endpointList{orEmpty(es)})
}

func (s *server) createEndpoint(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	req, err := decodeEndpointRequest(r.Body)
	if err != nil {
		return err
	}
	e, err := s.agent.CreateEndpoint(r.Context(), req)
	if err != nil {
		return fmt.Errorf("create endpoint %s: %w", req.Name, err)
	}
	return s.write(w, e)
}

func (s *server) deleteEndpoint(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	if err := s.agent.DeleteEndpoint(r.Context(), name); err != nil {
		return fmt.Errorf("delete endpoint %s: %w", name, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) endpointDevice(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	d, err := s.agent.EndpointDevice(r.Context(), name)
	if err != nil {
		return fmt.Errorf("device of endpoint %s: %w", name, err)
	}
	return s.write(w, d)
}

func (s *server) nodes(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	ns, err := s.agent.Nodes(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, nodeList{orEmpty(ns)})
}

func (s *server) forgetNode(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	name := r.PathValue("name")
	if err := model.ValidateName("name", name); err != nil {
		return &Error{Code: CodeInvalid, Field: "name", Message: err.Error()}
	}
	if err := s.agent.ForgetNode(r.Context(), name); err != nil {
		return fmt.Errorf("forget node %s: %w", name, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) connections(w http.ResponseWriter, r *http.Request) error {
	filter, err := decodeConnectionFilter(r.URL.RawQuery)
	if err != nil {
		return err
	}
	cs, err := s.agent.Connections(r.Context(), filter)
	if err != nil {
		return err
	}
	return s.write(w, connectionList{orEmpty(cs)})
}

func (s *server) traffic(w http.ResponseWriter, r *http.Request) error {
	if err := noQuery(r); err != nil {
		return err
	}
	list, err := s.agent.Traffic(r.Context())
	if err != nil {
		return err
	}
	return s.write(w, trafficList{orEmpty(list)})
}

// orEmpty makes an empty list "[]" in JSON, never "null".
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// write sends v as the answer. It marshals first, so that an error can still be answered as one.
func (s *server) write(w http.ResponseWriter, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	if _, err := w.Write(append(body, '\n')); err != nil {
		s.log.Debug("api client went away", "err", err)
	}
	return nil
}

// fail answers with err. A client that has gone away is told nothing and logged at debug level
// only.
func (s *server) fail(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		s.log.Debug("api client went away", "method", r.Method, "path", r.URL.Path)
		return
	}
	e := asError(err)
	if e.Code == CodeInternal {
		s.log.Error("api request", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	body, merr := json.Marshal(errorBody{e})
	if merr != nil {
		s.log.Error("encode api error", "err", merr)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status())
	if _, werr := w.Write(append(body, '\n')); werr != nil {
		s.log.Debug("api client went away", "err", werr)
	}
}
