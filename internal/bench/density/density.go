// Package density measures what more and more containers on one node, and live connections, cost
// the node and each other, and what memory an endpoint takes.
package density

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/model"
)

// The density experiment: what more and more containers on one node, and more and more live
// connections, cost the node and each other. The node is a lab's second one, because its agent runs
// no store; servers are on both nodes. A container is a network namespace, an endpoint and a thread
// of a peer's fleet.

// Sizes of the experiment.
var (
	Containers  = []int{10, 100, 300, 1000}
	Connections = []int{0, 1000, 10000, 30000, 100000}
	Rates       = []float64{1000, 3000, 10000}
)

// The bounds of what may be asked for.
const (
	// MaxDensityContainers is what a machine of some 20 GB has room for, and a fleet's process
	// threads.
	MaxDensityContainers  = 10000
	MaxDensityConnections = 200000
	maxDensityRate        = 100000
	minDensityDuration    = 50 * time.Millisecond
)

// Options say what to measure.
type Options struct {
	Containers  []int         // on the node, ascending
	Connections []int         // live at once, ascending, the first 0, all with the last number of containers
	Rates       []float64     // calls of socket() a second
	Scopes      []bench.Scope // of connections
	Rounds      int           // of latencies, at each step
	Duration    time.Duration
	Program     []string // words that run loadgen.Main
	Progress    io.Writer
}

// Validate reports what is out of bounds.
func (o Options) Validate() error {
	if err := (bench.Options{Runs: o.Rounds, Duration: max(o.Duration, time.Second)}).Validate(); err != nil {
		return err
	}
	if o.Duration < minDensityDuration {
		return fmt.Errorf("--duration %s: want %s or more", o.Duration, minDensityDuration)
	}
	if len(o.Containers) == 0 || !slices.IsSorted(o.Containers) || o.Containers[0] < 1 || o.Containers[len(o.Containers)-1] > MaxDensityContainers {
		return fmt.Errorf("--containers %v: want numbers in ascending order, 1..%d", o.Containers, MaxDensityContainers)
	}
	if len(o.Connections) == 0 || o.Connections[0] != 0 || !slices.IsSorted(o.Connections) || o.Connections[len(o.Connections)-1] > MaxDensityConnections {
		return fmt.Errorf("--connections %v: want numbers in ascending order, the first 0, at most %d", o.Connections, MaxDensityConnections)
	}
	for _, r := range o.Rates {
		if r < 1 || r > maxDensityRate {
			return fmt.Errorf("--rates %g: want 1..%d", r, maxDensityRate)
		}
	}
	if len(o.Scopes) == 0 {
		return errors.New("--scopes: name at least one")
	}
	return nil
}

// Node is one of the lab's two nodes.
type Node struct {
	Agent         *api.Client
	Netns         string // path of its network namespace
	Underlay      netip.Addr
	SeccompSocket string
	// AddNamespace makes the network namespace of container i, which counts from 1; names and path
	// are what an endpoint has.
	AddNamespace    func(i int) (name, path string, err error)
	RemoveNamespace func(i int) error
}

// Lab is a lab of two nodes that is up. The second node's agent must have room for the containers
// in its prefix.
type Lab struct {
	Nodes [2]Node
	First int // first number of a container that is free, on both nodes
	// Stays says that the lab is used by others afterwards, so that what is made has to be removed.
	// Otherwise it goes with the lab, which is faster.
	Stays bool
	// Restart starts the second node's agent again, which has ended, and returns when it serves.
	Restart func(context.Context) error
}

// perServer is how many connections there are to each server: below half of the source ports that
// one node has to it in mode host.
const perServer = 12500

// servers is how many servers there are on each node and for each mode.
func (o Options) servers() int {
	return 1 + (o.Connections[len(o.Connections)-1]-1)/perServer
}

