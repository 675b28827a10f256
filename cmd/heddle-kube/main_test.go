package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestDefaults: the package's settings name flags that there are.
func TestDefaults(t *testing.T) {
	raw, err := os.ReadFile("../../packaging/heddle-kube.default")
	if err != nil {
		t.Fatal(err)
	}
	set := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^#?(HEDDLE_KUBE_[A-Z_]+)=(.*)$`).FindAllStringSubmatch(string(raw), -1) {
		set[m[1]] = m[2]
	}
	flags, taken := newCommand().Flags(), map[string]bool{}
	lookup := func(name string) (string, bool) {
		value, there := set[name]
		taken[name] = true
		return value, there
	}
	if err := fromEnvironment(flags, lookup); err != nil {
		t.Error(err)
	}
	for name := range set {
		if !taken[name] {
			t.Errorf("%s is no flag's", name)
		}
	}
	for name := range taken {
		if _, there := set[name]; !there && !strings.HasSuffix(name, "_HELP") && !strings.HasSuffix(name, "_VERSION") {
			t.Errorf("%s is not explained", name)
		}
	}
	if got := flags.Lookup("kubeconfig").Value.String(); got != "/etc/heddle/kubeconfig" {
		t.Errorf("kubeconfig %q", got)
	}
	if err := fromEnvironment(newCommand().Flags(), func(name string) (string, bool) { return "soon", name == "HEDDLE_KUBE_LEASE_DURATION" }); err == nil ||
		!strings.Contains(err.Error(), "HEDDLE_KUBE_LEASE_DURATION") {
		t.Errorf("a duration of %q: %v", "soon", err)
	}
}
