package cost

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/report"
)

func instruction(code uint16, k uint32, jumps ...uint8) unix.SockFilter {
	f := unix.SockFilter{Code: code, K: k}
	if len(jumps) == 2 {
		f.Jt, f.Jf = jumps[0], jumps[1]
	}
	return f
}

// filterOf allows everything but what is handed over of call 41 (socket) with a first argument of
// 2, and what is forbidden: 101.
func filterOf() []unix.SockFilter {
	const load, ret, equal = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_RET | unix.BPF_K, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	return []unix.SockFilter{
		instruction(load, seccompArch),
		instruction(equal, unix.AUDIT_ARCH_X86_64, 0, 7),
		instruction(load, seccompNumber),
		instruction(equal, 101, 6, 0),
		instruction(equal, 41, 0, 3),
		instruction(load, seccompArgs),
		instruction(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, 0xf),
		instruction(equal, 2, 1, 0),
		instruction(ret, unix.SECCOMP_RET_ALLOW),
		instruction(ret, unix.SECCOMP_RET_USER_NOTIF),
		instruction(ret, unix.SECCOMP_RET_ERRNO|1),
	}
}

func TestDecide(t *testing.T) {
	f := filterOf()
	for _, c := range []struct {
		call     seccompCall
		action   uint32
		executed int
		constant bool
	}{
		{seccompCall{number: 39}, unix.SECCOMP_RET_ALLOW, 6, true},
		{seccompCall{number: 101}, unix.SECCOMP_RET_ERRNO | 1, 5, true},
		{seccompCall{number: 41, args: [6]uint64{2}}, unix.SECCOMP_RET_USER_NOTIF, 9, false},
		{seccompCall{number: 41, args: [6]uint64{18 << 32}}, unix.SECCOMP_RET_ALLOW, 9, false},
		{seccompCall{number: 41, args: [6]uint64{0x12}}, unix.SECCOMP_RET_USER_NOTIF, 9, false},
	} {
		c.call.arch = unix.AUDIT_ARCH_X86_64
		action, executed, constant, err := decide(f, c.call)
		if err != nil || action != c.action || executed != c.executed || constant != c.constant {
			t.Errorf("%+v: %#x after %d, constant %v, %v; want %+v", c.call, action, executed, constant, err, c)
		}
	}
	for name, bad := range map[string][]unix.SockFilter{
		"no end":              f[:3],
		"a jump out of it":    {instruction(unix.BPF_JMP|unix.BPF_JA, 7)},
		"unknown instruction": {instruction(unix.BPF_ST, 0)},
		"unaligned load":      {instruction(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, 17)},
		"load beyond the end": {instruction(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, seccompEnd)},
	} {
		if _, _, _, err := decide(bad, seccompCall{}); !errors.Is(err, errFilter) {
			t.Errorf("%s: %v", name, err)
		}
	}
	d, err := describeFilter("x", [][]unix.SockFilter{f}, unix.AUDIT_ARCH_X86_64, map[string]seccompCall{"getpid": {number: 39}, "socket": {number: 41}})
	if err != nil || d.Instructions != len(f) || d.Cached != highestCall-2 || d.Executed["getpid"] != 0 || d.Executed["socket"] != 9 {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err = describeFilter("none", nil, unix.AUDIT_ARCH_X86_64, nil); err != nil || d.Cached != highestCall {
		t.Errorf("no filter: %+v, %v", d, err)
	}
}

// TestStamp runs the smallest program: the time that it gives is between those before and after.
func TestStamp(t *testing.T) {
	program, err := stampProgram()
	if errors.Is(err, errStampArch) {
		t.Skip(err)
	}
	file := filepath.Join(t.TempDir(), "stamp")
	if err := errors.Join(err, os.WriteFile(file, program, 0o755)); err != nil {
		t.Fatal(err)
	}
	before, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(file).Output()
	if err != nil {
		t.Fatal(err)
	}
	at, err := readStamp(out)
	after, errAfter := monotonic()
	if err := errors.Join(err, errAfter); err != nil || at <= before || at >= after {
		t.Errorf("%s, between %s and %s: %v", at, before, after, err)
	}
	if _, err := readStamp(out[1:]); err == nil {
		t.Error("a part of what it writes is taken for the whole")
	}
}

func TestParseInSegs(t *testing.T) {
	n, err := parseInSegs([]byte("Ip: Forwarding InSegs\nIp: 1 9\nTcp: RtoAlgorithm InSegs OutSegs\nTcp: 1 42 43\nUdp: InSegs\nUdp: 7\n"))
	if err != nil || n != 42 {
		t.Errorf("%g, %v", n, err)
	}
	for _, bad := range []string{"", "Tcp: InSegs\n", "Tcp: RtoMin InSegs\nTcp: 1\n", "Tcp: InSegs\nTcp: x\n"} {
		if _, err := parseInSegs([]byte(bad)); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}

// stepsOf makes a round in which a program runs twice an operation, each of ns nanoseconds, in the
// second of 10 operations.
func stepsOf(ns float64) (all []stepRound) {
	for _, name := range loadgen.Steps {
		all = append(all, stepRound{Step: loadgen.Step{Name: name, Operations: 10, ElapsedS: 1e-5}, segments: 30,
			programs: programCounts{"from_underlay": {20, 20 * ns}, "rare": {0.1, 1e6}}})
	}
	return all
}

func TestSummarizeSteps(t *testing.T) {
	all := summarizeSteps(bench.Inter, bench.Heddle, [][]stepRound{stepsOf(150), stepsOf(130), stepsOf(120)}, [][]stepRound{stepsOf(0)}, 30)
	if len(all) != len(loadgen.Steps) {
		t.Fatalf("%d steps", len(all))
	}
	s := all[1]
	if s.Step != "connect" || s.Operations != 10 || s.Segments != 3 || s.Ns != (bench.Spread{Median: 200, Min: 180, Max: 240}) || len(s.Programs) != 1 || s.UncountedUs != 1 {
		t.Errorf("%+v", s)
	}
	if p := s.Programs[0]; p.Name != "from_underlay" || p.Runs != 2 || p.Ns != 200 {
		t.Errorf("%+v", p)
	}
	// Less than what counting costs is nothing, not less than nothing.
	if s := summarizeSteps(bench.Inter, bench.Host, [][]stepRound{stepsOf(10)}, nil, 30)[0]; s.Ns.Median != 0 || s.UncountedUs != 0 {
		t.Errorf("%+v", s)
	}
}

func TestWithoutListener(t *testing.T) {
	rule := map[string]any{"action": "SCMP_ACT_NOTIFY"}
	profile := map[string]any{"listenerPath": "/x", "listenerMetadata": "y", "flags": []any{}, "syscalls": []any{rule}}
	config := map[string]any{"linux": map[string]any{"seccomp": profile}}
	if err := withoutListener(config); err != nil || len(profile) != 1 || rule["action"] != "SCMP_ACT_ERRNO" {
		t.Errorf("%v, %v", profile, err)
	}
	if withoutListener(config) == nil || withoutListener(map[string]any{}) == nil {
		t.Error("a configuration without a listener is accepted")
	}
}

func start(name string, values ...float64) Duration {
	return Duration{name, bench.SpreadOf(values), values}
}

func TestCostSection(t *testing.T) {
	r := Result{Machine: "a machine", Background: 0.5, NoCounters: "perf: none", Steps: summarizeSteps(bench.Inter, bench.Heddle, [][]stepRound{stepsOf(150)}, nil, 0),
		Programs: []Program{{"from_underlay", 10, 20, 30}},
		Filters:  []Filter{{Name: "heddle", Instructions: 48, Cached: 458, Calls: 460, Executed: map[string]int{"getpid": 0}}, {Name: "engine", Missing: "not permitted"}},
		Syscalls: []Syscall{{"none", "getpid", bench.Spread{Median: 100, Min: 100, Max: 100}}, {"heddle", "getpid", bench.Spread{Median: 120, Min: 110, Max: 130}}},
		Starts: []Duration{start(StartRunc, 30, 40), start(StartHeddle, 50, 64), start(StartProgram, 1, 2), start(StartWrapper, 5, 6), start(StartFiltered, 33, 43),
			start(StartOverlay, 31)},
	}
	got := section(r)
	for _, want := range []string{"a machine", "busy machine", "`perf: none`", "`from_underlay` 2.00 x 150", "| 458 of 460 | 0 |",
		"not read: not permitted", "120 (110..130), +20", "by runc | 22.00 (20.00..24.00) |",
		"listener handed to the agent | 15.00 (13.00..17.00) |"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "heddle-runtime instead of runc") {
		t.Errorf("left in\n%s", got)
	}
	var b strings.Builder
	if err := report.Print(&b, Result{}.grids()); err != nil {
		t.Error("nothing measured:", err)
	}
}

func TestCostOptions(t *testing.T) {
	good := Options{Connections: 1, Trips: 1, Starts: 1, Rounds: 1, Duration: time.Second}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Options){
		"--connections": func(o *Options) { o.Connections = maxConnections + 1 },
		"--trips":       func(o *Options) { o.Trips = 0 },
		"--starts":      func(o *Options) { o.Starts = 0 },
		"--runs":        func(o *Options) { o.Rounds = 0 },
		"--duration":    func(o *Options) { o.Duration = time.Millisecond },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