// Result is the outcome of Run.
type Result struct {
	Machine string `json:"machine"`
	// Background is how many processors other programs kept busy before it began.
	Background  float64 `json:"background_cpus"`
	Rounds      int     `json:"rounds"`
	DurationS   float64 `json:"duration_s"`
	TookS       float64 `json:"took_s"`
	Containers  []Step  `json:"containers"`
	Connections []Live  `json:"connections"`
	Restart     Restart `json:"restart,omitzero"` // with the last numbers of both
}

// Restart is what it took until an agent that was told to end had a next one that served all calls.
type Restart struct {
	Containers int     `json:"containers"`
	Seconds    float64 `json:"seconds"`
	CPUSeconds float64 `json:"next_agent_cpu_seconds"`
}

// Latency is what connects took from containers of one mode to servers: of one container, and of
// all in turn. Spreads are over rounds.
type Latency struct {
	Mode    bench.Mode   `json:"mode"`
	Clients string       `json:"clients"` // "one" or "all"
	P50Us   bench.Spread `json:"socket_connect_p50_us"`
	P99Us   bench.Spread `json:"socket_connect_p99_us"`
	Socket  bench.Spread `json:"socket_p50_us"`
}

// Accept is how many connections a second one listener accepted, of several clients that connected
// at the same time.
type Accept struct {
	Mode bench.Mode `json:"mode"`
	PerS float64    `json:"accepted_per_s"`
}

// Rest is what the agent uses when nothing happens.
type Rest struct {
	CPU          float64 `json:"cpus"` // of one processor
	SwitchesPerS float64 `json:"voluntary_switches_per_s"`
}

// run is an experiment that goes on.
type run struct {
	place   Lab
	options Options
	begun   time.Time
	fleet   *fleetProcess
	pid     int // of the second node's agent

	names, paths []string // of the containers there are
	members      int      // of the fleet
	clients      map[bench.Mode][]int
	servers      map[bench.Scope]map[bench.Mode][]netip.AddrPort
	before       memory // without containers
	parts        parts
	failedBefore [2]api.Status
	made         []made
}

// made is a container that may be there: on which node, and what it is called.
type made struct {
	node, number int
	name         string
}

// Run runs the experiment in a lab that is up. It leaves containers in it: the lab has to go.
func Run(ctx context.Context, place Lab, o Options) (result Result, err error) {
	if err := o.Validate(); err != nil {
		return result, err
	}
	r := &run{place: place, options: o, begun: time.Now(), clients: map[bench.Mode][]int{}, servers: map[bench.Scope]map[bench.Mode][]netip.AddrPort{}}
	result.Rounds, result.DurationS = o.Rounds, o.Duration.Seconds()
	if r.fleet, err = startFleet(ctx, o.Program); err != nil {
		return result, err
	}
	defer func() {
		r.fleet.stop()
		if place.Stays {
			err = errors.Join(err, r.remove())
		}
	}()
	if err := r.prepare(ctx); err != nil {
		return result, r.explain(ctx, err)
	}
	for _, n := range o.Containers {
		step, err := r.containers(ctx, n)
		if err != nil {
			return result, r.explain(ctx, fmt.Errorf("%d containers: %w", n, err))
		}
		result.Containers = append(result.Containers, step)
	}
	for _, scope := range o.Scopes {
		for _, mode := range bench.Modes {
			c, err := r.connections(ctx, scope, mode)
			if err != nil {
				return result, r.explain(ctx, err)
			}
			result.Connections = append(result.Connections, c...)
		}
	}
	if !place.Stays { // an agent that others use was not started by this lab's arguments
		if result.Restart, err = r.restart(ctx); err != nil {
			return result, r.explain(ctx, err)
		}
	}
	result.TookS = time.Since(r.begun).Seconds()
	return result, nil
}

// remove takes away what was made.
func (r *run) remove() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	for _, m := range r.made {
		n := r.place.Nodes[m.node]
		if m.name != "" {
			if derr := n.Agent.DeleteEndpoint(ctx, m.name); derr != nil && !errors.Is(derr, api.ErrNotFound) {
				err = errors.Join(err, fmt.Errorf("remove endpoint %s: %w", m.name, derr))
			}
		}
		err = errors.Join(err, n.RemoveNamespace(m.number))
	}
	return err
}

