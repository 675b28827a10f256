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
func (r *runner) spin(ctx context.Context) (map[string]float64, error) {
	var s loadgen.Spins
	if err := r.peers(ctx, &s, os.Getpagesize(), "spin"); err != nil {
		return nil, err
	}
	if s.RoundTrips == 0 {
		return nil, errors.New("spin made no round trips")
	}
	return map[string]float64{latencyUs: s.ElapsedS * 1e6 / float64(s.RoundTrips) / 2}, nil
}

// copyAsked has one process copy what another one asks for.
func (r *runner) copyAsked(ctx context.Context, size int) (map[string]float64, error) {
	var c loadgen.Copies
	if err := r.peers(ctx, &c, loadgen.CopiesBytes(size), "copies", "-size", strconv.Itoa(size)); err != nil {
		return nil, err
	}
	perS := float64(c.Messages) / c.ElapsedS
	return map[string]float64{bytesPerS: perS * float64(size), messagesPerS: perS}, nil
}

// peers runs the two ends of a command that share so many bytes of memory, each on a processor of
// its own, and gives what the one that is measured says.
func (r *runner) peers(ctx context.Context, said any, bytes int, command ...string) (err error) {
	dir, err := os.MkdirTemp("/dev/shm", "heddle-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file := filepath.Join(dir, "shared")
	if err := os.WriteFile(file, make([]byte, bytes), 0o600); err != nil {
		return err
	}
	end := func(cpu int, more ...string) *exec.Cmd {
		words := append([]string{"bench", "loadgen"}, command...)
		words = append(words, "-path", file, "-cpu", strconv.Itoa(cpu), "-lifetime", (r.Duration + proc.ClientSlack).String())
		return exec.CommandContext(ctx, r.Lab.Heddle, append(words, more...)...)
	}
	answers, err := proc.StartLoad(end(r.cpus.Server, "-answer"), "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, answers.Kill()) }()
	out, err := proc.Output(end(r.cpus.Client, "-duration", r.Duration.String()))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(out, said); err != nil {
		return fmt.Errorf("%s said %q: %w", command[0], out, err)
	}
	_, err = answers.Finish(ctx)
	return err
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
		"iperf3", "-c", address.String(), "-p", port, "-t", r.seconds(1), "-l", strconv.Itoa(c.Bytes), "-J", "--connect-timeout", "5000",
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
