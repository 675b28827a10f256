package heddle_test

import (
	"strings"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// TestKustomize builds the example of a kustomization: it sets what the page on Kubernetes has its
// readers edit, and nothing else.
func TestKustomize(t *testing.T) {
	const manifests = "packaging/kubernetes"
	build := func(folder string) string {
		t.Helper()
		options := krusty.MakeDefaultOptions()
		made, err := krusty.MakeKustomizer(options).Run(filesys.MakeFsOnDisk(), folder)
		if err != nil {
			t.Fatalf("kustomize %s: %v", folder, err)
		}
		text, err := made.AsYaml()
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	base, edited := build(manifests), build("examples/kustomize")
	for from, to := range map[string]string{
		"image: heddle.dev/heddle:latest\n": "image: registry.example/heddle:1.2.3\n",
		"HEDDLE_STORE_NODE: \"\"\n":         "HEDDLE_STORE_NODE: control-1\n",
	} {
		if !strings.Contains(base, from) {
			t.Errorf("%s does not have %q", manifests, from)
		}
		base = strings.ReplaceAll(base, from, to)
	}
	if base != edited {
		t.Errorf("the example gives\n%s\nwant\n%s", edited, base)
	}
}
