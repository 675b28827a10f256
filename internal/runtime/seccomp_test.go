package runtime

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// evaluator says what a profile does with calls of one system call, by the rules runc applies: an
// entry that says what the default says is left out, several conditions on one argument are
// alternatives, and of several rules that fit the strictest counts. It shares no code with the code
// under test.
type evaluator struct {
	def   string
	rules []evalRule // of rising strictness
}

type evalRule struct {
	action     string
	strictness int
	conditions []evalCondition
	any        bool // one condition is enough
}

type evalCondition struct {
	Index           int
	Op              string
	Value, ValueTwo uint64
}

func newEvaluator(t testing.TB, profile object, syscall string) (e evaluator) {
	t.Helper()
	strictness := []string{"SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY", "SCMP_ACT_ERRNO", "SCMP_ACT_TRAP", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS"}
	text, err := json.Marshal(profile)
	if err != nil {
		t.Fatal(err)
	}
	var p struct {
		DefaultAction   string
		DefaultErrnoRet int
		Syscalls        []struct {
			Names    []string
			Action   string
			ErrnoRet int
			Args     []evalCondition
		}
	}
	if err := json.Unmarshal(text, &p); err != nil {
		t.Fatal(err)
	}
	e.def = p.DefaultAction
	for _, s := range p.Syscalls {
		if s.Action == p.DefaultAction && s.ErrnoRet == p.DefaultErrnoRet || !slices.Contains(s.Names, syscall) {
			continue
		}
		indexes := map[int]bool{}
		for _, c := range s.Args {
			indexes[c.Index] = true
		}
		if s.Action == actNotify && len(indexes) < len(s.Args) {
			t.Fatalf("two comparisons on one argument, which libseccomp cannot load: %+v", s)
		}
		e.rules = append(e.rules, evalRule{s.Action, slices.Index(strictness, s.Action), s.Args, len(indexes) < len(s.Args)})
	}
	slices.SortFunc(e.rules, func(a, b evalRule) int { return a.strictness - b.strictness })
	return e
}

func (e evaluator) action(args [6]uint64) string {
	for _, r := range slices.Backward(e.rules) {
		held := 0
		for _, c := range r.conditions {
			if c.holds(args[c.Index]) {
				held++
			}
		}
		if held == len(r.conditions) || r.any && held > 0 {
			return r.action
		}
	}
	return e.def
}

func (c evalCondition) holds(x uint64) bool {
	switch c.Op {
	case "SCMP_CMP_NE":
		return x != c.Value
	case "SCMP_CMP_LT":
		return x < c.Value
	case "SCMP_CMP_LE":
		return x <= c.Value
	case "SCMP_CMP_EQ":
		return x == c.Value
	case "SCMP_CMP_GE":
		return x >= c.Value
	case "SCMP_CMP_GT":
		return x > c.Value
	}
	return x&c.Value == c.ValueTwo&c.Value
}

func isTCP(args [6]uint64) bool { return (args[0] == 2 || args[0] == 10) && args[1]&0xf == 1 }

func parseProfile(t testing.TB, text string) object {
	t.Helper()
	p, err := decodeConfig("profile", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// edited gives the profile as the real runtime will read it: through JSON.
func edited(t testing.TB, text string, calls []trap) (object, bool) {
	t.Helper()
	p := parseProfile(t, text)
	trapped, err := addTraps(p, calls)
	if err != nil {
		t.Fatalf("addTraps(%s): %v", text, err)
	}
	out, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return parseProfile(t, string(out)), trapped
}

// probes are calls around every edge of Heddle's rules, and of the values in more.
func probes(more ...uint64) (calls [][6]uint64) {
	domains := []uint64{0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 16, 17, 31, 37, 38, 39, 40, 41, 1 << 32, 1<<32 | 2, 1<<32 | 10, math.MaxUint64}
	types := []uint64{0, 1, 2, 3, 4, 5, 6, 9, 10, 15, 16, 17, 18, 0x801, 0x802, 0x80001, 0x80801, 0x80003, 1<<32 | 1, 1 << 63, math.MaxUint64}
	protocols := []uint64{0, 4, 6, 17, 262}
	for _, v := range more {
		domains, types, protocols = append(domains, v-1, v, v+1), append(types, v-1, v, v+1), append(protocols, v-1, v, v+1)
	}
	for _, d := range domains {
		for _, ty := range types {
			for _, proto := range protocols {
				calls = append(calls, [6]uint64{d, ty, proto})
			}
		}
	}
	return calls
}

// isDeviceIoctl says what the kernel makes of ioctl's second argument, of which it takes the lower
// 32 bits.
func isDeviceIoctl(args [6]uint64) bool {
	cmd := uint32(args[1])
	return cmd >= 0x8900 && cmd <= 0x89ff || cmd >= 0x8b00 && cmd <= 0x8bff
}

// ioctlProbes are ioctls around every edge of Heddle's rule, and of the values in more.
func ioctlProbes(more ...uint64) (calls [][6]uint64) {
	for _, low := range append([]uint64{0, 0x5401, 0x8800, 0x8900, 0x8912, 0x8a00, 0x8b00, 0x8b01, 0x8c00, 0x18912, 0x80108906, 0xc0008912, 0xffff8912}, more...) {
		for _, v := range []uint64{low - 1, low, low + 1} {
			for _, high := range []uint64{0, 1, 0x8912, math.MaxUint32} {
				calls = append(calls, [6]uint64{3, high<<32 | v&math.MaxUint32, 0}, [6]uint64{v, high<<32 | 0x8927, v})
			}
		}
	}
	return calls
}

// checkEdit compares a profile before and after: a TCP socket that was let through is the
// listener's, a netlink socket of sock_diag refused if that is asked for, everything else is as it
// was. It reports whether anything was trapped.
func checkEdit(t testing.TB, text string, more ...uint64) bool {
	t.Helper()
	trapped := compareEdited(t, text, traps, more)
	if compareEdited(t, text, append(slices.Clone(traps), sockDiag), more) != trapped {
		t.Fatalf("calls are trapped with sock_diag refused, or without only: %s", text)
	}
	return trapped
}

func isSockDiag(args [6]uint64) bool { return args[0] == 16 && args[2] == 4 }

func compareEdited(t testing.TB, text string, calls []trap, more []uint64) bool {
	t.Helper()
	before := parseProfile(t, text)
	after, trapped := edited(t, text, calls)
	for _, name := range []string{"socket", "socketpair", "ptrace"} {
		b, a := newEvaluator(t, before, name), newEvaluator(t, after, name)
		for _, args := range probes(more...) {
			was, is := b.action(args), a.action(args)
			want := was
			if name == "socket" && isTCP(args) && (was == actAllow || was == actLog) {
				want = actNotify
			}
			if trapped && len(calls) > len(traps) && name == "socket" && isSockDiag(args) && (was == actAllow || was == actLog) {
				want = actErrno
			}
			if is != want {
				t.Fatalf("%s(%#x, %#x, %d): %s before, %s after, want %s\n%s", name, args[0], args[1], args[2], was, is, want, text)
			}
		}
	}
	b, a := newEvaluator(t, before, "ioctl"), newEvaluator(t, after, "ioctl")
	for _, args := range ioctlProbes(more...) {
		was, is := b.action(args), a.action(args)
		want := was
		if trapped && isDeviceIoctl(args) && (was == actAllow || was == actLog) {
			want = actNotify
		}
		if is != want {
			t.Fatalf("ioctl(%d, %#x, %#x): %s before, %s after, want %s\n%s", args[0], args[1], args[2], was, is, want, text)
		}
	}
	return trapped
}

const (
	allowRule = `{"names":["read","socket","ptrace"],"action":"SCMP_ACT_ALLOW"}`
	errDef    = `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[`
	allowDef  = `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[`
)

func oneArg(action string, conditions ...string) string {
	return fmt.Sprintf(`{"names":["socket"],"action":%q,"args":[%s]}`, action, strings.Join(conditions, ","))
}

func cond(index int, op string, v, v2 uint64) string {
	return fmt.Sprintf(`{"index":%d,"op":"SCMP_CMP_%s","value":%d,"valueTwo":%d}`, index, op, v, v2)
}

var mergeCases = []struct {
	name, profile string
	trapped       bool
}{
	{"empty allow", `{"defaultAction":"SCMP_ACT_ALLOW"}`, true},
	{"log default", `{"defaultAction":"SCMP_ACT_LOG"}`, true},
	{"allow with own rules", allowDef + oneArg("SCMP_ACT_ERRNO", cond(0, "EQ", 40, 0)) + `]}`, true},
	{"allow: raw forbidden", allowDef + oneArg("SCMP_ACT_ERRNO", cond(1, "MASKED_EQ", 0xf, 3)) + `]}`, true},
	{"allow: IPv4 forbidden", allowDef + oneArg("SCMP_ACT_ERRNO", cond(0, "EQ", 2, 0)) + `]}`, true},
	{"allow: IP forbidden", allowDef + oneArg("SCMP_ACT_ERRNO", cond(0, "EQ", 2, 0)) + "," + oneArg("SCMP_ACT_KILL", cond(0, "EQ", 10, 0)) + `]}`, true},
	{"allow: protocol 0 forbidden", allowDef + oneArg("SCMP_ACT_ERRNO", cond(2, "EQ", 0, 0)) + `]}`, true},
	{"allow: protocol not MPTCP forbidden", allowDef + oneArg("SCMP_ACT_ERRNO", cond(2, "NE", 262, 0)) + `]}`, true},
	{"allow: all sockets forbidden", allowDef + oneArg("SCMP_ACT_ERRNO") + `]}`, true},
	{"allow: sockets logged", allowDef + oneArg("SCMP_ACT_LOG") + `]}`, true},
	{"allow: sockets said twice", allowDef + oneArg("SCMP_ACT_ALLOW", cond(0, "EQ", 2, 0)) + `]}`, true},
	{"errno: nothing", errDef + `]}`, false},
	{"errno: all sockets", errDef + allowRule + `]}`, true},
	{"errno: all sockets twice", errDef + allowRule + "," + oneArg("SCMP_ACT_ALLOW") + `]}`, true},
	{"errno: unix only", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "EQ", 1, 0)) + `]}`, false},
	{"errno: unix and IPv6", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "EQ", 1, 0), cond(0, "EQ", 10, 0)) + `]}`, true},
	{"errno: no vsock", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "NE", 40, 0)) + `]}`, true},
	{"errno: one domain each", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "EQ", 2, 0)) + "," + oneArg("SCMP_ACT_ALLOW", cond(0, "EQ", 1, 0)) + `]}`, true},
	{"errno: TCP only", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "LT", 11, 0), cond(1, "MASKED_EQ", 0xff, 1)) + `]}`, true},
	{"errno: low types", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "GT", 1, 0), cond(1, "LE", 2, 0), cond(2, "GE", 6, 0)) + `]}`, true},
	{"errno: odd domains", errDef + oneArg("SCMP_ACT_ALLOW", cond(0, "MASKED_EQ", 3, 2)) + `]}`, true},
	{"errno: any type but raw", errDef + oneArg("SCMP_ACT_ALLOW", cond(1, "NE", 3, 0)) + `]}`, true},
	{"errno: IPv4 forbidden by a rule", errDef + allowRule + `,{"names":["socket"],"action":"SCMP_ACT_ERRNO","errnoRet":97,"args":[` + cond(0, "EQ", 2, 0) + `]}]}`, true},
	{"errno: rule as the default", errDef + allowRule + "," + oneArg("SCMP_ACT_ERRNO", cond(0, "EQ", 2, 0)) + `]}`, true},
	{"errno: ioctls, too", errDef + allowRule + `,{"names":["ioctl","close"],"action":"SCMP_ACT_ALLOW"}]}`, true},
	{"errno: ioctls but TIOCSTI", errDef + allowRule + `,{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[` + cond(1, "NE", 0x5412, 0) + `]}]}`, true},
	{"errno: low ioctls", errDef + allowRule + `,{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[` + cond(1, "LT", 0x8914, 0) + `]}]}`, true},
	{"allow: SIOCSIF* forbidden", allowDef + `{"names":["ioctl"],"action":"SCMP_ACT_ERRNO","args":[` + cond(1, "EQ", 0x8914, 0) + `]}]}`, true},
	{"allow: device ioctls forbidden", allowDef + `{"names":["ioctl"],"action":"SCMP_ACT_ERRNO","args":[` + cond(1, "MASKED_EQ", 0xff00, 0x8900) + `]}]}`, true},
	{"errno: ioctls but no sockets", errDef + `{"names":["ioctl"],"action":"SCMP_ACT_ALLOW"}]}`, true},
	{"kill default", `{"defaultAction":"SCMP_ACT_KILL_PROCESS","syscalls":[` + allowRule + `]}`, true},
}

