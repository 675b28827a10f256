package density

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// Step is a node with so many containers. Bytes are of one container, on average of all.
type Step struct {
	Containers int `json:"containers"`
	// The kernel's memory: of a network namespace with its loopback, which any container has; of an
	// endpoint in it; of a process, here a thread, with a table of descriptors; and of its being
	// intercepted.
	NamespaceBytes   float64 `json:"namespace_kernel_bytes"`
	EndpointBytes    float64 `json:"endpoint_kernel_bytes"`
	ThreadBytes      float64 `json:"thread_kernel_bytes"`
	InterceptedBytes float64 `json:"intercepted_kernel_bytes"`
	// Resident memory of a container's share of the agent and the fd keeper.
	AgentBytes  float64 `json:"agent_bytes"`
	KeeperBytes float64 `json:"holder_bytes"`
	// In all.
	AgentMB      float64 `json:"agent_rss_mb"`
	MapsMB       float64 `json:"maps_mb"`
	AgentThreads int     `json:"agent_threads"`
	AgentFiles   int     `json:"agent_files"`
	KeeperFiles  int     `json:"holder_files"`
	// MakeMs is the time that one of this step's endpoints took to be made, and MakeCPUMs the
	// agent's processor time for it; JoinMs that one of its listeners took to be handed over and to
	// give its first socket, several at a time.
	MakeMs    bench.Spread `json:"endpoint_made_ms"`
	MakeCPUMs float64      `json:"endpoint_made_agent_cpu_ms"`
	JoinMs    float64      `json:"listener_served_ms"`
	Rest      Rest         `json:"at_rest"`
	Latency   []Latency    `json:"latency"`
	Accept    []Accept     `json:"accept"`
	Paced     []Paced      `json:"paced"`
}

// Paced is what the agent used while containers called socket() at a rate.
type Paced struct {
	Callers int     `json:"callers"` // containers that called
	Rate    float64 `json:"calls_per_s_wanted"`
	PerS    float64 `json:"calls_per_s"`
	CPU     float64 `json:"agent_cpus"`
	// CPUUs is the agent's processor time for a call.
	CPUUs    float64 `json:"agent_cpu_us_per_call"`
	P50Us    float64 `json:"socket_p50_us"`
	P99Us    float64 `json:"socket_p99_us"`
	ReadyPct float64 `json:"ready_percent"` // of calls: answered with a socket that was made before
}

// Live is so many connections of one scope and mode, live at once.
type Live struct {
	Scope       bench.Scope `json:"scope"`
	Mode        bench.Mode  `json:"mode"`
	Connections int         `json:"connections"`
	Containers  int         `json:"containers"`
	// KernelBytes is the kernel's memory of a connection, both ends; AgentBytes the resident memory
	// of n2's agent for it.
	KernelBytes float64 `json:"kernel_bytes"`
	AgentBytes  float64 `json:"agent_bytes"`
	// OpenedPerS is how fast the last of them were opened, by several containers at a time.
	OpenedPerS float64   `json:"opened_per_s"`
	Rest       Rest      `json:"at_rest"` // in mode heddle
	Latency    []Latency `json:"latency"`
	Accept     Accept    `json:"accept"`
}

// parts sums what containers have brought so far, in bytes.
type parts struct{ namespace, endpoint, thread, intercepted float64 }

