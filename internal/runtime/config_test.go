package runtime

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func bundle(t testing.TB, config string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o640); err != nil {
		t.Fatal(err)
	}
	return dir
}

func read(t testing.TB, dir string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEditBundleKeepsWhatItDoesNotKnow(t *testing.T) {
	dir := bundle(t, `{"ociVersion":"1.0.2","x-future":{"n":18446744073709551615,"f":1.50,"s":"<&>","z":null},
		"annotations":{"io.heddle.endpoint":"n1/c1"},
		"linux":{"namespaces":[{"type":"pid"},{"type":"network"}],"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],"flags":["SECCOMP_FILTER_FLAG_LOG"],
		"syscalls":[{"names":["reboot"],"action":"SCMP_ACT_ERRNO","errnoRet":1,"x-why":"no"}]}}}`)
	changed, _, _, err := EditBundle(dir, "", false, false)
	if err != nil || !changed {
		t.Fatalf("EditBundle = %v, %v", changed, err)
	}
	text := read(t, dir)
	for _, want := range []string{`"n": 18446744073709551615`, `"f": 1.50`, `"<&>"`, `"z": null`, `"x-why": "no"`, `"SECCOMP_FILTER_FLAG_LOG"`, `"SCMP_ARCH_X86_64"`, `"type": "pid"`, `"listenerPath": "/run/heddle/seccomp.sock"`, `"listenerMetadata": "n1/c1"`} {
		if !strings.Contains(text, want) {
			t.Errorf("config.json lacks %s:\n%s", want, text)
		}
	}
	if info, _ := os.Stat(filepath.Join(dir, "config.json")); info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, want 0640", info.Mode())
	}
	if changed, _, _, err := EditBundle(dir, "", false, false); changed || err != nil {
		t.Errorf("second EditBundle = %v, %v: want an edited file left alone", changed, err)
	}
	if read(t, dir) != text {
		t.Error("second EditBundle changed the file")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".config*")); len(left) > 0 {
		t.Errorf("files left behind: %v", left)
	}
}

