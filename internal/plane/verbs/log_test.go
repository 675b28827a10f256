package verbs

import (
	"os"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/testutil"
)

// TestLogOfRouter: it is bounded.
func TestLogOfRouter(t *testing.T) {
	n := newNode(t)
	path := filepath.Join(n.dir, logFile)
	testutil.NoError(t, os.WriteFile(path, nil, 0o600))
	testutil.NoError(t, os.Truncate(path, process.MaxLog+1))
	n.open()
	n.eventually("it begins anew", func() bool {
		info, err := os.Stat(path)
		return err == nil && info.Size() < 200
	})
}
