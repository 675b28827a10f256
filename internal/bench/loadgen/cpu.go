package loadgen

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// anyCPU leaves a thread where the scheduler puts it.
const anyCPU = -1

// pin locks the calling goroutine to its thread, for good, and the thread to a processor. The
// goroutine must be one that ends with its work: the thread ends with it and is not used again.
func pin(cpu int) error {
	runtime.LockOSThread()
	if cpu == anyCPU {
		return nil
	}
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("--cpu %d: run on this processor: %w", cpu, err)
	}
	return nil
}

// userHz is the unit of /proc/stat: USER_HZ, 100 a second on every architecture Linux gives a
// stable ABI.
const userHz = 100

// CPUTime is a reading of the whole machine's processor time.
//
// Busy time is taken as wall time times processors, less what the kernel accounts as idle, waiting
// for I/O or stolen by the hypervisor. The obvious sum of user, system and softirq is no use here:
// kernels without VIRT_CPU_ACCOUNTING sample those at the tick, and a processor that works in
// bursts of microseconds between two ticks (which is what a round trip is) is seldom caught: a load
// of 10 % showed as 1 to 4. Idle time is measured at every entry and exit of the idle loop. The
// whole machine is measured on purpose: softirqs, the agent and the other end belong to a
// connection's cost; so does, for better or worse, whatever else the machine does meanwhile.
type CPUTime struct {
	at   time.Time
	idle time.Duration // idle, iowait and steal of all processors
	cpus int
	// What the kernel sampled at its ticks, see Split.
	user, system, softirq time.Duration
}

// ReadCPUTime reads /proc/stat.
func ReadCPUTime() (CPUTime, error) {
	b, err := os.ReadFile("/proc/stat")
	at := time.Now()
	if err != nil {
		return CPUTime{}, fmt.Errorf("read processor time: %w", err)
	}
	t, err := parseStat(b)
	if err != nil {
		return CPUTime{}, fmt.Errorf("read processor time: /proc/stat: %w", err)
	}
	t.at = at
	return t, nil
}

// BusySince gives the processor time the machine used between earlier and t, never negative.
// Its resolution is 10 ms for the machine.
func (t CPUTime) BusySince(earlier CPUTime) time.Duration {
	wall := t.at.Sub(earlier.at) * time.Duration(t.cpus)
	return max(0, wall-(t.idle-earlier.idle))
}

// Split is where the machine's processor time went.
type Split struct {
	User, System, SoftIRQ time.Duration // SoftIRQ with hard interrupts
}

// SplitSince divides BusySince by what the kernel's ticks found the processors doing. The sum is
// measured, the shares are a sample: of a hundred to a thousand ticks a second and processor.
func (t CPUTime) SplitSince(earlier CPUTime) Split {
	user, system, softirq := t.user-earlier.user, t.system-earlier.system, t.softirq-earlier.softirq
	all := user + system + softirq
	if all <= 0 {
		return Split{}
	}
	scale := float64(t.BusySince(earlier)) / float64(all)
	return Split{
		User:    time.Duration(float64(user) * scale),
		System:  time.Duration(float64(system) * scale),
		SoftIRQ: time.Duration(float64(softirq) * scale),
	}
}

// The fields of a line of /proc/stat, the label being field 0: proc_stat(5).
const (
	userField = 1 + iota
	niceField
	systemField
	idleField
	iowaitField
	irqField
	softirqField
	stealField
	statFields
)

// parseStat reads the times of all processors and their number from the text of /proc/stat.
func parseStat(b []byte) (t CPUTime, err error) {
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) == 0 || !bytes.HasPrefix(f[0], []byte("cpu")) {
			continue
		}
		if len(f[0]) > len("cpu") {
			t.cpus++
			continue
		}
		if len(f) < statFields {
			return CPUTime{}, fmt.Errorf("line %q: want %d fields", line, statFields)
		}
		for i, to := range map[int]*time.Duration{
			userField: &t.user, niceField: &t.user, systemField: &t.system, irqField: &t.softirq, softirqField: &t.softirq,
			idleField: &t.idle, iowaitField: &t.idle, stealField: &t.idle,
		} {
			ticks, err := strconv.ParseInt(string(f[i]), 10, 64)
			if err != nil {
				return CPUTime{}, fmt.Errorf("field %d: %w", i, err)
			}
			*to += time.Duration(ticks) * time.Second / userHz
		}
	}
	if t.cpus == 0 {
		return CPUTime{}, fmt.Errorf("no processor lines")
	}
	return t, nil
}
