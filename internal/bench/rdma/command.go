package rdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
)

// programs are what has to be installed, with their Debian packages.
var programs = map[string]string{"ib_write_bw": "perftest", "ib_write_lat": "perftest", "rstream": "rdmacm-utils", "iperf3": "iperf3",
	"NPtcp": "netpipe-tcp", "mpirun": "openmpi-bin"}

// installed says what is missing of them, and of what they are used with.
func installed() error {
	err := session.Lacking(programs)
	if _, missing := spreload(); missing != nil {
		err = errors.Join(err, missing)
	}
	if missing := exec.Command(python, "-c", "import numpy, mpi4py").Run(); missing != nil {
		return errors.Join(err, fmt.Errorf("%s has no numpy or no mpi4py: install Debian's packages python3-numpy and python3-mpi4py: %w", python, missing))
	}
	if missing := exec.Command(python, "-c", hasOpenBLAS).Run(); missing != nil {
		err = errors.Join(err, fmt.Errorf("%s's numpy does not calculate by OpenBLAS: install Debian's package libopenblas0-pthread: %w", python, missing))
	}
	return err
}

// hasOpenBLAS fails where numpy has another library for matrices. By the reference library, which
// is what Debian's numpy brings, a step of training calculates for 90 ms and hides what its bytes
// take.
const hasOpenBLAS = `import numpy; assert "openblas" in open("/proc/self/maps").read()`

// Command is `heddle bench rdma`.
func Command() session.Command {
	var cases []Case
	return session.Benchmark[Result]{
		Name:  "rdma",
		Short: "Measure RDMA without a card: perftest, sockets and MPI on one node and between nodes, with processor time",
		Long: `Runs Debian's unmodified perftest, rstream, NetPIPE and jobs of MPI processes in containers that have verbs, beside a copy by one
thread, two processes that spin, and TCP of the host and the overlay, with 1 to 512 queue pairs and with caps, and states the goals. The lab must have been made with --verbs; --up does that.`,
		Lab: session.Needs{Program: true, Size: lab.Size{Verbs: true}, Installed: installed},
		Flags: func(f session.Flags) {
			f.DeclareScopes()
			f.DeclareRuns(3, "runs of each case")
			f.DeclareDuration(time.Second, "length of a run (perftest and iperf3: whole seconds)")
		},
		Check: func(s *session.Session) error {
			scopes, err := s.ParseScopes()
			if err != nil {
				return err
			}
			cases = Cases(scopes)
			return bench.Options{Runs: s.Runs, Duration: s.Duration}.Validate()
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			r = Result{Machine: machine.Describe(), Processors: runtime.NumCPU(), Background: s.Background, Runs: s.Runs, DurationS: s.Duration.Seconds()}
			r.Rows, err = run(ctx, s, cases)
			return r, err
		},
		Print:     func(w io.Writer, _ *session.Session, r Result) error { return printResult(w, r) },
		Report:    writeReport,
		Summaries: []session.Summary{{Page: "rdma.md", Part: "rdma", Write: summarize}},
	}.Command()
}
