package datapath

import (
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// TestVerifierWork holds the programs to what the verifier may go through when an agent starts: it
// is most of the time that a start takes, and one function more that is looked at for each of its
// callers can double it. The limits leave room for kernels that prune less; `go test -v` gives the
// figures of this one.
func TestVerifierWork(t *testing.T) {
	testutil.NeedRoot(t, "loads BPF programs")
	// Nothing is 0: what a node does not use, the verifier leaves out.
	cfg := Config{
		Prefix6: netip.MustParsePrefix("fd48:6464:1::/96"), Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		NetworkID: 7, Underlay: underlayB, DirectPorts: model.PortRange{First: 17440, Last: 17455},
		Mark: 1, OverlayMark: 2, DropMark: 3, RejectMark: 4, ServiceMark: 6, VXLANPort: testVXLANPort, VNI: testVNI,
		EndpointSockets: 65536, EndpointPorts: 6175, NodePorts: model.PortRange{First: 57472, Last: 60999},
		EphemeralPorts: model.PortRange{First: 32768, Last: 60999}, DivertIfindex: 2, UnderlayIfindex: 3, Firewall: 10 * time.Second,
		OverlayIfindex: 4, VTEPMAC: "02:48:0a:00:00:01", relayGroups: true,
	}
	t.Run("IPv4 underlay", func(t *testing.T) { verify(t, cfg) })
	cfg.UnderlayInner, cfg.Outer, cfg.OuterIfindex = true, netip.MustParseAddr("fd00::2"), 5
	t.Run("IPv6 underlay", func(t *testing.T) { verify(t, cfg) })
}

func verify(t *testing.T, cfg Config) {
	const most, mostOfOne, mostStack = 400_000, 100_000, 512 + loopExtra
	spec, err := loadHeddle()
	if err != nil {
		t.Fatal(err)
	}
	if err := setVariables(spec, cfg); err != nil {
		t.Fatal(err)
	}
	if canCompareCallers(btf.NewCache()) == nil {
		if err := spec.Variables["config_agent"].Set(uint32(os.Getpid())); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	took := time.Since(began)
	total := 0
	names := make([]string, 0, len(loaded.Programs))
	for name := range loaded.Programs {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		verified, frames := verifierStats(t, loaded.Programs[name].VerifierLog)
		stack := deepestStack(t, loaded.Programs[name], frames)
		t.Logf("%-20s %7d instructions, stack %d", name, verified, stack)
		if stack > mostStack {
			t.Errorf("%s: the stack of a chain of its functions is %d bytes on Linux 6.1, which takes %d at most", name, stack, mostStack)
		}
		if verified > mostOfOne {
			t.Errorf("%s: the verifier went through %d instructions, more than %d", name, verified, mostOfOne)
		}
		total += verified
	}
	t.Logf("%d programs, %d instructions, loaded in %v", len(names), total, took.Round(time.Millisecond))
	if total > most {
		t.Errorf("the verifier went through %d instructions, more than %d", total, most)
	}
}

var (
	processedInsns = regexp.MustCompile(`processed (\d+) insns`)
	stackDepth     = regexp.MustCompile(`stack depth ([\d+]+)`)
)

// verifierStats reads from a verifier's log how many instructions it went through, and the stack
// frames in bytes of the program and its functions, in the order in which these stand.
func verifierStats(t *testing.T, log string) (verified int, frames []int) {
	t.Helper()
	number := func(text string) int {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("verifier log: %v", err)
		}
		return n
	}
	processed, depth := processedInsns.FindStringSubmatch(log), stackDepth.FindStringSubmatch(log)
	if processed == nil || depth == nil {
		t.Fatalf("verifier log says neither instructions nor stack: %q", log)
	}
	for _, frame := range strings.Split(depth[1], "+") {
		frames = append(frames, number(frame))
	}
	return number(processed[1]), frames
}

// loopExtra is what the kernel adds to the frame of a function in which it replaces bpf_loop, after
// it has judged the stack: the log has it. The deepest chains have one such function.
const loopExtra = 32

// deepestStack gives the bytes of the frames in the deepest chain of a program's functions, as
// Linux before 6.7 counts them (check_max_stack_depth): each frame in units of 32 bytes, where
// later kernels that compile programs have units of 16.
func deepestStack(t *testing.T, p *ebpf.Program, frames []int) int {
	t.Helper()
	info, err := p.Info()
	testutil.NoError(t, err)
	instructions, err := info.Instructions()
	testutil.NoError(t, err)
	// Of a program that was compiled the kernel says which function a call is to, and how far away
	// that stands.
	type call struct{ at, function, to int }
	var calls []call
	var starts []int // those that nothing calls, too: before Linux 6.8 global ones stay
	for it := instructions.Iterate(); it.Next(); {
		if btf.FuncMetadata(it.Ins) != nil {
			starts = append(starts, int(it.Offset))
		}
		if it.Ins.OpCode.JumpOp() != asm.Call || it.Ins.Src != asm.PseudoCall {
			continue
		}
		c := call{int(it.Offset), int(it.Ins.Constant), int(it.Offset) + 1 + int(it.Ins.Offset)}
		if c.function <= 0 || c.function >= len(frames) {
			t.Fatalf("%v calls function %d of %d", p, c.function, len(frames))
		}
		calls = append(calls, c)
	}
	if len(starts) != len(frames) {
		t.Fatalf("%v: %d frames of functions at %v", p, len(frames), starts)
	}
	callees := make(map[int][]int)
	for _, c := range calls {
		if starts[c.function] != c.to {
			t.Fatalf("%v: function %d is called at %d, and stands at %d", p, c.function, c.to, starts[c.function])
		}
		caller, exact := slices.BinarySearch(starts, c.at)
		if !exact {
			caller--
		}
		callees[caller] = append(callees[caller], c.function)
	}
	var deepest func(function int) int
	deepest = func(function int) (bytes int) {
		for _, callee := range callees[function] {
			bytes = max(bytes, deepest(callee))
		}
		return bytes + (max(frames[function], 1)+31)/32*32
	}
	return deepest(0)
}
