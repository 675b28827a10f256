package rdma

import (
	"fmt"

	"heddle.dev/heddle/internal/bench"
)

// Goal is a speed that the plane is made for, and what a run says of it. It is reported; nothing
// asserts it.
type Goal struct{ Wanted, Found, Verdict string }

// of gives the median of a metric; 0 if it was not measured.
func (r Result) of(c Case, metric string) float64 {
	return r.row(c).Metrics[metric].Median
}

// hopProcessors is what the goal of a hop wants: one for each end, and one for the router.
const hopProcessors = 3

// Goals judges a run.
func (r Result) Goals() []Goal {
	write := func(scope bench.Scope, bytes, qps int) Case {
		return Case{Program: "ib_write_bw", Scope: scope, Bytes: bytes, QPs: qps}
	}
	var goals []Goal
	add := func(wanted string, found, limit float64, higher bool, measured bool) {
		g := Goal{Wanted: wanted, Found: fmt.Sprintf("%.2f", found), Verdict: "not reached"}
		switch {
		case !measured:
			g.Found, g.Verdict = "", "not measured in this run"
		case found == limit || bench.Better(found, limit, higher):
			g.Verdict = "reached"
		}
		goals = append(goals, g)
	}
	ratio := func(wanted string, a, b, limit float64, higher bool) {
		add(wanted, a/b, limit, higher, a > 0 && b > 0)
	}
	for _, bytes := range []int{2 << 10, 8 << 10, 64 << 10, 1 << 20} {
		limit := 0.9
		if bytes < 8<<10 {
			limit = 0.5
		}
		ratio(fmt.Sprintf("WRITE of %s on one node: at least %.1f of a copy by one thread between two buffers", size(bytes), limit),
			r.of(write(bench.Intra, bytes, 1), bytesPerS), r.of(Case{Program: "copy", Bytes: bytes}, bytesPerS), limit, true)
		// Runs of before 30 November 2026 do not have it.
		if asked := r.of(Case{Program: "copy-asked", Bytes: bytes}, bytesPerS); asked > 0 {
			ratio("the same of a copy by one thread that another process asks for", r.of(write(bench.Intra, bytes, 1), bytesPerS), asked, limit, true)
		}
		if bytes < 1<<20 {
			ratio("the same by 64 queue pairs, of a copy between two times 64 buffers",
				r.of(write(bench.Intra, bytes, 64), bytesPerS), r.of(Case{Program: "copy", Bytes: bytes, QPs: 64}, bytesPerS), limit, true)
		}
	}
	batch := Case{Program: "ib_write_bw", Scope: bench.Intra, Bytes: 64, QPs: 1, Batch: 32}
	ratio("64-byte messages in batches: at least 3 million a second and router's processor", 1, r.of(batch, routerUs), 3, true)

	lat := r.of(Case{Program: "ib_write_lat", Scope: bench.Intra, Bytes: 2, QPs: 1}, latencyUs)
	spin := r.of(Case{Program: "spin", Bytes: 4}, latencyUs)
	add("WRITE of 2 B on one node: at most 1.5 us more than between two processes that spin", lat-spin, 1.5, false, lat > 0 && spin > 0)
	if hop := &goals[len(goals)-1]; r.Processors < hopProcessors {
		hop.Verdict = fmt.Sprintf("cannot be shown: two ends that poll and the router want %d processors, and there are %d", hopProcessors, r.Processors)
	}

	tcp := Case{Program: "tcp", Scope: bench.Inter, Bytes: 64 << 10}
	far := write(bench.Inter, 64<<10, 1)
	ratio("WRITE of 64 KiB between nodes: at least 0.95 of the host's TCP", r.of(far, bytesPerS), r.of(tcp, bytesPerS), 0.95, true)
	far.Program, far.Events = "ib_send_bw", true
	ratio("SEND's processor time there, by programs that sleep: at most 1.15 of the host's TCP", r.of(far, machineUs), r.of(tcp, machineUs), 1.15, false)
	stream := Case{Program: "rstream", Scope: bench.Intra, Bytes: 64 << 10}
	overlay := stream
	overlay.Program = "rstream-overlay"
	ratio("rsocket on one node: at least 2 x TCP of the overlay", r.of(stream, bytesPerS), r.of(overlay, bytesPerS), 2, true)
	pipe, piped := Case{Program: "netpipe", Scope: bench.Intra, Bytes: 64 << 10}, Case{Program: "netpipe-overlay", Scope: bench.Intra, Bytes: 64 << 10}
	ratio("the same by NetPIPE, one message of 64 KiB to and fro at a time", r.of(pipe, bytesPerS), r.of(piped, bytesPerS), 2, true)
	for _, scope := range []bench.Scope{bench.Intra, bench.Inter} {
		step := func(program string) float64 {
			return r.of(Case{Program: program, Scope: scope, Bytes: 8 << 20}, stepMs)
		}
		ratio("a step of data-parallel training "+scope.Title()+": at least 1.2 x faster than over the overlay's TCP", step("train-overlay"), step("train"), 1.2, true)
	}
	return goals
}
