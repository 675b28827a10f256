package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"heddle.dev/heddle/internal/model"
)

// maxResponseBytes bounds what the client reads: half a million connections with room to spare.
const maxResponseBytes = 256 << 20

// readyInterval is how often WaitReady asks.
const readyInterval = 20 * time.Millisecond

// Client speaks to one agent. It is safe for use by many goroutines. It implements Agent, so what
// is written against an agent works against a client too.
type Client struct {
	socketPath string
	prefix     string // of targets: which node's agent is meant
	http       *http.Client
}

var _ Agent = (*Client)(nil)

// Dial gives a client for the agent at socketPath; "" means DefaultSocket. Nothing is sent before
// the first call, so an agent that is not there is that call's error (ErrNoAgent). Deadlines are
// the contexts' of the calls.
func Dial(socketPath string) *Client {
	if socketPath == "" {
		socketPath = DefaultSocket
	}
	var d net.Dialer
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", socketPath)
		},
		DisableCompression: true,
		IdleConnTimeout:    time.Minute,
	}
	return &Client{socketPath: socketPath, http: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// On gives a client that asks the agent of another node, by way of this one's, for what agents
// answer each other (PeerPaths).
func (c *Client) On(node string) *Client {
	return &Client{socketPath: c.socketPath, prefix: "/v1/nodes/" + node, http: c.http}
}

// AskNode asks the agent of another node; see Agent.
func (c *Client) AskNode(ctx context.Context, node, target string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/v1/nodes/"+node+target, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unanswered(ctx, err)
	}
	return resp, nil
}

// SocketPath is the path the client was given.
func (c *Client) SocketPath() string { return c.socketPath }

// Close ends the client's idle connections. A client that is not closed leaks nothing but those,
// for a minute.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status asks for the agent's status.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var st Status
	err := c.call(ctx, http.MethodGet, "/v1/status", nil, &st)
	return st, err
}

// Endpoints lists the endpoints of the agent's node.
func (c *Client) Endpoints(ctx context.Context) ([]model.Endpoint, error) {
	var list endpointList
	err := c.call(ctx, http.MethodGet, "/v1/endpoints", nil, &list)
	return list.Endpoints, err
}

// CreateEndpoint attaches a container; see Agent.
func (c *Client) CreateEndpoint(ctx context.Context, req EndpointRequest) (model.Endpoint, error) {
	var e model.Endpoint
	if err := req.Validate(); err != nil {
		return e, err
	}
	err := c.call(ctx, http.MethodPost, "/v1/endpoints", req, &e)
	return e, err
}

// DeleteEndpoint detaches a container. errors.Is(err, ErrNotFound) if there is none of that name:
// who only wants it gone takes that for success.
func (c *Client) DeleteEndpoint(ctx context.Context, name string) error {
	if err := ValidateEndpointName("name", name); err != nil {
		return err
	}
	return c.call(ctx, http.MethodDelete, "/v1/endpoints/"+url.PathEscape(name), nil, nil)
}

// EndpointDevice asks how an endpoint is attached; see Agent.
func (c *Client) EndpointDevice(ctx context.Context, name string) (EndpointDevice, error) {
	var d EndpointDevice
	if err := ValidateEndpointName("name", name); err != nil {
		return d, err
	}
	err := c.call(ctx, http.MethodGet, "/v1/endpoints/"+url.PathEscape(name)+"/device", nil, &d)
	return d, err
}

// SetLimits holds an endpoint to limits; see Agent.
func (c *Client) SetLimits(ctx context.Context, name string, change LimitsChange) (model.Endpoint, error) {
	var e model.Endpoint
	if err := ValidateEndpointName("name", name); err != nil {
		return e, err
	}
	if err := ValidateLimits(change.Limits); err != nil {
		return e, err
	}
	err := withWas(func(say bool) error {
		if !say {
			change.Was = nil
		}
		return c.call(ctx, http.MethodPut, "/v1/endpoints/"+url.PathEscape(name)+"/limits", change, &e)
	})
	return e, err
}

// LimitUse asks for the limits in force; see Agent.
func (c *Client) LimitUse(ctx context.Context) ([]model.LimitUse, error) {
	var list limitList
	err := c.call(ctx, http.MethodGet, "/v1/limits", nil, &list)
	return list.Limits, err
}

