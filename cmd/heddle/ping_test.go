package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
)

// tried is a connection that took so long, or failed.
func tried(took, rtt time.Duration, failed string) api.Trace {
	return api.Trace{Policy: api.Explanation{Verdict: "allow", Port: 80}, Way: &api.Way{Path: "direct", Why: "it may"}, Connected: failed == "",
		Steps: []api.TraceStep{{Name: "policy", Took: time.Hour}, {Name: "connect", Took: took, Error: failed}}, Flow: &flow.Flow{Path: "direct", RTT: rtt}}
}

// TestPing: each connection is told of, and all of them added up; it ends with an error only if
// none came about.
func TestPing(t *testing.T) {
	list := []api.Trace{tried(3*time.Millisecond, time.Millisecond, ""), tried(time.Second, 0, "connection refused"), tried(time.Millisecond, 0, ""), tried(2*time.Millisecond, 3*time.Millisecond, "")}
	run := func(f pingFlags, traces []api.Trace) (string, error) {
		var out bytes.Buffer
		n := 0
		err := f.run(t.Context(), func(context.Context) (api.Trace, error) { n++; return traces[n-1], nil }, &out)
		if n != f.count {
			t.Errorf("%d tries, want %d", n, f.count)
		}
		return out.String(), err
	}
	text, err := run(pingFlags{count: 4, interval: time.Millisecond}, list)
	if err != nil {
		t.Error(err)
	}
	for _, want := range []string{"port 80: allow, would go direct: it may\n", "1: connected after 3ms, direct, round trip 1ms\n", "2: connection refused after 1s, direct\n",
		"\n4 tried, 3 connected, 25 % lost\n", "connect min/median/max 1ms / 2ms / 3ms\n", "round trip min/median/max 1ms / 3ms / 3ms\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	text, err = run(pingFlags{agentFlags: agentFlags{output: jsonOutput}, count: 2, interval: time.Millisecond}, list)
	var r pingReport
	if jsonErr := json.Unmarshal([]byte(text), &r); jsonErr != nil || err != nil || r.Tried != 2 || r.Connected != 1 || r.Connect.Median != 3*time.Millisecond || len(r.Traces) != 2 {
		t.Errorf("%s: %v, %v", text, err, jsonErr)
	}
	if text, err = run(pingFlags{count: 1, interval: time.Millisecond}, list[1:]); !errors.Is(err, errNotConnected) || !strings.Contains(text, "100 % lost") || strings.Contains(text, "min/median") {
		t.Errorf("%v: %s", err, text)
	}
}

// TestPingInterrupted: what is known is told.
func TestPingInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	n := 0
	f := pingFlags{count: 100, interval: time.Millisecond}
	err := f.run(ctx, func(context.Context) (api.Trace, error) {
		if n++; n == 3 {
			cancel()
			return api.Trace{}, ctx.Err()
		}
		return tried(time.Millisecond, 0, ""), nil
	}, &out)
	if err != nil || !strings.Contains(out.String(), "2 tried, 2 connected, 0 % lost") {
		t.Errorf("%v: %s", err, &out)
	}
}

// TestPingRefuses: what is out of bounds is refused before anybody is asked.
func TestPingRefuses(t *testing.T) {
	for _, args := range [][]string{{"a", "b", "--count", "0"}, {"a", "b", "--count", "10001"}, {"a", "b", "--interval", "1ms"}, {"a", "b", "--interval", "2h"}, {"a", "b:0"}, {"a"}} {
		cmd := newPingCmd()
		cmd.SetArgs(args)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); err == nil || errors.Is(err, api.ErrNoAgent) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// TestWayText: a path is said with its reason, and whose TCP it is.
func TestWayText(t *testing.T) {
	for want, w := range map[string]api.Way{
		"would go overlay: it listens not (fallback_local_plain)":                                 {Path: "overlay", Reason: "fallback_local_plain", Why: "it listens not"},
		"policy does not allow it":                                                                {Why: "policy does not allow it"},
		"would go direct: it may; its programs go by the stack smoltcp, this try by the kernel's": {Path: "direct", Why: "it may", Stack: "smoltcp"},
	} {
		if got := wayText(&w); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
