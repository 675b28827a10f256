// Package rdma measures the verbs plane with Debian's unmodified perftest, beside what a copy, two
// processes that spin, and TCP do in the same run.
package rdma

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/session"
)

// Case is one thing that is measured.
type Case struct {
	// Program is one of perftest's, rstream, netpipe (NetPIPE over rsockets), train, shuffle, or a
	// baseline: copy, copy-far, copy-asked, spin, tcp, and those that end in -overlay and -host.
	Program string      `json:"program"`
	Scope   bench.Scope `json:"scope,omitempty"` // none of a baseline in one place
	Bytes   int         `json:"bytes"`           // of a message
	// QPs is how many queue pairs there are, each with a buffer of its own at each end; of copy,
	// how many such buffers.
	QPs int `json:"qps,omitempty"`
	// Batch is how many send requests are posted at a time.
	Batch int `json:"batch,omitempty"`
	// Events has the programs sleep until there are completions instead of polling; perftest does
	// that for SEND only.
	Events bool `json:"events,omitempty"`
	// CapBPS is the cap of what the client's container sends, in bits a second.
	CapBPS int64 `json:"cap_bps,omitempty"`
}

func (c Case) String() string {
	words := []string{c.Program, string(c.Scope), size(c.Bytes)}
	if c.QPs > 1 {
		words = append(words, fmt.Sprintf("%d QPs", c.QPs))
	}
	if c.Batch > 0 {
		words = append(words, fmt.Sprintf("%d at a time", c.Batch))
	}
	if c.Events {
		words = append(words, "events")
	}
	if c.CapBPS > 0 {
		words = append(words, "cap "+capText(c.CapBPS))
	}
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), " ")
}

func (c Case) latency() bool { return strings.HasSuffix(c.Program, "_lat") }

// The metrics of rows, as they stand in JSON.
const (
	bytesPerS    = "bytes_per_s"
	messagesPerS = "messages_per_s"
	latencyUs    = "latency_us" // one way
	latencyP99Us = "latency_p99_us"
	// Processor time of a message: all of the machine's, the routers', both programs'.
	machineUs  = "machine_us_per_message"
	routerUs   = "router_us_per_message"
	programsUs = "programs_us_per_message"
	jain       = "jain"    // index of the messages of queue pairs: 1 if all had as many
	stepMs     = "step_ms" // of a job of MPI processes
	mpiMs      = "mpi_ms"  // of it, in MPI's calls
)

// Row is what came out: medians over the runs, by metric.
type Row struct {
	Case
	Metrics map[string]bench.Spread `json:"metrics"`
	// brief has tables show medians alone.
	brief bool
}

// Result is what `heddle bench rdma` found.
type Result struct {
	Machine    string  `json:"machine"`
	Processors int     `json:"processors"`
	Background float64 `json:"background"` // processors that other programs kept busy before
	Runs       int     `json:"runs"`
	DurationS  float64 `json:"duration_s"`
	Rows       []Row   `json:"rows"`
	brief      bool
}

// Cases lists what is measured in a run, in the order of reports.
func Cases(scopes []bench.Scope) []Case {
	var cases []Case
	for _, bytes := range []int{2 << 10, 8 << 10, 64 << 10, 1 << 20} {
		cases = append(cases, Case{Program: "copy", Bytes: bytes}, Case{Program: "copy-far", Bytes: bytes}, Case{Program: "copy-asked", Bytes: bytes})
		if bytes < 1<<20 {
			cases = append(cases, Case{Program: "copy", Bytes: bytes, QPs: 64})
		}
	}
	cases = append(cases, Case{Program: "spin", Bytes: 4})
	for _, scope := range scopes {
		cases = append(cases, Case{Program: "tcp", Scope: scope, Bytes: 64 << 10})
		for _, program := range []string{"ib_send_bw", "ib_write_bw"} {
			for _, qps := range []int{1, 64} {
				for _, bytes := range []int{2 << 10, 8 << 10, 64 << 10, 1 << 20} {
					// 64 of a MiB are 256 MiB to register, which would take longer than the run.
					// What many queue pairs add, WRITE shows.
					if qps == 1 || program == "ib_write_bw" && bytes < 1<<20 {
						cases = append(cases, Case{Program: program, Scope: scope, Bytes: bytes, QPs: qps})
					}
				}
			}
		}
		cases = append(cases, pairs(scope)...)
		cases = append(cases, capped(scope)...)
		cases = append(cases, apps(scope)...)
		cases = append(cases, Case{Program: "ib_write_bw", Scope: scope, Bytes: 64, QPs: 1, Batch: 32},
			Case{Program: "ib_send_bw", Scope: scope, Bytes: 64 << 10, QPs: 1, Events: true})
		for _, program := range []string{"ib_send_lat", "ib_write_lat"} {
			for _, bytes := range []int{2, 4 << 10} {
				cases = append(cases, Case{Program: program, Scope: scope, Bytes: bytes, QPs: 1})
			}
		}
		if scope == bench.Intra {
			cases = append(cases, Case{Program: "rstream", Scope: scope, Bytes: 64 << 10}, Case{Program: "rstream-overlay", Scope: scope, Bytes: 64 << 10})
		}
	}
	return cases
}

