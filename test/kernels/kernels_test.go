package kernels_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
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
	{"paths", "TestIPv6Paths|TestPods|TestServerProcesses"},
	{"policy", "TestPolicyCut"},
	{"lifecycle", "TestRestart"}, // takes longest: agents start again and again
}

// coreTimeout bounds one kernel's run, which takes some ten minutes where nothing else runs: an
// emulated processor goes through the verifier's work twenty times as slowly, for each agent that
// starts.
const coreTimeout = 90 * time.Minute

// place is where a machine has what the scenarios need.
type place struct {
	root string // the machine's files, a folder of this one
	tree string // of the repository, in the machine
	// bin has the programs, and scenarios the compiled tests; both in the machine.
	bin, scenarios string
}

// own is a machine that has this one's files.
func own(t *testing.T) place {
	t.Helper()
	tree, err := filepath.Abs("../..")
	testutil.NoError(t, err)
	// Not in a temporary folder: machines have one of their own.
	return place{root: "/", tree: tree, bin: filepath.Join(tree, "bin"), scenarios: filepath.Join(tree, "out/kernels")}
}

// TestKernels runs the core scenarios on each kernel of HEDDLE_KERNELS, package files apart by
// spaces, with the programs of bin/, after its verifier has said what it makes of the programs.
func TestKernels(t *testing.T) {
	kernels := strings.Fields(os.Getenv("HEDDLE_KERNELS"))
	if len(kernels) == 0 {
		t.Skip("HEDDLE_KERNELS does not name kernels' packages: make test-kernels gets them")
	}
	at := own(t)
	at.compile(t, runtime.GOARCH)
	for _, kernel := range kernels {
		t.Run(strings.TrimSuffix(filepath.Base(kernel), ".deb"), func(t *testing.T) {
			verifierWork(t, kernel)
			at.run(t, machine.Image{Kernel: kernel, Root: at.root})
		})
	}
}

// TestLabARM64 runs them on an arm64 kernel, with the programs of the package for arm64, in a
// machine that has the files of HEDDLE_ROOT: those of Debian's packages, with the package's own, and
// the repository's test/ in the folder heddle.
func TestLabARM64(t *testing.T) {
	kernel, busybox, root := os.Getenv("HEDDLE_KERNEL"), os.Getenv("HEDDLE_BUSYBOX"), os.Getenv("HEDDLE_ROOT")
	if kernel == "" || busybox == "" || root == "" {
		t.Skip("HEDDLE_KERNEL, HEDDLE_BUSYBOX and HEDDLE_ROOT do not name what is of arm64: make test-arm64-lab gets it")
	}
	at := place{root: root, tree: "/heddle", bin: "/heddle/bin", scenarios: "/heddle/scenarios"}
	at.compile(t, "arm64")
	at.run(t, machine.Image{Kernel: kernel, BusyBox: busybox, Root: root})
}

// compile makes the scenarios for machines of an architecture, as Go names it.
func (p place) compile(t *testing.T, arch string) {
	t.Helper()
	for _, scenario := range core {
		to := filepath.Join(p.root, p.scenarios, scenario.theme+".test")
		build := exec.Command("go", "test", "-c", "-o", to, "heddle.dev/heddle/test/"+scenario.theme)
		build.Env = append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
		if said, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build the scenarios: %v: %s", err, said)
		}
	}
}

// run boots a machine, and runs the scenarios one after the other.
func (p place) run(t *testing.T, image machine.Image) {
	t.Helper()
	built, err := image.Build(t.TempDir())
	testutil.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), coreTimeout)
	defer cancel()
	code, err := built.Run(ctx, p.script(), machine.Options{
		Megabytes: 6144, Processors: 2, OneThread: true, Console: machine.Lines(func(line string) { t.Log(line) }),
	})
	testutil.NoError(t, err)
	if code != 0 {
		t.Errorf("%d themes failed", code)
	}
}

// script runs the scenarios; its exit code is how many themes failed.
func (p place) script() string {
	var s strings.Builder
	fmt.Fprintf(&s, "export %s=20 HEDDLE_BIN=%s PATH=%s:$PATH\nmodprobe tun\nfailed=0\n", patience.Variable, p.bin, p.bin)
	s.WriteString("echo kernel $(uname -rm)\nheddle doctor | sed -n '/^STATUS/,/^$/p'\n")
	for _, scenario := range core {
		fmt.Fprintf(&s, "cd %s/test/%s && %s/%s.test -test.v -test.timeout 60m -test.run '^(%s)$' || failed=$((failed+1))\n",
			p.tree, scenario.theme, p.scenarios, scenario.theme, scenario.tests)
	}
	s.WriteString("exit $failed\n")
	return s.String()
}
