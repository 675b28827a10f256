package machine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Entries counts what is in a directory of a process.
func Entries(pid int, dir string) (int, error) {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
	if err != nil {
		return 0, fmt.Errorf("look at agent: %w", err)
	}
	return len(list), nil
}

// KeeperOf gives the process that keeps the listeners of agent pid: the other one of its control
// group. 0 if it is not found.
func KeeperOf(pid int) int {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return 0
	}
	own := UnifiedGroup(groups)
	all, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil || own == "" {
		return 0
	}
	for _, file := range all {
		other, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil || other == pid {
			continue
		}
		raw, err := os.ReadFile(file)
		if err == nil && UnifiedGroup(raw) == own {
			return other
		}
	}
	return 0
}

// UnifiedGroup finds the path in the unified hierarchy in the text of /proc/PID/cgroup.
func UnifiedGroup(raw []byte) string {
	for line := range strings.Lines(string(raw)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path)
		}
	}
	return ""
}

// VoluntarySwitches counts how often threads of a process have waited for something: each is a
// wake-up later.
func VoluntarySwitches(pid int) (total float64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return 0, err
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue // a thread that has ended
		}
		n, err := ParseSwitches(raw)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

func ParseSwitches(raw []byte) (float64, error) {
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, errors.New("read switches of a thread: its status has none")
}

// ProcessorTime reads what a process has used, threads that have ended included.
func ProcessorTime(pid int) (time.Duration, error) {
	// The clock of a process, as clock_getcpuclockid makes it: CPUCLOCK_SCHED.
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("read processor time of agent %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// MapBytes gives the kernel memory of the BPF maps that a process has open.
func MapBytes(pid int) (total float64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		return 0, err
	}
	seen := map[string]bool{} // maps, by id: one may be open twice
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil || !bytes.Contains(raw, []byte("map_id:")) {
			continue // closed meanwhile, or no map
		}
		fields := map[string]string{}
		for line := range strings.Lines(string(raw)) {
			name, value, _ := strings.Cut(line, ":")
			fields[name] = strings.TrimSpace(value)
		}
		if id := fields["map_id"]; seen[id] {
			continue
		} else {
			seen[id] = true
		}
		n, err := strconv.ParseFloat(fields["memlock"], 64)
		if err != nil {
			return 0, fmt.Errorf("read memory of BPF maps: %w", err)
		}
		total += n
	}
	return total, nil
}

// Process is a line of the table of processes.
type Process struct {
	parent int
	used   time.Duration // by itself and by children that it has waited for
}

// Processes reads every process of the machine. Those that end meanwhile are left out.
func Processes(proc string) (map[int]Process, error) {
	files, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "stat"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("read processes: none in %s: %w", proc, errors.Join(err, os.ErrNotExist))
	}
	processes := make(map[int]Process, len(files))
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

// parseProcess reads the text of /proc/PID/stat: proc_pid_stat(5). A program can put anything into
// its name.
func parseProcess(b []byte) (pid int, p Process, err error) {
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

// TreeTime sums up a process and everything below it.
func TreeTime(processes map[int]Process, root int) (used time.Duration) {
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

// ResidentBytes gives the resident memory of a process.
func ResidentBytes(pid int) (float64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, fmt.Errorf("read memory of agent: %w", err)
	}
	fields := strings.Fields(string(raw))
	if len(fields) < 2 {
		return 0, fmt.Errorf("read memory of agent: statm says %.40q", raw)
	}
	pages, err := strconv.ParseFloat(fields[1], 64)
	if err != nil {
		return 0, fmt.Errorf("read memory of agent: %w", err)
	}
	return pages * float64(os.Getpagesize()), nil
}
