package heddle_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp"
	"heddle.dev/heddle/internal/plane/verbs"
)

// documents gives the text of every Markdown file of the repository, by path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != "." || path == "bin" || path == "out") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, ".md") {
			return nil
		}
		raw, err := os.ReadFile(path)
		texts[filepath.ToSlash(path)] = string(raw)
		return err
	})
	if err != nil {
		t.Fatalf("read documents: %v", err)
	}
	return texts
}

// TestTenMinutes keeps what a reader sees first short, and its lines readable where they are typed.
// Rows of tables cannot be broken.
func TestTenMinutes(t *testing.T) {
	texts := documents(t)
	for path, text := range texts {
		if path != "README.md" && path != "docs/ARCHITECTURE.md" && !strings.HasPrefix(path, "docs/architecture/") {
			continue
		}
		for i, line := range strings.Split(text, "\n") {
			if n := utf8.RuneCountInString(line); n > 100 && !strings.HasPrefix(line, "|") {
				t.Errorf("%s:%d has %d columns, more than 100", path, i+1, n)
			}
		}
	}
	for path, most := range map[string]int{"README.md": 120, "docs/ARCHITECTURE.md": 170} {
		if n := strings.Count(texts[path], "\n"); n == 0 || n > most {
			t.Errorf("%s has %d lines; the most is %d", path, n, most)
		}
	}
	split := regexp.MustCompile(`^docs/(benchmarks(/(packets|rdma|stacks))?\.md|(architecture/.*|howto/.*)\.md|(differences|reasons|security)(\.md|/))`)
	for path, text := range texts {
		if n := len(strings.Fields(text)); split.MatchString(path) && n > 2500 {
			t.Errorf("%s has %d words, more than 2,500: give a part of it a page of its own", path, n)
		}
	}
}

// TestReadmeIsRun holds .ci/run to the test command that the README names.
func TestReadmeIsRun(t *testing.T) {
	command := regexp.MustCompile(`(?m)^    (make test)\b`).FindStringSubmatch(documents(t)["README.md"])
	if command == nil {
		t.Fatal("the README names no test command")
	}
	script, err := os.ReadFile(".ci/run")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(script)) {
		if strings.TrimSpace(line) == command[1] {
			return
		}
	}
	t.Errorf(".ci/run does not run %q, which the README names", command[1])
}

// readmeRows are the measurements in the rows of the README's table, in their order.
var readmeRows = []struct{ workload, scope, metric string }{
	{"iperf3", "inter", "throughput_bps"},
	{"iperf3", "inter", "cpu_s_per_gb"},
	{"rr", "inter", "rtt_p50_us"},
	{"crr", "inter", "socket_connect_p50_us"},
	{"crr", "inter", "socket_connect_p99_us"},
	{"crr", "inter", "connections_per_s"},
	{"rr", "intra", "rtt_p50_us"},
	{"crr", "intra", "socket_connect_p50_us"},
	{"crr", "intra", "socket_connect_p99_us"},
	{"crr", "intra", "connections_per_s"},
}

