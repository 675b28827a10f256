package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// TestLab runs what is fast of the suites, and what needs a lab of the program's own parts. The
// rest of the suites is `make conformance`.
func TestLab(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes network namespaces, containers and BPF programs")
	}
	bin := cmp.Or(os.Getenv("HEDDLE_BIN"), "../../bin")
	if _, err := os.Stat(bin + "/heddle"); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	l, err := bringUp(t.Context(), bin, testutil.LabName()+"-suites", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.takeDown(); err != nil {
			t.Error(err)
		}
	})
	t.Run("hung case", func(t *testing.T) { checkHungCase(t, l) })
	t.Run("left the lab", func(t *testing.T) { checkClosed(t, l) })
	chosen, err := choose(suiteNames(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var verdicts []verdict
	for _, m := range chosen {
		if !m.fast {
			continue
		}
		t.Run(m.suite+" "+m.name, func(t *testing.T) {
			if err := m.prepare(t.Context(), l.scratch); err != nil {
				t.Fatal(err)
			}
			v, err := judge(t.Context(), l, m)
			if err != nil {
				t.Fatal(err)
			}
			verdicts = append(verdicts, v)
			t.Log(v.text())
			if v.differs() {
				t.Error("Heddle does worse than the overlay")
			}
		})
	}
	if len(verdicts) > 0 && !intercepted(verdicts) {
		t.Error("no module got a socket through Heddle: nothing was compared")
	}
}

// checkHungCase checks that a case that does not end is found, is a failure, and does not keep the
// others from running: through a program whose second case sleeps for good, and ignores TERM as a
// suite may.
func checkHungCase(t *testing.T, l *lab) {
	m := module{suite: "own", name: "hangs", limit: 2 * time.Second, dir: func() string { return "/" },
		command: func(_, _ string, s selection, _ time.Duration) []string {
			const script = `trap "" TERM
for c in one two three; do case " $* " in *" $c "*) continue;; esac
echo begin $c; [ $c != two ] || while :; do sleep 1; done; echo end $c; done`
			return append([]string{"sh", "-c", script, "sh"}, s.without...)
		},
		parse: func(output, _ []byte) (map[string]caseResult, []string, error) {
			cases, running := map[string]caseResult{}, []string{}
			for line := range strings.Lines(string(output)) {
				what, name, _ := strings.Cut(strings.TrimSpace(line), " ")
				switch what {
				case "begin":
					running = append(running, name)
				case "end":
					running, cases[name] = nil, caseResult{outcome: passed}
				default:
					return nil, nil, fmt.Errorf("unexpected line %q", line)
				}
			}
			return cases, running, nil
		}}
	r, err := runModule(t.Context(), l, m, heddle, selection{}, m.limit)
	if err != nil {
		t.Fatal(err)
	}
	if r.broken != "" {
		t.Errorf("broken: %s", r.broken)
	}
	checkCases(t, r.cases, map[string]outcome{"one": passed, "two": failed, "three": passed})
	if !strings.Contains(r.cases["two"].detail, "did not end") {
		t.Errorf("case two: %q, want that it did not end", r.cases["two"].detail)
	}
}

// checkClosed checks that a packet that leaves the lab is noticed, in a lab of its own: one cannot
// take it back.
func checkClosed(t *testing.T, l *lab) {
	if err := l.closed(t.Context()); err != nil {
		t.Fatalf("before anything was sent: %v", err)
	}
	other, err := bringUp(t.Context(), strings.TrimSuffix(l.bin, "/heddle"), l.name+"-open", "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := other.takeDown(); err != nil {
			t.Error(err)
		}
	}()
	// UDP to a documentation address (RFC 5737).
	const send = `import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9))`
	if _, err := other.heddle(t.Context(), "lab", "exec", "--mode", overlay, container(overlay), "--", python3, "-c", send); err != nil {
		t.Fatal(err)
	}
	deadline, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for other.closed(deadline) == nil {
		select {
		case <-deadline.Done():
			t.Fatal("a packet to 192.0.2.1 was not noticed")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// TestChoose checks how modules are named on the command line.
func TestChoose(t *testing.T) {
	all, err := choose(suiteNames(), nil)
	if err != nil || len(all) < 10 {
		t.Fatalf("all: %d modules, %v", len(all), err)
	}
	some, err := choose(suiteNames(), []string{"net", "test_epoll"})
	if err != nil || len(some) != 2 {
		t.Errorf("two modules: %d, %v", len(some), err)
	}
	for _, wrong := range []struct{ suites, modules []string }{{[]string{"rust"}, nil}, {[]string{"go"}, []string{"test_epoll"}}} {
		if _, err := choose(wrong.suites, wrong.modules); err == nil {
			t.Errorf("choose(%v, %v) gave no error", wrong.suites, wrong.modules)
		}
	}
	seen := map[string]bool{}
	for _, m := range all {
		if seen[m.name] {
			t.Errorf("two modules are called %q", m.name)
		}
		seen[m.name] = true
	}
	for key := range known {
		if !slices.ContainsFunc(all, func(m module) bool { return m.suite == key[0] && m.name == key[1] }) {
			t.Errorf("known difference of %v: there is no such module", key)
		}
	}
}

// TestUpdatePage checks that the page keeps what is not of a suite that ran.
func TestUpdatePage(t *testing.T) {
	path := t.TempDir() + "/page.md"
	page := "head\n"
	for _, s := range suiteNames() {
		begin, end := markers(s)
		page += begin + "old " + s + "\n" + end
	}
	if err := os.WriteFile(path, []byte(page+"foot\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	v := verdict{module: module{suite: "go", name: "net"}, on: moduleRun{cases: map[string]caseResult{"TestA": {outcome: passed}}}}
	v.through = v.on
	for range 2 { // the second time replaces what the first wrote
		if err := updatePage(path, []verdict{v}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"head\n", "foot\n", "old cpython\n", "old stress-ng\n", "| go | net | heddle | 1 | 1 | 0 | 0 | 0 | 0 | none |"} {
		if bytes.Count(got, []byte(want)) != 1 {
			t.Errorf("page has %q %d times:\n%s", want, bytes.Count(got, []byte(want)), got)
		}
	}
	if bytes.Contains(got, []byte("old go")) {
		t.Errorf("page kept the old table:\n%s", got)
	}
	if err := os.WriteFile(path, []byte("no markers"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := updatePage(path, []verdict{v}); err == nil {
		t.Error("a page without markers was accepted")
	}
}
