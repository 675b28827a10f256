package verbs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckDevice(t *testing.T) {
	dir := t.TempDir()
	none := filepath.Join(dir, "none")
	if err := CheckDeviceIn(none, "rxe0"); err == nil || !strings.Contains(err.Error(), "and no other") {
		t.Errorf("without devices: %v", err)
	}
	for _, name := range []string{"mlx5_0", "rxe0"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := CheckDeviceIn(dir, "rxe0"); err != nil {
		t.Error(err)
	}
	if err := CheckDeviceIn(dir, "rxe1"); err == nil || !strings.HasSuffix(err.Error(), "there are: mlx5_0, rxe0") {
		t.Errorf("with others: %v", err)
	}
}