// TestReadmeTable holds the README's table to one run, the one that docs/benchmarks.md has under
// "Against peers".
func TestReadmeTable(t *testing.T) {
	raw, err := os.ReadFile("docs/benchmarks/peers.json")
	if err != nil {
		t.Fatal(err)
	}
	var run struct {
		Machine string
		Results []struct {
			Workload, Scope, Mode, Metric string
			Ratio                         float64 `json:"ratio_to_host"`
		}
	}
	if err := json.Unmarshal(raw, &run); err != nil {
		t.Fatal(err)
	}
	readme := documents(t)["README.md"]
	if _, day, _ := strings.Cut(run.Machine, "; "); day == "" || !strings.Contains(readme, day) {
		t.Errorf("the README does not say that its run is of %q", day)
	}
	var rows [][]string
	for line := range strings.Lines(readme) {
		if strings.HasPrefix(line, "|") {
			rows = append(rows, strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|"))
		}
	}
	if len(rows) != len(readmeRows)+2 {
		t.Fatalf("the README's table has %d lines; with its head it should have %d", len(rows), len(readmeRows)+2)
	}
	for i, want := range readmeRows {
		for column, mode := range rows[0] {
			mode, cell := strings.Trim(mode, " *"), strings.Trim(rows[i+2][column], " *")
			for _, r := range run.Results {
				if mode == "host" || r.Mode != mode || r.Workload != want.workload || r.Scope != want.scope || r.Metric != want.metric {
					continue
				}
				if said := fmt.Sprintf("%.2f", r.Ratio); said != cell {
					t.Errorf("README, %s %s of %s: %q; the run has %s", want.scope, want.metric, mode, cell, said)
				}
			}
		}
	}
}

// TestFilesAreThere: a file that the architecture, the threat model and its pages, or CONTRIBUTING
// names is in the repository.
func TestFilesAreThere(t *testing.T) {
	files := []string{"/rules_test.go"}
	for _, folder := range []string{"bpf", "clib", "cmd", "internal", "rust", "test"} {
		err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
			files = append(files, "/"+filepath.ToSlash(path))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	named := regexp.MustCompile("`([a-zA-Z0-9_/.-]+\\.(?:go|c|h|rs))`")
	for path, text := range documents(t) {
		if !slices.Contains([]string{"CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/security.md"}, path) &&
			!strings.HasPrefix(path, "docs/architecture/") && !strings.HasPrefix(path, "docs/security/") {
			continue
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !slices.ContainsFunc(files, func(file string) bool { return strings.HasSuffix(file, "/"+m[1]) }) {
				t.Errorf("%s: there is no file %s", path, m[1])
			}
		}
	}
}

// TestNamedTestsAreThere: a test that a document names as the proof of what it says is in the
// repository. A name that ends in an asterisk stands for several. docs/conformance.md names tests
// of others; decisions are of their day.
func TestNamedTestsAreThere(t *testing.T) {
	var tests []string
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, "_test.go") {
			return
		}
		raw, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range declared.FindAllSubmatch(raw, -1) {
			tests = append(tests, string(m[1]))
		}
	})
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*)(\\*?)`")
	for path, text := range documents(t) {
		if path == "docs/conformance.md" || strings.HasPrefix(path, "docs/decisions/") {
			continue
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !slices.ContainsFunc(tests, func(test string) bool { return test == m[1] || m[2] == "*" && strings.HasPrefix(test, m[1]) }) {
				t.Errorf("%s: there is no test %s", path, m[1]+m[2])
			}
		}
	}
}

// declarations are those of all planes that there are.
var declarations = map[string]plane.Declaration{"tcp": tcp.Declaration, "verbs": verbs.Declaration}

// reasonRows reads the tables of docs/reasons/: of each reason the cells after its name, and its
// page.
func reasonRows(t *testing.T, texts map[string]string) (rows map[string][]string, pages map[string]string) {
	link := regexp.MustCompile(`\[([^]]*)\]\([^)]*\)`)
	rows, pages = make(map[string][]string), make(map[string]string)
	for path, text := range texts {
		if !strings.HasPrefix(path, "docs/reasons/") {
			continue
		}
		for line := range strings.Lines(text) {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " |")
			if len(cells) != 4 {
				continue
			}
			for i := range cells {
				cells[i] = strings.TrimSpace(link.ReplaceAllString(cells[i], "$1"))
			}
			name := strings.Trim(cells[0], "`")
			if rows[name] != nil && name != "reason" {
				t.Errorf("%s and %s both have a row for %s", pages[name], path, name)
			}
			rows[name], pages[name] = cells[1:], path
		}
	}
	return rows, pages
}

// indexedReasons are the pages below docs/ that docs/reasons.md names, by how reasons' names begin.
func indexedReasons(text string) map[string]string {
	began, led := regexp.MustCompile("`([a-z_]+_)`"), regexp.MustCompile(`\]\((reasons/[a-z]+\.md)`)
	index := make(map[string]string)
	for line := range strings.Lines(text) {
		if to := led.FindStringSubmatch(line); to != nil {
			for _, m := range began.FindAllStringSubmatch(line, -1) {
				index[m[1]] = "docs/" + to[1]
			}
		}
	}
	return index
}

// TestDeclaredNamesAreDocumented holds docs/reasons/ and its index to the reasons of all planes,
// with what to do about each, and docs/protocols/agent-api.md to their paths, protocols and faults.
func TestDeclaredNamesAreDocumented(t *testing.T) {
	texts := documents(t)
	rows, pages := reasonRows(t, texts)
	index := indexedReasons(texts["docs/reasons.md"])
	named := func(plane, what, name string) {
		if !strings.Contains(texts["docs/protocols/agent-api.md"], "`"+name+"`") {
			t.Errorf("docs/protocols/agent-api.md does not name the %s plane's %s %s", plane, what, name)
		}
	}
	for plane, d := range declarations {
		for _, r := range d.Reasons {
			if r.Name == "none" {
				continue // the number 0, which nothing is counted under
			}
			row := rows[r.Name]
			if row == nil || row[0] != string(r.Kind) || row[2] != r.Remedy {
				t.Errorf("docs/reasons/ has for the %s plane's reason %s %q, want its kind %q, a meaning, and %q", plane, r.Name, row, r.Kind, r.Remedy)
				continue
			}
			found := false
			for start, page := range index {
				found = found || strings.HasPrefix(r.Name, start) && page == pages[r.Name]
			}
			if !found {
				t.Errorf("docs/reasons.md does not lead from the beginning of %s to %s", r.Name, pages[r.Name])
			}
		}
		for _, p := range d.Paths {
			named(plane, "path", string(p))
		}
		for _, p := range d.Protocols {
			named(plane, "protocol", p)
		}
		for _, f := range d.Faults {
			named(plane, "fault", string(f))
		}
	}
	for _, f := range api.FaultReasons {
		named("neutral", "fault", string(f))
	}
}
