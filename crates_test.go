package heddle_test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// crate is one crate of others: a version of it, with what rust/crates.toml says about it.
type crate struct{ licence, used, why string }

// TestCrates holds the Rust workspace to the crates that were reviewed: rust/crates.toml says
// which, and what this cannot know.
func TestCrates(t *testing.T) {
	reviewed := reviewedCrates(t)
	locked := map[string]bool{}
	for _, file := range []string{"rust/Cargo.lock", "rust/shared-ring/fuzz/Cargo.lock", "rust/verbs-protocol/fuzz/Cargo.lock", "rust/heddle-stack/fuzz/Cargo.lock"} {
		for _, name := range lockedCrates(t, file) {
			locked[name] = true
			if _, ok := reviewed[name]; !ok {
				t.Errorf("%s names %s, which rust/crates.toml does not have: review it first", file, name)
			}
		}
	}
	for name, c := range reviewed {
		if !locked[name] {
			t.Errorf("rust/crates.toml has %s, which no lock file names", name)
		}
		if c.licence == "" || c.why == "" || !slices.Contains([]string{"ships", "models", "fuzz", "elsewhere"}, c.used) {
			t.Errorf("rust/crates.toml does not say licence, use and reason of %s: %+v", name, c)
		}
	}
	ships := compiledCrates(t, "")
	models := compiledCrates(t, "--cfg loom")
	maps.DeleteFunc(models, func(name, _ string) bool { return ships[name] != "" })
	compareUse(t, reviewed, ships, "ships")
	compareUse(t, reviewed, models, "models")
}

// compareUse demands that the crates reviewed for a use are those that cargo compiles for it, with
// the same licences.
func compareUse(t *testing.T, reviewed map[string]crate, compiled map[string]string, use string) {
	t.Helper()
	for name, licence := range compiled {
		if c := reviewed[name]; c.used != use || c.licence != licence {
			t.Errorf("%s: rust/crates.toml says %q, %q; cargo says %q, %q", name, c.used, c.licence, use, licence)
		}
	}
	for name, c := range reviewed {
		if c.used == use && compiled[name] == "" {
			t.Errorf("%s: rust/crates.toml says %q, but cargo does not compile it for that", name, use)
		}
	}
}

var tomlString = regexp.MustCompile(`^(\w+) = "(.*)"$`)

// tables reads the named tables of a TOML file whose values are strings of one line; others are
// left out.
func tables(t *testing.T, file, header string) []map[string]string {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out []map[string]string
	for _, part := range strings.Split(string(raw), "[["+header+"]]\n")[1:] {
		table := map[string]string{}
		for line := range strings.Lines(part) {
			if m := tomlString.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
				table[m[1]] = m[2]
			}
		}
		out = append(out, table)
	}
	return out
}

// reviewedCrates returns what rust/crates.toml has, by name and version.
func reviewedCrates(t *testing.T) map[string]crate {
	t.Helper()
	out := map[string]crate{}
	for _, table := range tables(t, "rust/crates.toml", "crate") {
		name := table["name"] + " " + table["version"]
		if _, twice := out[name]; twice {
			t.Errorf("rust/crates.toml has %s twice", name)
		}
		out[name] = crate{table["licence"], table["used"], table["why"]}
	}
	return out
}

// lockedCrates returns the crates of others that a lock file names, by name and version: those of
// this repository have no source.
func lockedCrates(t *testing.T, file string) []string {
	t.Helper()
	var out []string
	for _, table := range tables(t, file, "package") {
		if table["source"] != "" {
			out = append(out, table["name"]+" "+table["version"])
		}
	}
	if len(out) == 0 {
		t.Fatalf("no crates in %s", file)
	}
	return out
}

// compiledCrates asks cargo which crates of others it compiles with these flags of the compiler,
// beside those of tests, and returns their licences.
func compiledCrates(t *testing.T, flags string) map[string]string {
	t.Helper()
	cargo := exec.Command("cargo", "tree", "--locked", "--edges", "normal,build", "--prefix", "none", "--no-dedupe", "--format", "{p}|{l}")
	cargo.Dir = "rust"
	cargo.Env = append(os.Environ(), "RUSTFLAGS="+flags)
	var problem strings.Builder
	cargo.Stderr = &problem
	text, err := cargo.Output()
	if err != nil {
		t.Fatalf("ask cargo for crates: %v: %s", err, problem.String())
	}
	here, err := filepath.Abs("rust")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, licence, ok := strings.Cut(strings.TrimSpace(line), "|")
		words := strings.Fields(name)
		if !ok || len(words) < 2 || strings.Contains(name, "("+here) {
			continue
		}
		out[words[0]+" "+strings.TrimPrefix(words[1], "v")] = licence
	}
	return out
}
