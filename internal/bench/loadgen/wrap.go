package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Metered is what meter prints about the program it ran.
type Metered struct {
	ElapsedS float64 `json:"elapsed_s"`
	BusyCPUS float64 `json:"busy_cpu_s"` // whole machine, see CPUTime
	Output   string  `json:"output"`     // its standard output
}

// wrapped gives the command line of s so that it dies with this process, on the processor that s
// names. The caller's thread is its own.
func wrapped(ctx context.Context, s settings) (*exec.Cmd, error) {
	if len(s.command) == 0 {
		return nil, errors.New("want a command: -- CMD ARG")
	}
	if s.cpu != anyCPU { // inherited
		if err := pin(s.cpu); err != nil {
			return nil, err
		}
	}
	cmd := exec.CommandContext(ctx, s.command[0], s.command[1:]...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = time.Second
	return cmd, nil
}

// meter runs a program to its end and measures the processor time of the machine meanwhile. It runs
// next to the program, inside the place that is measured: outside, the cost of getting in would be
// counted.
func meter(ctx context.Context, s settings, streams Streams) (err error) {
	// Pdeathsig follows the thread that started the child, so that thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	remove, err := provided(&s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	cmd, err := wrapped(ctx, s)
	if err != nil {
		return err
	}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, streams.Err
	before, err := ReadCPUTime()
	if err != nil {
		return err
	}
	start := time.Now()
	if err := cmd.Run(); err != nil {
		// Programs that report in JSON say there what went wrong.
		return errors.Join(fmt.Errorf("run %s: %w: %s", s.command[0], err, bytes.TrimSpace(output.Bytes())), ctx.Err())
	}
	elapsed := time.Since(start)
	after, err := ReadCPUTime()
	if err != nil {
		return err
	}
	return json.NewEncoder(streams.Out).Encode(Metered{
		ElapsedS: elapsed.Seconds(), BusyCPUS: after.BusySince(before).Seconds(), Output: output.String(),
	})
}

// guardGrace is how long a guarded program has between SIGINT, at which servers end in order, and
// its death.
const guardGrace = 10 * time.Second

// guard runs a server that knows no end of its own, and ends it with its standard input, after its
// lifetime, or with this process: nothing is left behind in a container when the bench is killed.
// For a server that does not say when it listens, it says so itself, by --until: an address, or a
// port of UDP as udp/PORT.
func guard(ctx context.Context, s settings, streams Streams) (err error) {
	runtime.LockOSThread() // see meter
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	remove, err := provided(&s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	cmd, err := wrapped(ctx, s)
	if err != nil {
		return err
	}
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(os.Interrupt) }, guardGrace
	cmd.Stdout, cmd.Stderr = streams.Out, streams.Err
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", s.command[0], err)
	}
	if s.until != "" {
		go reportListening(ctx, s.until, streams)
	}
	stopped := make(chan struct{})
	go func() {
		select {
		case <-ended(streams.In):
			close(stopped)
			cancel()
		case <-ctx.Done():
		}
	}()
	err = cmd.Wait()
	select {
	case <-stopped:
		return nil
	default:
	}
	if ctx.Err() != nil {
		return fmt.Errorf("guard %s: %w after %s", s.command[0], os.ErrDeadlineExceeded, s.lifetime)
	}
	if err != nil {
		return fmt.Errorf("run %s: %w", s.command[0], err)
	}
	return nil
}

// reportListening prints Ready once somebody accepts at address. If nobody ever does, whoever waits
// for that line gives up.
func reportListening(ctx context.Context, address string, streams Streams) {
	for ctx.Err() == nil {
		if listens(ctx, address) {
			// Without a reader of the output the server's end is near anyway.
			_, _ = fmt.Fprintln(streams.Out, Ready)
			return
		}
		select {
		case <-time.After(listenPause):
		case <-ctx.Done():
		}
	}
}

// listens reports whether somebody accepts at address, or has the port of UDP.
func listens(ctx context.Context, address string) bool {
	if port, ok := strings.CutPrefix(address, "udp/"); ok {
		n, err := strconv.ParseUint(port, 10, 16)
		return err == nil && (hasPort("/proc/net/udp", n) || hasPort("/proc/net/udp6", n))
	}
	d := net.Dialer{Timeout: acceptedTimeout}
	c, err := d.DialContext(ctx, "tcp", address)
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

// hasPort reports whether a socket of a table of /proc/net has a local port: the second column,
// behind a colon, as four hexadecimal digits.
func hasPort(table string, port uint64) bool {
	b, err := os.ReadFile(table)
	if err != nil {
		return false // no such family here
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 1 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
			return true
		}
	}
	return false
}

// How long reportListening waits for one connect, and between two.
const (
	acceptedTimeout = 2 * time.Second
	listenPause     = 20 * time.Millisecond
)
