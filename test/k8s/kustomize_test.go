package k8s_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// TestKustomize: what the example's kustomization makes is the manifest, in all of its objects, with
// the example's image and store's node.
func TestKustomize(t *testing.T) {
	kubectl := program(t, "kubectl")
	render := func(folder string) string {
		out, err := kubectlOutput(exec.Command(kubectl, "kustomize", folder), "")
		testutil.NoError(t, err)
		return out
	}
	base, got := render("../../packaging/kubernetes"), render("../../examples/kustomize")
	manifest, err := os.ReadFile("../../packaging/kubernetes/heddle.yaml")
	testutil.NoError(t, err)
	if want, objects := strings.Count(string(manifest), "\nkind: "), strings.Count("\n"+base, "\nkind: "); objects != want {
		t.Errorf("the base has %d objects, the manifest %d", objects, want)
	}
	const node = "\n  HEDDLE_STORE_NODE: "
	before, rest, found := strings.Cut(base, node)
	_, after, _ := strings.Cut(rest, "\n")
	if !found {
		t.Fatalf("the base does not say HEDDLE_STORE_NODE:\n%s", base)
	}
	want := before + node + "control-1\n" + after
	for _, line := range strings.Split(base, "\n") {
		if image, is := strings.CutPrefix(strings.TrimSpace(line), "image: heddle.dev/heddle"); is {
			want = strings.ReplaceAll(want, "image: heddle.dev/heddle"+image+"\n", "image: registry.example/heddle:1.2.3\n")
		}
	}
	if got != want {
		t.Errorf("the example makes\n%s\nwant\n%s", got, want)
	}
	if !strings.Contains(got, "image: registry.example/heddle:1.2.3\n") {
		t.Error("the example's image is nowhere")
	}
}
