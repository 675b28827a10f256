package hang

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// TestJudge: rest for as long as it may, without a look at which it waits, is a hang, and so is
// processor time that leads to nothing.
func TestJudge(t *testing.T) {
	rest, waits := seen{}, seen{waits: true}
	repeat := func(s seen, n int) (out []seen) {
		for range n {
			out = append(out, s)
		}
		return out
	}
	for what, c := range map[string]struct {
		looks []seen
		hangs bool
	}{
		"rests":                {repeat(rest, looks+1), true},
		"rests not yet":        {repeat(rest, looks), false},
		"gets no processor":    {repeat(waits, 1000), false},
		"was ready in between": {append(append(repeat(rest, looks), waits), repeat(rest, looks)...), false},
		"runs":                 {[]seen{{true, time.Hour}, {true, time.Hour + runs}}, true},
		"runs not yet":         {[]seen{{true, time.Hour}, {true, time.Hour + runs - tick}}, false},
	} {
		var q question
		hangs := false
		for _, s := range c.looks {
			hangs = hangs || q.hangs(s)
		}
		if hangs != c.hangs {
			t.Errorf("%s: hangs %v", what, hangs)
		}
	}
}

// TestLook reads what the kernel writes, whatever the program is called.
func TestLook(t *testing.T) {
	proc := t.TempDir()
	write := func(path, stat string) {
		t.Helper()
		path = filepath.Join(proc, "7", path)
		testutil.NoError(t, os.MkdirAll(path, 0o755))
		testutil.NoError(t, os.WriteFile(filepath.Join(path, "stat"), []byte(stat), 0o600))
	}
	stat := func(state string) string { return "7 (a) R b) " + state + " 1 2 3 4 5 6 7 8 9 10 150 50 0 0\n" }
	write("", stat("S"))
	write("task/7", stat("S"))
	if s := look(proc, 7); s.waits || s.spent != 2*time.Second {
		t.Errorf("%+v", s)
	}
	for _, state := range []string{"R", "D"} {
		write("task/8", stat(state))
		if s := look(proc, 7); !s.waits {
			t.Errorf("%s: %+v", state, s)
		}
	}
	if s := look(proc, 8); s != (seen{}) {
		t.Errorf("nobody: %+v", s)
	}
}

func start(t *testing.T, name string, args ...string) int {
	t.Helper()
	cmd := exec.Command(name, args...)
	testutil.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

const forEver = "while :; do :; done"

// TestHangs: a process that is stopped hangs, and one that sleeps.
func TestHangs(t *testing.T) {
	stopped := start(t, "sh", "-c", forEver)
	testutil.NoError(t, unix.Kill(stopped, unix.SIGSTOP))
	for what, pid := range map[string]int{"stopped": stopped, "sleeps": start(t, "sleep", "600")} {
		bound, cancel := Bound(t.Context(), pid)
		select {
		case <-bound.Done():
			if !errors.Is(context.Cause(bound), Err) {
				t.Errorf("%s: %v", what, context.Cause(bound))
			}
		case <-time.After(testutil.WaitTimeout):
			t.Errorf("%s: not found", what)
		}
		cancel()
	}
	bound, cancel := Bound(t.Context(), stopped)
	cancel()
	if errors.Is(context.Cause(bound), Err) {
		t.Error("one that has answered hangs")
	}
}

// TestRuns: a process that runs for ever hangs when it has run for its time, however long a busy
// machine needs to give it that.
func TestRuns(t *testing.T) {
	pid := start(t, "sh", "-c", forEver)
	bound, cancel := Bound(t.Context(), pid)
	defer cancel()
	for look("/proc", pid).spent < runs {
		select {
		case <-bound.Done():
			if spent := look("/proc", pid).spent; spent < runs { // it may have spent the rest since this loop looked
				t.Fatalf("it hangs after %s of processor time", spent)
			}
		case <-time.After(every):
		}
	}
	for look("/proc", pid).spent < 2*runs && bound.Err() == nil {
		time.Sleep(every / 4) // its processor time is the clock
	}
	if !errors.Is(context.Cause(bound), Err) {
		t.Errorf("it does not hang after %s of processor time", look("/proc", pid).spent)
	}
}

// slowCgroup makes one whose processes get a hundredth of a processor.
func slowCgroup(t *testing.T) string {
	t.Helper()
	for _, c := range []struct{ top, file, value string }{
		{"/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "1000"}, {"/sys/fs/cgroup", "cpu.max", "1000 100000"}, {"/sys/fs/cgroup/unified", "cpu.max", "1000 100000"},
	} {
		dir := filepath.Join(c.top, "heddle-hang-test-"+strconv.Itoa(os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			testutil.EventuallyTrue(t, "the cgroup to go", func() bool { return os.Remove(dir) == nil })
		})
		if os.WriteFile(filepath.Join(dir, c.file), []byte(c.value), 0) == nil {
			return dir
		}
	}
	t.Skip("this host has no cgroups that limit processors")
	return ""
}

// TestStarved: a process that gets a hundredth of a processor does not hang.
func TestStarved(t *testing.T) {
	testutil.NeedRoot(t, "makes a cgroup")
	dir := slowCgroup(t)
	pid := start(t, "sh", "-c", forEver)
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o600))
	bound, cancel := Bound(t.Context(), pid)
	defer cancel()
	before := look("/proc", pid).spent
	select {
	case <-bound.Done():
		t.Errorf("it has run for %s, and hangs", look("/proc", pid).spent-before)
	case <-time.After(3 * After):
	}
}
