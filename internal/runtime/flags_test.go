package runtime

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// TestFlags: a runtime that can is asked to keep signals from answered calls, beside what the
// profile or the runtime has.
func TestFlags(t *testing.T) {
	const wait, spec, log = flagWaitKillable, flagSpecAllow, "SECCOMP_FILTER_FLAG_LOG"
	const runc = `"annotations":{"org.opencontainers.runc.version":"1.5.0"},`
	supported := func(flags ...string) string {
		return `"linux":{"seccomp":{"supportedFlags":["` + strings.Join(flags, `","`) + `"]}}}`
	}
	can := supported(log, spec, wait)
	for _, c := range []struct {
		name, features string // "": the runtime does not know the question
		flags          string // of the profile, as JSON
		want           any    // afterwards
	}{
		{"runc with all", "{" + runc + can, "", []any{wait, spec}},
		{"runc that knows no other", "{" + runc + supported(wait), "", []any{wait}},
		{"runc with an old libseccomp", "{" + runc + supported(log, spec), "", nil},
		{"runc that says nothing of flags", "{" + runc + `"linux":{}}`, "", nil},
		{"runc without the question", "", "", nil},
		{"no JSON", "features of runc", "", nil},
		{"profile with flags", "{" + runc + can, `["` + log + `"]`, []any{log, wait}},
		{"profile with no flags", "{" + runc + can, `[]`, []any{wait}},
		{"profile that has it", "{" + runc + can, `["` + wait + `"]`, []any{wait}},
		{"profile with something else", "{" + runc + can, `"x"`, "x"},
		{"another runtime", "{" + can, "", nil},
		{"another runtime, profile with flags", "{" + can, `["` + log + `"]`, []any{log, wait}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(name, content string, mode os.FileMode) {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(content), mode); err != nil {
					t.Fatal(err)
				}
			}
			profile := ""
			if c.flags != "" {
				profile = `,"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","flags":` + c.flags + `}`
			}
			write("config.json", `{"process":{},"annotations":{"io.heddle.endpoint":"n1/c1"},
				"linux":{"namespaces":[{"type":"network"},{"type":"pid"},{"type":"mount"}]`+profile+`}}`, 0o600)
			write("features.json", c.features, 0o600)
			write("runtime", "#!/bin/sh\n[ \"$1\" != features ] || exec grep . "+dir+"/features.json\n", 0o700)
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(self, "create", "--bundle", dir, "id")
			socket := filepath.Join(dir, "seccomp.sock")
			cmd.Env = append(os.Environ(), envWrapper+"=1", EnvRuntime+"="+filepath.Join(dir, "runtime"), EnvSocket+"="+socket)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			config, err := readConfig(filepath.Join(dir, "config.json"))
			if err != nil {
				t.Fatal(err)
			}
			got := config["linux"].(object)["seccomp"].(object)
			if got["listenerPath"] != socket || !reflect.DeepEqual(got["flags"], c.want) {
				t.Errorf("flags %v, want %v, in %v", got["flags"], c.want, got)
			}
		})
	}
}
