package kernels_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/machine"
)

// core are the scenarios that say whether Heddle works on a kernel, by theme: packages of test/,
// each with a lab of two nodes. None of them measures time: limits are left out, since an emulated
// machine is slower than what they are set to.
var core = []struct{ theme, tests string }{
	{"policy", "TestPolicyCut"},
	{"lifecycle", "TestRestart"},
	{"paths", "TestIPv6Paths|TestPods"},
}

// coreTimeout bounds one kernel's run, which takes some ten minutes where nothing else runs: an
// emulated processor goes through the verifier's work twenty times as slowly, for each agent that
// starts.
const coreTimeout = 90 * time.Minute

// TestKernels runs the core scenarios on each kernel of HEDDLE_KERNELS, package files apart by
// spaces, with the programs of HEDDLE_BIN.
func TestKernels(t *testing.T) {
	kernels := strings.Fields(os.Getenv("HEDDLE_KERNELS"))
	if len(kernels) == 0 {
		t.Skip("HEDDLE_KERNELS does not name kernels' packages: make test-kernels gets them")
	}
	root, err := filepath.Abs("../..")
	testutil.NoError(t, err)
	// Not in a temporary folder: machines have one of their own.
	programs := filepath.Join(root, "out/kernels")
	for _, scenario := range core {
		build := exec.Command("go", "test", "-c", "-o", filepath.Join(programs, scenario.theme+".test"), "heddle.dev/heddle/test/"+scenario.theme)
		if said, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build the scenarios: %v: %s", err, said)
		}
	}
	for _, kernel := range kernels {
		t.Run(strings.TrimSuffix(filepath.Base(kernel), ".deb"), func(t *testing.T) {
			built, err := machine.Image{Kernel: kernel, Root: true}.Build(t.TempDir())
			testutil.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), coreTimeout)
			defer cancel()
			code, err := built.Run(ctx, coreScript(root, programs), machine.Options{
				Megabytes: 6144, Processors: 2, Console: machine.Lines(func(line string) { t.Log(line) }),
			})
			testutil.NoError(t, err)
			if code != 0 {
				t.Errorf("%d themes failed", code)
			}
		})
	}
}

// coreScript runs the scenarios one after the other; its exit code is how many themes failed.
func coreScript(root, programs string) string {
	var s strings.Builder
	fmt.Fprintf(&s, "export %s=20 HEDDLE_BIN=%s/bin PATH=%s/bin:$PATH\nmodprobe tun\nfailed=0\n", patience.Variable, root, root)
	s.WriteString("echo kernel $(uname -rm)\nheddle doctor | sed -n '/^STATUS/,/^$/p'\n")
	for _, scenario := range core {
		fmt.Fprintf(&s, "cd %s/test/%s && %s/%s.test -test.v -test.timeout 60m -test.run '^(%s)$' || failed=$((failed+1))\n",
			root, scenario.theme, programs, scenario.theme, scenario.tests)
	}
	s.WriteString("exit $failed\n")
	return s.String()
}
