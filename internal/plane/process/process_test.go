package process_test

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/testutil"
)

// TestRuns: a process runs a program of the same bytes, also when the file that it was started from
// has gone.
func TestRuns(t *testing.T) {
	dir := t.TempDir()
	raw, err := os.ReadFile("/bin/cat")
	testutil.NoError(t, err)
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		testutil.NoError(t, os.WriteFile(path, content, 0o700))
		return path
	}
	started := write("started", raw)
	cmd := exec.Command(started)
	input, err := cmd.StdinPipe()
	testutil.NoError(t, err)
	output, err := cmd.StdoutPipe()
	testutil.NoError(t, err)
	testutil.NoError(t, cmd.Start())
	defer func() {
		_ = input.Close()
		_ = cmd.Wait()
	}()
	// It runs, and not a child that has yet to execute it, when it has answered.
	_, err = input.Write([]byte("x"))
	testutil.NoError(t, err)
	_, err = io.ReadFull(output, make([]byte, 1))
	testutil.NoError(t, err)
	other := append([]byte(nil), raw...)
	other[len(other)-1] ^= 1
	for path, want := range map[string]bool{started: true, write("same", raw): true, write("other", other): false, write("longer", append(raw, 0)): false} {
		if got, err := process.Runs(cmd.Process.Pid, path); err != nil || got != want {
			t.Errorf("runs %s: %v, %v; want %v", filepath.Base(path), got, err, want)
		}
	}
	testutil.NoError(t, os.Remove(started))
	if got, err := process.Runs(cmd.Process.Pid, filepath.Join(dir, "same")); err != nil || !got {
		t.Errorf("runs what has taken the place of its own file: %v, %v", got, err)
	}
	if _, err := process.Runs(cmd.Process.Pid, started); err == nil {
		t.Error("no error without the installed program")
	}
}

// TestReachLeavesSocket: a program is only taken for none, and its socket removed for another one,
// if nobody listens.
func TestReachLeavesSocket(t *testing.T) {
	dir := t.TempDir()
	p := process.Program{Name: "false", Path: "/bin/false", Socket: filepath.Join(dir, "socket"), Log: filepath.Join(dir, "log")}
	testutil.NoError(t, os.WriteFile(p.Socket, nil, 0o600))
	for _, failed := range []error{unix.EMFILE, unix.ENOMEM, unix.EAGAIN, os.ErrDeadlineExceeded} {
		_, err := process.Reach(p, func(string) (link, error) { return link{}, failed })
		if _, there := os.Lstat(p.Socket); !errors.Is(err, failed) || there != nil {
			t.Errorf("after %v: %v, and the socket: %v", failed, err, there)
		}
	}
	_, err := process.Reach(p, func(string) (link, error) { return link{}, unix.ECONNREFUSED })
	if _, there := os.Lstat(p.Socket); !errors.Is(err, process.ErrEnded) || there == nil {
		t.Errorf("nobody listens: %v, and the socket is there: %v", err, there == nil)
	}
}
