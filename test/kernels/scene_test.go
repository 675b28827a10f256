package kernels_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/machine"
)

// sceneTimeout bounds what takes some minutes where nothing else runs: agents start nine times.
const sceneTimeout = 60 * time.Minute

// TestEncrypt runs the scene of test/encrypt on a kernel that has WireGuard.
func TestEncrypt(t *testing.T) {
	scene{"encrypt", "^TestEncryption(IPv6)?$", "wireguard", "test-encrypt"}.run(t)
}

// TestUnderlayDevices runs what test/underlays has for a kernel with VLANs and bonds.
func TestUnderlayDevices(t *testing.T) {
	scene{"underlays", "^(TestVLAN|TestBond)$", "-a 8021q bonding", "test-underlay-devices"}.run(t)
}

// scene is a package of test/ whose tests run in an emulated machine.
type scene struct {
	theme, tests string
	modules      string // of the kernel, that are loaded first
	target       string // of make
}

func (s scene) run(t *testing.T) {
	kernel := os.Getenv("HEDDLE_KERNEL")
	if kernel == "" {
		t.Skipf("HEDDLE_KERNEL does not name a kernel's package: make %s gets one", s.target)
	}
	root, err := filepath.Abs("../..")
	testutil.NoError(t, err)
	// Not in a temporary folder: machines have one of their own.
	program := filepath.Join(root, "out", s.theme+".test")
	if said, err := exec.Command("go", "test", "-c", "-o", program, "heddle.dev/heddle/test/"+s.theme).CombinedOutput(); err != nil {
		t.Fatalf("build the scene: %v: %s", err, said)
	}
	built, err := machine.Image{Kernel: kernel, Root: "/"}.Build(t.TempDir())
	testutil.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), sceneTimeout)
	defer cancel()
	script := fmt.Sprintf(`export %s=20 HEDDLE_BIN=%s/bin
modprobe %s && echo kernel $(uname -rm)
cd %[2]s/test/%[4]s && %s -test.v -test.timeout 50m -test.run '%s'
`, patience.Variable, root, s.modules, s.theme, program, s.tests)
	code, err := built.Run(ctx, script, machine.Options{Megabytes: 4096, Processors: 2, Console: machine.Lines(func(line string) { t.Log(line) })})
	testutil.NoError(t, err)
	if code != 0 {
		t.Errorf("the scene ends with %d", code)
	}
}
