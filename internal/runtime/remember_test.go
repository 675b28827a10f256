package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// runtimeCounting is a runtime that counts how often it is asked for its features; it knows one
// flag.
func runtimeCounting(t *testing.T, flag string) (program string, asked func() int) {
	t.Helper()
	dir := t.TempDir()
	program, count := filepath.Join(dir, "runtime"), filepath.Join(dir, "asked")
	script := fmt.Sprintf("#!/bin/sh\necho >>%s\necho '{\"linux\":{\"seccomp\":{\"supportedFlags\":[\"%s\"]}}}'\n", count, flag)
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return program, func() int {
		raw, _ := os.ReadFile(count)
		return strings.Count(string(raw), "\n")
	}
}

func TestKnownFeatures(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, rememberedFile)
	program, asked := runtimeCounting(t, flagWaitKillable)
	check := func(what string, wantAsked int) {
		t.Helper()
		f := knownFeatures(dir, program)
		if got := f.Linux.Seccomp.SupportedFlags; len(got) != 1 || got[0] != flagWaitKillable {
			t.Errorf("%s: flags %v", what, got)
		}
		if got := asked(); got != wantAsked {
			t.Errorf("%s: asked %d times, want %d", what, got, wantAsked)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check("the first time", 1)
	check("again", 1)
	// Another runtime is asked, and so is this one after it.
	other, otherAsked := runtimeCounting(t, "OTHER")
	if f := knownFeatures(dir, other); otherAsked() != 1 || f.Linux.Seccomp.SupportedFlags[0] != "OTHER" {
		t.Errorf("another runtime: asked %d times, %+v", otherAsked(), f)
	}
	check("after another", 2)
	// The same path with another program.
	raw, err := os.ReadFile(program)
	must(err)
	must(os.WriteFile(program+".new", append(raw, "# newer\n"...), 0o700))
	must(os.Rename(program+".new", program))
	check("upgraded", 3)
	check("upgraded, again", 3)
	// An answer of long ago, or of a time to come.
	for i, at := range []time.Time{time.Now().Add(-2 * rememberedFor), time.Now().Add(time.Hour)} {
		must(os.Chtimes(file, at, at))
		check(at.String(), 4+i)
	}
	// What is no answer.
	must(os.WriteFile(file, []byte("{"), 0o600))
	check("cut off", 6)
	must(os.Remove(file))
	must(os.Symlink(program, file))
	check("a link", 7)
	must(os.Remove(file))
	must(os.Mkdir(file, 0o700))
	check("a directory", 8)
	check("which cannot be replaced", 9)
	must(os.Remove(file))
	check("taken away", 10)
	if left, err := filepath.Glob(filepath.Join(dir, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	// Where others may write, nothing is believed and nothing kept.
	must(os.Chmod(dir, 0o777))
	check("others may write", 11)
	must(os.Remove(file))
	check("others may write, and no file", 12)
	if _, err := os.Lstat(file); err == nil {
		t.Error("kept where others may write")
	}
	if f := knownFeatures(filepath.Join(dir, "none"), program); len(f.Linux.Seccomp.SupportedFlags) != 1 {
		t.Errorf("no directory: %+v", f)
	}
	if f := knownFeatures(dir, filepath.Join(dir, "none")); len(f.Linux.Seccomp.SupportedFlags) != 0 {
		t.Errorf("no runtime: %+v", f)
	}
}

func FuzzRecall(f *testing.F) {
	f.Add([]byte(`{"runtime":"x","features":{"linux":{"seccomp":{"supportedFlags":["a"]}}}}`))
	f.Add([]byte(`{`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		file := filepath.Join(dir, rememberedFile)
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, _ = recall(file, "x", time.Now()) // it must not panic
	})
}
