package agentpod

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

func TestNodeName(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{
		"n1", "worker-17", strings.Repeat("a", 32), strings.Repeat("a", 33), strings.Repeat("a", 34), strings.Repeat("a", 253),
		"ip-10-0-1-2.eu-central-1.compute.internal", "ip-10-0-1-3.eu-central-1.compute.internal", "a.b", "a-b", "a.b.c",
		strings.Repeat("a", 20) + ".-" + strings.Repeat("b", 40),
	} {
		got := NodeName(name)
		if err := model.ValidateName("node", got); err != nil {
			t.Errorf("NodeName(%q) = %q: %v", name, got, err)
		}
		if model.ValidateName("node", name) == nil && got != name {
			t.Errorf("NodeName(%q) = %q, want it unchanged", name, got)
		}
		if seen[got] != "" {
			t.Errorf("%q and %q are both %q", name, seen[got], got)
		}
		seen[got] = name
	}
}

func FuzzNodeName(f *testing.F) {
	f.Add("a.b")
	f.Fuzz(func(t *testing.T, name string) {
		// What Kubernetes lets a node be called: a DNS subdomain.
		for _, label := range strings.Split(name, ".") {
			if label == "" || strings.Trim(label, "-") != label || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
				return
			}
		}
		if got := NodeName(name); model.ValidateName("node", got) != nil {
			t.Errorf("NodeName(%q) = %q", name, got)
		}
	})
}

// TestImageHasLibraries: what containers may ask for is in the image that `make image` makes.
func TestImageHasLibraries(t *testing.T) {
	script, err := os.ReadFile("../../packaging/build-image.sh")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(script), "for l in ")
	built, _, _ := strings.Cut(after, "; do")
	for _, l := range libraries {
		name := strings.TrimSuffix(strings.TrimPrefix(l, "libheddle-"), ".so")
		if !slices.Contains(strings.Fields(built), name) {
			t.Errorf("the image has %q, and not %s", built, l)
		}
	}
}

