package api

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/flow"
)

// TestFlows: what the agent gives comes to the client, in order, and so does the request.
func TestFlows(t *testing.T) {
	agent := newFakeAgent()
	agent.flowLines = []FlowLine{{Flow: &flow.Flow{Event: flow.Open, Socket: 1}}, {Lost: 7}, {Flow: &flow.Flow{Event: flow.End, Socket: 1}}}
	c := serve(t, agent)
	filter, err := flow.ParseQuery("from=n1/*&label=app%3Dweb&since=5m&last=3")
	if err != nil {
		t.Fatal(err)
	}
	for _, follow := range []bool{false, true} {
		var got []FlowLine
		err := c.Flows(t.Context(), FlowRequest{Filter: filter, Follow: follow}, func(line FlowLine) error {
			got = append(got, line)
			return nil
		})
		if follow != errors.Is(err, ErrAgentEnded) || !follow && err != nil {
			t.Errorf("follow %v: %v", follow, err)
		}
		if len(got) != 3 || got[0].Flow.Event != flow.Open || got[1].Lost != 7 || got[2].Flow.Event != flow.End {
			t.Errorf("follow %v: %+v", follow, got)
		}
	}
	if n := len(agent.flowRequests); n != 2 || agent.flowRequests[1].Filter.String() != filter.String() || !agent.flowRequests[1].Follow {
		t.Errorf("requests %+v", agent.flowRequests)
	}
	agent.flowLines, agent.err = nil, &Error{Code: CodeInvalid, Field: "path", Message: "no such"}
	if err := c.Flows(t.Context(), FlowRequest{}, func(FlowLine) error { return nil }); !errors.Is(err, ErrInvalid) {
		t.Errorf("the agent's error: %v", err)
	}
	h := NewHandler(agent, nil, slog.New(slog.DiscardHandler))
	for _, query := range []string{"from=10.0.0.1/8", "follow=perhaps", "follow=1&follow=1", "limit=3", "%zz"} {
		if status, text := rawRequest(h, http.MethodGet, "/v1/flows?"+query, ""); status != http.StatusBadRequest || !strings.Contains(text, `"invalid"`) {
			t.Errorf("%s: %d %s", query, status, text)
		}
	}
}

// endless gives flows until it is told that nobody reads.
type endless struct {
	*fakeAgent
	ended chan error
}

func (a *endless) Flows(ctx context.Context, _ FlowRequest, emit func(FlowLine) error) error {
	for {
		if err := errors.Join(emit(FlowLine{Flow: &flow.Flow{Event: flow.Open}}), ctx.Err()); err != nil {
			a.ended <- err
			return err
		}
	}
}

// TestFollowerGoesAway: the agent stops for one that has gone.
func TestFollowerGoesAway(t *testing.T) {
	agent := &endless{newFakeAgent(), make(chan error, 1)}
	c := serve(t, agent)
	enough := errors.New("enough")
	n := 0
	if err := c.Flows(t.Context(), FlowRequest{Follow: true}, func(FlowLine) error {
		if n++; n == 100 {
			return enough
		}
		return nil
	}); !errors.Is(err, enough) {
		t.Fatal(err)
	}
	<-agent.ended
}

// TestOldAgentHasNoFlows: one of a version before is told from one that does not find something.
func TestOldAgentHasNoFlows(t *testing.T) {
	s := &server{agent: newFakeAgent(), log: slog.New(slog.DiscardHandler), mux: http.NewServeMux()}
	s.handle("/", nil) // as it answers what it does not know
	socket := filepath.Join(t.TempDir(), "api.sock")
	ln, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = ServeOn(t.Context(), ln, s) }()
	c := Dial(socket)
	defer c.Close()
	err = c.Flows(t.Context(), FlowRequest{}, func(FlowLine) error { return nil })
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeUnsupported || e.Remedy == "" || !strings.Contains(e.Message, socket) {
		t.Errorf("an old agent: %v", err)
	}
}

func TestTrace(t *testing.T) {
	c := serve(t, newFakeAgent())
	got, err := c.Trace(t.Context(), TraceRequest{From: "n1/c1", To: "10.244.1.3", Port: 80})
	if err != nil || got.Policy.Verdict != "allow" || len(got.Steps) != 1 || got.Steps[0].Error != "10.244.1.3" || got.Flow == nil || got.Flow.Event != flow.Fail {
		t.Errorf("%+v, %v", got, err)
	}
	h := NewHandler(newFakeAgent(), nil, slog.New(slog.DiscardHandler))
	for body, field := range map[string]string{
		`{"to":"b","port":80}`: "from", `{"from":"a","port":80}`: "to", `{"from":"a","to":"b"}`: "port", `{"from":"a","to":"b","port":65536}`: "port",
		`{"from":"a","to":"b","port":80,"send":1}`: "send",
	} {
		if status, text := rawRequest(h, http.MethodPost, "/v1/trace", body); status != http.StatusBadRequest || !strings.Contains(text, `"field":"`+field+`"`) {
			t.Errorf("%s: %d %s, want the field %s", body, status, text, field)
		}
	}
}
