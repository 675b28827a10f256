package main

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/agentpod"
	"heddle.dev/heddle/internal/node"
)

// TestEndIsWaitedFor: whoever ends an agent gives it the time to say what it waits for.
func TestEndIsWaitedFor(t *testing.T) {
	const toSay = 2 * time.Second
	seconds := func(path, line string) time.Duration {
		t.Helper()
		raw, err := os.ReadFile("../../packaging/" + path)
		if err != nil {
			t.Fatal(err)
		}
		found := regexp.MustCompile(`(?m)^\s*` + line + `\s*(\d+)$`).FindSubmatch(raw)
		if found == nil {
			t.Fatalf("%s has no %s", path, line)
		}
		d, err := time.ParseDuration(string(found[1]) + "s")
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if got := seconds("heddled.service", "TimeoutStopSec="); got < endTime+toSay {
		t.Errorf("heddled.service waits %s, the agent %s", got, endTime)
	}
	if agentpod.AgentEnds < endTime+toSay {
		t.Errorf("the pod waits %s, the agent %s", agentpod.AgentEnds, endTime)
	}
	if got := seconds("kubernetes/heddle.yaml", "terminationGracePeriodSeconds:"); got < agentpod.AgentEnds+toSay {
		t.Errorf("the kubelet waits %s, the pod %s", got, agentpod.AgentEnds)
	}
	// One endpoint may take as long as the store: then the next call must come in time.
	if moreTime < node.ProgressEvery+30*time.Second {
		t.Errorf("%s of time are asked for every %s", moreTime, node.ProgressEvery)
	}
}

// TestBoundEnd: a process that hangs after its signal says where, and ends.
func TestBoundEnd(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	var said strings.Builder
	codes := make(chan int)
	callOff := boundEnd(ctx, time.Millisecond, &said, func(code int) { codes <- code })
	defer callOff()
	select {
	case code := <-codes:
		t.Fatalf("ended with %d without a signal", code)
	case <-time.After(20 * time.Millisecond):
	}
	stop()
	if code := <-codes; code != 1 || !strings.Contains(said.String(), "TestBoundEnd") {
		t.Errorf("ended with %d, saying %q; want 1 and this test's stack", code, said.String())
	}
}

// TestBoundEndCalledOff: one that ends in time is left alone.
func TestBoundEndCalledOff(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	exited := make(chan int, 1)
	callOff := boundEnd(ctx, time.Hour, &strings.Builder{}, func(code int) { exited <- code })
	stop()
	callOff()
	select {
	case code := <-exited:
		t.Errorf("ended with %d", code)
	default:
	}
}