// removeTimeout bounds how long containers take to go, one after the other.
const removeTimeout = time.Minute

// addNamespace makes the network namespace of a container on one of the nodes.
func (r *run) addNamespace(node, number int) (name, path string, err error) {
	r.made = append(r.made, made{node: node, number: number})
	name, path, err = r.place.Nodes[node].AddNamespace(number)
	r.made[len(r.made)-1].name = name
	return name, path, err
}

func (r *run) say(format string, args ...any) {
	// Progress is a courtesy; the measurement goes on without it.
	_, _ = fmt.Fprintf(r.options.Progress, "[%4.0f s] %s\n", time.Since(r.begun).Seconds(), fmt.Sprintf(format, args...))
}

// explain adds to an error what the agents have refused since the beginning, by their names for it.
func (r *run) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	for i, n := range r.place.Nodes {
		now, serr := n.Agent.Status(ctx)
		if serr != nil {
			return errors.Join(err, serr)
		}
		for reason, count := range now.Interception.Failed {
			if more := count - r.failedBefore[i].Interception.Failed[reason]; more > 0 {
				err = fmt.Errorf("%w; node %d: %s %d times", err, i+1, reason, more)
			}
		}
		for k, c := range now.Counters {
			if before := r.failedBefore[i].Counters; k < len(before) && c.Value > before[k].Value && (c.Kind == model.KindDrop || c.Kind == model.KindRefusal) {
				err = fmt.Errorf("%w; node %d: %s %d times", err, i+1, c.Name, c.Value-before[k].Value)
			}
		}
	}
	return err
}

// prepare brings the servers up.
func (r *run) prepare(ctx context.Context) error {
	for i, n := range r.place.Nodes {
		status, err := n.Agent.Status(ctx)
		if err != nil {
			return err
		}
		r.failedBefore[i], r.pid = status, status.PID // the second's in the end
	}
	for i := range r.place.Nodes {
		scope := bench.Scopes[i] // the first node's are between nodes
		r.servers[scope] = map[bench.Mode][]netip.AddrPort{}
		for range r.options.servers() {
			if err := r.serve(ctx, i, scope, r.place.First+len(r.servers[scope][bench.Heddle])); err != nil {
				return err
			}
		}
	}
	var err error
	if r.before, err = r.resting(ctx); err != nil {
		return err
	}
	r.say("%d servers on each node; the agent of n2 has %.0f MB", r.options.servers(), r.before.agent/1e6)
	return nil
}

// serve makes a container of a node, with a server in each mode.
func (r *run) serve(ctx context.Context, node int, scope bench.Scope, number int) error {
	n := r.place.Nodes[node]
	name, path, err := r.addNamespace(node, number)
	if err != nil {
		return err
	}
	e, err := n.Agent.CreateEndpoint(ctx, api.EndpointRequest{Name: name, NetnsPath: path, Intercepted: true})
	if err != nil {
		return fmt.Errorf("make endpoint %s: %w", name, err)
	}
	first := r.members
	err = r.join(ctx, []loadgen.FleetMember{{Netns: n.Netns}, {Netns: path}, {Netns: path, Endpoint: name, Socket: n.SeccompSocket}})
	if err != nil {
		return err
	}
	reply, err := r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetServe, Members: []int{first, first + 1, first + 2}})
	if err != nil {
		return err
	}
	for k, mode := range bench.Modes {
		addr := e.Addr4()
		if mode == bench.Host {
			addr = n.Underlay
		}
		r.servers[scope][mode] = append(r.servers[scope][mode], netip.AddrPortFrom(addr, reply.Ports[k]))
	}
	return nil
}

func (r *run) join(ctx context.Context, members []loadgen.FleetMember) error {
	_, err := r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetJoin, Join: members})
	r.members += len(members)
	return err
}
