package main

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// checkCases compares how cases ended.
func checkCases(t *testing.T, got map[string]caseResult, want map[string]outcome) {
	t.Helper()
	if !slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want))) {
		t.Errorf("cases are %q, want %q", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	}
	for name, o := range want {
		if got[name].outcome != o {
			t.Errorf("%s: %s, want %s", name, got[name].outcome, o)
		}
	}
}

const cpythonOutput = `== CPython 3.11.2
0:00:00 load avg: 2.83 [1/1] test_select
setUpClass (test.test_select.Bad) ... ERROR
test_errno (test.test_select.SelectTestCase.test_errno) ... ok
test_sub (test.test_select.SelectTestCase.test_sub)
What it is about ...   test_sub (test.test_select.SelectTestCase.test_sub) (i=1)
What it is about ... FAIL

======================================================================
ERROR: setUpClass (test.test_select.Bad)
----------------------------------------------------------------------
Traceback (most recent call last):
OSError: no class

======================================================================
FAIL: test_sub (test.test_select.SelectTestCase.test_sub) (i=1)
What it is about
----------------------------------------------------------------------
Traceback (most recent call last):
AssertionError: 1 != 2

----------------------------------------------------------------------
Ran 4 tests in 1.521s

FAILED (failures=1, errors=1, skipped=1)
`

const cpythonReport = `<testsuites tests="4"><testsuite tests="4">
<testcase name="test.test_select.SelectTestCase.test_errno" status="run" result="completed" time="0.1" />
<testcase name="test.test_select.SelectTestCase.test_a" status="run" result="completed"><error type="OSError" message="m">text of it</error></testcase>
<testcase name="test.test_select.SelectTestCase.test_b" status="run" result="completed"><failure type="AssertionError">text</failure></testcase>
<testcase name="test.test_select.SelectTestCase.test_s" status="run" result="completed"><skipped>not here</skipped></testcase>
<testcase />
</testsuite></testsuites>`

func TestParseCPython(t *testing.T) {
	cases, running, err := parseCPython([]byte(cpythonOutput), []byte(cpythonReport))
	if err != nil || len(running) > 0 {
		t.Fatalf("running %q, error %v", running, err)
	}
	const class = "test.test_select.SelectTestCase."
	checkCases(t, cases, map[string]outcome{
		class + "test_errno": passed, class + "test_a": failed, class + "test_b": failed, class + "test_s": skipped,
		class + "test_sub": failed, "setUpClass (test.test_select.Bad)": failed,
	})
	for id, want := range map[string]string{class + "test_sub": "1 != 2", class + "test_a": "text of it", "setUpClass (test.test_select.Bad)": "no class"} {
		if !strings.Contains(cases[id].detail, want) {
			t.Errorf("%s: %q, want %q in it", id, cases[id].detail, want)
		}
	}
}