func TestEditBundleWithoutProfile(t *testing.T) {
	for _, config := range []string{
		`{"annotations":{"io.heddle.endpoint":"a"},"linux":{"namespaces":[{"type":"network"}]}}`,
		`{"annotations":{"io.heddle.endpoint":"a","io.heddle.seccomp-socket":"/x"},"linux":{"namespaces":[{"type":"network"}],"seccomp":null}}`,
	} {
		dir := bundle(t, config)
		if changed, _, _, err := EditBundle(dir, "/run/other.sock", false, false); !changed || err != nil {
			t.Fatalf("EditBundle = %v, %v", changed, err)
		}
		c, err := readConfig(filepath.Join(dir, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		p := c["linux"].(object)["seccomp"].(object)
		if p["listenerPath"] != "/run/other.sock" {
			t.Errorf("listenerPath %v, want the caller's", p["listenerPath"])
		}
		if a, ok := p["architectures"].([]any); !ok || len(a) < 2 {
			t.Errorf("architectures %v: 32-bit programs would be killed", p["architectures"])
		}
	}
}

func TestEditBundleLeavesOthersAlone(t *testing.T) {
	for _, config := range []string{
		`{}`, `{"annotations":null}`, `{"annotations":{"other":"x"},"linux":7}`,
		`{"annotations":{"io.heddle.endpoint":"a"},"linux":{"namespaces":[{"type":"network"}],"seccomp":{"defaultAction":"SCMP_ACT_ERRNO"}}}`, // no sockets at all
	} {
		dir := bundle(t, config)
		if changed, _, _, err := EditBundle(dir, "", false, false); changed || err != nil {
			t.Errorf("%s: EditBundle = %v, %v", config, changed, err)
		}
		if read(t, dir) != config {
			t.Errorf("%s became %s", config, read(t, dir))
		}
	}
}

func TestEditBundleRefuses(t *testing.T) {
	const annotated = `"annotations":{"io.heddle.endpoint":"a"}`
	for _, c := range []struct{ name, config, want string }{
		{"empty", ``, "line 1"},
		{"broken", "{\n\"a\":1,\n]}", "line 3"},
		{"trailing", `{} {}`, "after the configuration"},
		{"list", `[]`, "want an object"},
		{"annotations", `{"annotations":[]}`, "annotations: want an object"},
		{"endpoint type", `{"annotations":{"io.heddle.endpoint":1}}`, "annotations.io.heddle.endpoint"},
		{"endpoint empty", `{"annotations":{"io.heddle.endpoint":""}}`, "annotations.io.heddle.endpoint"},
		{"socket relative", `{"annotations":{"io.heddle.endpoint":"a","io.heddle.seccomp-socket":"x"},"linux":{"namespaces":[{"type":"network"}]}}`, "io.heddle.seccomp-socket"},
		{"socket type", `{"annotations":{"io.heddle.endpoint":"a","io.heddle.seccomp-socket":{}},"linux":{"namespaces":[{"type":"network"}]}}`, "io.heddle.seccomp-socket"},
		{"intercept", `{"annotations":{"io.heddle.intercept":"no"}}`, "io.heddle.intercept"},
		{"intercept type", `{"annotations":{"io.heddle.intercept":false}}`, "io.heddle.intercept"},
		{"linux", `{` + annotated + `,"linux":3}`, "linux: want an object"},
		{"seccomp", `{` + annotated + `,"linux":{"namespaces":[{"type":"network"}],"seccomp":"unconfined"}}`, "linux.seccomp: want an object"},
		{"listener", `{` + annotated + `,"linux":{"namespaces":[{"type":"network"}],"seccomp":{"listenerPath":"/o","defaultAction":"SCMP_ACT_ALLOW"}}}`, "linux.seccomp.listenerPath"},
		{"listener's metadata", `{` + annotated + `,"linux":{"namespaces":[{"type":"network"}],"seccomp":{"listenerPath":"/run/heddle/seccomp.sock","listenerMetadata":"b","defaultAction":"SCMP_ACT_ALLOW"}}}`, "linux.seccomp.listenerPath"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := bundle(t, c.config)
			_, _, _, err := EditBundle(dir, "", false, false)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), dir) {
				t.Errorf("error %v, want one naming the file and %q", err, c.want)
			}
			if read(t, dir) != c.config {
				t.Error("the file was changed")
			}
		})
	}
	if _, _, _, err := EditBundle(t.TempDir(), "", false, false); err == nil || !strings.Contains(err.Error(), "--bundle") {
		t.Errorf("no config.json: %v", err)
	}
}

func FuzzAddListener(f *testing.F) {
	f.Add(`{"annotations":{"io.heddle.endpoint":"a"},"linux":{"namespaces":[{"type":"network"}],"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["socket"],"action":"SCMP_ACT_ERRNO","args":[{"index":0,"op":"SCMP_CMP_EQ","value":2}]}]}}}`)
	f.Fuzz(func(t *testing.T, text string) {
		c, err := decodeConfig("config.json", []byte(text))
		if err != nil {
			return
		}
		to, err := targetOf(c, "/bundle", "/s")
		if err != nil {
			return
		}
		changed, _, err := edit(c, &to, false)
		if err != nil || !changed {
			return
		}
		out, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeConfig("config.json", out)
		if err != nil {
			t.Fatal(err)
		}
		if to, err = targetOf(again, "/bundle", "/s"); err != nil {
			t.Fatal(err)
		}
		if changed, _, err := edit(again, &to, false); changed || err != nil {
			t.Fatalf("second edit of %s: %v, %v", out, changed, err)
		}
	})
}

