// Package kernels_test tries on other kernels what the machine's own does not do, in emulated
// machines. HEDDLE_KERNEL is the file of a kernel's Debian package; without it every test is
// skipped: `make test-lsm` has it.
package kernels_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/machine"
)

// timeout bounds what a machine may take for a test that takes half a minute.
const timeout = 10 * time.Minute

// TestLSM runs the test of the second lock (bpf/lsm.bpf.c) on a kernel that takes BPF programs on
// security hooks.
func TestLSM(t *testing.T) {
	kernel := os.Getenv("HEDDLE_KERNEL")
	if kernel == "" {
		t.Skip("HEDDLE_KERNEL does not name a kernel's package: make test-lsm gets one")
	}
	const script = `echo "kernel $(uname -r), security modules $(cat /sys/kernel/security/lsm)"
HEDDLE_DEMAND_LSM=1 /datapath.test -test.run 'TestLock$' -test.v`
	testDatapath(t, kernel, script, "lsm=capability,bpf")
}

func TestVerifierWork(t *testing.T) {
	kernel := os.Getenv("HEDDLE_KERNEL")
	if kernel == "" {
		t.Skip("HEDDLE_KERNEL does not name a kernel's package: make test-lsm gets one")
	}
	verifierWork(t, kernel)
}

// verifierWork has the kernel's verifier take every program, and holds them to the limits of the
// datapath's TestVerifierWork: an older verifier refuses what a newer one takes, and prunes less.
func verifierWork(t *testing.T, kernel string) {
	t.Helper()
	testDatapath(t, kernel, "uname -r; /datapath.test -test.run 'TestVerifierWork$' -test.v", "")
}

// ofSources are tests that read the programs' sources, which are not in the machine.
const ofSources = "'TestLoopbackAliasMatches|TestMirrorMatches'"

// TestARM64 has an arm64 kernel's verifier take every program, and runs the tests of the datapath
// there.
func TestARM64(t *testing.T) {
	kernel, busybox := os.Getenv("HEDDLE_KERNEL"), os.Getenv("HEDDLE_BUSYBOX")
	if kernel == "" || busybox == "" {
		t.Skip("HEDDLE_KERNEL and HEDDLE_BUSYBOX do not name packages of arm64: make test-arm64 gets them")
	}
	testDatapathOn(t, machine.Image{Kernel: kernel, BusyBox: busybox}, "arm64", "uname -rm; /datapath.test -test.v -test.timeout 60m -test.skip "+ofSources, "", time.Hour)
}

// testDatapath runs a script with the datapath's tests, /datapath.test, on the kernel of a package.
func testDatapath(t *testing.T, kernel, script, arguments string) {
	t.Helper()
	testDatapathOn(t, machine.Image{Kernel: kernel}, runtime.GOARCH, script, arguments, timeout)
}

// testDatapathOn does so in a machine of an image, of an architecture as Go has it.
func testDatapathOn(t *testing.T, image machine.Image, arch, script, arguments string, limit time.Duration) {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "datapath.test")
	build := exec.Command("go", "test", "-c", "-o", program, "heddle.dev/heddle/internal/plane/tcp/datapath")
	build.Env = append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the test: %v: %s", err, out)
	}
	image.Files = map[string]string{"/datapath.test": program}
	built, err := image.Build(dir)
	testutil.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	code, err := built.Run(ctx, script, machine.Options{Arguments: arguments, Console: machine.Lines(func(line string) { t.Log(line) })})
	testutil.NoError(t, err)
	if code != 0 {
		t.Errorf("the datapath's tests end with %d", code)
	}
}
