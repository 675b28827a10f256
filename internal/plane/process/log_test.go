package process_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/testutil"
)

// TestLogIsBounded: a program that writes without an end has a log that begins anew; what it writes
// after that is there.
func TestLogIsBounded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "writes")
	testutil.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\nhead -c 20000000 /dev/zero\ntouch "+dir+"/written\nwhile [ ! -e "+dir+"/go ]; do sleep 0.01; done\necho later\n"), 0o755))
	p := process.Program{Name: "writes", Path: path, Socket: filepath.Join(dir, "socket"), Log: filepath.Join(dir, "log")}
	ctx, stop := context.WithCancel(t.Context())
	var said bytes.Buffer
	ended := make(chan struct{})
	go func() { defer close(ended); p.BoundLog(ctx, slog.New(slog.NewTextHandler(&said, nil))) }()
	reached := make(chan error, 1)
	go func() {
		_, err := process.Reach(p, func(string) (link, error) { return link{}, unix.ENOENT })
		reached <- err
	}()
	size := func() int64 {
		info, err := os.Stat(p.Log)
		if err != nil {
			return -1
		}
		return info.Size()
	}
	testutil.EventuallyTrue(t, "it has written", func() bool { _, err := os.Stat(filepath.Join(dir, "written")); return err == nil })
	testutil.EventuallyTrue(t, "its log begins anew, and says so", func() bool {
		if size() >= process.MaxLog {
			return false
		}
		raw, err := os.ReadFile(p.Log)
		return err == nil && strings.HasSuffix(string(raw), "begins anew\n")
	})
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o600))
	<-reached // it has ended
	raw, err := os.ReadFile(p.Log)
	testutil.NoError(t, err)
	if text := string(raw); !strings.HasSuffix(text, "begins anew\nlater\n") || len(raw) > 200 {
		t.Errorf("log of %d bytes: %.300q", len(raw), raw)
	}
	stop()
	<-ended
	if strings.Count(said.String(), "emptied") != 1 {
		t.Errorf("said %s", said.String())
	}
}

// TestLogBehindItsEnd: blocks count that a program has asked for and not written.
func TestLogBehindItsEnd(t *testing.T) {
	p := process.Program{Log: filepath.Join(t.TempDir(), "log")}
	testutil.NoError(t, os.WriteFile(p.Log, []byte("x"), 0o600))
	if err := exec.Command("fallocate", "--keep-size", "--length", "20M", p.Log).Run(); err != nil {
		t.Skipf("%s is on a file system without fallocate(FALLOC_FL_KEEP_SIZE): %v", t.TempDir(), err)
	}
	ctx, stop := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer stop()
	go p.BoundLog(ctx, slog.New(slog.DiscardHandler))
	testutil.EventuallyTrue(t, "the blocks are given back", func() bool {
		out, err := exec.Command("stat", "--format=%b", p.Log).Output()
		return err == nil && len(strings.TrimSpace(string(out))) < 4
	})
}