// TestEditBundleOfLateNetwork: Docker and nerdctl name no endpoint and no namespace; their hooks say
// that there may be one.
func TestEditBundleOfLateNetwork(t *testing.T) {
	const hook = `"hooks":{"prestart":[{"path":"/proc/1/exe","args":["libnetwork-setkey","-exec-root=/var/run/docker","0123","4567"]}]}`
	const nerdctl = `"hooks":{"createRuntime":[{"path":"/n","args":["/n","--data-root=/d","internal","oci-hook","createRuntime"]}],"poststop":[]}`
	for config, want := range map[string]bool{
		`{` + hook + `,"linux":{"namespaces":[{"type":"network"}]}}`:                                                          true,
		`{` + nerdctl + `,"linux":{"namespaces":[{"type":"network"}]}}`:                                                       true,
		`{` + hook + `,"linux":{"namespaces":[{"type":"pid"}]}}`:                                                              false, // --network host
		`{"hooks":{"prestart":[{"path":"/x","args":["other"]},{"path":"/y"},7]},"linux":{"namespaces":[{"type":"network"}]}}`: false,
		`{"hooks":[],"linux":{"namespaces":[{"type":"network"}]}}`:                                                            false,
	} {
		dir := bundle(t, config)
		changed, _, _, err := EditBundle(dir, "", false, false)
		if changed != want || err != nil {
			t.Errorf("%s: EditBundle = %v, %v", config, changed, err)
		}
		if want && !strings.Contains(read(t, dir), `"listenerMetadata": "`+model.EndpointByNetns+`"`) {
			t.Errorf("%s became %s", config, read(t, dir))
		}
	}
}

func TestDefaultAnnotations(t *testing.T) {
	for list, want := range map[string]string{
		"":                                 `{"io.heddle.verbs":"false"}`,
		"io.heddle.verbs=true,io.heddle.a": "",
		"PATH=/bin":                        "",
		"io.heddle.verbs=true,io.heddle.verbs-spin-us=5": `{"io.heddle.verbs":"false","io.heddle.verbs-spin-us":"5"}`,
	} {
		config := object{"annotations": object{"io.heddle.verbs": "false"}}
		without, err := defaultAnnotations(config, list, injections, nil)
		if got, _ := json.Marshal(config["annotations"]); want != "" && (err != nil || string(got) != want || without != nil) {
			t.Errorf("%q: %s, %v, %v", list, got, without, err)
		}
		if want == "" && (err == nil || !strings.Contains(err.Error(), EnvAnnotations+": ")) {
			t.Errorf("%q: %v", list, err)
		}
	}
}

// TestDefaultAnnotationsThatDoNotFit: a container for which nobody has asked for a library starts
// without it, and it is said; one whose annotation asks does not start.
func TestDefaultAnnotationsThatDoNotFit(t *testing.T) {
	dir := installed(t)
	for _, c := range []struct {
		mounts string
		dirs   []string
		why    string
	}{
		{`[{"destination":"/dev","type":"tmpfs"}]`, []string{dir}, ""},
		{`[{"destination":"/dev","type":"bind"}]`, []string{dir}, "/dev is no tmpfs"},
		{`[{"destination":"/dev","type":"tmpfs"},{"destination":"/dev/heddle-card.so","type":"bind","source":"/x"}]`, []string{dir}, "mounts[1]"},
		{`[{"destination":"/dev","type":"tmpfs"}]`, []string{"/nowhere"}, "libheddle-card.so is not installed"},
	} {
		config, err := decodeConfig("c", []byte(`{"mounts":`+c.mounts+`}`))
		if err != nil {
			t.Fatal(err)
		}
		without, err := defaultAnnotations(config, card.annotation+"=true,io.heddle.other=true", []injection{card}, c.dirs)
		if err != nil {
			t.Fatal(err)
		}
		annotations := config["annotations"].(object)
		given := annotations[card.annotation] == "true"
		if given != (c.why == "") || given != (without == nil) || annotations["io.heddle.other"] != "true" {
			t.Errorf("%s: %v without %v", c.mounts, annotations, without)
		}
		if without != nil && (!strings.Contains(without[0].why, c.why) || !strings.Contains(without[0].why, card.annotation+" of "+EnvAnnotations)) {
			t.Errorf("%s: %s", c.mounts, without[0].why)
		}
		config["annotations"] = object{card.annotation: "true"}
		_, _, err = inject(config, []injection{card}, target{socket: "/s"}, c.dirs)
		if (err == nil) != (c.why == "") {
			t.Errorf("%s, asked for: %v", c.mounts, err)
		}
	}
}
