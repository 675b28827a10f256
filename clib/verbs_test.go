// Package clib_test looks at the library that stands in for libibverbs.so.1: what it exports, what
// it needs and what it does not do.
package clib_test

import (
	"debug/elf"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// library is the library as `make build` made it.
func library(t *testing.T) string {
	t.Helper()
	bin := os.Getenv("HEDDLE_BIN")
	if bin == "" {
		bin = "../bin"
	}
	path := filepath.Join(bin, "libheddle-verbs.so")
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("run `make build`: %v", err)
	}
	return path
}

// debian is the library of the package libibverbs1.
func debian(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("dpkg", "-L", "libibverbs1").Output()
	if err != nil {
		t.Fatalf("list files of libibverbs1: %v", err)
	}
	for _, path := range strings.Fields(string(out)) {
		if filepath.Base(path) == "libibverbs.so.1" {
			return path
		}
	}
	t.Fatal("the package libibverbs1 has no libibverbs.so.1")
	return ""
}

// exported gives the names with their versions ("ibv_alloc_pd@@IBVERBS_1.1", @ for one that is not
// the default) and the kinds of what a library exports.
func exported(t *testing.T, path string) map[string]elf.SymType {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]elf.SymType{}
	for _, s := range symbols {
		if s.Section == elf.SHN_UNDEF || elf.ST_BIND(s.Info) == elf.STB_LOCAL || s.Version == "" || s.Section == elf.SHN_ABS {
			continue
		}
		mark := "@@"
		if s.VersionIndex.IsHidden() {
			mark = "@"
		}
		out[s.Name+mark+s.Version] = elf.ST_TYPE(s.Info)
	}
	return out
}

// TestExportsAll: what Debian's library exports is exported, with the same version and kind:
// programs and the drivers of cards are linked with all of it when they start.
func TestExportsAll(t *testing.T) {
	want, have := exported(t, debian(t)), exported(t, library(t))
	if len(want) < 150 {
		t.Fatalf("only %d symbols of Debian's library were read", len(want))
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if have[name] != want[name] {
			t.Errorf("%s is of kind %v, want %v", name, have[name], want[name])
		}
	}
}

// TestExportsPrivate: of drivers' symbols there are all under the names that other releases have
// for the private version.
func TestExportsPrivate(t *testing.T) {
	have := exported(t, library(t))
	for name := range have {
		base, ok := strings.CutSuffix(name, "@@IBVERBS_PRIVATE_34")
		if !ok {
			continue
		}
		for _, version := range []string{"22", "25", "33", "57", "59", "64", "65"} {
			other := strings.Replace(base, "verbs_register_driver_34", "verbs_register_driver_"+version, 1) + "@IBVERBS_PRIVATE_" + version
			if have[other] != have[name] {
				t.Errorf("%s is of kind %v, want %v", other, have[other], have[name])
			}
		}
	}
}

// TestNeeds: the library needs these functions of the process's C library, in no certain version,
// so that it loads under any; and it does nothing when it is loaded.
func TestNeeds(t *testing.T) {
	f, err := elf.Open(library(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if needed, err := f.ImportedLibraries(); err != nil || len(needed) > 0 {
		t.Errorf("needs %v, %v", needed, err)
	}
	if soname, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(soname, []string{"libibverbs.so.1"}) {
		t.Errorf("is called %v, %v", soname, err)
	}
	symbols, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	may := []string{"__errno_location", "calloc", "dl_iterate_phdr", "free", "getauxval", "getenv", "memcmp", "memcpy", "memset", "recv", "strlen", "syscall"}
	for _, s := range symbols {
		if !slices.Contains(may, s.Name) || s.Version != "" {
			t.Errorf("imports %s, version %q", s.Name, s.Version)
		}
	}
	for _, tag := range []elf.DynTag{elf.DT_INIT, elf.DT_INIT_ARRAY, elf.DT_FINI, elf.DT_FINI_ARRAY, elf.DT_VERNEED} {
		if values, err := f.DynValue(tag); err != nil || len(values) > 0 {
			t.Errorf("has %v: %v, %v", tag, values, err)
		}
	}
}

// read gives a file's text.
func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// between gives what stands between two marks.
func between(t *testing.T, text, from, to string) string {
	t.Helper()
	_, text, found := strings.Cut(text, from)
	text, _, ended := strings.Cut(text, to)
	if !found || !ended {
		t.Fatalf("there is no %q up to %q", from, to)
	}
	return text
}

// unsupported gives the functions of the verbs API that answer EOPNOTSUPP: those that the library
// exports so, and those that verbs.h answers itself because an operation of the context is not set.
func unsupported(t *testing.T) []string {
	var out []string
	rows := between(t, read(t, "verbs/unsupported.c"), "#define PUBLIC_NAMES(ROW)", "/*")
	for _, m := range regexp.MustCompile(`ROW\((\w+),`).FindAllStringSubmatch(rows, -1) {
		out = append(out, m[1])
	}
	device := read(t, "verbs/device.c")
	set := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?:v->|\s\.)(\w+) = `).FindAllStringSubmatch(device, -1) {
		set[m[1]] = true
	}
	header := read(t, "/usr/include/infiniband/verbs.h")
	for _, name := range []string{"ibv_context_ops", "verbs_context"} {
		operations := between(t, header, "\nstruct "+name+" {", "\n};")
		for _, m := range regexp.MustCompile(`\(\*\s*(\w+)\)\s*\(`).FindAllStringSubmatch(operations, -1) {
			if !set[m[1]] && !strings.HasPrefix(m[1], "_compat_") && !strings.HasPrefix(m[1], "ABI_") {
				out = append(out, "ibv_"+strings.TrimPrefix(m[1], "ibv_"))
			}
		}
	}
	slices.Sort(out)
	return out
}

// TestUnsupportedIsDocumented: docs/howto/rdma-library.md lists what answers EOPNOTSUPP, all of it and
// nothing else.
func TestUnsupportedIsDocumented(t *testing.T) {
	page := between(t, read(t, "../docs/howto/rdma-library.md"), "<!-- unsupported -->", "<!-- end -->")
	var listed []string
	for _, m := range regexp.MustCompile("`(ibv_\\w+)`").FindAllStringSubmatch(page, -1) {
		listed = append(listed, m[1])
	}
	slices.Sort(listed)
	if want := unsupported(t); !slices.Equal(listed, want) {
		t.Errorf("docs/howto/rdma-library.md lists other functions than those that answer EOPNOTSUPP, which are:\n%s", fmt.Sprintf("`%s`", strings.Join(want, "`, `")))
	}
}
