package runtime

import (
	"fmt"
	"maps"
	goruntime "runtime"
	"slices"
)

// Actions of the OCI runtime specification that this package tells apart.
const (
	actAllow  = "SCMP_ACT_ALLOW"
	actLog    = "SCMP_ACT_LOG"
	actErrno  = "SCMP_ACT_ERRNO"
	actNotify = "SCMP_ACT_NOTIFY"
)

// actions are all that the specification knows; true for those that let the call through.
var actions = map[string]bool{
	actAllow: true, actLog: true, actErrno: false, actNotify: false, "SCMP_ACT_TRACE": false, "SCMP_ACT_TRAP": false,
	"SCMP_ACT_KILL": false, "SCMP_ACT_KILL_THREAD": false, "SCMP_ACT_KILL_PROCESS": false,
}

// trap names the calls of one system call that the agent answers, or, if answer is set, the filter
// itself: with those fields of a rule.
type trap struct {
	syscall string
	calls   []callSet
	answer  object
}

// traps are Heddle's: TCP sockets, and the ioctls that would show or change the node's devices
// through one. The kernel keeps the socket's type in the low four bits of the second argument,
// beside SOCK_CLOEXEC and SOCK_NONBLOCK.
var traps = []trap{
	{syscall: "socket", calls: []callSet{streamSocket(afInet), streamSocket(afInet6)}},
	{syscall: "ioctl", calls: []callSet{deviceIoctl()}},
}

// ioctlTraps are those of a container that is not intercepted (trapIoctls).
var ioctlTraps = traps[1:]

// Linux's numbers, the same on every architecture Heddle builds for.
const (
	afInet       = 2
	afInet6      = 10
	sockStream   = 1
	sockTypeMask = 0xf
)

func streamSocket(domain uint64) callSet {
	b := anyCall()
	b[0] = point(domain)
	b[1] = masked(sockTypeMask, sockStream)
	return b
}

// deviceIoctl is the ioctls 0x8900-0x89ff (sockets, devices) and 0x8b00-0x8bff (wireless). The
// kernel takes the lower half of the register, so the upper half must not make a difference here.
// internal/trap/ioctl has the same numbers.
func deviceIoctl() callSet {
	b := anyCall()
	b[1] = masked(0xfffffd00, 0x8900)
	return b
}

// compatArchitectures are what a kernel of each architecture runs. A profile made from nothing has
// to list them: libseccomp kills a call of an architecture that a filter does not name, and without
// a profile a 32-bit program ran.
var compatArchitectures = map[string][]any{
	"amd64": {"SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"},
	"arm64": {"SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"},
}

// newProfile gives the profile of a container that had none: everything is allowed, and trapped
// calls are the agent's.
func newProfile() object {
	p := object{"defaultAction": actAllow}
	if a, ok := compatArchitectures[goruntime.GOARCH]; ok {
		p["architectures"] = slices.Clone(a)
	}
	return p
}

// addTraps changes profile (the object linux.seccomp) so that traps are answered by a listener, and
// everything else is treated as before. Calls the profile forbids stay forbidden. It reports
// whether any call is left for the listener; without one the profile is not changed.
//
// Where rules of the profile overlap with different actions, the stricter one counts.
func addTraps(profile object, traps []trap) (trapped bool, err error) {
	def, err := defaultAction(profile)
	if err != nil {
		return false, err
	}
	entries, err := syscallEntries(profile)
	if err != nil {
		return false, err
	}
	var notify, answers []any
	for _, t := range traps {
		var rules []any
		if entries, rules, err = trapSyscall(entries, def, t); err != nil {
			return false, err
		}
		if t.answer == nil {
			notify = append(notify, rules...)
		} else {
			answers = append(answers, rules...)
		}
	}
	if len(notify) == 0 {
		return false, nil
	}
	profile["syscalls"] = slices.Concat(entries, notify, answers)
	return true, nil
}

// outcome is an action with its error number: what libseccomp compares actions by.
type outcome struct {
	action string
	errno  uint64
}

// defaultAction reads what the profile does with calls that no rule names.
func defaultAction(profile object) (outcome, error) {
	o, err := readOutcome(profile, "linux.seccomp", "defaultAction", "defaultErrnoRet")
	if err == nil && o.action == actNotify {
		err = fmt.Errorf("linux.seccomp.defaultAction: %s leaves no call for Heddle to answer: take it out of the profile", actNotify)
	}
	return o, err
}

// readOutcome reads an action and its error number from an object at path.
func readOutcome(o object, path, actionField, errnoField string) (outcome, error) {
	name, err := readString(o, path, actionField)
	if err != nil {
		return outcome{}, err
	}
	if _, known := actions[name]; !known {
		return outcome{}, fmt.Errorf("%s.%s: %q is no action of the OCI runtime specification (SCMP_ACT_ALLOW and so on)", path, actionField, name)
	}
	errno, err := readNumber(o, path, errnoField, 1) // EPERM, as runc has it
	if err != nil {
		return outcome{}, err
	}
	if name != actErrno && name != "SCMP_ACT_TRACE" {
		errno = 0 // means nothing for the others
	}
	return outcome{name, errno}, nil
}

// syscallEntries reads the profile's rules, each of them an object.
func syscallEntries(profile object) ([]any, error) {
	list, err := readList(profile, "linux.seccomp", "syscalls")
	if err != nil {
		return nil, err
	}
	for i, e := range list {
		path := fmt.Sprintf("linux.seccomp.syscalls[%d]", i)
		entry, ok := e.(object)
		if !ok {
			return nil, fmt.Errorf("%s: want an object", path)
		}
		o, err := readOutcome(entry, path, "action", "errnoRet")
		if err != nil {
			return nil, err
		}
		if o.action == actNotify {
			return nil, fmt.Errorf("%s.action: the profile has %s rules of its own, and a container has one listener only: take them out of the profile, or the io.heddle.endpoint annotation off the container", path, actNotify)
		}
		if _, err := readStrings(entry, path, "names"); err != nil {
			return nil, err
		}
	}
	return slices.Clone(list), nil
}

