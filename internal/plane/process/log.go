package process

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// MaxLog is how many bytes a program's log may have. It is on the disk of the agent's state,
	// and of the store, which programs that are not Heddle's must not fill.
	MaxLog = 16 << 20
	// lookAtLog is how often that is looked at.
	lookAtLog = time.Second
)

// BoundLog keeps the program's log below MaxLog, or what the program can write in a second more,
// until ctx ends: a longer one begins anew.
func (p Program) BoundLog(ctx context.Context, log *slog.Logger) {
	tick := time.NewTicker(lookAtLog)
	defer tick.Stop()
	for said := ""; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		emptied, err := emptyLog(p.Log)
		now := ""
		switch {
		case err != nil:
			now = err.Error()
		case emptied:
			now = fmt.Sprintf("it had more than %d MiB", MaxLog>>20)
		}
		if now != "" && now != said {
			log.Warn("a program's log is emptied", "program", p.Name, "log", p.Log, "why", now)
			said = now
		}
	}
}

// emptyLog empties a log that is too long. Who writes it appends: what comes next is at its
// beginning.
func emptyLog(path string) (emptied bool, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // it has not been started yet
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	// It could ask for blocks behind the end, or leave a hole.
	used := info.Size()
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		used = max(used, st.Blocks*512)
	}
	if used <= MaxLog {
		return false, nil
	}
	if err := f.Truncate(0); err != nil {
		return false, err
	}
	_, err = fmt.Fprintf(f, "%s heddled: this log had %d bytes and begins anew\n", time.Now().UTC().Format(time.RFC3339), info.Size())
	return true, err
}
