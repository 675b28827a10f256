package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench/peer"
)

// peerReadyLine is what the guard of a server prints once the server accepts.
const peerReadyLine = peer.Ready + "\n"

// loadProcess is a client that runs while its machine is watched.
type loadProcess struct {
	cmd            *exec.Cmd
	stdin          interface{ Close() error }
	stdout, stderr *tail
	marked         chan struct{} // closed when its mark came
	exited         chan struct{} // closed when it has ended, after err was set
	err            error
}

// startLoad starts a client. mark is what it prints when its measured phase is over, "" if it does not say.
func startLoad(cmd *exec.Cmd, mark string) (*loadProcess, error) {
	prepare(cmd)
	c := &loadProcess{cmd: cmd, stdout: &tail{limit: outputLimit}, stderr: &tail{limit: tailLimit}, marked: make(chan struct{}), exited: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = c.stdout, c.stderr
	if mark != "" {
		cmd.Stdout = &readiness{mark: []byte(mark), seen: c.marked, rest: c.stdout}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("open input: %w", err)
	}
	c.stdin = stdin
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	go func() {
		c.err = cmd.Wait()
		close(c.exited)
	}()
	return c, nil
}

// runsFor waits for a while; over says that the measured phase is: by the client's mark or, if byExit is set, by its end.
func (c *loadProcess) runsFor(ctx context.Context, d time.Duration, byExit bool) (over bool, err error) {
	select {
	case <-c.marked:
		return true, nil
	case <-c.exited:
		if byExit && c.err == nil {
			return true, nil
		}
		// The end of ctx ends the client, and both are there to be seen.
		return false, c.explain(errors.Join(ctx.Err(), fmt.Errorf("ended before the measured phase did: %w", errOrEnd(c.err))))
	case <-ctx.Done():
		return false, c.explain(ctx.Err())
	case <-time.After(d):
		return false, nil
	}
}

// finish lets the client end and gives what it printed.
func (c *loadProcess) finish(ctx context.Context) ([]byte, error) {
	// It fails only if the process is gone already.
	_ = c.stdin.Close()
	select {
	case <-c.exited:
	case <-time.After(clientSlack):
		return nil, c.explain(fmt.Errorf("not ended %s after the measured phase", clientSlack))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if c.err != nil {
		return nil, c.explain(errors.Join(ctx.Err(), c.err))
	}
	if c.stdout.lost {
		return nil, fmt.Errorf("printed more than %d bytes", outputLimit)
	}
	return c.stdout.kept, nil
}

// kill makes sure that the client has ended: by the end of its input, SIGTERM, or death.
func (c *loadProcess) kill() error {
	_ = c.stdin.Close()
	select {
	case <-c.exited:
		return nil
	default:
	}
	_ = c.cmd.Cancel() // gone in the meantime, if it fails
	select {
	case <-c.exited:
		return nil
	case <-time.After(stopTimeout):
	}
	if err := c.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill client: %w", err)
	}
	<-c.exited
	return nil
}

func (c *loadProcess) explain(err error) error {
	said := strings.TrimSpace(c.stderr.String() + "\n" + lastBytes(c.stdout.String(), tailLimit/2))
	if said == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, said)
}

func lastBytes(s string, n int) string { return s[max(0, len(s)-n):] }

// cpuReading is the machine's processor time at an instant, and that of the two ends' processes.
type cpuReading struct {
	at             time.Time
	machine        peer.CPUTime
	server, client time.Duration
}

// readCPU reads what the processes at and below the two given have used.
func readCPU(server, client int) (r cpuReading, err error) {
	processes, err := readProcesses("/proc")
	if err != nil {
		return r, err
	}
	r.server, r.client = treeTime(processes, server), treeTime(processes, client)
	if r.machine, err = peer.ReadCPUTime(); err != nil {
		return r, err
	}
	r.at = time.Now()
	return r, nil
}

// readingPause is the time between two readings: the window's ends are put between those around them, because who reads may be
// late on a machine that is busy.
const readingPause = 300 * time.Millisecond

// cpuWindow is the processor time of a window.
type cpuWindow struct {
	wall, busy     float64 // seconds
	split          peer.Split
	server, client float64 // seconds
}