func TestAddTraps(t *testing.T) {
	for _, c := range mergeCases {
		t.Run(c.name, func(t *testing.T) {
			if trapped := checkEdit(t, c.profile); trapped != c.trapped {
				t.Errorf("trapped = %v, want %v", trapped, c.trapped)
			}
		})
	}
}

func TestAddTrapsDocker(t *testing.T) {
	files, err := filepath.Glob("testdata/docker*.json")
	if err != nil || len(files) < 3 {
		t.Fatalf("testdata: %v, %d profiles", err, len(files))
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if !checkEdit(t, string(text)) {
			t.Errorf("%s: nothing trapped", f)
		}
		after, _ := edited(t, string(text), append(slices.Clone(traps), sockDiag))
		for _, name := range []string{"socket", "ioctl"} {
			if n := rulesFor(after, name) - rulesFor(parseProfile(t, string(text)), name); n > 30 {
				t.Errorf("%s: %d rules more: every other %s() pays for them", f, n, name)
			}
		}
	}
}

// rulesFor counts the rules of a profile that name a system call.
func rulesFor(profile object, syscall string) (n int) {
	for _, r := range profile["syscalls"].([]any) {
		if slices.Contains(r.(object)["names"].([]any), any(syscall)) {
			n++
		}
	}
	return n
}

