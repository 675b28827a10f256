package rdma

import (
	"context"
	"errors"
	"fmt"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
)

// reading is what has been used and done up to a moment.
type reading struct {
	machine               loadgen.CPUTime
	routers, programs     time.Duration
	messages              uint64
	queuePairs, processes int               // of both ends, and the processes that have them
	sent                  map[uint32]uint64 // messages by queue pair of the client
}

// Use is the processor time of messages that were watched while both ends moved some, so without
// the programs' start and end. Machine is all of the machine's: routers, programs, kernel.
type Use struct {
	Messages                   float64
	Machine, Routers, Programs time.Duration
	// Jain is Jain's index of the messages of the client's queue pairs.
	Jain float64
}

// errTooShort is a run that was over before it was seen twice.
var errTooShort = errors.New("messages were not seen to move twice: use a longer --duration")

// watchEvery is how often a run is looked at: seldom enough not to be seen in it.
const watchEvery = 40 * time.Millisecond

// watch looks at a run until ctx is over, and gives what was used between the first time that
// messages moved and the last.
func watch(ctx context.Context, agents []*api.Client, scope bench.Scope) (Use, error) {
	var first, last, now reading
	var err error
	for {
		select {
		case <-ctx.Done():
			if last.messages <= first.messages || first.messages == 0 {
				return Use{}, errors.Join(errTooShort, err)
			}
			return Use{
				Messages: float64(last.messages - first.messages), Machine: last.machine.BusySince(first.machine),
				Routers: last.routers - first.routers, Programs: last.programs - first.programs,
				Jain: jainOf(first.sent, last.sent),
			}, nil
		case <-time.After(watchEvery):
		}
		// A process that has just ended cannot be read, nor can an agent once ctx is over.
		if now, err = read(ctx, agents, scope); err != nil || now.messages == 0 {
			continue
		}
		switch {
		// Others than those that were seen first: these were an earlier run's, or not all.
		case first.messages == 0, last.messages == 0 && (now.queuePairs != first.queuePairs || now.processes != first.processes):
			first = now
		case now.messages > max(first.messages, last.messages) && now.queuePairs == first.queuePairs && now.processes == first.processes:
			last = now
		}
	}
}

// read takes a reading of the pair that runs in a scope; it has no messages until both ends have
// queue pairs.
func read(ctx context.Context, agents []*api.Client, scope bench.Scope) (r reading, err error) {
	client, server := scope.Ends()
	processes, ends := map[int]bool{}, map[string]bool{}
	r.sent = make(map[uint32]uint64)
	for _, agent := range agents {
		state, err := agent.RDMA(ctx)
		if err != nil {
			return r, err
		}
		if state.Router == nil || state.Router.PID == 0 {
			return r, errors.New("a node has no router")
		}
		used, err := machine.ProcessorTime(state.Router.PID)
		if err != nil {
			return r, fmt.Errorf("router: %w", err)
		}
		r.routers += used
		for _, q := range state.QueuePairs {
			if q.Endpoint == client || q.Endpoint == server {
				ends[q.Endpoint], processes[q.PID] = true, true
				r.queuePairs++
				r.messages += q.Requests
			}
			if q.Endpoint == client {
				r.sent[q.Number] = q.Requests
			}
		}
	}
	if len(ends) < 2 {
		r.messages = 0
		return r, nil
	}
	for pid := range processes {
		used, err := machine.ProcessorTime(pid)
		if err != nil {
			return r, fmt.Errorf("program: %w", err)
		}
		r.programs += used
	}
	r.processes = len(processes)
	r.machine, err = loadgen.ReadCPUTime()
	return r, err
}

// jainOf gives Jain's index of what was counted between two moments; 1 if all had as much.
func jainOf(first, last map[uint32]uint64) float64 {
	var sum, squares float64
	for number, n := range last {
		v := float64(n - first[number])
		sum, squares = sum+v, squares+v*v
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / squares / float64(len(last))
}