// containers brings the node to n containers, and measures it.
func (r *run) containers(ctx context.Context, n int) (step Step, err error) {
	step.Containers = n
	if err := r.grow(ctx, &step); err != nil {
		return step, err
	}
	now, err := r.resting(ctx)
	if err != nil {
		return step, err
	}
	each := func(bytes float64) float64 { return bytes / float64(n) }
	step.NamespaceBytes, step.EndpointBytes = each(r.parts.namespace), each(r.parts.endpoint)
	step.ThreadBytes, step.InterceptedBytes = each(r.parts.thread), each(r.parts.intercepted)
	step.AgentBytes, step.KeeperBytes = each(now.agent-r.before.agent), each(now.keeper-r.before.keeper)
	step.AgentMB, step.MapsMB = now.agent/1e6, now.maps/1e6
	step.AgentThreads, step.AgentFiles, step.KeeperFiles = now.threads, now.files, now.keeperFiles
	r.say("%d containers: %.0f kB of the kernel's memory each (namespace %.0f, endpoint %.0f, thread %.0f, intercepted %.0f), %.1f kB of the agent's; agent %.0f MB, %d threads, %d files",
		n, each(r.parts.namespace+r.parts.endpoint+r.parts.thread+r.parts.intercepted)/1e3, step.NamespaceBytes/1e3, step.EndpointBytes/1e3, step.ThreadBytes/1e3,
		step.InterceptedBytes/1e3, step.AgentBytes/1e3, step.AgentMB, step.AgentThreads, step.AgentFiles)
	if step.Rest, err = r.rest(ctx, 2*r.options.Duration); err != nil {
		return step, err
	}
	if step.Latency, err = r.latency(ctx, bench.Inter, bench.Modes); err != nil {
		return step, err
	}
	for _, mode := range bench.Modes {
		a, err := r.accept(ctx, bench.Inter, mode)
		if err != nil {
			return step, err
		}
		step.Accept = append(step.Accept, a)
	}
	r.say("%d containers: at rest %.3f processors and %.0f switches/s; connects p50 %s; accepted/s %s", n, step.Rest.CPU, step.Rest.SwitchesPerS,
		sayLatency(step.Latency), sayAccept(step.Accept...))
	for _, callers := range []int{1, min(n, manyCallers)} {
		for _, rate := range r.options.Rates {
			p, err := r.paced(ctx, callers, rate)
			if err != nil {
				return step, fmt.Errorf("%g calls of socket() a second: %w", rate, err)
			}
			step.Paced = append(step.Paced, p)
			r.say("%d containers, of which %d call socket() %.0f times a second (wanted: %g): agent %.3f processors, %.1f us a call, %.0f %% ready; p50 %.1f us, p99 %.0f us",
				n, p.Callers, p.PerS, p.Rate, p.CPU, p.CPUUs, p.ReadyPct, p.P50Us, p.P99Us)
		}
	}
	return step, nil
}

// manyCallers is how many containers call socket() when several do.
const manyCallers = 40

// grow makes containers until there are as many as step has, part by part.
func (r *run) grow(ctx context.Context, step *Step) error {
	from := len(r.names)
	last, err := r.steady(ctx)
	if err != nil {
		return err
	}
	part := func(to *float64, share float64) error {
		now, err := r.steady(ctx)
		*to += (now.kernel - last.kernel) * share
		last = now
		return err
	}
	for i := from; i < step.Containers; i++ {
		name, path, err := r.addNamespace(1, r.place.First+r.options.servers()+i)
		if err != nil || ctx.Err() != nil {
			return fmt.Errorf("container %d: %w", i+1, errors.Join(err, ctx.Err()))
		}
		r.names, r.paths = append(r.names, name), append(r.paths, path)
	}
	if err := part(&r.parts.namespace, 1); err != nil {
		return err
	}
	if err := r.makeEndpoints(ctx, step, from); err != nil {
		return err
	}
	if err := part(&r.parts.endpoint, 1); err != nil {
		return err
	}
	threads := r.parts.thread
	if err := r.growThreads(ctx, from, step.Containers, part); err != nil {
		return err
	}
	elapsed, err := r.enter(ctx, bench.Heddle, from, step.Containers)
	if err != nil {
		return err
	}
	step.JoinMs = elapsed * 1e3 / float64(max(step.Containers-from, 1))
	err = part(&r.parts.intercepted, 1)
	r.parts.intercepted -= r.parts.thread - threads
	return err
}

// plainThreads is how many containers have a thread that is not intercepted, and one of the node,
// beside the one that is: threads of all three for each would be more than a machine's process ids.
const plainThreads = 2000

// growThreads makes a thread that is not intercepted in the node's namespace, and one in the
// container's, for each of the containers from..to-1, up to plainThreads: the same for the kernel.
// Those beyond cost as much as the ones before.
func (r *run) growThreads(ctx context.Context, from, to int, part func(*float64, float64) error) error {
	last := max(from, min(to, plainThreads))
	for _, mode := range []bench.Mode{bench.Host, bench.Overlay} {
		if _, err := r.enter(ctx, mode, from, last); err != nil {
			return err
		}
	}
	if err := part(&r.parts.thread, 0.5); err != nil {
		return err
	}
	if last > 0 {
		r.parts.thread *= float64(to) / float64(last)
	}
	return nil
}

// makeEndpoints makes those of the containers from from on.
func (r *run) makeEndpoints(ctx context.Context, step *Step, from int) error {
	cpu, err := machine.ProcessorTime(r.pid)
	if err != nil {
		return err
	}
	var took []float64
	for i := from; i < step.Containers; i++ {
		began := time.Now()
		if _, err := r.place.Nodes[1].Agent.CreateEndpoint(ctx, api.EndpointRequest{Name: r.names[i], NetnsPath: r.paths[i], Intercepted: true}); err != nil {
			return fmt.Errorf("make endpoint %s: %w", r.names[i], err)
		}
		took = append(took, time.Since(began).Seconds()*1e3)
	}
	used, err := machine.ProcessorTime(r.pid)
	if err != nil {
		return err
	}
	step.MakeMs, step.MakeCPUMs = bench.SpreadOf(took), (used-cpu).Seconds()*1e3/float64(max(len(took), 1))
	return nil
}