// Nodes lists the nodes of the network.
func (c *Client) Nodes(ctx context.Context) ([]Node, error) {
	var list nodeList
	err := c.call(ctx, http.MethodGet, "/v1/nodes", nil, &list)
	return list.Nodes, err
}

// ForgetNode removes a node that is gone; see Agent.
func (c *Client) ForgetNode(ctx context.Context, name string) error {
	if err := model.ValidateName("name", name); err != nil {
		return &Error{Code: CodeInvalid, Field: "name", Message: err.Error()}
	}
	return c.call(ctx, http.MethodDelete, "/v1/nodes/"+name, nil, nil)
}

// Connections lists the live TCP sockets of the node's endpoints; see ConnectionFilter.
func (c *Client) Connections(ctx context.Context, filter ConnectionFilter) ([]model.Connection, error) {
	query := url.Values{}
	if filter.Endpoint != "" {
		query.Set("endpoint", filter.Endpoint)
	}
	if filter.Listeners {
		query.Set("listeners", strconv.FormatBool(true))
	}
	target := "/v1/connections"
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	var list connectionList
	err := c.call(ctx, http.MethodGet, target, nil, &list)
	return list.Connections, err
}

// Traffic asks what the sockets of the node's endpoints did.
func (c *Client) Traffic(ctx context.Context) ([]model.Traffic, error) {
	var list trafficList
	err := c.call(ctx, http.MethodGet, "/v1/traffic", nil, &list)
	return list.Traffic, err
}

// WaitReady returns when the agent answers a status request, or when ctx ends: then with the error
// of the last request that ended before, which says more than that time ran out.
func (c *Client) WaitReady(ctx context.Context) error {
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	var last error
	for {
		_, err := c.Status(ctx)
		if err == nil {
			return nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-tick.C:
		}
	}
}

// call sends one request, with in as JSON body unless nil, and decodes the answer into out unless
// nil.
func (c *Client) call(ctx context.Context, method, target string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+c.prefix+target, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	status, answer, err := c.exchange(req)
	if err != nil {
		return c.unanswered(ctx, err)
	}
	if err := decodeAnswer(status, answer, out); err != nil {
		var said *Error
		if errors.As(err, &said) {
			return err // the agent's own, as it is
		}
		return fmt.Errorf("agent at %s: %w", c.socketPath, err)
	}
	return nil
}

// exchange sends a request and gives its answer; an error says that there is none, or not a whole
// one.
func (c *Client) exchange(req *http.Request) (status int, answer []byte, err error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }() // everything of interest has been read
	answer, err = io.ReadAll(io.LimitReader(resp.Body, maxResponseBytes+1))
	return resp.StatusCode, answer, err
}

// decodeAnswer decodes an answer into out unless nil.
func decodeAnswer(status int, answer []byte, out any) error {
	if len(answer) > maxResponseBytes {
		return fmt.Errorf("answer exceeds %d bytes", maxResponseBytes)
	}
	if status/100 != 2 {
		return decodeError(status, answer)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("decode answer: %w", err)
	}
	return nil
}

// decodeError reads the body of an answer that is not 2xx. Whatever answers there may be no agent,
// so a body of another form is quoted.
func decodeError(status int, answer []byte) error {
	var body errorBody
	if err := json.Unmarshal(answer, &body); err != nil || body.Error == nil || body.Error.Code == "" {
		return fmt.Errorf("answer %d %s without an error object: %.120q", status, http.StatusText(status),
			strings.TrimSpace(string(answer)))
	}
	return body.Error
}

// unanswered names the socket, and says what it means that a request was not answered: that no
// agent is there, or that it ended first, whatever the connection's end looked like. Only what the
// caller itself decided, and a socket that cannot be used, is neither.
func (c *Client) unanswered(ctx context.Context, err error) error {
	// The URL in it is made up, so the wrapping *url.Error helps nobody.
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	var op *net.OpError
	dialing := errors.As(err, &op) && op.Op == "dial"
	switch {
	case ctx.Err() != nil:
	case dialing && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)):
		return fmt.Errorf("%w on %s: %w", ErrNoAgent, c.socketPath, err)
	case !dialing:
		return fmt.Errorf("%w: %s: %w", ErrAgentEnded, c.socketPath, err)
	}
	return fmt.Errorf("agent at %s: %w", c.socketPath, err)
}
