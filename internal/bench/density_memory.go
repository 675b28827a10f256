package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// densityMemory is what takes memory, in bytes, and what else may run out.
type densityMemory struct {
	kernel        float64 // of the whole machine: caches of objects, per-CPU memory, stacks, page tables
	agent, holder float64 // resident
	maps          float64 // of the agent's BPF maps
	threads       int     // of the agent
	files         int     // of the agent
	holderFiles   int
}

// densityFields are the lines of /proc/meminfo that a connection or a container makes grow. Caches that can be reclaimed are not
// among them: they are files' and come and go with what else the machine does. Of these, sockets' inodes are counted.
var densityFields = []string{"SUnreclaim", "Percpu", "KernelStack", "PageTables"}

const socketInodes = "sock_inode_cache"

// parseMeminfo sums fields of the text of /proc/meminfo, in bytes.
func parseMeminfo(raw []byte, fields ...string) (total float64, err error) {
	for _, name := range fields {
		found := false
		for line := range bytes.Lines(raw) {
			f := strings.Fields(string(line))
			if len(f) != 3 || f[0] != name+":" || f[2] != "kB" {
				continue
			}
			kb, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				return 0, fmt.Errorf("read the kernel's memory: %w", err)
			}
			total, found = total+1024*kb, true
		}
		if !found {
			return 0, fmt.Errorf("read the kernel's memory: /proc/meminfo has no line %s", name)
		}
	}
	return total, nil
}

func kernelMemory() (float64, error) {
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	total, err := parseMeminfo(raw, densityFields...)
	if err != nil {
		return 0, err
	}
	if raw, err = os.ReadFile("/proc/slabinfo"); err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	inodes, err := parseSlabinfo(raw, socketInodes)
	return total + inodes, err
}

// parseSlabinfo finds the size of one of the kernel's caches in the text of /proc/slabinfo, in bytes: slabinfo(5).
func parseSlabinfo(raw []byte, cache string) (float64, error) {
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 15 || f[0] != cache {
			continue
		}
		pages, e1 := strconv.ParseFloat(f[5], 64) // a slab
		slabs, e2 := strconv.ParseFloat(f[14], 64)
		if err := errors.Join(e1, e2); err != nil {
			return 0, fmt.Errorf("read the kernel's memory: cache %s: %w", cache, err)
		}
		return pages * slabs * float64(os.Getpagesize()), nil
	}
	return 0, fmt.Errorf("read the kernel's memory: /proc/slabinfo has no cache %s", cache)
}

// Memory is read when it moves by less than densityStill for an interval, after densitySettles (of short runs, less) at the latest: sockets,
// devices and namespaces are freed some time after they have gone.
const (
	densityStill    = 128 << 10
	densityInterval = 250 * time.Millisecond
	densitySettles  = 2500 * time.Millisecond
)

// settled reads all memory once the kernel's has stopped moving.
func (r *densityRun) settled(ctx context.Context) (m densityMemory, err error) {
	for deadline, last := time.Now().Add(min(densitySettles, 4*r.options.Duration)), -1.0; ; {
		if m.kernel, err = kernelMemory(); err != nil {
			return m, err
		}
		if moved := m.kernel - last; last >= 0 && moved < densityStill && moved > -densityStill || time.Now().After(deadline) {
			break
		}
		last = m.kernel
		if err := pause(ctx, densityInterval); err != nil {
			return m, err
		}
	}
	var e1, e2, e3, e4, e5 error
	m.agent, e1 = residentBytes(r.pid)
	m.maps, e2 = mapBytes(r.pid)
	m.threads, e3 = entries(r.pid, "task")
	m.files, e4 = entries(r.pid, "fd")
	if holder := holderOf(r.pid); holder > 0 {
		m.holder, e5 = residentBytes(holder)
		m.holderFiles, _ = entries(holder, "fd") // it may have ended since
	}
	return m, errors.Join(e1, e2, e3, e4, e5)
}

// entries counts what is in a directory of a process.
func entries(pid int, dir string) (int, error) {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
	if err != nil {
		return 0, fmt.Errorf("look at agent: %w", err)
	}
	return len(list), nil
}

// holderOf gives the process that keeps the listeners of agent pid: the other one of its control group. 0 if it is not found.
func holderOf(pid int) int {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return 0
	}
	own := unifiedGroup(groups)
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
		if err == nil && unifiedGroup(raw) == own {
			return other
		}
	}
	return 0
}

// unifiedGroup finds the path in the unified hierarchy in the text of /proc/PID/cgroup.
func unifiedGroup(raw []byte) string {
	for line := range strings.Lines(string(raw)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path)
		}
	}
	return ""
}

// voluntarySwitches counts how often threads of a process have waited for something: each is a wake-up later.
func voluntarySwitches(pid int) (total float64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return 0, err
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue // a thread that has ended
		}
		n, err := parseSwitches(raw)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

func parseSwitches(raw []byte) (float64, error) {
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, errors.New("read switches of a thread: its status has none")
}

// rest measures what the agent uses while nothing is asked of it.
func (r *densityRun) rest(ctx context.Context, duration time.Duration) (rest DensityRest, err error) {
	cpu, e1 := processorTime(r.pid)
	switches, e2 := voluntarySwitches(r.pid)
	began := time.Now()
	if err := errors.Join(e1, e2, pause(ctx, duration)); err != nil {
		return rest, err
	}
	cpuAfter, e1 := processorTime(r.pid)
	elapsed := time.Since(began).Seconds()
	after, e2 := voluntarySwitches(r.pid)
	return DensityRest{CPU: (cpuAfter - cpu).Seconds() / elapsed, SwitchesPerS: max(0, after-switches) / elapsed}, errors.Join(e1, e2)
}