// trapSyscall cuts t's calls out of the rules that let them through. It gives the entries without
// them and the rules that hand them to the listener.
func trapSyscall(entries []any, def outcome, t trap) (kept, notify []any, err error) {
	var permitted, forbidden []callSet
	if actions[def.action] {
		permitted = []callSet{anyCall()}
	}
	for i, e := range entries {
		path := fmt.Sprintf("linux.seccomp.syscalls[%d]", i)
		entry := e.(object)
		names, _ := readStrings(entry, path, "names")
		o, err := readOutcome(entry, path, "action", "errnoRet")
		if err != nil {
			return nil, nil, err
		}
		// A rule that says what the default says is no rule to libseccomp's users: they leave it
		// out.
		if !slices.Contains(names, t.syscall) || o == def {
			kept = append(kept, entry)
			continue
		}
		calls, err := readCalls(entry, path)
		if err != nil {
			return nil, nil, err
		}
		if !actions[o.action] {
			forbidden = append(forbidden, calls...)
			kept = append(kept, entry)
			continue
		}
		permitted = append(permitted, calls...)
		kept = append(kept, cutEntry(entry, names, calls, t)...)
	}
	var ours []callSet
	for _, p := range permitted {
		for _, c := range t.calls {
			if b, ok := c.intersect(p); ok {
				ours = append(ours, subtractAll(subtractAll([]callSet{b}, forbidden), ours)...)
			}
		}
	}
	answer := t.answer
	if answer == nil {
		answer = object{"action": actNotify}
	}
	for _, b := range ours {
		notify = append(notify, writeRules(answer, t.syscall, b)...)
	}
	return kept, notify, nil
}

// cutEntry gives the entries that let through what entry did, without t's calls.
func cutEntry(entry object, names []string, calls []callSet, t trap) []any {
	rest := subtractAll(calls, t.calls)
	if slices.Equal(rest, calls) {
		return []any{entry}
	}
	var out []any
	if others := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == t.syscall }); len(others) > 0 {
		e := maps.Clone(entry)
		e["names"] = toAny(others)
		out = append(out, e)
	}
	for _, b := range rest {
		out = append(out, writeRules(entry, t.syscall, b)...)
	}
	return out
}

// readCalls reads the calls an entry is about. Several conditions on one argument are alternatives,
// not a conjunction: libseccomp cannot express the latter, and runc makes a rule of each.
func readCalls(entry object, path string) ([]callSet, error) {
	args, err := readList(entry, path, "args")
	if err != nil {
		return nil, err
	}
	seen := map[uint64]int{}
	var conditions [][]callSet // for each condition, the callSets in which it holds
	for i, a := range args {
		at := fmt.Sprintf("%s.args[%d]", path, i)
		arg, ok := a.(object)
		if !ok {
			return nil, fmt.Errorf("%s: want an object", at)
		}
		index, callSets, err := readCondition(arg, at)
		if err != nil {
			return nil, err
		}
		seen[index]++
		conditions = append(conditions, callSets)
	}
	if len(conditions) > len(seen) {
		return slices.Concat(conditions...), nil
	}
	calls := []callSet{anyCall()}
	for _, c := range conditions {
		var next []callSet
		for _, b := range calls {
			for _, alternative := range c {
				if both, ok := b.intersect(alternative); ok {
					next = append(next, both)
				}
			}
		}
		calls = next
	}
	return calls, nil
}

// readCondition reads one element of args.
func readCondition(arg object, path string) (index uint64, callSets []callSet, err error) {
	if index, err = readNumber(arg, path, "index", numArgs); err != nil {
		return 0, nil, err
	}
	if index >= numArgs {
		return 0, nil, fmt.Errorf("%s.index: want 0 to %d", path, numArgs-1)
	}
	var c comparison
	if c.op, err = readString(arg, path, "op"); err != nil {
		return 0, nil, err
	}
	if c.value, err = readNumber(arg, path, "value", 0); err != nil {
		return 0, nil, err
	}
	if c.valueTwo, err = readNumber(arg, path, "valueTwo", 0); err != nil {
		return 0, nil, err
	}
	valueSets, err := c.values()
	if err != nil {
		return 0, nil, fmt.Errorf("%s.op: %w", path, err)
	}
	for _, s := range valueSets {
		b := anyCall()
		b[index] = s
		callSets = append(callSets, b)
	}
	return index, callSets, nil
}

// writeRules writes callSet b of one system call as rules with at most one comparison an argument.
// Fields other than names and args are those of like.
func writeRules(like object, syscall string, b callSet) []any {
	argLists := [][]any{nil}
	for i, s := range b {
		var next [][]any
		for _, c := range s.comparisons() {
			for _, list := range argLists {
				if c == nil {
					next = append(next, list)
					continue
				}
				arg := object{"index": number(uint64(i)), "value": number(c.value), "op": c.op}
				if c.op == opMaskedEQ {
					arg["valueTwo"] = number(c.valueTwo)
				}
				next = append(next, append(slices.Clone(list), arg))
			}
		}
		argLists = next
	}
	var out []any
	for _, args := range argLists {
		e := maps.Clone(like)
		e["names"] = []any{syscall}
		delete(e, "args")
		if len(args) > 0 {
			e["args"] = args
		}
		out = append(out, e)
	}
	return out
}
