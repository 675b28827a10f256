package runtime

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/model"
)

// A container that names no endpoint is Heddle's if the agent's record has its network namespace,
// under whatever path.
func TestEndpointByNetns(t *testing.T) {
	dir := t.TempDir()
	ns, other, link := filepath.Join(dir, "ns"), filepath.Join(dir, "other"), filepath.Join(dir, "link")
	for _, f := range []string{ns, other} {
		if err := os.WriteFile(f, nil, 0o600); err != nil { // any file is as good as a namespace's here
			t.Fatal(err)
		}
	}
	if err := os.Symlink(ns, link); err != nil {
		t.Fatal(err)
	}
	config := func(path, more string) string {
		return fmt.Sprintf(`{%s"linux":{"namespaces":[{"type":"pid"},{"type":"network"%s}]}}`, more, path)
	}
	at := func(path string) string { return fmt.Sprintf(`,"path":%q`, path) }
	record := func(intercepted bool) string {
		return fmt.Sprintf(`{"endpoints":[{"netns_path":%q,"intercepted":true},{"netns_path":%q,"intercepted":%v}]}`, filepath.Join(dir, "gone"), link, intercepted)
	}
	for name, c := range map[string]struct {
		record, config string
		all, changed   bool
		kept           string
	}{
		"an endpoint's":          {record(true), config(at(ns), ""), false, true, ""},
		"not intercepted":        {record(false), config(at(ns), ""), false, false, ""},
		"another":                {record(true), config(at(other), ""), false, false, ""},
		"gone":                   {record(true), config(at(filepath.Join(dir, "gone")), ""), false, false, ""},
		"none":                   {record(true), `{"linux":{}}`, true, false, ""},
		"the node's":             {record(true), config(at("/proc/self/ns/net"), ""), true, false, ""},
		"no record":              {"", config(at(ns), ""), false, false, ""},
		"malformed record":       {"{", config(at(ns), ""), false, false, "node.json"},
		"own":                    {record(true), config("", ""), false, false, ""},
		"own, all":               {record(true), config("", ""), true, true, ""},
		"another, all":           {record(true), config(at(other), ""), true, true, ""},
		"with a capability":      {record(true), config(at(ns), `"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}},`), false, true, leftCapability},
		"with other annotations": {record(true), config(at(ns), `"annotations":{"a":"b"},`), false, true, ""},
		"opted out":              {record(true), config(at(ns), `"annotations":{"io.heddle.intercept":"false","io.heddle.endpoint":"e"},`), true, false, ""},
		"not opted out":          {record(true), config(at(ns), `"annotations":{"io.heddle.intercept":"true"},`), false, true, ""},
		"a pod's sandbox":        {record(true), config(at(ns), `"annotations":{"io.kubernetes.cri.container-type":"sandbox"},`), true, false, ""},
		"in a pod's sandbox":     {record(true), config(at(ns), `"annotations":{"io.kubernetes.cri.container-type":"container"},`), false, true, ""},
	} {
		for form, write := range map[string]func(t *testing.T, dir, record string){"": writeFiles, ", before endpoints had files": writeNode} {
			t.Run(name+form, func(t *testing.T) {
				run := t.TempDir()
				if c.record != "" {
					write(t, run, c.record)
				}
				dir := bundle(t, c.config)
				changed, kept, _, err := EditBundle(dir, filepath.Join(run, "seccomp.sock"), c.all, false)
				if err != nil || changed != c.changed || !strings.Contains(kept, c.kept) || kept != "" && c.kept == "" {
					t.Fatalf("changed %v, kept %q, %v", changed, kept, err)
				}
				if has := strings.Contains(read(t, dir), `"listenerMetadata": "@netns"`); has != (c.changed && c.kept == "") {
					t.Errorf("listener %v:\n%s", has, read(t, dir))
				}
				if again, _, _, err := EditBundle(dir, filepath.Join(run, "seccomp.sock"), c.all, false); again || err != nil {
					t.Errorf("second edit: changed %v, %v", again, err)
				}
			})
		}
	}
}

// writeNode writes a record as agents did that had one file for all endpoints.
func writeNode(t *testing.T, dir, record string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, endpointfile.Node), []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
}

// writeFiles writes the same as agents do; what is no record is the node's.
func writeFiles(t *testing.T, dir, record string) {
	t.Helper()
	var r struct {
		Endpoints []model.Endpoint `json:"endpoints"`
	}
	if json.Unmarshal([]byte(record), &r) != nil {
		writeNode(t, dir, record)
		return
	}
	writeNode(t, dir, "{}")
	files := endpointfile.In(dir)
	for i, e := range r.Endpoints {
		raw, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		var inode uint64
		if info, err := os.Stat(e.NetnsPath); err == nil {
			inode = info.Sys().(*syscall.Stat_t).Ino
		}
		if err := files.Put(model.EndpointID(i+1), inode, raw); err != nil {
			t.Fatal(err)
		}
	}
}
