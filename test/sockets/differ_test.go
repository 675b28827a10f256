package sockets

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"heddle.dev/heddle/internal/differ"
	"heddle.dev/heddle/internal/differ/generate"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// How the differential tester is run by hand; see docs/howto/differential-tester.md.
var (
	differSeed    = flag.Uint64("differ.seed", 0, "run the program of this seed, or with -differ.programs those from it on; 0: fixed ones")
	differFor     = flag.Duration("differ.for", 0, "run programs of random seeds for this long")
	differCount   = flag.Int("differ.programs", 0, "how many programs to run")
	differProgram = flag.String("differ.program", "", "run the program in this JSON file")
	differKeep    = flag.String("differ.keep", "", "folder for the programs of findings")
	differKinds   = flag.Int("differ.findings", 5, "stop after findings of so many kinds")
)

// parallel is how many programs run at a time: they wait more than they compute.
const parallel = 6

// differPools are where workers are started, beside the node and the host outside: containers by mode.
type differPools map[string][]string

// bothModes are the pools of TestDiffer.
var bothModes = differPools{"overlay": differContainers[:3], "heddle": differContainers[:3]}

var differContainers = []string{"n1/c1", "n1/c2", "n2/c1", "n2/c2"}

// differLab starts workers in every place until the end of the test.
func differLab(t *testing.T, pools differPools) differ.Lab {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "heddle-differ-") // which the containers share
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	executor := filepath.Join(dir, "executor")
	build := exec.Command("go", "build", "-trimpath", "-o", executor, "../../internal/differ/executor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the executor: %v\n%s", err, out)
	}
	hub, err := differ.Listen(filepath.Join(dir, "hub"))
	testutil.NoError(t, err)
	t.Cleanup(hub.Close)
	hosts := differ.Lab{Hub: hub, Addrs: map[string]differ.Addrs{}}
	serve := func(pool string) []string {
		return []string{executor, "serve", filepath.Join(dir, "hub"), pool, fmt.Sprint(2 * parallel)}
	}
	for mode, containers := range pools {
		for _, c := range containers {
			hosts.Addrs[c] = differAddrs(t, "overlay", c)
			if in := differAddrs(t, "heddle", c); in != hosts.Addrs[c] {
				t.Fatalf("%s is %v in heddle mode and %v in overlay mode", c, in, hosts.Addrs[c])
			}
			lab.Start(t, mode, c, serve(differ.Pool(c, mode))...)
		}
	}
	hosts.Addrs[differ.PlaceNode] = differAddrs(t, "host", "n1/c1")
	lab.Start(t, "host", "n1/c1", serve(differ.PlaceNode)...)
	hosts.Addrs[differ.PlaceOutside] = differ.Addrs{V4: lab.OutsideTarget(t), V6: lab.Outside6(t).String()}
	startServeOutside(t, serve(differ.PlaceOutside))
	// The prefix of n1 has room for many more containers than the lab has.
	spare := netip.MustParseAddr(hosts.Addrs["n1/c1"].V4).As4()
	spare[3] = 99
	prefix, err := netip.MustParseAddr(hosts.Addrs["n1/c1"].V6).Prefix(model.Prefix6Bits)
	testutil.NoError(t, err)
	hosts.Spare = differ.Addrs{V4: netip.AddrFrom4(spare).String(), V6: model.Overlay6(prefix, netip.AddrFrom4(spare)).String()}
	name := lab.Name
	hosts.InUse = func() (map[int]bool, error) { return portsInUse(name) }
	hosts.Gateway = differ.Addrs{V4: lab.GatewayOf("n1/c1")(t), V6: lab.Gateway6Of("n1/c1")(t)}
	return hosts
}

// portsInUse reads the local ports of every TCP socket in a lab.
func portsInUse(name string) (map[int]bool, error) {
	inUse := map[int]bool{}
	names, err := filepath.Glob(netns.Path(name + "-*"))
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("no namespaces of lab %s", name)
	}
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		err := netns.Do(name, func() error {
			for _, file := range []string{"tcp", "tcp6"} {
				table, err := os.ReadFile("/proc/thread-self/net/" + file)
				if err != nil {
					return err
				}
				for _, m := range localPort.FindAllSubmatch(table, -1) {
					port, err := strconv.ParseUint(string(m[1]), 16, 16)
					if err != nil {
						return err
					}
					inUse[int(port)] = true
				}
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return inUse, nil
}

// localPort finds them in /proc/net/tcp.
var localPort = regexp.MustCompile(`(?m)^ *\d+: [0-9A-F]+:([0-9A-F]{4}) `)

func differAddrs(t *testing.T, mode, container string) differ.Addrs {
	t.Helper()
	return differ.Addrs{V4: lab.Address(t, mode, container), V6: lab.Address6(t, mode, container).String()}
}

func startServeOutside(t *testing.T, argv []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", lab.Name + "-outside"}, argv...)...)
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		t.Fatalf("start workers outside: %v", err)
	}
	t.Cleanup(func() {
		_ = stdin.Close() // ends it
		defer time.AfterFunc(testutil.WaitTimeout, cancel).Stop()
		_ = cmd.Wait()
	})
}

// hunt runs programs, several at a time, until next gives no more, and collects findings, one of
// each kind: those that stand are shrunk.
type hunt struct {
	t      *testing.T
	runner differ.Runner
	set    *generate.Set
	next   func() (differ.Program, bool)

	ran      atomic.Int64
	mu       sync.Mutex // guards the rest
	kinds    map[string]bool
	findings []*differ.Finding
	failed   int // programs that could not be run
}

// shrinkTime bounds the work on one finding.
const shrinkTime = 20 * time.Second

func (h *hunt) run() {
	h.t.Helper()
	h.kinds = map[string]bool{}
	var wait sync.WaitGroup
	for range parallel {
		wait.Go(func() {
			for h.more() {
				p, ok := h.next()
				if !ok {
					return
				}
				h.try(p)
			}
		})
	}
	wait.Wait()
	var stand []string
	for _, f := range h.findings {
		if line := h.confirm(*f); line != "" {
			stand = append(stand, line)
		}
	}
	h.t.Logf("%d programs, %d differences, of which %d stand", h.ran.Load(), len(h.findings), len(stand))
	for _, line := range stand {
		h.t.Error(line) // once more: the programs above are long
	}
}

// confirmations is how often a finding is looked at alone, when all the other programs have ended:
// neither the load of the machine nor what the others do is a difference of the modes.
const confirmations = 5

// confirm reports a finding that stands, in full, and gives a line about it.
func (h *hunt) confirm(first differ.Finding) string {
	f, err := differ.Confirm(h.runner, first.Program, confirmations)
	if err != nil {
		h.t.Errorf("seed %d: %v\n%s", first.Program.Seed, err, first.Program)
		return ""
	}
	if f == nil {
		h.t.Logf("seed %d: %s: seen while other programs ran, not when it ran alone:\n%s", first.Program.Seed, first.Kind(), first)
		return ""
	}
	kind := f.Kind()
	small := differ.Shrink(h.runner, *f, h.set.Allowed, shrinkTime)
	h.t.Errorf("seed %d: %s\n%s", f.Program.Seed, kind, small)
	h.keep(small)
	return fmt.Sprintf("seed %d: %s", f.Program.Seed, kind)
}

func (h *hunt) more() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.kinds) < *differKinds && h.failed < 3
}

