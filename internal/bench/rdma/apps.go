package rdma

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
)

// mode says where a case's programs run, by the end of its name: without verbs it is TCP.
func (c Case) mode() bench.Mode {
	switch {
	case strings.HasSuffix(c.Program, "-overlay"):
		return bench.Overlay
	case strings.HasSuffix(c.Program, "-host"):
		return bench.Host
	}
	return bench.Heddle
}

// spreload finds the library by which programs for sockets use rsockets.
func spreload() (string, error) {
	found, err := filepath.Glob("/usr/lib/*/rsocket/librspreload.so.1")
	if err == nil && len(found) == 0 {
		err = errors.New("no librspreload.so.1: install Debian's package librdmacm1")
	}
	return strings.Join(found, ""), err
}

// netpipeTrips is how many round trips NetPIPE makes of a size, several times over.
const netpipeTrips = 200

// netpipe has messages go to and fro by sockets, which rsockets take the place of.
func (r *runner) netpipe(ctx context.Context, c Case) (_ map[string]float64, err error) {
	client, server, address, err := r.place(ctx, c.mode(), c.Scope)
	if err != nil {
		return nil, err
	}
	size := strconv.Itoa(c.Bytes)
	// It speaks on its standard error.
	words := []string{"sh", "-c", `exec "$@" 2>&1`, "sh", "NPtcp", "-P", strconv.Itoa(int(r.port())), "-p", "0", "-l", size, "-u", size, "-n", strconv.Itoa(netpipeTrips), "-o", "/dev/null"}
	if c.mode() == bench.Heddle {
		library, err := spreload()
		if err != nil {
			return nil, err
		}
		words = append([]string{"env", "LD_PRELOAD=" + library}, words...)
	}
	served, err := proc.StartLoad(r.Lab.Exec(ctx, c.mode(), server, words...), "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, served.Kill()) }()
	out, err := r.untilItListens(ctx, func() *exec.Cmd {
		return r.Lab.Exec(ctx, c.mode(), client, append(words, "-h", address.String())...)
	})
	if err != nil {
		return nil, err
	}
	f, err := ParseNetpipe(out)
	return map[string]float64{bytesPerS: f.BytesPerS, latencyUs: f.LatencyUs}, err
}

// ParseNetpipe reads what NetPIPE says of its one size: throughput in Mb/s (of 2^20 bits), and the
// time of one way.
func ParseNetpipe(out []byte) (f Figure, err error) {
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) != 11 || fields[7] != "Mbps" || fields[10] != "usec" {
			continue
		}
		values, err := numbers([]string{fields[6], fields[9]}, 2)
		if err != nil {
			return f, fmt.Errorf("NetPIPE: row %q: %w", line, err)
		}
		return Figure{BytesPerS: values[0] * (1 << 20) / 8, LatencyUs: values[1]}, nil
	}
	return f, fmt.Errorf("NetPIPE: no row: %q", bytes.TrimSpace(out))
}

// untilItListens runs a client again and again until its server takes it: nobody sees from outside
// when an rsocket listens.
func (r *runner) untilItListens(ctx context.Context, client func() *exec.Cmd) (out []byte, err error) {
	for until := time.Now().Add(proc.ReadyTimeout); ; {
		if out, err = proc.Output(client()); err == nil || time.Now().After(until) {
			return out, err
		}
		if err := proc.Pause(ctx, 50*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// A job of MPI processes, and what starts those of another container: launch.sh is what mpirun
// takes for ssh, and hands the command over to beside.sh there.
var (
	//go:embed mpi/job.py
	jobProgram []byte
	//go:embed mpi/launch.sh
	launchScript []byte
	//go:embed mpi/beside.sh
	besideScript []byte
)

// python is Debian's, which has the packages.
const python = "/usr/bin/python3"

// job runs two processes in two containers: over UCX with verbs, or with TCP of the overlay.
func (r *runner) job(ctx context.Context, c Case) (_ map[string]float64, err error) {
	dir, err := os.MkdirTemp("", "heddle-bench-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for name, content := range map[string][]byte{"job.py": jobProgram, "launch.sh": launchScript, "beside.sh": besideScript} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o700); err != nil {
			return nil, err
		}
	}
	for _, pipe := range []string{"asked", "ended"} {
		if err := unix.Mkfifo(filepath.Join(dir, pipe), 0o600); err != nil {
			return nil, fmt.Errorf("make a pipe: %w", err)
		}
	}
	client, server, address, err := r.place(ctx, c.mode(), c.Scope)
	if err != nil {
		return nil, err
	}
	own, err := r.Lab.IP(ctx, c.mode(), client)
	if err != nil {
		return nil, err
	}
	ucx := []string{"-x", "UCX_TLS=rc,self", "-x", "UCX_NET_DEVICES=heddle0:1"}
	if c.mode() == bench.Overlay {
		ucx = []string{"-x", "UCX_TLS=tcp,self", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"}
	}
	env := []string{"env", "--chdir", dir, "TMPDIR=" + dir, "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OPENBLAS_NUM_THREADS=1"}
	beside, err := proc.StartLoad(r.Lab.Exec(ctx, c.mode(), server, append(env, "./beside.sh")...), "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, beside.Kill()) }()
	words := append(env, "mpirun", "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", filepath.Join(dir, "launch.sh"), "--mca", "oob", "tcp",
		"--mca", "pml", "ucx", "--mca", "btl", "self")
	words = append(append(words, ucx...), "-x", "OPENBLAS_NUM_THREADS", "-np", "2", "--host", own.String()+","+address.String(),
		python, "job.py", strings.TrimSuffix(c.Program, "-overlay"), strconv.FormatFloat(r.Duration.Seconds(), 'f', -1, 64))
	out, err := proc.Output(r.Lab.Exec(ctx, c.mode(), client, words...))
	if err != nil {
		return nil, err
	}
	return readJob(out)
}

// readJob reads what the job's first process says.
func readJob(out []byte) (map[string]float64, error) {
	var said struct {
		Steps    int     `json:"steps"`
		ElapsedS float64 `json:"elapsed_s"`
		MPIS     float64 `json:"mpi_s"` // in MPI's calls, of the processes' mean
		Bytes    float64 `json:"bytes"`
		Good     bool    `json:"good"`
	}
	if err := json.Unmarshal(out, &said); err != nil {
		return nil, fmt.Errorf("the job said %q: %w", out, err)
	}
	if !said.Good || said.Steps < 1 || said.ElapsedS <= 0 || said.MPIS <= 0 {
		return nil, fmt.Errorf("the job's processes have not what they should have: %q", bytes.TrimSpace(out))
	}
	perStep := 1e3 / float64(said.Steps)
	return map[string]float64{stepMs: said.ElapsedS * perStep, mpiMs: said.MPIS * perStep}, nil
}
