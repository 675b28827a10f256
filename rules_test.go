// Package heddle_test holds the rules of the repository as tests.
package heddle_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"heddle.dev/heddle/internal/testutil"
)

const module = "heddle.dev/heddle/"

// allowed says which of our packages each may import, beside internal/model: the dependency
// direction of docs/architecture/packages.md. A package that is missing here fails the test.
var allowed = map[string][]string{
	"internal/model":           {},
	"internal/policy":          {},
	"internal/policy/document": {"internal/policy", "internal/stack"},
	"internal/policy/generate": {"internal/policy"},
	"internal/stack":           {"internal/policy"},

	"internal/store":               {"internal/policy", "internal/stack"},
	"internal/store/etcd":          {"internal/patience", "internal/policy", "internal/store"},
	"internal/endpoint":            {},
	"internal/netns":               {},
	"internal/callfilter":          {},
	"internal/hang":                {},
	"internal/plane/tcp/probe":     {},
	"internal/plane/tcp/datapath":  {"internal/flow", "internal/plane/tcp/lockwait", "internal/plane/tcp/names"},
	"internal/plane/tcp/lockwait":  {},
	"internal/plane/tcp/names":     {},
	"internal/netcfg":              {"internal/netcfg/firewall", "internal/netcfg/netdev", "internal/netcfg/rtnl", "internal/netcfg/sysctl", "internal/netns"},
	"internal/netcfg/firewall":     {"internal/netcfg/netdev", "internal/netcfg/rtnl"},
	"internal/netcfg/netdev":       {"internal/netcfg/sysctl"},
	"internal/netcfg/rtnl":         {},
	"internal/netcfg/sysctl":       {},
	"internal/plane/tcp/intercept": {"internal/trap", "internal/trap/task"},
	"internal/trap":                {"internal/fdkeep", "internal/trap/task"},
	"internal/trap/ioctl":          {"internal/trap", "internal/trap/task"},
	"internal/trap/task":           {"internal/netns"},
	"internal/fdkeep":              {"internal/patience"},
	"internal/flow":                {},
	"internal/flowlog":             {"internal/flow"},
	"internal/otlp":                {"internal/flow"},
	"internal/logform":             {},
	"internal/api":                 {"internal/flow", "internal/policy", "internal/stack"},
	"internal/cni":                 {"internal/api", "internal/podlabels", "internal/policy"},
	"internal/kube":                {"internal/api", "internal/podlabels", "internal/policy", "internal/policy/document", "internal/version"},
	"internal/podlabels":           {},
	"internal/dockernet":           {"internal/api"},
	"internal/capture":             {},
	"internal/doctor":              {"internal/api", "internal/fdkeep", "internal/plane/tcp/datapath", "internal/netcfg", "internal/netcfg/firewall", "internal/netns", "internal/runtime", "internal/plane/process", "internal/plane/stacks/module", "internal/plane/verbs", "internal/stack"},
	"internal/plane/tcp/procnet":   {},
	"internal/runtime":             {"internal/endpointfile", "internal/plane/tcp/procnet", "internal/plane/verbs/folder"},
	"internal/durable":             {},
	"internal/endpointfile":        {},
	"internal/agentpod":            {"internal/durable"},
	"internal/peerapi":             {"internal/durable", "internal/patience"},
	"internal/ui":                  {"internal/api", "internal/flow", "internal/policy"},
	"internal/ui/uitest":           {"internal/api", "internal/flow"},
	"internal/trust":               {"internal/durable"},
	"internal/plane":               {"internal/api", "internal/flow", "internal/netcfg", "internal/stack", "internal/trap"},
	"internal/plane/planetest":     {"internal/api", "internal/netcfg", "internal/plane", "internal/stack", "internal/trap"},
	"internal/plane/tcp": {"internal/api", "internal/plane/tcp/datapath", "internal/dockernet", "internal/plane/tcp/intercept", "internal/fdkeep", "internal/flow", "internal/netcfg", "internal/netcfg/firewall", "internal/netcfg/netdev",
		"internal/plane", "internal/plane/stacks/protocol", "internal/plane/tcp/congestion", "internal/plane/tcp/lockwait", "internal/plane/tcp/names", "internal/plane/tcp/probe", "internal/plane/tcp/procnet", "internal/stack", "internal/trap/ioctl"},
	"internal/plane/queues":          {"internal/api", "internal/hang", "internal/netcfg", "internal/plane", "internal/plane/guest", "internal/plane/process", "internal/plane/queues/protocol", "internal/stack", "internal/trap"},
	"internal/plane/guest":           {"internal/trap", "internal/trap/task"},
	"internal/plane/lanes":           {"internal/api", "internal/netcfg", "internal/plane", "internal/plane/guest", "internal/stack", "internal/trap"},
	"internal/plane/process":         {"internal/callfilter", "internal/patience"},
	"internal/plane/stacks":          {"internal/api", "internal/flow", "internal/netcfg", "internal/plane", "internal/plane/process", "internal/plane/stacks/module", "internal/plane/stacks/protocol", "internal/plane/stacks/socket", "internal/stack", "internal/trap", "internal/trap/task"},
	"internal/plane/verbs":           {"internal/api", "internal/netcfg", "internal/plane", "internal/plane/layout", "internal/plane/process", "internal/plane/verbs/folder", "internal/plane/verbs/protocol"},
	"internal/plane/verbs/folder":    {},
	"internal/plane/verbs/protocol":  {},
	"internal/plane/queues/protocol": {"internal/plane/layout"},
	"internal/plane/layout":          {},

	"internal/plane/stacks/module":   {"internal/api", "internal/hang", "internal/plane/process", "internal/plane/stacks/protocol", "internal/stack"},
	"internal/plane/stacks/protocol": {"internal/plane/layout"},
	"internal/plane/stacks/socket":   {"internal/plane", "internal/plane/stacks/protocol", "internal/trap/task"},
	"internal/netstack":              {"internal/callfilter", "internal/hang", "internal/plane/stacks/protocol"},
	"examples/stack-module":          {"internal/plane/stacks/protocol"},
	"internal/plane/tcp/congestion":  {"internal/stack"},

	"internal/node": {"internal/api", "internal/dockernet", "internal/durable", "internal/endpoint", "internal/endpointfile", "internal/fdkeep", "internal/flow", "internal/flowlog", "internal/netcfg", "internal/netcfg/firewall", "internal/netcfg/netdev", "internal/netcfg/sysctl", "internal/otlp", "internal/patience", "internal/peerapi",
		"internal/plane", "internal/plane/tcp", "internal/policy", "internal/stack", "internal/store", "internal/store/etcd", "internal/trap", "internal/trust", "internal/wireguard"},
	"internal/wireguard":  {"internal/durable", "internal/patience"},
	"internal/uninstall":  {"internal/endpointfile", "internal/wireguard", "internal/plane/tcp/datapath", "internal/fdkeep", "internal/netcfg", "internal/patience", "internal/plane/tcp/procnet", "internal/plane/queues", "internal/plane/stacks/module", "internal/plane/verbs", "internal/plane/verbs/folder"},
	"internal/version":    {},
	"internal/systemd":    {},
	"internal/lab":        {"internal/api", "internal/lab/fabric", "internal/netns", "internal/patience", "internal/runtime", "internal/trust"},
	"internal/lab/fabric": {},
	// The benches: what they are made of, then each. Flags of a benchmark stand beside what they
	// mean.
	"internal/bench/histogram": {},
	"internal/bench/loadgen":   {"internal/bench/histogram"},
	"internal/bench/machine":   {"internal/bench/loadgen"},
	"internal/bench/proc":      {"internal/bench/loadgen"},
	"internal/bench":           {"internal/bench/loadgen", "internal/bench/machine", "internal/bench/proc"},
	"internal/bench/report":    {"internal/bench"},
	"internal/bench/plot":      {"internal/bench", "internal/bench/machine"},
	"internal/bench/session":   {"internal/api", "internal/bench", "internal/bench/machine", "internal/bench/proc", "internal/bench/report", "internal/lab", "internal/netns"},
	"internal/bench/benchtest": {"internal/bench", "internal/bench/loadgen"},
	"internal/bench/baseline":  {"internal/bench", "internal/bench/session", "internal/lab", "internal/lab/fabric", "internal/netcfg", "internal/netns"},
	"internal/bench/core":      aBenchmark("internal/bench/peers", "internal/bench/baseline"),
	"internal/bench/cost":      aBenchmark("internal/bench/loadgen", "internal/api", "internal/netns", "internal/plane/tcp/datapath"),
	"internal/bench/density":   aBenchmark("internal/bench/loadgen", "internal/api", "internal/lab", "internal/netns"),
	"internal/bench/nodes":     aBenchmark("internal/bench/loadgen", "internal/api", "internal/lab", "internal/netns"),
	"internal/bench/paper":     aBenchmark("internal/bench/histogram", "internal/bench/loadgen"),
	"internal/bench/peers":     aBenchmark("internal/bench/baseline", "internal/netns"),
	"internal/bench/policy":    aBenchmark("internal/bench/loadgen", "internal/api", "internal/policy"),
	"internal/bench/pool":      aBenchmark("internal/lab"),
	"internal/bench/rdma":      aBenchmark("internal/bench/loadgen", "internal/api", "internal/lab"),
	"internal/bench/stacks":    aBenchmark("internal/api", "internal/delayline", "internal/lab", "internal/netns", "internal/policy", "internal/stack"),
	"internal/delayline":       {"internal/netns"},
	// In heddled only: the command line goes without etcd.
	"internal/bench/populate": {"internal/store", "internal/store/etcd", "internal/trust"},

	"internal/differ":          {},
	"internal/differ/generate": {"internal/differ"},
	"internal/differ/executor": {"internal/differ"},

	// For tests alone.
	"internal/testutil": {"internal/patience"},
	"test/lab":          {"internal/api", "internal/netns", "internal/patience", "internal/testutil"},
	"test/machine":      {},
	"test/labstore":     {"internal/netns", "internal/trust", "test/lab"},
}

