package process_test

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

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