func (h *hunt) try(p differ.Program) {
	f, err := differ.Check(h.runner, p, 3)
	h.ran.Add(1)
	if err != nil {
		h.t.Errorf("seed %d: %v\n%s", p.Seed, err, p)
		h.mu.Lock()
		h.failed++
		h.mu.Unlock()
		return
	}
	if f == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if kind := f.Kind(); !h.kinds[kind] {
		h.kinds[kind] = true
		h.findings = append(h.findings, f)
	}
}

func (h *hunt) keep(f differ.Finding) {
	if *differKeep == "" {
		return
	}
	path := filepath.Join(*differKeep, fmt.Sprintf("seed-%d.json", f.Program.Seed))
	err := os.MkdirAll(*differKeep, 0o755)
	if err == nil {
		err = os.WriteFile(path, []byte(f.Program.JSON()), 0o644)
	}
	if err != nil {
		h.t.Errorf("keep the program of a finding: %v", err)
	}
}

// TestNamedPrograms runs the programs that once were findings, and some that must work. With
// -differ.program it runs that one and prints its trace.
func TestNamedPrograms(t *testing.T) {
	hosts := differLab(t, bothModes)
	if *differProgram != "" {
		for _, p := range namedPrograms(t, *differProgram) {
			f, err := differ.Check(hosts.Run, p, 3)
			testutil.NoError(t, err)
			if f != nil {
				t.Error(f)
				continue
			}
			overlay, err := hosts.Run(p, "overlay", differ.Slow)
			testutil.NoError(t, err)
			t.Logf("equal in both modes:\n%s", differ.Diff(p, overlay, overlay))
		}
		return
	}
	for _, p := range namedPrograms(t, "testdata/differ/*.json") {
		t.Run(p.Name, func(t *testing.T) {
			if f, err := differ.Check(hosts.Run, p, 3); err != nil || f != nil {
				t.Errorf("%v\n%v", err, f)
			}
		})
	}
	// Findings that wait: one that is equal belongs to the others, or it could come back unseen.
	for _, p := range namedPrograms(t, "testdata/differ/open/*.json") {
		t.Run("open/"+p.Name, func(t *testing.T) {
			if f, err := differ.Check(hosts.Run, p, 3); err != nil || f == nil {
				t.Errorf("equal in both modes now: move it to testdata/differ, and take its exclusion out (error: %v)", err)
			}
		})
	}
}

func namedPrograms(t *testing.T, pattern string) (all []differ.Program) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	testutil.NoError(t, err)
	for _, file := range files {
		programs, err := differ.Load(file)
		testutil.NoError(t, err)
		all = append(all, programs...)
	}
	if len(all) == 0 && !strings.Contains(pattern, "/open/") {
		t.Fatalf("no programs in %s", pattern)
	}
	return all
}

// firstSeed is that of the programs that every run has.
const firstSeed = 1

// TestDiffer runs generated programs in both modes.
func TestDiffer(t *testing.T) {
	h := &hunt{t: t, runner: differLab(t, bothModes).Run, set: generate.Intercepted}
	h.asked(600)
}

// asked runs so many programs, the same in every run, or those that the flags ask for.
func (h *hunt) asked(count int) {
	h.t.Helper()
	began := time.Now()
	seed := uint64(firstSeed)
	if *differSeed != 0 {
		seed, count = *differSeed, 1
	}
	if *differCount != 0 {
		count = *differCount
	}
	var n atomic.Uint64
	h.next = func() (differ.Program, bool) {
		i := n.Add(1) - 1
		return h.set.Program(seed + i), i < uint64(count)
	}
	if *differFor != 0 {
		h.next = func() (differ.Program, bool) {
			return h.set.Program(rand.Uint64N(1 << 48)), time.Since(began) < *differFor
		}
	}
	h.run()
	if *differSeed != 0 && count == 1 && !h.t.Failed() {
		h.t.Log(h.set.Program(seed))
	}
}