// aBenchmark gives what the package of a command of `heddle bench` may import: what all of them
// share, and more.
func aBenchmark(more ...string) []string {
	shared := []string{"internal/bench", "internal/bench/machine", "internal/bench/plot", "internal/bench/proc", "internal/bench/report", "internal/bench/session"}
	return append(shared, more...)
}

// only names the packages that may import a library, and why the others may not.
var only = map[string]struct {
	importers []string
	why       string
}{
	"github.com/cilium/ebpf":             {[]string{"internal/plane/tcp/datapath", "internal/plane/tcp/congestion", "internal/bench/baseline", "test/lab"}, "nothing else knows a BPF map's layout; congestion controls have maps of their own, and so has the bench's baseline; tests count entries"},
	"github.com/vishvananda/netlink":     {[]string{"internal/netcfg", "internal/netcfg/firewall", "internal/netcfg/netdev", "internal/netcfg/rtnl", "internal/lab/fabric"}, "devices and routes of a node have one owner; the lab wires hosts, which is no agent's business"},
	"golang.zx2c4.com/wireguard":         {[]string{"internal/netcfg"}, "a node's devices have one owner"},
	"go.opentelemetry.io/proto":          {[]string{"internal/otlp"}, "what leaves the node has one way out"},
	"github.com/google/nftables":         {[]string{"internal/netcfg/firewall"}, "the firewall has one owner"},
	"go.etcd.io/etcd":                    {[]string{"internal/store/etcd", "test/labstore"}, "the store can be replaced; tests read what lies in it"},
	"go.yaml.in/yaml":                    {[]string{"internal/policy/document"}, "documents have one reader"},
	"github.com/containernetworking/cni": {[]string{"internal/cni", "test/lab"}, "one program speaks CNI; tests are its engine"},
	"github.com/gopacket/gopacket":       {[]string{"internal/capture"}, "one package writes packets down"},
	"github.com/spf13/cobra":             {[]string{"cmd/heddle", "cmd/heddled", "cmd/heddle-kube"}, "flags are for programs"},
	"k8s.io":                             {[]string{"internal/kube"}, "it is large: one program has it, which no other needs"},
	"github.com/quic-go/quic-go":         {[]string{"internal/bench/loadgen"}, "it is a benchmark's application, beside tests"},
	"gvisor.dev/gvisor":                  {[]string{"internal/netstack", "examples/stack-module"}, "it parses what anybody sends: who has it is a program that can do little else"},
}