func TestAddTrapsRefuses(t *testing.T) {
	for _, c := range []struct{ name, profile, want string }{
		{"no default", `{}`, "linux.seccomp.defaultAction"},
		{"odd default", `{"defaultAction":"ALLOW"}`, "linux.seccomp.defaultAction"},
		{"notify default", `{"defaultAction":"SCMP_ACT_NOTIFY"}`, "linux.seccomp.defaultAction"},
		{"rules no list", `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":{}}`, "linux.seccomp.syscalls"},
		{"rule no object", allowDef + `7]}`, "linux.seccomp.syscalls[0]"},
		{"names no strings", allowDef + `{"names":[3],"action":"SCMP_ACT_ERRNO"}]}`, "linux.seccomp.syscalls[0].names[0]"},
		{"odd action", allowDef + `{"names":["read"],"action":"x"}]}`, "linux.seccomp.syscalls[0].action"},
		{"own notify", allowDef + `{"names":["read"],"action":"SCMP_ACT_NOTIFY"}]}`, "linux.seccomp.syscalls[0].action"},
		{"odd operator", allowDef + oneArg("SCMP_ACT_ERRNO", cond(0, "XX", 1, 0)) + `]}`, "linux.seccomp.syscalls[0].args[0].op"},
		{"no index", allowDef + oneArg("SCMP_ACT_ERRNO", `{"op":"SCMP_CMP_EQ"}`) + `]}`, "linux.seccomp.syscalls[0].args[0].index"},
		{"large index", allowDef + oneArg("SCMP_ACT_ERRNO", cond(6, "EQ", 1, 0)) + `]}`, "linux.seccomp.syscalls[0].args[0].index"},
		{"negative value", allowDef + oneArg("SCMP_ACT_ERRNO", `{"index":0,"op":"SCMP_CMP_EQ","value":-1}`) + `]}`, "linux.seccomp.syscalls[0].args[0].value"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := addTraps(parseProfile(t, c.profile), traps)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one naming %s", err, c.want)
			}
		})
	}
}

