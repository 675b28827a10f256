package module

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
)

// nobody wants a module.
type nobody struct{ Owner }

func (nobody) Wants(*Module) bool { return false }

// TestLogsOfModules: the logs of Heddle's modules and of the operator's own are bounded.
func TestLogsOfModules(t *testing.T) {
	dir := t.TempDir()
	testutil.NoError(t, os.Mkdir(filepath.Join(dir, ownFolder), 0o700))
	for kind, name := range map[stack.Kind]string{stack.Netstack: "netstack.log", stack.ModuleKind("mine"): "modules/mine.log"} {
		path := filepath.Join(dir, name)
		testutil.NoError(t, os.WriteFile(path, nil, 0o600))
		testutil.NoError(t, os.Truncate(path, process.MaxLog+1))
		m := New(kind, &Config{Programs: Programs{StateDir: dir}, Log: slog.New(slog.DiscardHandler)}, nobody{})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); m.Keep(ctx) }()
		testutil.EventuallyTrue(t, name+" begins anew", func() bool {
			info, err := os.Stat(path)
			return err == nil && info.Size() < 200
		})
		stop()
		<-ended
	}
}
