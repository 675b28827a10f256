package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/version"
)

func TestVersionTellsOfAgents(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	startAgent(t, socket, "n1")
	out, err := runInspect(t, newVersionCmd(), "--api", socket, "--output", "json")
	var b build
	if jerr := json.Unmarshal([]byte(out), &b); err != nil || jerr != nil {
		t.Fatalf("version as JSON: %s (%v, %v)", out, err, jerr)
	}
	if b.Version != version.String() || b.Least == "" || b.Kernel == "" || len(b.Agents) != 1 || b.Agents[0].Node != "n1" {
		t.Errorf("version: %+v", b)
	}
	out, err = runInspect(t, newVersionCmd(), "--api", socket)
	if err != nil || !strings.Contains(out, "agent of n1") || !strings.Contains(out, "another build") {
		t.Errorf("of an agent of another version: %s (%v)", out, err)
	}
	if out, err = runInspect(t, newVersionCmd(), "--api", socket+".none"); err == nil || !strings.Contains(out, b.Least) {
		t.Errorf("of an agent that is named and does not run: %s (%v)", out, err)
	}
}

func TestVersionNeedsNoAgent(t *testing.T) {
	var out strings.Builder
	b := build{Version: "1.2.3", Go: "go1.25", Platform: "linux/arm64", Least: "5.17", Kernel: "6.1.0", NoAgent: "no agent on SOCKET"}
	if err := printBuild(&out, b); err != nil {
		t.Fatal(err)
	}
	const want = "heddle  1.2.3, go1.25, linux/arm64\n" +
		"kernel  6.1.0; an agent needs 5.17 or later, or what `heddle doctor` probes for brought to an earlier one\n" +
		"agent   no agent on SOCKET\n"
	if out.String() != want {
		t.Errorf("version:\n%s\nwant:\n%s", out.String(), want)
	}
}