// source is one parsed Go file of ours that is no test and not generated.
type source struct {
	path, pkg string // pkg: its folder
	file      *ast.File
	fset      *token.FileSet
	text      []string // its lines
}

// indentation counts the tabs before what a line says.
func (s source) indentation(line int) int {
	return len(s.text[line-1]) - len(strings.TrimLeft(s.text[line-1], "\t"))
}

func sources(t *testing.T) []source {
	t.Helper()
	out, err := parsed()
	testutil.NoError(t, err)
	if len(out) == 0 {
		t.Fatal("no sources found")
	}
	return out
}

// parsed is what all rules read: with the race detector, parsing it for each is most of their time.
var parsed = sync.OnceValues(func() (out []source, err error) {
	err = filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".") && p != "." || d.Name() == "testdata" || d.Name() == "bin" || d.Name() == "out") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(p, ".go") || strings.HasSuffix(p, "_test.go") || strings.HasSuffix(p, "_bpfel.go") {
			return nil
		}
		raw, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, p, raw, parser.ParseComments)
		if err != nil {
			return err
		}
		out = append(out, source{p, path.Dir(filepath.ToSlash(p)), f, fset, strings.Split(string(raw), "\n")})
		return nil
	})
	return out, err
})

// TestImports enforces the dependency direction and the libraries that have one importer.
func TestImports(t *testing.T) {
	for _, s := range sources(t) {
		for _, spec := range s.file.Imports {
			imported := strings.Trim(spec.Path.Value, `"`)
			for library, rule := range only {
				if (imported == library || strings.HasPrefix(imported, library+"/")) && !slices.Contains(rule.importers, s.pkg) {
					t.Errorf("%s imports %s: only %v may: %s", s.path, imported, rule.importers, rule.why)
				}
			}
			ours, isOurs := strings.CutPrefix(imported, module)
			if !isOurs || strings.HasPrefix(s.pkg, "cmd/") || ours == "internal/model" {
				continue
			}
			may, known := allowed[s.pkg]
			if !known {
				t.Errorf("%s: package %s is not in the table of dependencies", s.path, s.pkg)
			}
			if !slices.Contains(may, ours) {
				t.Errorf("%s imports %s, against the dependency direction", s.path, ours)
			}
		}
	}
}

