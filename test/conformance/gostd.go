package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// goModules are the standard library's packages about connections, whose tests are built with the
// resolver of the C library and without. -short leaves out what needs the Internet.
var goModules = []module{
	goPackage("net", false, fast),
	goPackage("net", true, slow),
	goPackage("net/http", false, slow),
	goPackage("net/http", true, slow),
	goPackage("crypto/tls", false, slow),
	goPackage("crypto/tls", true, slow),
	goPackage("net/rpc", false, slow),
	goPackage("net/http/httptest", false, slow),
	goPackage("net/http/httputil", false, slow),
}

// goLeftOut are tests that have nothing to do with sockets and take minutes: it runs `go vet`.
var goLeftOut = []string{"TestOmitHTTP2Vet"}

func goPackage(path string, cgo, isFast bool) module {
	name := path
	if cgo {
		name += " (cgo)"
	}
	binary := func(scratch string) string {
		return filepath.Join(scratch, strings.NewReplacer("/", "-", " ", "-").Replace(name)+".test")
	}
	return module{suite: "go", name: name, fast: isFast, limit: 4 * time.Minute,
		dir: func() string {
			root, _ := goRoot() // prepare has seen to the error
			return filepath.Join(root, "src", path)
		},
		prepare: func(ctx context.Context, scratch string) error { return buildGoTest(ctx, path, cgo, binary(scratch)) },
		command: func(scratch, _ string, s selection, limit time.Duration) []string {
			// The program itself gives up first: it prints where it hangs.
			argv := []string{binary(scratch), "-test.v=test2json", "-test.short", "-test.timeout", (limit - killedAfter).String()}
			if len(s.only) > 0 {
				argv = append(argv, "-test.run", goPattern(s.only))
			}
			return append(argv, "-test.skip", goPattern(append(slices.Clone(goLeftOut), s.without...)))
		},
		parse: parseGo}
}

// goRoot gives the folder of the Go installation, with the packages' test data.
var goRoot = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOROOT: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
})

func buildGoTest(ctx context.Context, path string, cgo bool, binary string) error {
	if _, err := goRoot(); err != nil {
		return err
	}
	if _, err := os.Stat(binary); err == nil {
		return nil
	}
	enabled := "CGO_ENABLED=0"
	if cgo {
		enabled = "CGO_ENABLED=1"
	}
	return machineRun(ctx, []string{enabled}, "go", "test", "-c", "-o", binary, path)
}

// goPattern gives the pattern for -test.run and -test.skip that matches these tests and their
// subtests.
func goPattern(names []string) string {
	var out []string
	for _, name := range names {
		levels := strings.Split(name, "/")
		for i := range levels {
			levels[i] = "^" + regexp.QuoteMeta(levels[i]) + "$"
		}
		out = append(out, strings.Join(levels, "/"))
	}
	return strings.Join(out, "|")
}

// goEvent is an event of test2json, as far as it is of interest.
type goEvent struct{ Action, Test, Output string }

// runningGo is a line of the list of running tests that a test program prints when its time is
// over.
var runningGo = regexp.MustCompile(`(?m)^\t+((?:Test|Example|Fuzz)\S+) \(([\dhms.µn]+)\)$`)

// parseGo reads a run of a Go test program.
func parseGo(output, _ []byte) (map[string]caseResult, []string, error) {
	cmd := exec.Command("go", "tool", "test2json")
	cmd.Stdin = bytes.NewReader(output)
	events, err := cmd.Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go tool test2json: %w", err)
	}
	cases, said, open := map[string]caseResult{}, map[string]string{}, map[string]bool{}
	whole := false // the program came to its end
	for line := range bytes.Lines(events) {
		var e goEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, nil, fmt.Errorf("go tool test2json: %w: %q", err, line)
		}
		if e.Test == "" {
			whole = whole || e.Output == "PASS\n" || e.Output == "FAIL\n"
			continue
		}
		switch e.Action {
		case "run":
			open[e.Test] = true
		case "output":
			said[e.Test] += e.Output
		case "pass", "fail", "skip":
			delete(open, e.Test)
			cases[e.Test] = caseResult{goOutcomes[e.Action], said[e.Test]}
		}
	}
	if !whole {
		running := stuckGo(output, open)
		if len(running) == 0 {
			return nil, nil, errors.New("the program ended early, and no test was stuck\n" + tail(output))
		}
		return nil, running, nil
	}
	if len(cases) == 0 {
		return nil, nil, errors.New("no test ran\n" + tail(output))
	}
	return cases, nil, nil
}

var goOutcomes = map[string]outcome{"pass": passed, "fail": failed, "skip": skipped}

// leastStuck is how long a test must have run to be the one that a program does not end for. On a
// busy machine a program can also be late because all of its tests were.
const leastStuck = 10 * time.Second

// stuckGo gives the tests that a program which ended early was at: of those it lists the ones that
// ran longest, if any ran for long, or else, without a list, all that had begun; and only the
// innermost.
func stuckGo(output []byte, open map[string]bool) []string {
	longest := leastStuck
	took := map[string]time.Duration{}
	for _, m := range runningGo.FindAllSubmatch(output, -1) {
		d, err := time.ParseDuration(string(m[2]))
		if err != nil {
			continue
		}
		took[string(m[1])] = d
		longest = max(longest, d)
	}
	var out []string
	for name := range open {
		if d, listed := took[name]; len(took) == 0 || listed && d >= leastStuck && 2*d >= longest {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return slices.DeleteFunc(slices.Clone(out), func(name string) bool { return hasSubtest(out, name) })
}

func hasSubtest(names []string, name string) bool {
	return slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, name+"/") })
}