// enter adds a member in one mode to the fleet for each of the containers from..to-1.
func (r *run) enter(ctx context.Context, mode bench.Mode, from, to int) (elapsedS float64, err error) {
	var join []loadgen.FleetMember
	for i := from; i < to; i++ {
		m := loadgen.FleetMember{Netns: r.paths[i]}
		switch mode {
		case bench.Host:
			m.Netns = r.place.Nodes[1].Netns
		case bench.Heddle:
			m.Endpoint, m.Socket = r.names[i], r.place.Nodes[1].SeccompSocket
		}
		join = append(join, m)
		r.clients[mode] = append(r.clients[mode], r.members+i-from)
	}
	if len(join) == 0 {
		return 0, nil
	}
	began := time.Now()
	err = r.join(ctx, join)
	return time.Since(began).Seconds(), err
}

// restart ends the second node's agent, and awaits that the next one serves all listeners.
func (r *run) restart(ctx context.Context) (out Restart, err error) {
	agent := r.place.Nodes[1].Agent
	before, err := agent.Status(ctx)
	if err != nil {
		return out, err
	}
	pidfd, err := unix.PidfdOpen(before.PID, 0)
	if err != nil {
		return out, fmt.Errorf("the agent: %w", err)
	}
	defer unix.Close(pidfd)
	began := time.Now()
	if err := unix.PidfdSendSignal(pidfd, unix.SIGTERM, nil, 0); err != nil {
		return out, fmt.Errorf("end the agent: %w", err)
	}
	if err := awaitEnd(ctx, pidfd); err != nil {
		return out, err
	}
	r.say("the agent has ended after %.2f s", time.Since(began).Seconds())
	if err := r.place.Restart(ctx); err != nil {
		return out, err
	}
	for {
		now, err := agent.Status(ctx)
		if err != nil {
			return out, err
		}
		if now.Interception.Listeners >= before.Interception.Listeners {
			cpu, err := machine.ProcessorTime(now.PID)
			out = Restart{Containers: len(r.names), Seconds: time.Since(began).Seconds(), CPUSeconds: cpu.Seconds()}
			r.say("%d containers: the next agent serves after %.2f s, %.2f of its processor time", out.Containers, out.Seconds, out.CPUSeconds)
			return out, err
		}
		if err := proc.Pause(ctx, 10*time.Millisecond); err != nil {
			return out, err
		}
	}
}

// agentEnds bounds how long the agent may take to end.
const agentEnds = time.Minute

// awaitEnd returns when the process of a pidfd has ended.
func awaitEnd(ctx context.Context, pidfd int) error {
	ended := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for until := time.Now().Add(agentEnds); ; {
		n, err := unix.Poll(ended, 100) // so that an interrupt of the bench is seen
		switch {
		case err != nil && err != unix.EINTR:
			return fmt.Errorf("await the agent's end: %w", err)
		case n > 0:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(until):
			return fmt.Errorf("the agent has not ended after %s: its log says what it waits for", agentEnds)
		}
	}
}

// Connects of one latency, and callers of an accept rate.
const (
	latencyConnects = 300
	acceptCallers   = 8
)

// latency measures connects of modes in turn.
func (r *run) latency(ctx context.Context, scope bench.Scope, modes []bench.Mode) (out []Latency, err error) {
	type cell struct {
		mode    bench.Mode
		clients string
	}
	values := map[cell][3][]float64{}
	for round := range r.options.Rounds {
		for i := range modes {
			mode := modes[(i+round)%len(modes)]
			for _, clients := range []string{"one", "all"} {
				members := r.clients[mode][:1]
				if clients == "all" {
					members = turned(r.clients[mode], round*latencyConnects)
				}
				reply, err := r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetLatency, Members: members, To: r.servers[scope][mode], Count: latencyConnects})
				if err != nil {
					return nil, fmt.Errorf("%s %s: %w", scope, mode, err)
				}
				v := values[cell{mode, clients}]
				for k, x := range []float64{reply.ConnectP50Us, reply.ConnectP99Us, reply.SocketP50Us} {
					v[k] = append(v[k], x)
				}
				values[cell{mode, clients}] = v
			}
		}
	}
	for _, mode := range modes {
		for _, clients := range []string{"one", "all"} {
			v := values[cell{mode, clients}]
			out = append(out, Latency{Mode: mode, Clients: clients, P50Us: bench.SpreadOf(v[0]), P99Us: bench.SpreadOf(v[1]), Socket: bench.SpreadOf(v[2])})
		}
	}
	return out, nil
}

