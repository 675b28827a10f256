package rdma

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// copyBytes copies messages again and again, by one thread.
func copyBytes(size, span int) map[string]float64 {
	perS := machine.CopyRate(size, span)
	return map[string]float64{bytesPerS: perS, messagesPerS: perS / float64(size)}
}

// spin has two processes look at shared memory.
func (r *runner) spin(ctx context.Context) (_ map[string]float64, err error) {
	dir, err := os.MkdirTemp("/dev/shm", "heddle-bench-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file := filepath.Join(dir, "shared")
	if err := os.WriteFile(file, make([]byte, os.Getpagesize()), 0o600); err != nil {
		return nil, err
	}
	words := func(cpu int, more ...string) *exec.Cmd {
		return exec.CommandContext(ctx, r.Lab.Heddle, append([]string{"bench", "peer", "spin", "-path", file,
			"-cpu", strconv.Itoa(cpu), "-lifetime", (r.Duration + proc.ClientSlack).String()}, more...)...)
	}
	answers, err := proc.StartLoad(words(r.cpus.Server, "-answer"), "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, answers.Kill()) }()
	out, err := proc.Output(words(r.cpus.Client, "-duration", r.Duration.String()))
	if err != nil {
		return nil, err
	}
	var s loadgen.Spins
	if err := json.Unmarshal(out, &s); err != nil || s.RoundTrips == 0 {
		return nil, fmt.Errorf("spin said %q: %w", out, err)
	}
	if _, err := answers.Finish(ctx); err != nil {
		return nil, err
	}
	return map[string]float64{latencyUs: s.ElapsedS * 1e6 / float64(s.RoundTrips) / 2}, nil
}

// tcp has iperf3 send messages in the nodes' own namespaces: on one node over its loopback.
func (r *runner) tcp(ctx context.Context, c Case) (_ map[string]float64, err error) {
	client, server, address, err := r.place(ctx, bench.Host, c.Scope)
	if err != nil {
		return nil, err
	}
	port := strconv.Itoa(int(r.port()))
	lifetime := r.Duration + time.Second + proc.ClientSlack
	served, err := proc.Start(ctx, r.Lab.Exec(ctx, bench.Host, server, bench.Command(r.Program, "guard", "-lifetime", lifetime.String(), "--",
		"iperf3", "-s", "-1", "--forceflush", "-p", port)...), "Server listening")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, served.Stop()) }()
	out, err := proc.Output(r.Lab.Exec(ctx, bench.Host, client, bench.Command(r.Program, "meter", "-lifetime", lifetime.String(), "--",
		"iperf3", "-c", address.String(), "-p", port, "-t", r.seconds(), "-l", strconv.Itoa(c.Bytes), "-J", "--connect-timeout", "5000",
		"-A", fmt.Sprintf("%d,%d", r.cpus.Client, r.cpus.Server))...))
	if err != nil {
		return nil, err
	}
	sample, err := bench.ReadIperf(out)
	if err != nil {
		return nil, err
	}
	perS := sample["throughput_bps"] / 8
	return map[string]float64{
		bytesPerS: perS, messagesPerS: perS / float64(c.Bytes),
		machineUs: sample["cpu_s_per_gb"] * float64(c.Bytes) / 1e3,
	}, nil
}

// rstreamTransfers is how many messages rstream sends there and back; it knows no time.
const rstreamTransfers = 5000

// rstream sends to and fro by rsocket, or by sockets of the overlay.
func (r *runner) rstream(ctx context.Context, c Case) (_ map[string]float64, err error) {
	mode := bench.Heddle
	words := []string{"rstream", "-p", strconv.Itoa(int(r.port())), "-S", strconv.Itoa(c.Bytes), "-C", strconv.Itoa(rstreamTransfers)}
	if c.Program == "rstream-overlay" {
		mode, words = bench.Overlay, append(words, "-T", "s")
	}
	client, server, address, err := r.place(ctx, mode, c.Scope)
	if err != nil {
		return nil, err
	}
	served, err := proc.StartLoad(r.Lab.Exec(ctx, mode, server, words...), "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, served.Kill()) }()
	words = append(words, "-s", address.String())
	out, err := r.untilItListens(ctx, func() *exec.Cmd { return r.Lab.Exec(ctx, mode, client, words...) })
	if err != nil {
		return nil, err
	}
	if _, err := served.Finish(ctx); err != nil {
		return nil, err
	}
	f, err := ParseRstream(out)
	return map[string]float64{bytesPerS: f.BytesPerS, messagesPerS: f.BytesPerS / float64(c.Bytes)}, err
}
