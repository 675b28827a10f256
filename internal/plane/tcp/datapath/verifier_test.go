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

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// TestVerifierWork holds the programs to what the verifier may go through when an agent starts: it
// is most of the time that a start takes, and one function more that is looked at for each of its
// callers can double it. The limits leave room for kernels that prune less; `go test -v` gives the
// figures of this one.
func TestVerifierWork(t *testing.T) {
	testutil.NeedRoot(t, "loads BPF programs")
	const most, mostOfOne = 300_000, 100_000
	spec, err := loadHeddle()
	if err != nil {
		t.Fatal(err)
	}
	// Nothing is 0: what a node does not use, the verifier leaves out.
	if err := setVariables(spec, Config{
		Prefix6: netip.MustParsePrefix("fd48:6464:1::/96"), Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		NetworkID: 7, Underlay: underlayB, DirectPorts: model.PortRange{First: 17440, Last: 17455},
		Mark: 1, OverlayMark: 2, DropMark: 3, RejectMark: 4, VXLANPort: testVXLANPort, VNI: testVNI,
		EndpointSockets: 65536, EndpointPorts: 6175, NodePorts: model.PortRange{First: 57472, Last: 60999},
		EphemeralPorts: model.PortRange{First: 32768, Last: 60999}, DivertIfindex: 2, UnderlayIfindex: 3, Firewall: 10 * time.Second,
		OverlayIfindex: 4, VTEPMAC: "02:48:0a:00:00:01",
	}); err != nil {
		t.Fatal(err)
	}
	if canCompareCallers() == nil {
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
		verified, stack := verifierStats(t, loaded.Programs[name].VerifierLog)
		t.Logf("%-20s %7d instructions, stack %d", name, verified, stack)
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

// verifierStats reads from a verifier's log how many instructions it went through, and the largest
// stack frame in bytes of the program and its functions.
func verifierStats(t *testing.T, log string) (verified, stack int) {
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
		stack = max(stack, number(frame))
	}
	return number(processed[1]), stack
}
