package runtime

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestParseArgs(t *testing.T) {
	for _, c := range []struct {
		args string
		want commandLine
	}{
		{"", commandLine{bundle: ".", logFormat: "text"}},
		{"--version", commandLine{bundle: ".", logFormat: "text"}},
		{"create x", commandLine{name: "create", bundle: ".", logFormat: "text"}},
		{"start", commandLine{name: "start", bundle: ".", logFormat: "text"}},
		{"--root=/r start x", commandLine{name: "start", root: "/r", id: "x", bundle: ".", logFormat: "text"}},
		{"--root /r --log /l --log-format json create --bundle /b --pid-file p x", commandLine{name: "create", root: "/r", bundle: "/b", log: "/l", logFormat: "json"}},
		{"--root create run -b /b x", commandLine{name: "run", root: "create", bundle: "/b", logFormat: "text"}},
		{"--debug --systemd-cgroup run -b=/b x", commandLine{name: "run", bundle: "/b", logFormat: "text"}},
		{"-root=/r -log=/l run -bundle /b x", commandLine{name: "run", root: "/r", bundle: "/b", log: "/l", logFormat: "text"}},
		{"run x --bundle /b", commandLine{name: "run", bundle: "/b", logFormat: "text"}},
		{"run --pid-file --bundle x", commandLine{name: "run", bundle: ".", logFormat: "text"}},
		{"run -d --no-pivot --bundle /a -b /b x", commandLine{name: "run", bundle: "/b", logFormat: "text"}},
		{"run x -- --bundle /b", commandLine{name: "run", bundle: ".", logFormat: "text"}},
		{"exec x prog --bundle /b", commandLine{name: "exec", bundle: ".", logFormat: "text"}},
		{"run --bundle", commandLine{name: "run", bundle: "", logFormat: "text"}},
	} {
		if got := parseArgs(strings.Fields(c.args)); got != c.want {
			t.Errorf("parseArgs(%s) = %+v, want %+v", c.args, got, c.want)
		}
	}
}

func TestFindRuntime(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "real")
	if err := os.WriteFile(real, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := FindRuntime(real); got != real || err != nil {
		t.Errorf("FindRuntime(%s) = %s, %v", real, got, err)
	}
	// A wrapper that is installed as "runc" must not find itself.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "self")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{link, filepath.Join(dir, "none")} {
		if got, err := FindRuntime(name); err == nil || !strings.Contains(err.Error(), EnvRuntime) {
			t.Errorf("FindRuntime(%s) = %s, %v", name, got, err)
		}
	}
}

func TestExecLogsWhyItFails(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	t.Setenv(EnvRuntime, "/no/such/program")
	if err := Exec([]string{"--log", log, "--log-format", "json", "state", "x"}); err == nil {
		t.Fatal("no error")
	}
	text, err := os.ReadFile(log)
	if err != nil || !strings.Contains(string(text), `"level":"error"`) || !strings.Contains(string(text), "/no/such/program") {
		t.Errorf("log: %q, %v", text, err)
	}
}
