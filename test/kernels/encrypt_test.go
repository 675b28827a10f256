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

// encryptTimeout bounds what takes some minutes where nothing else runs: agents start nine times.
const encryptTimeout = 60 * time.Minute

// TestEncrypt runs the scene of test/encrypt on a kernel that has WireGuard.
func TestEncrypt(t *testing.T) {
	kernel := os.Getenv("HEDDLE_KERNEL")
	if kernel == "" {
		t.Skip("HEDDLE_KERNEL does not name a kernel's package: make test-encrypt gets one")
	}
	root, err := filepath.Abs("../..")
	testutil.NoError(t, err)
	// Not in a temporary folder: machines have one of their own.
	program := filepath.Join(root, "out/encrypt.test")
	if said, err := exec.Command("go", "test", "-c", "-o", program, "heddle.dev/heddle/test/encrypt").CombinedOutput(); err != nil {
		t.Fatalf("build the scene: %v: %s", err, said)
	}
	built, err := machine.Image{Kernel: kernel, Root: "/"}.Build(t.TempDir())
	testutil.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), encryptTimeout)
	defer cancel()
	script := fmt.Sprintf(`export %s=20 HEDDLE_BIN=%s/bin
modprobe wireguard && echo kernel $(uname -rm)
cd %[2]s/test/encrypt && %s -test.v -test.timeout 50m -test.run '%s'
`, patience.Variable, root, program, "^TestEncryption$")
	code, err := built.Run(ctx, script, machine.Options{Megabytes: 4096, Processors: 2, Console: machine.Lines(func(line string) { t.Log(line) })})
	testutil.NoError(t, err)
	if code != 0 {
		t.Errorf("the scene ends with %d", code)
	}
}