func TestParseCPythonUnended(t *testing.T) {
	const head = "test_a (test.test_x.T.test_a) ... ok\n"
	for name, c := range map[string]struct{ output, running string }{
		"hangs":          {head + "test_b (test.test_x.T.test_b) ... Timeout (0:01:00)!\nThread 0x1:\n", "test.test_x.T.test_b"},
		"with docstring": {head + "test_b (test.test_x.T.test_b)\nWhat it does ... Timeout!\n", "test.test_x.T.test_b"},
		"between cases":  {head + "Fatal Python error: Segmentation fault\n", ""},
		"before any":     {"== CPython\n", ""},
	} {
		_, running, err := parseCPython([]byte(c.output), nil)
		if got := strings.Join(running, " "); got != c.running {
			t.Errorf("%s: running %q, want %q", name, got, c.running)
		}
		if (err == nil) != (c.running != "") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if _, _, err := parseCPython([]byte("Ran 0 tests"), []byte("<testsuites><testsuite/></testsuites>")); err == nil {
		t.Error("a run without cases was accepted")
	}
}

func TestPatterns(t *testing.T) {
	if got := pythonPattern("setUpClass (test.test_x.T)"); got != "test.test_x.T.*" {
		t.Errorf("pattern of a class is %q", got)
	}
	if got := goPattern([]string{"TestA", "TestB/x.y"}); got != `^TestA$|^TestB$/^x\.y$` {
		t.Errorf("pattern of tests is %q", got)
	}
}

// goOutput is what a test program prints with -test.v=test2json; ^ stands for the byte that marks
// its lines.
const goOutput = `^=== RUN   TestA
    a_test.go:1: said by A
^--- PASS: TestA (0.00s)
^=== RUN   TestB
^=== RUN   TestB/sub
    a_test.go:2: said by sub
^=== NAME  TestB
^--- FAIL: TestB (0.00s)
    ^--- FAIL: TestB/sub (0.00s)
^=== RUN   TestC
    a_test.go:3: not here
^--- SKIP: TestC (0.00s)
`

func TestParseGo(t *testing.T) {
	marked := func(s string) []byte { return []byte(strings.ReplaceAll(s, "^", "\x16")) }
	cases, running, err := parseGo(marked(goOutput+"^FAIL\n"), nil)
	if err != nil || len(running) > 0 {
		t.Fatalf("running %q, error %v", running, err)
	}
	checkCases(t, cases, map[string]outcome{"TestA": passed, "TestB": failed, "TestB/sub": failed, "TestC": skipped})
	if !strings.Contains(cases["TestB/sub"].detail, "said by sub") {
		t.Errorf("detail of the subtest is %q", cases["TestB/sub"].detail)
	}
	for name, c := range map[string]struct{ rest, running string }{
		"time is over": {"^=== RUN   TestD\n^=== RUN   TestD/x\n^=== RUN   TestE\npanic: test timed out after 3m\n\trunning tests:\n\t\tTestD (2m50s)\n\t\tTestD/x (2m49s)\n\t\tTestE (1s)\n\ngoroutine 1:\n", "TestD/x"},
		"crash":        {"^=== RUN   TestD\npanic: oh\n", "TestD"},
		"after a test": {"fatal error: oh\n", "TestC"}, // test2json lays it at that test's door
	} {
		_, running, err := parseGo(marked(goOutput+c.rest), nil)
		if got := strings.Join(running, " "); got != c.running {
			t.Errorf("%s: running %q, want %q", name, got, c.running)
		}
		if err != nil {
			t.Errorf("%s: error %v", name, err)
		}
	}
	slow := goOutput + "^=== RUN   TestD\npanic: test timed out after 3m\n\trunning tests:\n\t\tTestD (1s)\n"
	if _, running, err := parseGo(marked(slow), nil); err == nil {
		t.Errorf("a program that was slow in all tests: running %q, want an error", running)
	}
	if _, _, err := parseGo([]byte("fatal error: oh\n"), nil); err == nil {
		t.Error("a crash before all tests was accepted")
	}
	if _, _, err := parseGo(marked("^PASS\n"), nil); err == nil {
		t.Error("a run without tests was accepted")
	}
}

const stressOutput = `stress-ng: metrc: [39] stressor       bogo ops real time  usr time  sys time   bogo ops/s     bogo ops/s
stress-ng: metrc: [39] sock               1034      2.00      0.09      2.17       516.87         457.18
stress-ng: info:  [39] successful run completed in 2.00s
=== sock --sock-domain ipv6 === 0
stress-ng: metrc: [85] sockdiag              0      2.00      0.02      1.89         0.00           0.00
=== sockdiag === 0
stress-ng: info:  [127] ping-sock: skipping stressor, permission denied
=== ping-sock === 0
stress-ng: fail:  [127] epoll: oh
=== epoll === 2
`

func TestParseStress(t *testing.T) {
	cases, _, err := parseStress([]byte(stressOutput), nil)
	if err != nil {
		t.Fatal(err)
	}
	checkCases(t, cases, map[string]outcome{"sock --sock-domain ipv6": passed, "sockdiag": skipped, "ping-sock": skipped, "epoll": failed})
	for _, wrong := range []string{"", "=== sock === 0\n"} {
		if _, _, err := parseStress([]byte(wrong), nil); err == nil {
			t.Errorf("%q was accepted", wrong)
		}
	}
}

func TestIPReceived(t *testing.T) {
	got, err := ipReceived("Ip: Forwarding DefaultTTL InReceives\nIp: 2 64 17\nIcmp: InMsgs\nIcmp: 0\n")
	if err != nil || got != 17 {
		t.Errorf("received %d, %v", got, err)
	}
	if _, err := ipReceived("Tcp: 1\n"); err == nil {
		t.Error("no count, and no error")
	}
}

func TestIP6Received(t *testing.T) {
	got, err := ip6Received("Ip6InReceives                   \t19\nIp6InMcastPkts                  \t2\nIcmp6InMsgs                     \t3\n")
	if err != nil || got != 17 {
		t.Errorf("received %d, %v", got, err)
	}
	for _, partial := range []string{"", "Ip6InReceives 19\n", "Ip6InMcastPkts 2\n"} {
		if _, err := ip6Received(partial); err == nil {
			t.Errorf("%q: no count, and no error", partial)
		}
	}
}

// TestLimits checks that a module's own time limit comes before the one that kills it.
func TestLimits(t *testing.T) {
	all, err := choose(suiteNames(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.limit < leastLimit || m.limit > 10*time.Minute {
			t.Errorf("%s %s: limit %s", m.suite, m.name, m.limit)
		}
	}
}