// composer is the one file of the agent that knows planes by name.
const composer = "internal/node/planes.go"

// TestAgentComposesPlanes keeps what a plane has for itself out of the agent, but for the file that
// opens the planes.
func TestAgentComposesPlanes(t *testing.T) {
	composed := false
	for _, s := range sources(t) {
		for _, spec := range s.file.Imports {
			imported := strings.TrimPrefix(strings.Trim(spec.Path.Value, `"`), module)
			if s.pkg != "internal/node" || !strings.HasPrefix(imported, "internal/plane/") {
				continue
			}
			composed = true
			if s.path != composer {
				t.Errorf("%s imports %s: only %s may; ask by an interface of internal/plane", s.path, imported, composer)
			}
		}
	}
	if !composed {
		t.Errorf("%s, which composes the planes, imports none", composer)
	}
}

// TestPackageDocs demands that every package says what it is for.
func TestPackageDocs(t *testing.T) {
	documented := map[string]bool{}
	for _, s := range sources(t) {
		documented[s.pkg] = documented[s.pkg] || s.file.Doc != nil
	}
	for pkg, ok := range documented {
		if !ok {
			t.Errorf("package %s has no package comment", pkg)
		}
	}
}

// TestHooksAndParts tells the files of bpf/ apart by name: hooks, programs that the kernel calls,
// are in .bpf.c files, and parts, which they have in common, in headers with a guard of their own.
func TestHooksAndParts(t *testing.T) {
	objects := []string{"bpf/heddle.bpf.c"} // no programs of its own: it includes those of the folders
	program := regexp.MustCompile(`(?m)^SEC\("(cgroup/|sockops"|tc"|iter/|lsm/|struct_ops/)`)
	seen := 0
	err := filepath.WalkDir("bpf", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		seen++
		p = filepath.ToSlash(p)
		raw, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		guard := strings.ToUpper(strings.NewReplacer("bpf/include/", "heddle_", "bpf/", "heddle_", "/", "_", ".", "_").Replace(p))
		switch {
		case strings.HasSuffix(p, ".bpf.c"):
			if !program.Match(raw) && !slices.Contains(objects, p) {
				t.Errorf("%s has no program: parts are in headers", p)
			}
		case strings.HasSuffix(p, ".h"):
			if program.Match(raw) {
				t.Errorf("%s has a program: hooks are in .bpf.c files", p)
			}
			if !bytes.Contains(raw, []byte("#ifndef "+guard+"\n")) {
				t.Errorf("%s has no guard %s", p, guard)
			}
		default:
			t.Errorf("%s: files are named *.bpf.c or *.h", p)
		}
		if lines := bytes.Count(raw, []byte("\n")); lines > maxFile {
			t.Errorf("%s has %d lines; split it by what it is about (limit %d)", p, lines, maxFile)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen == 0 {
		t.Fatal("no files in bpf/")
	}
}

const maxFunction, maxFile = 80, 600

// commentColumns is how wide a comment that has its lines to itself may be; a tab is four.
const commentColumns = 100

// TestComments keeps comments readable where they are typed. Directives, links and, in Go, what is
// laid out by spaces cannot be broken.
func TestComments(t *testing.T) {
	for _, s := range sources(t) {
		for _, group := range s.file.Comments {
			for _, c := range group.List {
				at := s.fset.Position(c.Pos())
				indented := 4 * (at.Column - 1) // if it has a line of its own
				alone := at.Column == 1 || s.indentation(at.Line) == at.Column-1
				fixed := !strings.HasPrefix(c.Text, "// ") || strings.HasPrefix(c.Text, "//    ") || strings.Contains(c.Text, "://")
				if n := indented + utf8.RuneCountInString(c.Text); alone && !fixed && n > commentColumns {
					t.Errorf("%s:%d: a comment of %d columns (limit %d)", s.path, at.Line, n, commentColumns)
				}
			}
		}
	}
	for _, dir := range []string{"bpf", "clib", "rust", "internal/bench", "test"} {
		seen := 0
		err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() && d.Name() == "target" { // cargo's, where it was called by hand
				return fs.SkipDir
			}
			if !d.IsDir() && slices.Contains([]string{".c", ".h", ".rs"}, filepath.Ext(p)) {
				seen++
				return checkBlockComments(t, p)
			}
			return nil
		})
		if err != nil || seen == 0 {
			t.Errorf("%s: %d files of C and Rust: %v", dir, seen, err)
		}
	}
}

