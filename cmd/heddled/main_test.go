package main

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"heddle.dev/heddle/internal/node"
)

// TestDefaultFile: /etc/default/heddled has every flag, with its default, and no other.
func TestDefaultFile(t *testing.T) {
	raw, err := os.ReadFile("../../packaging/heddled.default")
	if err != nil {
		t.Fatal(err)
	}
	in := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^#HEDDLED_([A-Z0-9_]+)=(.*)$`).FindAllStringSubmatch(string(raw), -1) {
		in[strings.ToLower(strings.ReplaceAll(m[1], "_", "-"))] = m[2]
	}
	// What the file shows instead of the program's default, and why.
	other := map[string]string{
		"underlay": "192.0.2.1", "join-file": "/etc/heddle/join.pem", // examples
		"pool":   "10.244.0.0/16",     // the network's default, not the flag's
		"cgroup": delegatedCgroup,     // the unit sets it
		"node":   "", "store-dir": "", // of this host; of another flag
		"verbs-spin-us": "", // of this host's processors
		"vni":           "", "prefix": "", "prefix6": "", "rdma-outside": "",
	}
	cmd := newCommand()
	cmd.InitDefaultHelpFlag()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		got, ok := in[f.Name]
		delete(in, f.Name)
		if f.Name == "help" || f.Name == "version" {
			return
		}
		want, special := other[f.Name]
		if !special {
			want = f.DefValue
		}
		if !ok || got != want {
			t.Errorf("--%s: the file has %q (found: %v), want %q", f.Name, got, ok, want)
		}
	})
	for name := range in {
		t.Errorf("there is no flag --%s", name)
	}
}

func TestFromEnvironment(t *testing.T) {
	var f flags
	cmd := &cobra.Command{}
	f.register(cmd)
	p := cmd.Flags()
	if err := p.Parse([]string{"--vni", "7"}); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{
		"HEDDLED_UNDERLAY": "192.0.2.1", "HEDDLED_POOL": "10.1.0.0/16,10.2.0.0/16", "HEDDLED_VNI": "8",
		"HEDDLED_STATE_DIR": "", "HEDDLED_NO_HOLDER": "true", "STORE": "x",
	}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	if err := fromEnvironment(p, lookup); err != nil {
		t.Fatal(err)
	}
	if f.underlay != "192.0.2.1" || len(f.pool) != 2 || f.vni != 7 || f.cfg.StateDir != "/var/lib/heddle" || !f.noKeeper || f.store != "embedded" {
		t.Errorf("flags %+v", f)
	}
	if !p.Changed("pool") || p.Changed("store") {
		t.Error("a flag from the environment must count as given, and no other")
	}
	env = map[string]string{"HEDDLED_NETWORK_ID": "many"}
	if err := fromEnvironment(p, lookup); err == nil || !strings.Contains(err.Error(), "HEDDLED_NETWORK_ID") {
		t.Errorf("a number that is none: %v", err)
	}
}

// TestKubernetesSettings: an agent takes the ConfigMap of packaging/kubernetes as it is, and where it
// serves the store nothing of a control plane's listens, which is etcd's 2379 first of all.
func TestKubernetesSettings(t *testing.T) {
	raw, err := os.Open("../../packaging/kubernetes/heddle.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	env := map[string]string{"HEDDLED_UNDERLAY": "192.0.2.1", "HEDDLED_NODE": "control-1"} // the DaemonSet's
	for documents := yaml.NewDecoder(raw); ; {
		var d struct {
			Kind string
			Data map[string]string
		}
		if err := documents.Decode(&d); err != nil {
			break
		}
		if d.Kind == "ConfigMap" {
			maps.Copy(env, d.Data)
		}
	}
	var f flags
	cmd := &cobra.Command{}
	f.register(cmd)
	if err := fromEnvironment(cmd.Flags(), func(name string) (string, bool) { v, ok := env[name]; return v, ok }); err != nil {
		t.Fatal(err)
	}
	for name := range env {
		if flag, of := strings.CutPrefix(name, envPrefix); of && cmd.Flags().Lookup(strings.ToLower(strings.ReplaceAll(flag, "_", "-"))) == nil {
			t.Errorf("%s: there is no such flag", name)
		}
	}
	cfg, err := f.config()
	if err != nil {
		t.Fatal(err)
	}
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	// etcd's clients, peers and metrics; the API server; the kubelet, kube-proxy, the controller manager and the scheduler.
	taken := []uint16{2379, 2380, 2381, 6443, 10248, 10249, 10250, 10256, 10257, 10259}
	if cfg.Store != node.EmbeddedStore || slices.Contains(taken, cfg.StorePort) || cfg.DirectPorts.Contains(cfg.StorePort) {
		t.Errorf("the store %s is served at port %d", cfg.Store, cfg.StorePort)
	}
}