// windowOf adds up the readings of a window. The parts of an interval that are outside count by their length.
func windowOf(readings []cpuReading, begin time.Time, length time.Duration) (w cpuWindow, err error) {
	end := begin.Add(length)
	for i := 1; i < len(readings); i++ {
		a, b := readings[i-1], readings[i]
		whole := b.at.Sub(a.at).Seconds()
		inside := earlier(b.at, end).Sub(later(a.at, begin)).Seconds()
		if whole <= 0 || inside <= 0 {
			continue
		}
		share := inside / whole
		split := b.machine.SplitSince(a.machine)
		w.wall += inside
		w.busy += share * b.machine.BusySince(a.machine).Seconds()
		w.split.User += time.Duration(share * float64(split.User))
		w.split.System += time.Duration(share * float64(split.System))
		w.split.SoftIRQ += time.Duration(share * float64(split.SoftIRQ))
		// A process that has gone takes its time with it.
		w.server += share * max(b.server-a.server, 0).Seconds()
		w.client += share * max(b.client-a.client, 0).Seconds()
	}
	if w.wall < length.Seconds()/2 {
		return w, fmt.Errorf("%.1f s of %s were watched: the machine is too busy", w.wall, length)
	}
	return w, nil
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// addTo adds the metrics of processors, and those that divide by the rate that is there already.
func (w cpuWindow) addTo(s *paperSample) error {
	rate := s.metrics[MetricRate]
	if w.busy <= 0 || rate <= 0 {
		return fmt.Errorf("%.3f operations/s, %.3f s of processors in %.3f s: nothing was measured", rate, w.busy, w.wall)
	}
	s.metrics[MetricCPU] = w.busy / w.wall
	s.metrics[MetricUser] = w.split.User.Seconds() / w.wall
	s.metrics[MetricSystem] = w.split.System.Seconds() / w.wall
	s.metrics[MetricSoftIRQ] = w.split.SoftIRQ.Seconds() / w.wall
	s.metrics[MetricServerCPU] = w.server / w.wall
	s.metrics[MetricClientCPU] = w.client / w.wall
	s.metrics[MetricCPUPerOp] = w.busy / w.wall / rate * 1e6
	return nil
}

// process is a line of the table of processes.
type process struct {
	parent int
	used   time.Duration // by itself and by children that it has waited for
}

// readProcesses reads every process of the machine. Those that end meanwhile are left out.
func readProcesses(proc string) (map[int]process, error) {
	files, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "stat"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("read processes: none in %s: %w", proc, errors.Join(err, os.ErrNotExist))
	}
	processes := make(map[int]process, len(files))
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		pid, p, err := parseProcess(b)
		if err != nil {
			return nil, fmt.Errorf("read processes: %s: %w", file, err)
		}
		processes[pid] = p
	}
	return processes, nil
}

// parseProcess reads the text of /proc/PID/stat: proc_pid_stat(5). A program can put anything into its name.
func parseProcess(b []byte) (pid int, p process, err error) {
	const parentField, utimeField, fields, perSecond = 1, 11, 15, 100 // behind the name, the state being field 0
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return 0, p, fmt.Errorf("%q: no name", b)
	}
	if pid, err = strconv.Atoi(string(bytes.TrimSpace(b[:open]))); err != nil {
		return 0, p, fmt.Errorf("%q: %w", b, err)
	}
	f := bytes.Fields(b[end+1:])
	if len(f) < fields {
		return 0, p, fmt.Errorf("%q: want %d fields", b, fields)
	}
	if p.parent, err = strconv.Atoi(string(f[parentField])); err != nil {
		return 0, p, fmt.Errorf("%q: %w", b, err)
	}
	// utime, stime, cutime, cstime
	for _, field := range f[utimeField : utimeField+4] {
		ticks, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil {
			return 0, p, fmt.Errorf("%q: %w", b, err)
		}
		p.used += time.Duration(ticks) * time.Second / perSecond
	}
	return pid, p, nil
}

// treeTime sums up a process and everything below it.
func treeTime(processes map[int]process, root int) (used time.Duration) {
	for pid, p := range processes {
		for at, steps := pid, 0; at > 0 && steps <= len(processes); at, steps = processes[at].parent, steps+1 {
			if at == root {
				used += p.used
				break
			}
		}
	}
	return used
}
