package module

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
)

// TestRenewed: a module that runs another build than the one installed is ended, but not while
// connections live, and not if only the file is another one.
func TestRenewed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	installed := filepath.Join(dir, programs[stack.Smoltcp].name)
	cmd := exec.Command("sleep", "600")
	testutil.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	bytes, err := os.ReadFile(cmd.Path)
	testutil.NoError(t, err)
	cfg := &Config{Programs: Programs{Self: filepath.Join(dir, "heddled")}, Drain: time.Hour, Log: slog.New(slog.DiscardHandler)}
	m, b := New(stack.Smoltcp, cfg, nil), build{}
	l := &Link{Requests: process.Requests{Conn: process.Conn{PID: cmd.Process.Pid}}}
	testutil.NoError(t, os.WriteFile(installed, bytes, 0o755))
	testutil.NoError(t, m.renew(l, &b, &protocol.Stats{}))
	testutil.NoError(t, os.Remove(installed))
	testutil.NoError(t, os.WriteFile(installed, append(bytes, 0), 0o755))
	testutil.NoError(t, m.renew(l, &b, &protocol.Stats{Connections: 2, TimeWait: 1}))
	select {
	case <-ended:
		t.Fatal("it is ended, with a connection")
	default:
	}
	if m.drains == nil || m.drains.Until == nil || time.Until(*m.drains.Until) < time.Hour/2 {
		t.Errorf("it drains %+v, want an hour", m.drains)
	}
	if err := m.renew(l, &b, &protocol.Stats{Connections: 1, TimeWait: 1}); err == nil {
		t.Error("it stays, without a connection")
	}
	select {
	case <-ended:
	case <-time.After(testutil.WaitTimeout):
		t.Error("it has not ended")
	}
	// A module that has drained for as long as it may ends with its connections, but for 0.
	gone, busy := &Link{Requests: process.Requests{Conn: process.Conn{PID: 1 << 30}}}, &protocol.Stats{Connections: 2, TimeWait: 1}
	past := time.Now()
	m.drains = &api.StackDrain{Until: &past}
	if err := m.renew(gone, &b, busy); err == nil || !strings.Contains(err.Error(), "ended with 1 connections") {
		t.Errorf("after its time: %v", err)
	}
	m.drains = &api.StackDrain{}
	testutil.NoError(t, m.renew(gone, &b, busy))
	b.same = true
	if err := m.renew(gone, &b, busy); err != nil || m.drains != nil {
		t.Errorf("with the same build again: %v, drains %+v", err, m.drains)
	}
}
