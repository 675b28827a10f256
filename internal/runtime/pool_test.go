package runtime

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const pooled = `{"annotations":{"io.heddle.endpoint":"a","io.heddle.socket-pool":"true"},"process":{"env":[%s]},
	"mounts":[{"destination":"/proc","type":"proc"},{"destination":"/dev","type":"tmpfs"}],"linux":{"namespaces":[{"type":"network"}]}}`

func TestAddPool(t *testing.T) {
	library := filepath.Join(t.TempDir(), poolFile)
	if err := os.WriteFile(library, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for have, want := range map[string]string{
		``:                                       `["LD_PRELOAD=/dev/heddle-pool.so"]`,
		`"LD_PRELOAD=/dev/heddle-pool.so:/x.so"`: `["LD_PRELOAD=/dev/heddle-pool.so:/x.so"]`,
		`"A=1","LD_PRELOAD=/x.so"`:               `["A=1","LD_PRELOAD=/x.so:/dev/heddle-pool.so"]`,
		`"LD_PRELOAD=","LD_PRELOADER=1"`:         `["LD_PRELOAD=/dev/heddle-pool.so","LD_PRELOADER=1"]`,
	} {
		config, err := decodeConfig("c", []byte(strings.Replace(pooled, "%s", have, 1)))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := inject(config, injections, target{intercepted: true}, []string{"/nowhere", filepath.Dir(library)}); err != nil {
			t.Fatal(err)
		}
		env, _ := json.Marshal(config["process"].(object)["env"])
		if string(env) != want {
			t.Errorf("env %s became %s, want %s", have, env, want)
		}
		mounts := config["mounts"].([]any)
		last := mounts[len(mounts)-1].(object)
		if len(mounts) != 3 || last["source"] != library || last["destination"] != poolInContainer {
			t.Errorf("mounts %v", mounts)
		}
	}
}

func TestAddPoolRefuses(t *testing.T) {
	library := filepath.Join(t.TempDir(), poolFile)
	if err := os.WriteFile(library, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	whole := strings.Replace(pooled, "%s", "", 1)
	for _, c := range []struct{ config, dir, want string }{
		{strings.Replace(whole, `"io.heddle.socket-pool":"true"`, `"io.heddle.socket-pool":"yes"`, 1), filepath.Dir(library), `want "true" or "false"`},
		{whole, library + "x", "is not installed"},
		{strings.Replace(whole, `"type":"tmpfs"`, `"type":"bind"`, 1), filepath.Dir(library), "/dev is no tmpfs"},
	} {
		config, err := decodeConfig("c", []byte(c.config))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := inject(config, injections, target{intercepted: true}, []string{c.dir}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.config, err, c.want)
		}
	}
	for _, config := range []string{`{}`, strings.Replace(whole, `"io.heddle.socket-pool":"true"`, `"io.heddle.socket-pool":"false"`, 1)} {
		c, err := decodeConfig("c", []byte(config))
		if err != nil {
			t.Fatal(err)
		}
		before, _ := json.Marshal(c)
		_, _, err = inject(c, injections, target{intercepted: true}, nil)
		if after, _ := json.Marshal(c); err != nil || string(after) != string(before) {
			t.Errorf("%s became %s, %v", before, after, err)
		}
	}
}
