package machine

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"
)

const processText = "42 (a) (b\n) S 7 42 42 0 -1 4194560 100 0 0 0 150 50 20 30 20 0 4 0 100\n"

func TestProcesses(t *testing.T) {
	pid, p, err := parseProcess([]byte(processText))
	if err != nil || pid != 42 || p.parent != 7 || p.used != 2500*time.Millisecond {
		t.Errorf("%d, %+v, %v", pid, p, err)
	}
	tree := map[int]Process{1: {0, 100}, 7: {1, 10}, 42: {7, 1}, 43: {42, 2}, 50: {1, 1000}, 60: {61, 5}, 61: {60, 5}}
	if used := TreeTime(tree, 7); used != 13 {
		t.Errorf("%d below 7, want 13", used)
	}
	own, err := Processes("/proc")
	if err != nil || TreeTime(own, os.Getppid()) < own[os.Getpid()].used {
		t.Errorf("less below the parent than of this process, %v", err)
	}
}

func FuzzParseProcess(f *testing.F) {
	f.Add([]byte(processText))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, p, err := parseProcess(b); err == nil && p.parent < -1<<40 {
			t.Errorf("%q: %+v", b, p)
		}
	})
}

func TestBackgroundSeesALoop(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	spinning := make(chan struct{})
	go func() {
		defer close(spinning)
		for ctx.Err() == nil {
		}
	}()
	busy, err := Background(t.Context())
	cancel()
	<-spinning
	// The loop may have had to share its processor.
	if err != nil || busy < QuietMachine || busy > float64(1<<10) {
		t.Errorf("got %v, %v", busy, err)
	}
	if _, err := Background(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel: %v", err)
	}
}
