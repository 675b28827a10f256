package queues

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/testutil"
)

// TestLogOfService: it is bounded.
func TestLogOfService(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, logFile)
	testutil.NoError(t, os.WriteFile(path, nil, 0o600))
	testutil.NoError(t, os.Truncate(path, process.MaxLog+1))
	p := &Plane{cfg: Config{StateDir: dir, Log: slog.New(slog.DiscardHandler)}, wake: make(chan struct{}, 1)}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	testutil.EventuallyTrue(t, "it begins anew", func() bool {
		info, err := os.Stat(path)
		return err == nil && info.Size() < 200
	})
	stop()
	testutil.NoError(t, <-ended)
}
