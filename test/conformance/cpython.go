package main

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// python3 is the distribution's, whose test suite the package is for, whatever else is in PATH.
const python3 = "/usr/bin/python3"

// cpythonModules are the modules of CPython's own suite that are about sockets. Resources that
// would leave the machine are not enabled; what test_socketserver calls "network" stays on
// loopback.
var cpythonModules = []module{
	cpython("test_select", time.Minute, fast),
	cpython("test_epoll", time.Minute, fast),
	cpython("test_selectors", 2*time.Minute, fast),
	cpython("test_socketserver", time.Minute, fast, "--use", "network"),
	cpython("test_httplib", time.Minute, fast),
	cpython("test_asyncore", time.Minute, slow),
	cpython("test_asynchat", time.Minute, slow),
	cpython("test_httpservers", time.Minute, slow),
	cpython("test_urllib2_localnet", time.Minute, slow),
	cpython("test_smtplib", time.Minute, slow),
	cpython("test_poplib", time.Minute, slow),
	cpython("test_os", time.Minute, slow), // sendfile
	cpython("test_eintr", time.Minute, slow),
	cpython("test_ftplib", 2*time.Minute, slow),
	cpython("test_xmlrpc", 3*time.Minute, slow),
	// VSOCK tests wait for a host that answers on it.
	cpython("test_socket", 4*time.Minute, slow, "--ignore", "*VSOCK*"),
	cpython("test_ssl", 5*time.Minute, slow),
	cpython("test_asyncio", 6*time.Minute, slow),
	cpython("test_multiprocessing_fork", 6*time.Minute, slow),
}

// Whether a module is part of `make test`.
const (
	fast = true
	slow = false
)

func cpython(name string, limit time.Duration, isFast bool, args ...string) module {
	return module{suite: "cpython", name: name, fast: isFast, limit: limit, prepare: pythonSuite,
		dir: func() string { return "/tmp" }, // the suite makes a folder of its own there
		command: func(_, report string, s selection, limit time.Duration) []string {
			// The suite itself gives up first: it prints where it hangs.
			own := fmt.Sprint((limit - killedAfter).Seconds())
			argv := append([]string{python3, "-m", "test", "--verbose", "--timeout", own, "--junit-xml", report}, args...)
			for _, id := range s.only {
				argv = append(argv, "--match", pythonPattern(id))
			}
			for _, id := range s.without {
				argv = append(argv, "--ignore", pythonPattern(id))
			}
			return append(argv, name)
		},
		parse: parseCPython}
}

// pythonSuite checks that the suite is installed.
func pythonSuite(ctx context.Context, _ string) error {
	return machineRun(ctx, nil, python3, "-c", "import test.test_socket, _testcapi")
}

// pythonPattern gives the pattern that selects a case: its name, or all cases of the class or
// module whose preparation is the case.
func pythonPattern(id string) string {
	if _, of, isSetup := strings.Cut(id, " ("); isSetup {
		return strings.TrimSuffix(of, ")") + ".*"
	}
	return id
}

// junit is the report of CPython's suite, as far as it is of interest.
type junit struct {
	Cases []struct {
		Name    string     `xml:"name,attr"`
		Failure *junitText `xml:"failure"`
		Error   *junitText `xml:"error"`
		Skipped *junitText `xml:"skipped"`
	} `xml:"testsuite>testcase"`
}

type junitText struct {
	Text string `xml:",chardata"`
}

var (
	// began is a line that names a case: test_x (test.test_module.Class.test_x) ...
	began = regexp.MustCompile(`(?m)^\w+ \((test\.[\w.]+)\)(?: \.\.\. ?|$)`)
	// ended is how such a line goes on once the case has ended.
	ended = regexp.MustCompile(`(?m)(?:\.\.\. |^)(?:ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$`)
	// failure is the head of a failure in the list that follows the cases. A failure of a class's
	// or a module's preparation has no entry in the report, and one of a subtest none with a name.
	failure = regexp.MustCompile(`(?m)^={70}\n(?:FAIL|ERROR): (\w+) \(([\w.]+)\).*\n`)
	// afterFailure is where the text of a failure ends.
	afterFailure = regexp.MustCompile(`(?m)^(?:={70}$|-{70}\nRan )`)
)

// parseCPython reads a run of CPython's suite.
func parseCPython(output, report []byte) (map[string]caseResult, []string, error) {
	if len(report) == 0 {
		if id := unendedCPython(output); id != "" {
			return nil, []string{id}, nil
		}
		return nil, nil, fmt.Errorf("no report\n%s", tail(output))
	}
	var r junit
	if err := xml.Unmarshal(report, &r); err != nil {
		return nil, nil, fmt.Errorf("read report: %w", err)
	}
	cases := map[string]caseResult{}
	for _, c := range r.Cases {
		switch {
		case c.Name == "": // a case with failed subtests; the output has them
		case c.Failure != nil:
			cases[c.Name] = caseResult{failed, c.Failure.Text}
		case c.Error != nil:
			cases[c.Name] = caseResult{failed, c.Error.Text}
		case c.Skipped != nil:
			cases[c.Name] = caseResult{skipped, c.Skipped.Text}
		default:
			cases[c.Name] = caseResult{outcome: passed}
		}
	}
	for _, at := range failure.FindAllSubmatchIndex(output, -1) {
		method, id := string(output[at[2]:at[3]]), string(output[at[4]:at[5]])
		if !strings.HasSuffix(id, "."+method) {
			id = method + " (" + id + ")"
		}
		if _, known := cases[id]; !known || cases[id].outcome != failed {
			cases[id] = caseResult{failed, failureText(output[at[1]:])}
		}
	}
	if len(cases) == 0 {
		return nil, nil, errors.New("no case ran\n" + tail(output))
	}
	return cases, nil, nil
}

// unendedCPython gives the case that had begun last if it did not end.
func unendedCPython(output []byte) string {
	all := began.FindAllSubmatchIndex(output, -1)
	if len(all) == 0 {
		return ""
	}
	last := all[len(all)-1]
	if ended.Match(output[last[0]:]) {
		return ""
	}
	return string(output[last[2]:last[3]])
}

// failureText gives the text of a failure: up to the next one, or to the end of the list.
func failureText(rest []byte) string {
	if at := afterFailure.FindIndex(rest); at != nil {
		rest = rest[:at[0]]
	}
	return strings.TrimSpace(string(rest))
}