// runner is the state of one benchmark; only its goroutine uses it.
type runner struct {
	*session.Session
	agents []*api.Client
	cpus   machine.Pinning
	// counts says how many messages fill the measured time, of programs that want a number.
	counts  map[Case]int
	servers int // so far
}

// run measures every case in turn, several times over, each time from another one on.
func run(ctx context.Context, s *session.Session, cases []Case) ([]Row, error) {
	cpus, err := machine.ChoosePinning()
	if err != nil {
		return nil, err
	}
	agents, err := s.Lab.Agents()
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, a := range agents {
			a.Close()
		}
	}()
	if err := haveVerbs(ctx, agents); err != nil {
		return nil, err
	}
	r := &runner{Session: s, agents: agents, cpus: cpus, counts: make(map[Case]int)}
	values := make(map[Case]map[string][]float64)
	start, total := time.Now(), s.Runs*len(cases)
	for n := range s.Runs {
		for i := range cases {
			c := cases[(i+n*len(cases)/s.Runs)%len(cases)]
			done := n*len(cases) + i
			remaining := time.Duration(0)
			if done > 0 {
				remaining = time.Since(start) / time.Duration(done) * time.Duration(total-done)
			}
			s.Step(fmt.Sprintf("run %d: %s", n+1, c), done, total, remaining)
			sample, err := r.measure(ctx, c)
			if err != nil {
				return nil, fmt.Errorf("%s, run %d: %w", c, n+1, err)
			}
			if values[c] == nil {
				values[c] = make(map[string][]float64)
			}
			for metric, v := range sample {
				values[c][metric] = append(values[c][metric], v)
			}
		}
	}
	var rows []Row
	for _, c := range cases {
		row := Row{Case: c, Metrics: make(map[string]bench.Spread)}
		for metric, v := range values[c] {
			row.Metrics[metric] = bench.SpreadOf(v)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// haveVerbs reports whether the lab's containers have verbs; the error says what to do.
func haveVerbs(ctx context.Context, agents []*api.Client) error {
	for _, agent := range agents {
		if state, err := agent.RDMA(ctx); err != nil {
			return err
		} else if len(state.Devices) == 0 {
			return errors.New("the lab's containers have no verbs: make it anew with --verbs, or use --up")
		}
	}
	return nil
}

// measure runs one case once.
func (r *runner) measure(ctx context.Context, c Case) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Duration+proc.ReadyTimeout+2*proc.ClientSlack)
	defer cancel()
	switch c.Program {
	case "copy":
		return copyBytes(c.Bytes, c.Bytes*max(c.QPs, 1)), nil
	case "copy-far":
		return copyBytes(c.Bytes, machine.FarSpan), nil
	case "copy-asked":
		return r.copyAsked(ctx, c.Bytes)
	case "spin":
		return r.spin(ctx)
	case "tcp":
		return r.tcp(ctx, c)
	case "rstream", "rstream-overlay":
		return r.rstream(ctx, c)
	case "netpipe", "netpipe-overlay", "netpipe-host":
		return r.netpipe(ctx, c)
	case "train", "train-overlay", "shuffle", "shuffle-overlay":
		return r.job(ctx, c)
	}
	lift, err := r.limit(ctx, c)
	if err != nil {
		return nil, err
	}
	f, use, err := r.timedOrCounted(ctx, c)
	err = errors.Join(err, lift())
	if err != nil {
		return nil, err
	}
	sample := map[string]float64{
		machineUs: micros(use.Machine) / use.Messages, routerUs: micros(use.Routers) / use.Messages, programsUs: micros(use.Programs) / use.Messages,
	}
	if c.latency() {
		sample[latencyUs], sample[latencyP99Us] = f.LatencyUs, f.LatencyP99Us
	} else {
		sample[bytesPerS], sample[messagesPerS] = f.BytesPerS, f.MessagesPerS
	}
	if c.QPs > 1 {
		sample[jain] = use.Jain
	}
	return sample, nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// timedOrCounted runs perftest for a time, or for a number of messages where it must. A run by time
// gives no more than a mean of latency, and there is none with events, but it says how many
// messages fill the time.
func (r *runner) timedOrCounted(ctx context.Context, c Case) (f Figure, use Use, err error) {
	timed := []string{"-D", r.seconds(1)}
	if !c.latency() && !c.Events {
		for times := 1; times <= 4; times *= 2 {
			if f, use, err = r.perftest(ctx, c, []string{"-D", r.seconds(times)}); !errors.Is(err, errTooShort) {
				break // else, with many queue pairs, most of its time went by before the first message
			}
		}
		return f, use, err
	}
	if r.counts[c] == 0 {
		polling := c
		polling.Events = false
		if f, use, err = r.perftest(ctx, polling, timed); err != nil {
			return f, use, err
		}
		r.counts[c] = fills(r.Duration, f)
	}
	// Ends that share processors are fast in one run and slow in the next.
	for range 4 {
		f, use, err = r.perftest(ctx, c, []string{"-n", strconv.Itoa(r.counts[c])})
		if !errors.Is(err, errTooShort) {
			break
		}
		r.counts[c] *= 4
	}
	return f, use, err
}

// maxRoundTrips bounds runs that turn out slower than the one by which they were counted.
const maxRoundTrips = 20_000

// fills says how many messages, or round trips of two, take a time.
func fills(d time.Duration, f Figure) int {
	if f.LatencyUs > 0 {
		return int(min(max(d.Seconds()*1e6/f.LatencyUs/2, 100), maxRoundTrips))
	}
	return int(min(max(d.Seconds()*f.MessagesPerS, 100), 1e6))
}

// seconds is so many times the time of a run as programs want it, which know whole seconds.
func (r *runner) seconds(times int) string {
	return strconv.Itoa(times * int((r.Duration+time.Second-1)/time.Second))
}

// words are those of a case's program, but for the server's address.
func (c Case) words(port uint16, length []string) []string {
	words := append([]string{c.Program, "-F", "-x", "0", "-p", strconv.Itoa(int(port)), "-s", strconv.Itoa(c.Bytes)}, length...)
	if c.QPs > 1 {
		words = append(words, "-q", strconv.Itoa(c.QPs))
	}
	if c.Batch > 0 {
		words = append(words, "-l", strconv.Itoa(c.Batch))
	}
	if c.Events {
		words = append(words, "-e")
	}
	return words
}

// perftest runs both ends once, and watches what they use.
func (r *runner) perftest(ctx context.Context, c Case, length []string) (f Figure, use Use, err error) {
	client, server := c.Scope.Ends()
	address, err := r.Lab.IP(ctx, bench.Heddle, server)
	if err != nil {
		return f, use, err
	}
	port := r.port()
	served, err := proc.StartLoad(r.Lab.Exec(ctx, bench.Heddle, server, c.words(port, length)...), "")
	if err != nil {
		return f, use, err
	}
	defer func() { err = errors.Join(err, served.Kill()) }()
	if err := r.awaitListener(ctx, server, port); err != nil {
		_, said := served.Finish(ctx)
		return f, use, errors.Join(err, said)
	}
	type outcome struct {
		use Use
		err error
	}
	watching, stop := context.WithCancel(ctx)
	watched := make(chan outcome, 1)
	go func() {
		use, err := watch(watching, r.agents, c.Scope)
		watched <- outcome{use, err}
	}()
	out, err := proc.Output(r.Lab.Exec(ctx, bench.Heddle, client, append(c.words(port, length), address.String())...))
	stop()
	o := <-watched
	if err != nil {
		return f, use, fmt.Errorf("client in %s: %w", client, err)
	}
	if _, err := served.Finish(ctx); err != nil {
		return f, use, fmt.Errorf("server in %s: %w", server, err)
	}
	f, err = ParsePerftest(out)
	return f, o.use, errors.Join(err, o.err)
}

// port gives each server one of its own: one that lingers is not in the way of the next.
func (r *runner) port() uint16 {
	r.servers++
	return bench.Port(r.servers)
}

// awaitListener waits until a container listens at a port.
func (r *runner) awaitListener(ctx context.Context, container string, port uint16) error {
	ctx, cancel := context.WithTimeout(ctx, proc.ReadyTimeout)
	defer cancel()
	node := 0
	if strings.HasPrefix(container, "n2/") {
		node = 1
	}
	for {
		all, err := r.agents[node].Connections(ctx, api.ConnectionFilter{Endpoint: container, Listeners: true})
		for _, c := range all {
			if !c.Remote.IsValid() && c.Local.Port() == port {
				return nil
			}
		}
		if waitErr := proc.Pause(ctx, 10*time.Millisecond); waitErr != nil {
			return fmt.Errorf("nothing listens at port %d in %s: %w", port, container, errors.Join(waitErr, err))
		}
	}
}

// place gives the server's container of a scope, and its address in a mode.
func (r *runner) place(ctx context.Context, mode bench.Mode, scope bench.Scope) (client, server string, address netip.Addr, err error) {
	client, server = scope.Ends()
	address, err = r.Lab.IP(ctx, mode, server)
	return client, server, address, err
}