// turned gives the list from its element at on, and then what is before.
func turned(list []int, at int) []int {
	at %= len(list)
	return slices.Concat(list[at:], list[:at])
}

// accept measures what one listener accepts.
func (r *run) accept(ctx context.Context, scope bench.Scope, mode bench.Mode) (Accept, error) {
	members := r.clients[mode][:min(acceptCallers, len(r.clients[mode]))]
	reply, err := r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetAccept, Members: members, To: r.servers[scope][mode][:1], Duration: r.options.Duration / 2})
	if err != nil {
		return Accept{}, fmt.Errorf("%s %s: %w", scope, mode, err)
	}
	return Accept{Mode: mode, PerS: float64(reply.Count) / reply.ElapsedS}, nil
}

// paced measures the agent while containers call socket() at a rate.
func (r *run) paced(ctx context.Context, callers int, rate float64) (p Paced, err error) {
	before, err := r.place.Nodes[1].Agent.Status(ctx)
	if err != nil {
		return p, err
	}
	cpu, err := machine.ProcessorTime(r.pid)
	if err != nil {
		return p, err
	}
	// Those that came last: sockets are made ahead for the first ones of many only.
	members := r.clients[bench.Heddle][len(r.clients[bench.Heddle])-callers:]
	reply, err := r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetPace, Members: members, Rate: rate, Duration: r.options.Duration})
	if err != nil {
		return p, err
	}
	used, err := machine.ProcessorTime(r.pid)
	if err != nil {
		return p, err
	}
	after, err := r.place.Nodes[1].Agent.Status(ctx)
	if err != nil {
		return p, err
	}
	calls := float64(max(reply.Count, 1))
	ready := float64(after.Interception.PremadeHits - before.Interception.PremadeHits)
	return Paced{Callers: callers, Rate: rate, PerS: calls / reply.ElapsedS, CPU: (used - cpu).Seconds() / reply.ElapsedS,
		CPUUs: (used - cpu).Seconds() * 1e6 / calls, P50Us: reply.SocketP50Us, P99Us: reply.SocketP99Us, ReadyPct: min(100, 100*ready/calls)}, nil
}

// connections measures more and more live connections of one scope and mode, and ends them.
func (r *run) connections(ctx context.Context, scope bench.Scope, mode bench.Mode) (out []Live, err error) {
	before, err := r.steady(ctx)
	if err != nil {
		return nil, err
	}
	held := 0
	for _, n := range r.options.Connections {
		live := Live{Scope: scope, Mode: mode, Connections: n, Containers: len(r.names)}
		if more := n - held; more > 0 {
			reply, err := r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetHold, Members: r.clients[mode], To: r.servers[scope][mode], Count: more})
			if err != nil {
				return nil, fmt.Errorf("%s %s: connection %d of %d: %w", scope, mode, held+reply.Count+1, n, err)
			}
			held, live.OpenedPerS = n, float64(reply.Count)/reply.ElapsedS
		}
		now, err := r.steady(ctx)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			live.KernelBytes, live.AgentBytes = (now.kernel-before.kernel)/float64(n), (now.agent-before.agent)/float64(n)
		}
		if mode == bench.Heddle {
			if live.Rest, err = r.rest(ctx, r.options.Duration); err != nil {
				return nil, err
			}
		}
		if live.Latency, err = r.latency(ctx, scope, []bench.Mode{mode}); err != nil {
			return nil, err
		}
		if live.Accept, err = r.accept(ctx, scope, mode); err != nil {
			return nil, err
		}
		r.say("%s %s, %d connections live: %.1f kB each, opened at %.0f/s; agent at rest %.3f processors; connects p50 %s; accepted/s %s", scope, mode, n,
			live.KernelBytes/1e3, live.OpenedPerS, live.Rest.CPU, sayLatency(live.Latency), sayAccept(live.Accept))
		out = append(out, live)
	}
	if held == 0 {
		return out, nil
	}
	_, err = r.fleet.do(ctx, loadgen.FleetCommand{Op: loadgen.FleetDrop, Members: r.clients[mode]})
	return out, err
}

func sayLatency(all []Latency) (text string) {
	for i, l := range all {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%s/%s %.0f us", l.Mode, l.Clients, l.P50Us.Median)
	}
	return text
}

func sayAccept(all ...Accept) (text string) {
	for i, a := range all {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%s %.0f", a.Mode, a.PerS)
	}
	return text
}