// node is a node's directories, and an installation from programs beside them.
func node(t *testing.T, network Network) Installation {
	t.Helper()
	dir := t.TempDir()
	i := Installation{From: filepath.Join(dir, "image"), Programs: filepath.Join(dir, "opt/heddle/bin"), CNIPrograms: filepath.Join(dir, "opt/cni/bin"),
		CNIConfig: filepath.Join(dir, "etc/cni/net.d"), Network: network, CNIVersion: "1.0.0"}
	if err := os.MkdirAll(i.CNIConfig, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"heddle", "heddle-runtime", "heddle-cni", "libheddle-verbs.so"} {
		put(t, filepath.Join(i.From, p), "program "+p)
	}
	return i
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// list reads a network's list.
func list(t *testing.T, i Installation, file string) (l struct {
	CNIVersion, Name string
	Plugins          []map[string]any
}) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(i.CNIConfig, file))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &l); err != nil {
		t.Fatal(err)
	}
	return l
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestInstallMain(t *testing.T) {
	i := node(t, Main)
	put(t, filepath.Join(i.Programs, "heddle-runtime"), "the one before")
	put(t, filepath.Join(i.CNIConfig, ChainedFile), "{}")
	for range 2 { // it can be repeated
		if err := i.Install(); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{i.Programs + "/heddle-runtime": "program heddle-runtime", i.CNIPrograms + "/heddle-cni": "program heddle-cni",
		i.Programs + "/libheddle-verbs.so": "program libheddle-verbs.so"} {
		raw, err := os.ReadFile(path)
		if err != nil || string(raw) != want {
			t.Errorf("%s: %q, %v", path, raw, err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: mode %v, %v", path, info.Mode(), err)
		}
	}
	if got := files(t, i.CNIConfig); !slices.Equal(got, []string{ConflistFile}) {
		t.Errorf("CNI configurations %v", got)
	}
	if l := list(t, i, ConflistFile); l.CNIVersion != "1.0.0" || len(l.Plugins) != 1 || l.Plugins[0]["type"] != "heddle-cni" ||
		fmt.Sprint(l.Plugins[0]["capabilities"]) != "map[bandwidth:true ips:true portMappings:true]" {
		t.Errorf("list %+v", l)
	}
}

func TestInstallChained(t *testing.T) {
	for name, c := range map[string]struct {
		file, had string
		plugins   []any
	}{
		"list": {"10-other.conflist", `{"cniVersion":"0.3.1","name":"other","x":12345678901234567890,"plugins":[{"type":"bridge"},{"type":"portmap"}]}`,
			[]any{"bridge", "portmap", "heddle-cni"}},
		"one plugin":         {"10-other.conf", `{"cniVersion":"0.3.1","name":"other","type":"ptp"}`, []any{"ptp", "heddle-cni"}},
		"with ours in there": {"10-other.conflist", `{"cniVersion":"0.3.1","name":"other","plugins":[{"type":"bridge"},{"type":"heddle-cni"}]}`, []any{"bridge", "heddle-cni"}},
	} {
		t.Run(name, func(t *testing.T) {
			i := node(t, Chained)
			i.Adopted = []string{"10.88.0.0/16"}
			if err := i.Install(); err == nil || !strings.Contains(err.Error(), "no network to stand behind") {
				t.Errorf("nothing to stand behind: %v", err)
			}
			put(t, filepath.Join(i.CNIConfig, ConflistFile), `{}`) // ours is not the other
			put(t, filepath.Join(i.CNIConfig, c.file), c.had)
			for range 2 {
				if err := i.Install(); err != nil {
					t.Fatal(err)
				}
			}
			if got := files(t, i.CNIConfig); !slices.Equal(got, []string{ChainedFile, c.file}) {
				t.Errorf("CNI configurations %v", got)
			}
			l := list(t, i, ChainedFile)
			var types []any
			for _, p := range l.Plugins {
				types = append(types, p["type"])
			}
			last := l.Plugins[len(l.Plugins)-1]
			if l.Name != "other" || l.CNIVersion != "0.3.1" || !slices.Equal(types, c.plugins) || fmt.Sprint(last["carried"]) != "[10.88.0.0/16]" ||
				fmt.Sprint(last["capabilities"]) != "map[bandwidth:true]" {
				t.Errorf("list %+v", l)
			}
		})
	}
	i := node(t, Chained)
	put(t, filepath.Join(i.CNIConfig, "10-other.conf"), `{`)
	if err := i.Install(); err == nil || !strings.Contains(err.Error(), "10-other.conf") {
		t.Errorf("malformed: %v", err)
	}
}

func TestParseNetwork(t *testing.T) {
	for text, ok := range map[string]bool{"main": true, "chained": true, "none": true, "": false, "Main": false} {
		if _, err := ParseNetwork(text); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
	i := node(t, None)
	if err := i.Install(); err != nil || len(files(t, i.CNIConfig)) != 0 {
		t.Errorf("none: %v, %v", err, files(t, i.CNIConfig))
	}
}

func TestHierarchies(t *testing.T) {
	mounts := t.TempDir()
	for _, dir := range []string{"unified/pod", "cpu,cpuacct/pod", "systemd/pod"} {
		put(t, filepath.Join(mounts, dir, "cgroup.procs"), "")
	}
	got, err := hierarchies("12:cpu,cpuacct:/pod\n9:name=systemd:/pod\n5:devices:/\n4:memory:/pod\n0::/pod\n", mounts)
	want := []hierarchy{{mounts + "/cpu,cpuacct", "/pod"}, {mounts + "/systemd", "/pod"}, {mounts + "/unified", "/pod"}} // memory is not mounted
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	put(t, filepath.Join(mounts, "pod/cgroup.procs"), "")
	if got, err = hierarchies("0::/pod\n", mounts); err != nil || !slices.Equal(got, []hierarchy{{mounts, "/pod"}}) {
		t.Errorf("version 2 alone: %v, %v", got, err)
	}
	if got, err = hierarchies("0:/pod\n", mounts); err == nil {
		t.Errorf("malformed: %v", got)
	}
}

func TestOwnCgroupNamespace(t *testing.T) {
	const self = "/proc/self/ns/cgroup"
	for other, want := range map[string]bool{self: false, "/proc/self/ns/uts": true, filepath.Join(t.TempDir(), "none"): false} {
		if own, err := ownCgroupNamespace(self, other); own != want || err != nil {
			t.Errorf("beside %s: %v, %v", other, own, err)
		}
	}
}

// agent is an Agent whose program is a script.
func agent(t *testing.T, script string) Agent {
	t.Helper()
	program := filepath.Join(t.TempDir(), "agent")
	put(t, program, "#!/bin/sh\n"+script)
	if err := os.Chmod(program, 0o755); err != nil {
		t.Fatal(err)
	}
	return Agent{Node: "n1", Program: program, Cgroups: t.TempDir(), Log: slog.New(slog.DiscardHandler)}
}

func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out := filepath.Join(t.TempDir(), "out")

	a := agent(t, "exit 3")
	if err := a.Run(ctx); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("an agent that fails: %v", err)
	}
	a = agent(t, "exit 0")
	if err := a.Run(ctx); err == nil {
		t.Error("an agent that ends by itself is no success")
	}

	// The other nodes wait for the join file; once it is there they run with it, until they are
	// asked to end.
	a = agent(t, `trap "exit 0" TERM; echo "$@" >`+out+`.new; mv `+out+`.new `+out+`; while :; do sleep 0.01; done`)
	a.StoreNode, a.JoinFile = "n2", filepath.Join(t.TempDir(), "join.pem")
	ended := make(chan error, 1)
	runs, end := context.WithCancel(ctx)
	defer end()
	go func() { ended <- a.Run(runs) }()
	select {
	case err := <-ended:
		t.Fatalf("did not wait for the join file: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	put(t, a.JoinFile, "x")
	for {
		if raw, err := os.ReadFile(out); err == nil {
			if want := "--node n1 --join-file " + a.JoinFile; strings.TrimSpace(string(raw)) != want {
				t.Errorf("arguments %q, want %q", raw, want)
			}
			break
		}
		if ctx.Err() != nil {
			t.Fatal("the agent was not started")
		}
		time.Sleep(5 * time.Millisecond)
	}
	end()
	if err := <-ended; err != nil {
		t.Errorf("asked to end: %v", err)
	}
}
