// Package callfilter has the kernel refuse system calls to threads, and to what they start.
package callfilter

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Rule says what becomes of a call.
type Rule struct {
	Call uint32
	// Errno is what it fails with; 0: it is allowed.
	Errno unix.Errno
	// Of a Mask that is not 0, the rule is for calls whose argument number Argument has Value in
	// these bits.
	Argument    uint8
	Mask, Value uint32
}

// Each gives a rule for each call.
func Each(errno unix.Errno, calls ...uint32) (rules []Rule) {
	for _, nr := range calls {
		rules = append(rules, Rule{Call: nr, Errno: errno})
	}
	return rules
}

// NoClone3 has a C library take clone(), whose flags a filter sees: those of clone3() lie in
// memory.
var NoClone3 = Rule{Call: unix.SYS_CLONE3, Errno: unix.ENOSYS}

// Scope is whose calls a filter is for.
type Scope uintptr

// A filter cannot be taken off again.
const (
	ThisThread Scope = 0
	AllThreads Scope = unix.SECCOMP_FILTER_FLAG_TSYNC
)

// Install has the first rule hold that fits a call, and otherwise what is otherwise, 0 being that
// the call is allowed. Nobody in scope can get privileges by a program from then on.
func Install(scope Scope, otherwise unix.Errno, rules ...Rule) error {
	filter, err := compile(otherwise, rules)
	if err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, uintptr(scope), uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("filter system calls: %w", errno)
	}
	return nil
}

// compile writes the filter over struct seccomp_data.
func compile(otherwise unix.Errno, rules []Rule) ([]unix.SockFilter, error) {
	const loadNr, loadArch, loadArgs = 0, 4, 16
	// x32 is the bit of the numbers by which amd64 has all calls once more.
	const x32 = 0x40000000
	arch, ok := map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[runtime.GOARCH]
	if !ok {
		return nil, fmt.Errorf("no filter of system calls for %s", runtime.GOARCH)
	}
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	jump := func(how uint16, k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | how | unix.BPF_K, Jt: yes, Jf: no, K: k}
	}
	give := func(errno unix.Errno) unix.SockFilter {
		k := uint32(unix.SECCOMP_RET_ALLOW)
		if errno != 0 {
			k = unix.SECCOMP_RET_ERRNO | uint32(errno)
		}
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k}
	}
	filter := []unix.SockFilter{
		load(loadArch), jump(unix.BPF_JEQ, arch, 1, 0), {Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_KILL_PROCESS},
		load(loadNr), jump(unix.BPF_JGE, x32, 0, 1), give(unix.ENOSYS),
	}
	for _, r := range rules {
		if r.Mask == 0 {
			filter = append(filter, jump(unix.BPF_JEQ, r.Call, 0, 1), give(r.Errno))
			continue
		}
		filter = append(filter, jump(unix.BPF_JEQ, r.Call, 0, 5),
			load(loadArgs+8*uint32(r.Argument)), unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: r.Mask},
			jump(unix.BPF_JEQ, r.Value, 0, 1), give(r.Errno), load(loadNr))
	}
	return append(filter, give(otherwise)), nil
}
