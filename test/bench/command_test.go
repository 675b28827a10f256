package bench

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// benchCommand runs a bench of `heddle bench` in this lab and gives what it wrote to NAME.json in
// folder. Should it take longer than limit, it gets an interrupt, so that it cleans up.
func benchCommand[T any](t *testing.T, limit time.Duration, folder, name string, args ...string) (result T) {
	t.Helper()
	file := filepath.Join(folder, name+".json")
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, lab.Bin, append([]string{"bench", name, "--lab", lab.Name, "--json", file}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = testutil.WaitTimeout
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &result)
	}
	testutil.NoError(t, err)
	return result
}