// FuzzAddTraps builds a profile of two rules of two conditions each and compares it before and
// after.
func FuzzAddTraps(f *testing.F) {
	f.Add(true, uint8(0), uint8(1), uint64(2), uint64(0), uint8(1), uint8(6), uint64(15), uint64(1), false)
	f.Add(false, uint8(0), uint8(0), uint64(40), uint64(0), uint8(1), uint8(1), uint64(3), uint64(9), true)
	ops := []string{"NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"}
	f.Fuzz(func(t *testing.T, deny bool, i1, op1 uint8, v1, w1 uint64, i2, op2 uint8, v2, w2 uint64, mixed bool) {
		def, act, second := allowDef, "SCMP_ACT_ERRNO", "SCMP_ACT_KILL"
		if deny {
			def, act, second = errDef, "SCMP_ACT_ALLOW", "SCMP_ACT_LOG"
		}
		if !mixed {
			second = act
		}
		a, b := cond(int(i1%3), ops[int(op1)%len(ops)], v1, w1), cond(int(i2%3), ops[int(op2)%len(ops)], v2, w2)
		if i1%3 == i2%3 {
			checkEdit(t, def+oneArg(act, a)+","+oneArg(act, a, b)+`]}`, v1, v2, w1, w2)
			return
		}
		// With two actions of which both let through, the strictest is not ours to judge: cut
		// apart.
		if second == "SCMP_ACT_LOG" {
			checkEdit(t, def+oneArg(act, a, b)+`]}`, v1, v2, w1, w2)
			return
		}
		checkEdit(t, def+oneArg(act, a, b)+","+oneArg(second, b)+`]}`, v1, v2, w1, w2)
	})
}
