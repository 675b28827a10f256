package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"time"
)

// endTime is how long an agent may take to end after SIGTERM or SIGINT: longer than every bounded
// wait on the way (5 s for requests under way, some seconds each for the store and for the node's
// name), and well within what whoever started it waits before it kills: TimeoutStopSec= of
// packaging/heddled.service, agentpod.AgentEnds.
const endTime = 20 * time.Second

// moreTime is what an agent that starts asks its service manager for again and again while it takes
// over endpoints: with ten thousand, and a store that is slow, no bound for all of it would do.
const moreTime = 90 * time.Second

// maxStacks bounds what an agent that does not end says of itself, in bytes.
const maxStacks = 1 << 20

// boundEnd makes a process that still runs a time after ctx ended say what it waits for, and end
// with status 1. Nothing is lost by that: an agent must be able to end at any moment, by SIGKILL
// too, and the next takes over what it left. The function that it gives calls this off.
func boundEnd(ctx context.Context, within time.Duration, w io.Writer, exit func(code int)) (callOff func()) {
	over := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
		case <-over:
			return
		}
		timer := time.NewTimer(within)
		defer timer.Stop()
		select {
		case <-over:
			return
		case <-timer.C:
		}
		stacks := make([]byte, maxStacks)
		stacks = stacks[:runtime.Stack(stacks, true)]
		fmt.Fprintf(w, "heddled: did not end within %s of the signal, and ends as if it was killed: the next agent takes over. "+
			"This is a fault of Heddle's; please report what it was waiting for:\n%s\n", within, stacks)
		exit(1)
	}()
	return func() { close(over) }
}
