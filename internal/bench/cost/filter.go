package cost

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Filter is a container's seccomp filter as the kernel has it.
type Filter struct {
	Name string `json:"name"`
	// Instructions are of classic BPF, of all filters of the process together; Missing says why
	// they could not be read.
	Instructions int    `json:"instructions"`
	Missing      string `json:"missing,omitempty"`
	// Cached is how many of the system calls below Calls are allowed without running the filter:
	// since Linux 5.11 the kernel remembers those that a filter allows whatever their arguments.
	// This is the kernel's own rule, applied to the filter: it does not say itself.
	Cached int `json:"cached"`
	Calls  int `json:"calls"`
	// Executed is how many instructions run before a call is decided, 0 for one that is cached, by
	// name.
	Executed map[string]int `json:"executed"`
}

// seccompCall is what a filter sees of a system call: struct seccomp_data without the instruction
// pointer.
type seccompCall struct {
	number, arch uint32
	args         [6]uint64
}

// Offsets in struct seccomp_data.
const (
	seccompNumber = 0
	seccompArch   = 4
	seccompArgs   = 16
	seccompEnd    = 64
)

// load gives the 32 bits of the call at an offset; constant is false for what differs between calls
// of a number.
func (c seccompCall) load(offset uint32) (value uint32, constant bool, err error) {
	switch {
	case offset == seccompNumber:
		return c.number, true, nil
	case offset == seccompArch:
		return c.arch, true, nil
	case offset < seccompEnd && offset%4 == 0:
		var b [seccompEnd]byte
		for i, a := range c.args {
			binary.LittleEndian.PutUint64(b[seccompArgs+8*i:], a)
		}
		return binary.LittleEndian.Uint32(b[offset:]), false, nil
	}
	return 0, false, fmt.Errorf("load at offset %d", offset)
}

var errFilter = errors.New("seccomp filter: unknown instruction")

// decide runs a filter on a call. executed is the number of instructions, constant says that the
// decision was reached without a look at anything but the call's number and architecture, by
// instructions that the kernel's own rule follows.
func decide(filter []unix.SockFilter, call seccompCall) (action uint32, executed int, constant bool, err error) {
	constant = true
	var a uint32
	for pc := 0; pc < len(filter); pc++ {
		in := filter[pc]
		executed++
		switch in.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			v, same, err := call.load(in.K)
			if err != nil {
				return 0, executed, false, fmt.Errorf("%w: %w", errFilter, err)
			}
			a, constant = v, constant && same
		case unix.BPF_RET | unix.BPF_K:
			return in.K, executed, constant, nil
		case unix.BPF_JMP | unix.BPF_JA:
			pc += int(in.K)
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= in.K
		default:
			taken, known := jumps(in, a)
			if !known {
				return 0, executed, false, fmt.Errorf("%w: %#x at %d", errFilter, in.Code, pc)
			}
			if taken {
				pc += int(in.Jt)
			} else {
				pc += int(in.Jf)
			}
		}
	}
	return 0, executed, false, fmt.Errorf("%w: no end", errFilter)
}

// jumps says whether a conditional jump is taken.
func jumps(in unix.SockFilter, a uint32) (taken, known bool) {
	switch in.Code {
	case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
		return a == in.K, true
	case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
		return a >= in.K, true
	case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
		return a > in.K, true
	case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
		return a&in.K != 0, true
	}
	return false, false
}

// cached reports whether the kernel allows a call of this number without running any of the
// filters.
func cached(filters [][]unix.SockFilter, number, arch uint32) bool {
	for _, f := range filters {
		action, _, constant, err := decide(f, seccompCall{number: number, arch: arch})
		if err != nil || !constant || action != unix.SECCOMP_RET_ALLOW {
			return false
		}
	}
	return true
}

// highestCall is the number up to which system calls are looked at: beyond are only few and new
// ones.
const highestCall = 460

// describeFilter says what filters do to calls, by name.
func describeFilter(name string, filters [][]unix.SockFilter, arch uint32, calls map[string]seccompCall) (Filter, error) {
	d := Filter{Name: name, Calls: highestCall, Executed: make(map[string]int)}
	for _, f := range filters {
		d.Instructions += len(f)
	}
	for n := range uint32(highestCall) {
		if cached(filters, n, arch) {
			d.Cached++
		}
	}
	for call, c := range calls {
		c.arch = arch
		if cached(filters, c.number, arch) {
			d.Executed[call] = 0
			continue
		}
		for _, f := range filters {
			_, n, _, err := decide(f, c)
			if err != nil {
				return d, err
			}
			d.Executed[call] += n
		}
	}
	return d, nil
}

// ptraceSeccompGetFilter is PTRACE_SECCOMP_GET_FILTER of ptrace(2).
const ptraceSeccompGetFilter = 0x420c

// filtersOf reads the seccomp filters of a process, the last one first. It stops the process for a
// moment.
func filtersOf(pid int) (filters [][]unix.SockFilter, err error) {
	runtime.LockOSThread() // ptrace is between threads
	defer runtime.UnlockOSThread()
	if err := unix.PtraceAttach(pid); err != nil {
		return nil, fmt.Errorf("attach to process: %w", err)
	}
	defer func() {
		if detachErr := unix.PtraceDetach(pid); detachErr != nil {
			err = errors.Join(err, fmt.Errorf("detach from process: %w", detachErr))
		}
	}()
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		return nil, fmt.Errorf("wait for process: %w", err)
	}
	for index := uintptr(0); ; index++ {
		n, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, ptraceSeccompGetFilter, uintptr(pid), index, 0, 0, 0)
		if errno == unix.ENOENT || errno == unix.EINVAL && index == 0 { // no more; no filter at all
			return filters, nil
		}
		if errno != 0 {
			return nil, fmt.Errorf("PTRACE_SECCOMP_GET_FILTER: %w", errno)
		}
		f := make([]unix.SockFilter, n)
		if n == 0 {
			return nil, errors.New("PTRACE_SECCOMP_GET_FILTER: an empty filter")
		}
		if _, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, ptraceSeccompGetFilter, uintptr(pid), index, uintptr(unsafe.Pointer(&f[0])), 0, 0); errno != 0 {
			return nil, fmt.Errorf("PTRACE_SECCOMP_GET_FILTER: %w", errno)
		}
		filters = append(filters, f)
	}
}
