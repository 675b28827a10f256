package density

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/netns"
)

// EndpointMemoryResult is what an endpoint takes: its veth pair with routes and filters, its
// entries in maps, and the agent's account of it. The container's network namespace is not counted:
// there is one with any network.
type EndpointMemoryResult struct {
	Endpoints int          `json:"endpoints"` // that were made at a time
	Rounds    int          `json:"rounds"`
	Kernel    bench.Spread `json:"kernel_bytes"` // of one endpoint: what cannot be reclaimed of slab, per-CPU memory and stacks
	Agent     bench.Spread `json:"agent_bytes"`  // of one endpoint: resident memory of the agent
}

// MaxMemoryEndpoints is how many endpoints a node of the default network has addresses for, with
// some to spare.
const MaxMemoryEndpoints = 240

// endpointsSteadyLimit is how long memory may go on changing after endpoints have come or gone.
const endpointsSteadyLimit = 2 * time.Second

// RunEndpointMemory makes n endpoints at the agent, and removes them, as often as rounds says, and
// looks at what memory the kernel and the agent take meanwhile. Coming and going are figures of
// their own. prefix names the network namespaces.
func RunEndpointMemory(ctx context.Context, agent *api.Client, prefix string, n, rounds int, progress io.Writer) (_ EndpointMemoryResult, err error) {
	if n < 1 || n > MaxMemoryEndpoints || rounds < 1 || rounds > bench.MaxRuns {
		return EndpointMemoryResult{}, fmt.Errorf("%d endpoints in %d rounds: want 1..%d and 1..%d", n, rounds, MaxMemoryEndpoints, bench.MaxRuns)
	}
	status, err := agent.Status(ctx)
	if err != nil {
		return EndpointMemoryResult{}, err
	}
	m := &endpointMemory{agent: agent, pid: status.PID, n: n, prefix: prefix}
	defer func() { err = errors.Join(err, m.undo()) }()
	for i := range n {
		if err := netns.Create(m.netns(i)); err != nil {
			return EndpointMemoryResult{}, err
		}
	}
	var kernel, resident []float64
	// The first time, caches and the agent's heap grow to what they then keep.
	for round := range rounds + 1 {
		_, _ = fmt.Fprintf(progress, "round %d of %d: %d endpoints come and go\n", round, rounds, n) // a courtesy
		steps, err := m.round(ctx)
		if err != nil {
			return EndpointMemoryResult{}, err
		}
		if round == 0 {
			continue
		}
		for _, s := range steps {
			kernel, resident = append(kernel, s[0]), append(resident, s[1])
		}
	}
	return EndpointMemoryResult{Endpoints: n, Rounds: rounds, Kernel: bench.SpreadOf(kernel), Agent: bench.SpreadOf(resident)}, nil
}

// endpointMemory is an experiment that goes on.
type endpointMemory struct {
	agent  *api.Client
	pid    int
	n      int
	made   int // endpoints that may be there
	prefix string
}

func (m *endpointMemory) netns(i int) string { return fmt.Sprintf("%s-m%d", m.prefix, i) }

func endpointName(i int) string { return fmt.Sprintf("bench/m%d", i) }

// round gives the growth of kernel and agent, in bytes an endpoint, when all endpoints come and,
// negated, when they go.
func (m *endpointMemory) round(ctx context.Context) (steps [2][2]float64, err error) {
	before, err := m.steady(ctx)
	if err != nil {
		return steps, err
	}
	for i, change := range []func(context.Context) error{m.create, m.delete} {
		if err := change(ctx); err != nil {
			return steps, err
		}
		after, err := m.steady(ctx)
		if err != nil {
			return steps, err
		}
		sign := 1.0
		if i == 1 {
			sign = -1
		}
		for k := range before {
			steps[i][k] = sign * (after[k] - before[k]) / float64(m.n)
		}
		before = after
	}
	return steps, nil
}

func (m *endpointMemory) create(ctx context.Context) error {
	for m.made < m.n {
		i := m.made
		m.made++
		_, err := m.agent.CreateEndpoint(ctx, api.EndpointRequest{Name: endpointName(i), NetnsPath: netns.Path(m.netns(i)), Intercepted: true})
		if err != nil {
			return fmt.Errorf("make endpoint %s: %w", endpointName(i), err)
		}
	}
	return nil
}

func (m *endpointMemory) delete(ctx context.Context) error {
	for ; m.made > 0; m.made-- {
		name := endpointName(m.made - 1)
		if err := m.agent.DeleteEndpoint(ctx, name); err != nil && !errors.Is(err, api.ErrNotFound) {
			return fmt.Errorf("remove endpoint %s: %w", name, err)
		}
	}
	return nil
}

// undo removes endpoints and namespaces, whatever became of the experiment.
func (m *endpointMemory) undo() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	err := m.delete(ctx)
	for i := range m.n {
		err = errors.Join(err, netns.Delete(m.netns(i)))
	}
	return err
}

// steady reads the memory of kernel and agent once the kernel's has stopped moving: devices are
// freed after they are gone.
func (m *endpointMemory) steady(ctx context.Context) (now [2]float64, err error) {
	const still = 64 << 10 // bytes
	read := func() (float64, error) { return machine.KernelMemory(machine.EndpointFields...) }
	if now[0], err = machine.Steady(ctx, read, still, endpointsSteadyLimit); err != nil {
		return now, err
	}
	now[1], err = machine.ResidentBytes(m.pid)
	return now, err
}
