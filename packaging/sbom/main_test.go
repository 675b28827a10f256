package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// uPlotSum is the SHA-256 of uPlot.esm.js in version uPlot, as its authors publish it.
const uPlotSum = "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba"

// crates are lines as cargo prints them.
const crates = "heddle-rdma v0.1.0 (/src/rust/heddle-rdma)|\nlibc v0.2.191|MIT OR Apache-2.0\n\nbitflags v2.10.0 (proc-macro)|MIT OR Apache-2.0\nlibc v0.2.191|MIT OR Apache-2.0\n"

func TestSBOM(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var first, second bytes.Buffer
	for _, out := range []*bytes.Buffer{&first, &second} {
		if err := write(out, "heddle", "1.2.3", []string{self}, strings.NewReader(crates)); err != nil {
			t.Fatal(err)
		}
	}
	if first.String() != second.String() {
		t.Error("the same input gives other bytes")
	}
	var document struct {
		BOMFormat string
		Metadata  struct {
			Component struct{ Name, Version string }
		}
		Components []struct{ Purl string }
	}
	if err := json.Unmarshal(first.Bytes(), &document); err != nil {
		t.Fatal(err)
	}
	if document.BOMFormat != "CycloneDX" || document.Metadata.Component.Name != "heddle" || document.Metadata.Component.Version != "1.2.3" {
		t.Errorf("it is of %+v", document.Metadata.Component)
	}
	var got []string
	for _, c := range document.Components {
		got = append(got, c.Purl)
	}
	for _, want := range []string{"pkg:cargo/libc@0.2.191", "pkg:cargo/bitflags@2.10.0", "pkg:npm/uplot@" + uPlot} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is not in it: %q", want, got)
		}
	}
	for _, prefix := range []string{"pkg:golang/std@1.", "pkg:golang/github.com/CycloneDX/cyclonedx-go@v"} {
		if !slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, prefix) }) {
			t.Errorf("nothing begins with %s: %q", prefix, got)
		}
	}
	if strings.Contains(first.String(), "heddle-rdma") || strings.Contains(first.String(), "/src/") {
		t.Error("crates of the repository are in it")
	}
}

func TestSBOMRefuses(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := t.TempDir() + "/text"
	if err := os.WriteFile(text, []byte("no program"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ program, crates, want string }{
		{text, crates, text}, {self, "", "list of crates: it is empty"}, {self, "libc\n", "want NAME vVERSION|LICENSE"},
	} {
		if err := write(&bytes.Buffer{}, "heddle", "1", []string{c.program}, strings.NewReader(c.crates)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q, %q: %v, want %q", c.program, c.crates, err, c.want)
		}
	}
}

func TestUPlotIsThatVersion(t *testing.T) {
	text, err := os.ReadFile("../../internal/ui/assets/vendor/uplot.js")
	if err != nil {
		t.Fatal(err)
	}
	if sum := fmt.Sprintf("%x", sha256.Sum256(text)); sum != uPlotSum {
		t.Errorf("it is not uPlot %s: set the version that it is, and its sum %s", uPlot, sum)
	}
}