// checkBlockComments is TestComments for a file of C or Rust.
func checkBlockComments(t *testing.T, p string) error {
	raw, err := os.ReadFile(p)
	if err != nil || bytes.Contains(raw, []byte("automatically generated")) {
		return err
	}
	within := false // a comment that began on an earlier line
	for i, line := range strings.Split(strings.ReplaceAll(string(raw), "\t", "    "), "\n") {
		begins := strings.HasPrefix(strings.TrimSpace(line), "/*")
		comment := within || begins || strings.HasPrefix(strings.TrimSpace(line), "//")
		if n := utf8.RuneCountInString(line); comment && n > commentColumns && !strings.Contains(line, "://") {
			t.Errorf("%s:%d: a comment of %d columns (limit %d)", p, i+1, n, commentColumns)
		}
		within = (within || begins) && !strings.Contains(line, "*/")
	}
	return nil
}

// fixedTimeout is a bound of timeout(1) that is the same on every machine.
var fixedTimeout = regexp.MustCompile(`"timeout", "[0-9]`)

// TestTimeouts: what tests of nodes bound by timeout(1) has HEDDLE_PATIENCE (testutil.Seconds).
// Those of test/k8s run on no emulated machine.
func TestTimeouts(t *testing.T) {
	paths, err := filepath.Glob("test/*/*_test.go")
	if err != nil || len(paths) < 50 {
		t.Fatalf("%d files of tests, %v", len(paths), err)
	}
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if found := fixedTimeout.Find(raw); found != nil && !strings.HasPrefix(path, "test/k8s/") {
			t.Errorf("%s: %s...: want testutil.Seconds, which is longer on a slow machine", path, found)
		}
	}
}

// TestSizes keeps functions and files readable.
func TestSizes(t *testing.T) {
	for _, s := range sources(t) {
		if n := len(s.text) - 1; n > maxFile {
			t.Errorf("%s has %d lines; split it by what it is about (limit %d)", s.path, n, maxFile)
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := s.fset.Position(f.End()).Line - s.fset.Position(f.Pos()).Line; n > maxFunction {
				t.Errorf("%s: %s has %d lines (limit %d)", s.path, f.Name.Name, n, maxFunction)
			}
		}
	}
}
