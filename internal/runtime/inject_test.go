package runtime

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// card is an injection as a plane with devices has one.
var card = injection{
	annotation: "io.heddle.card",
	libraries:  []library{{"libheddle-card.so", "/dev/heddle-card.so"}},
	env:        []string{"CARD=heddle0"},
	binds:      []bind{{source: func(to target) string { return filepath.Join(to.dir(), to.endpoint+".sock") }, at: "/dev/heddle-card.sock", writable: true}},
	devices:    []device{{"/dev/cards/card0", 1, 3}},
}

const carded = `{"annotations":{"io.heddle.card":"true"},"process":{"env":["A=1"]},"mounts":[{"destination":"/proc","type":"proc"},{"destination":"/dev","type":"tmpfs"}],
	"linux":{"devices":[{"path":"/dev/fuse","type":"c","major":10,"minor":229}],"resources":{"devices":[{"allow":false,"access":"rwm"}]}}}`

// installed gives a directory with card's library.
func installed(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libheddle-card.so"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestInject: every kind of thing is added where the real runtime looks for it, after what the
// bundle has.
func TestInject(t *testing.T) {
	dir := installed(t)
	config, err := decodeConfig("c", []byte(carded))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := inject(config, []injection{socketPool, card}, target{socket: "/run/heddle/seccomp.sock", endpoint: "n1-c1"}, []string{"/nowhere", dir}); err != nil {
		t.Fatal(err)
	}
	// A bundle that was copied from this one has everything, and gets nothing twice.
	before, _ := json.Marshal(config["mounts"])
	nodes, _ := json.Marshal(config["linux"])
	for _, again := range []error{addBind(config, card.binds[0], target{socket: "/run/heddle/seccomp.sock", endpoint: "n1-c1"}), addDevice(config, card.devices[0])} {
		if again != nil {
			t.Error(again)
		}
	}
	mountsAfter, _ := json.Marshal(config["mounts"])
	nodesAfter, _ := json.Marshal(config["linux"])
	if string(mountsAfter) != string(before) || string(nodesAfter) != string(nodes) {
		t.Errorf("added again: %s %s", mountsAfter, nodesAfter)
	}
	linux := config["linux"].(object)
	for what, c := range map[string]struct {
		have any
		want string
	}{
		"environment": {config["process"].(object)["env"], `["A=1","LD_PRELOAD=/dev/heddle-card.so","CARD=heddle0"]`},
		"mounts": {config["mounts"].([]any)[2:], `[{"destination":"/dev/heddle-card.sock","options":["bind","private","nosuid","nodev"],"source":"/run/heddle/n1-c1.sock","type":"bind"},` +
			`{"destination":"/dev/heddle-card.so","options":["bind","ro","private","nosuid","nodev"],"source":"` + dir + `/libheddle-card.so","type":"bind"}]`},
		"devices": {linux["devices"].([]any)[1:], `[{"fileMode":438,"gid":0,"major":1,"minor":3,"path":"/dev/cards/card0","type":"c","uid":0}]`},
		"rules":   {linux["resources"].(object)["devices"], `[{"access":"rwm","allow":false},{"access":"rw","allow":true,"major":1,"minor":3,"type":"c"}]`},
	} {
		if got, err := json.Marshal(c.have); err != nil || string(got) != c.want {
			t.Errorf("%s: %s, %v\nwant %s", what, got, err, c.want)
		}
	}
}

// TestInjectRefuses: what cannot be added is named, with what to do.
func TestInjectRefuses(t *testing.T) {
	dir := installed(t)
	for _, c := range []struct{ old, new, want string }{
		{`"true"`, `"maybe"`, `annotations.io.heddle.card: maybe: want "true" or "false"`},
		{`"true"`, `true`, `annotations.io.heddle.card: true: want "true" or "false"`},
		{`,{"destination":"/dev","type":"tmpfs"}`, ``, "/dev is no tmpfs"},
		{`"type":"tmpfs"`, `"type":"bind"`, "/dev is no tmpfs"},
		{`{"destination":"/proc"`, `{"destination":"/dev/heddle-card.sock","type":"bind"},{"destination":"/proc"`, "mounts[0]: the bundle has something at /dev/heddle-card.sock itself"},
		{`{"destination":"/proc"`, `{"destination":"/dev//cards/card0/","type":"bind"},{"destination":"/proc"`, "mounts[0]: the bundle has something at /dev/cards/card0 itself"},
		{`"/dev/fuse"`, `"/dev/cards/card0"`, "linux.devices[0]: the bundle has something at /dev/cards/card0 itself"},
		{`"A=1"`, `"CARD=mine"`, `process.env[0]: CARD is to be "CARD=heddle0"`},
		{`"env":["A=1"]`, `"env":"A=1"`, "process.env: want a list"},
		{`"linux":{`, `"linux":{"x":1,`, ""},
	} {
		config, err := decodeConfig("c", []byte(strings.Replace(carded, c.old, c.new, 1)))
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = inject(config, []injection{card}, target{}, []string{dir})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s instead of %s: %v, want %q", c.new, c.old, err, c.want)
		}
	}
	config, _ := decodeConfig("c", []byte(carded))
	if _, _, err := inject(config, []injection{card}, target{}, []string{"/nowhere"}); err == nil || !strings.Contains(err.Error(), "libheddle-card.so is not installed") {
		t.Errorf("without the library: %v", err)
	}
}

// TestInjectRuns: a container has the device and the socket, and may use them.
func TestInjectRuns(t *testing.T) {
	c := newContainer(t, `"io.heddle.card":"true"`, ``)
	listener, err := net.Listen("unix", filepath.Join(c.bundle, "c1.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	path := filepath.Join(c.bundle, "config.json")
	config, err := readConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	without := card
	without.libraries = nil // there is none to be loaded
	if _, _, err := inject(config, []injection{without}, target{socket: filepath.Join(c.bundle, "s"), endpoint: "c1"}, nil); err != nil {
		t.Fatal(err)
	}
	config["process"].(object)["args"] = []any{"/bin/sh", "-c", `echo x > /dev/cards/card0 && test -c /dev/cards/card0 && test -S /dev/heddle-card.sock && echo "$CARD works"`}
	if err := writeConfig(path, config); err != nil {
		t.Fatal(err)
	}
	if out, err := c.runc("", "run", "--bundle", c.bundle, c.id); err != nil || strings.TrimSpace(out) != "heddle0 works" {
		t.Errorf("%v: %s", err, out)
	}
}
