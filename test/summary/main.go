// Command summary says how `make test` goes, and how it went: from the events of go test that
// gotestsum writes down, a file for each part. `summary -every 1m DIR` prints where the parts are
// until whoever started it ends. `summary DIR` sums up, and fails if a test failed. One that passed
// when it was tried again it names as a fault: of the test, or of what it tests.
package main

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// recorded has what the parts took in a run before this one, as sum prints it: shard, part, tests
// without subtests, seconds. Parts of a shard run one after the other, shards side by side.
//
//go:embed record
var recorded string

type part struct {
	shard, name string
	tests       int
	seconds     float64

	// What its events say of this run; names are PACKAGE.TEST.
	began, last           time.Time
	ended                 int // tests, without subtests
	passed, failed, again []string
	skipped               []string
	idle                  []string // packages that were tried again without any test: they failed outside of their tests
}

// look reads the record, and what the files in dir say of its parts so far.
func look(dir string) (out []part, err error) {
	for line := range strings.Lines(recorded) {
		var p part
		if _, err := fmt.Sscan(line, &p.shard, &p.name, &p.tests, &p.seconds); err != nil {
			return nil, fmt.Errorf("record: %q: %w", line, err)
		}
		if f, err := os.Open(filepath.Join(dir, p.name+".json")); err == nil { // else it has not begun
			p.read(f)
			_ = f.Close()
		}
		out = append(out, p)
	}
	return out, nil
}

// of are the lines that are read: the others, output mostly, are many.
var of = []string{`"Action":"start"`, `"Action":"pass"`, `"Action":"fail"`, `"Action":"skip"`, "testing: warning: no tests to run"}

func (p *part) read(events io.Reader) {
	results := make(map[string][]string) // of each test, in the order of its tries
	in := bufio.NewReader(events)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			break // what is being written comes the next time
		}
		var e struct {
			Time                          time.Time
			Action, Package, Test, Output string
		}
		if !slices.ContainsFunc(of, func(s string) bool { return strings.Contains(line, s) }) || json.Unmarshal([]byte(line), &e) != nil {
			continue
		}
		if p.last = e.Time; p.began.IsZero() {
			p.began = e.Time
		}
		switch {
		case e.Action == "output" && strings.HasPrefix(e.Output, "testing: warning: no tests to run"):
			p.idle = append(p.idle, e.Package)
		case e.Test != "" && slices.Contains([]string{"pass", "fail", "skip"}, e.Action):
			results[e.Package+"."+e.Test] = append(results[e.Package+"."+e.Test], e.Action)
			if len(results[e.Package+"."+e.Test]) == 1 && !strings.Contains(e.Test, "/") {
				p.ended++
			}
		}
	}
	for name, tries := range results {
		switch last := tries[len(tries)-1]; {
		case last == "fail":
			p.failed = append(p.failed, name)
		case slices.Contains(tries, "fail"):
			p.again = append(p.again, name)
		case last == "skip":
			p.skipped = append(p.skipped, name)
		default:
			p.passed = append(p.passed, name)
		}
	}
	p.failed, p.again, p.skipped = withoutParents(p.failed), withoutParents(p.again), withoutParents(p.skipped)
}

// withoutParents leaves out tests that fail because a subtest does.
func withoutParents(names []string) (out []string) {
	slices.Sort(names)
	for _, n := range names {
		if !slices.ContainsFunc(names, func(other string) bool { return strings.HasPrefix(other, n+"/") }) {
			out = append(out, n)
		}
	}
	return out
}

// progress says where the parts are, and how long the slowest shard may take still, if tests take
// what they took.
func progress(parts []part, now time.Time) string {
	said, left, gone := []string{}, make(map[string]float64), time.Duration(0)
	for i, p := range parts {
		over := slices.ContainsFunc(parts[i+1:], func(next part) bool { return next.shard == p.shard && !next.began.IsZero() })
		if !over {
			left[p.shard] += p.seconds * max(0, 1-float64(p.ended)/float64(p.tests))
		}
		if !over && !p.began.IsZero() {
			said = append(said, fmt.Sprintf("%s %d of %d tests", p.name, p.ended, max(p.tests, p.ended)))
		}
		if !p.began.IsZero() {
			gone = max(gone, now.Sub(p.began))
		}
	}
	slower := 0.0
	for _, s := range left {
		slower = max(slower, s)
	}
	return fmt.Sprintf("progress: %s; %s gone, some %s left", strings.Join(said, ", "), gone.Round(time.Second), (time.Duration(slower) * time.Second).Round(10*time.Second))
}

// elsewhere are tests that are no part of `make test`, and why not.
var elsewhere = []string{
	"make test-rdma-card: RDMA by cards, emulated machines with another kernel (70 MB of packages), 4 minutes, 10 on a busy machine",
	"make test-nerdctl: containers of nerdctl, which is built first, some minutes",
	"make test-vm: TCP of a virtual machine by queues, an emulated machine, 1 minute",
	"make test-ui: the page of heddle ui in a browser, 124 MB of packages",
	"make test-arm64: the BPF programs on an arm64 kernel, an emulated machine, half an hour",
	"make test-arm64-package: the package for arm64 installed, upgraded and removed, an emulated machine, a quarter of an hour",
	"make test-arm64-lab: a lab of the package for arm64, an emulated machine, half an hour",
	"make test-encrypt: WireGuard between nodes, an emulated machine with another kernel, 10 minutes",
	"make test-lsm: the second lock and the verifier of another kernel, emulated machines",
	"make test-kernels: Debian's kernels, emulated machines, a quarter of an hour each",
	"make test-k8s: a real Kubernetes, which is built first",
	"make test-docs, test-nodes, test-upgrade, soak, chaos, chaos-store, conformance: minutes to hours each",
}

// sum prints how each part went: what was skipped, and what was wrong, by name. It is false if
// something is.
func sum(out io.Writer, parts []part) (ok bool) {
	ok = true
	for _, p := range parts {
		fmt.Fprintf(out, "%s: %d passed, %d failed, %d needed a second try, %d skipped (record: %s %s %d %.0f)\n", p.name, len(p.passed), len(p.failed), len(p.again),
			len(p.skipped), p.shard, p.name, p.ended, p.last.Sub(p.began).Seconds())
		for _, name := range p.skipped {
			fmt.Fprintf(out, "SKIPPED: %s: %s\n", p.name, name)
		}
		for _, name := range p.again {
			fmt.Fprintf(out, "FAULT: %s: needed a second try: %s\n", p.name, name)
		}
		fail := func(what string, names []string) {
			for _, name := range names {
				ok = false
				fmt.Fprintf(out, "FAIL: %s: %s: %s\n", p.name, what, name)
			}
		}
		fail("failed", p.failed)
		fail("failed outside its tests, see "+p.name+".json, and was tried again without any", p.idle)
		if len(p.passed) == 0 {
			fail("no test passed: often no lab could be brought up, see above and", []string{p.name + ".json"})
		}
	}
	return ok
}

func main() {
	every := flag.Duration("every", 0, "print where the tests are, this often, as long as the parent lives")
	flag.Parse()
	for parent := os.Getppid(); *every > 0 && os.Getppid() == parent; time.Sleep(*every) {
		if parts, err := look(flag.Arg(0)); err == nil {
			fmt.Println(progress(parts, time.Now()))
		}
	}
	if *every > 0 {
		return
	}
	parts, err := look(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	good := err == nil && sum(os.Stdout, parts)
	for _, what := range elsewhere {
		fmt.Println("NOT RUN: " + what)
	}
	if !good {
		os.Exit(1)
	}
}
