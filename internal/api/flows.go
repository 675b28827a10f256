package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// flowWriteTimeout is how long who follows flows may leave a line unread. It ends what has stopped
// and yet keeps its connection.
const flowWriteTimeout = 30 * time.Second

// maxFlowLine bounds a line that the client reads: two ends with all the labels that they may have.
const maxFlowLine = 1 << 20

// FlowRequest asks for flows of a node.
type FlowRequest struct {
	Filter flow.Filter
	// Follow: those that are kept, and then those that come.
	Follow bool
}

// FlowLine is one line of the answer. One without a flow says that the agent is there, or that
// flows were lost because they were not read fast enough.
type FlowLine struct {
	Flow *flow.Flow `json:"flow,omitempty"`
	Lost uint64     `json:"lost,omitempty"`
	// Since is from when on flows are kept, if earlier ones were pushed out.
	Since time.Time `json:"since,omitzero"`
}

// FlowStats is what an agent says of flows.
type FlowStats struct {
	// Counts are those since the agent's start, by event and path.
	Counts []FlowCount `json:"counts,omitempty"`
	// Kept is how many are in memory.
	Kept      int `json:"kept"`
	Followers int `json:"followers"`
	// Lost counts those that followers were too slow for. Those that the agent was too slow for are
	// the reason lost_flow_event.
	Lost uint64 `json:"lost"`
	// Export is nil if flows go to no collector.
	Export *FlowExport `json:"export,omitempty"`
}

// FlowExport is what became of flows that a collector of OpenTelemetry is to have, since the
// agent's start. While it does not work, the fault flows_not_exported says why.
type FlowExport struct {
	Endpoint string `json:"endpoint"`
	Sent     uint64 `json:"sent"`
	// Lost are those it did not get, by why.
	Lost map[string]uint64 `json:"lost"`
}

// FlowCount counts flows of an event and path; Path is empty if they have none.
type FlowCount struct {
	Event flow.Event `json:"event"`
	Path  model.Path `json:"path,omitempty"`
	Count uint64     `json:"count"`
}

// FlowError gives what package flow says of a filter the form that travels.
func FlowError(err error) error {
	var f *flow.FieldError
	if errors.As(err, &f) {
		return &Error{Code: CodeInvalid, Field: f.Field, Message: f.Message, Remedy: f.Remedy}
	}
	return err
}

// decodeFlowRequest reads the query of GET /v1/flows.
func decodeFlowRequest(query string) (req FlowRequest, err error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return req, &Error{Code: CodeInvalid, Message: "malformed query: " + err.Error()}
	}
	if follow, there := values["follow"]; there {
		if len(follow) != 1 {
			return req, &Error{Code: CodeInvalid, Field: "follow", Message: "given more than once"}
		}
		if req.Follow, err = strconv.ParseBool(follow[0]); err != nil {
			return req, &Error{Code: CodeInvalid, Field: "follow", Message: fmt.Sprintf("%.40q is no truth value", follow[0]), Remedy: "use true or false"}
		}
		delete(values, "follow")
	}
	if req.Filter, err = flow.ParseFilter(values); err != nil {
		return FlowRequest{}, FlowError(err)
	}
	return req, nil
}

// flows answers with lines of JSON, as they come.
func (s *server) flows(w http.ResponseWriter, r *http.Request) error {
	req, err := decodeFlowRequest(r.URL.RawQuery)
	if err != nil {
		return err
	}
	out := http.NewResponseController(w)
	defer func() { _ = out.SetWriteDeadline(time.Time{}) }() // the connection may have further requests
	begun := false
	begin := func() {
		if begun {
			return
		}
		begun = true
		w.Header().Set("Content-Type", "application/x-ndjson")
		// The server's own limit is for requests; this one has been read.
		_ = out.SetReadDeadline(time.Time{})
	}
	err = s.agent.Flows(r.Context(), req, func(line FlowLine) error {
		begin()
		body, err := json.Marshal(line)
		if err != nil {
			return fmt.Errorf("encode flow: %w", err)
		}
		_ = out.SetWriteDeadline(time.Now().Add(flowWriteTimeout))
		if _, err := w.Write(append(body, '\n')); err != nil {
			return err
		}
		if req.Follow {
			return out.Flush()
		}
		return nil
	})
	if err != nil && !begun {
		return err
	}
	begin()
	if err != nil {
		s.log.Debug("api client of flows went away", "err", err)
	}
	return nil
}

// Flows gives emit the lines of the agent's answer. With Follow it returns when ctx ends, emit
// fails or the agent ends.
func (c *Client) Flows(ctx context.Context, req FlowRequest, emit func(FlowLine) error) error {
	values := req.Filter.Values()
	if req.Follow {
		values.Set("follow", "true")
	}
	target := "http://agent" + c.prefix + "/v1/flows"
	if len(values) > 0 {
		target += "?" + values.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(r)
	if err != nil {
		return c.unanswered(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }() // what follows is of no interest
	if resp.StatusCode != http.StatusOK {
		return c.noFlows(resp)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 64<<10), maxFlowLine)
	for lines.Scan() {
		var line FlowLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return fmt.Errorf("agent at %s: decode flow: %w", c.socketPath, err)
		}
		if err := emit(line); err != nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case lines.Err() != nil:
		return fmt.Errorf("%w: %s: %w", ErrAgentEnded, c.socketPath, lines.Err())
	case req.Follow:
		return fmt.Errorf("%w: %s", ErrAgentEnded, c.socketPath)
	}
	return nil
}

// noFlows says why there are none. What an earlier version answers about a path that it does not
// know is an error object to a client of its own, and none to another agent.
func (c *Client) noFlows(resp *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(resp.Body, MaxRequestBytes))
	if err == nil {
		err = decodeError(resp.StatusCode, body)
	}
	var said *Error
	object := errors.As(err, &said)
	if resp.StatusCode == http.StatusNotFound && object == (c.prefix == "") {
		return &Error{Code: CodeUnsupported, Message: fmt.Sprintf("the agent at %s is of a version that tells of no flows", c.socketPath),
			Remedy: "replace it by one of this version"}
	}
	if object {
		return err
	}
	return fmt.Errorf("agent at %s: %w", c.socketPath, err)
}
