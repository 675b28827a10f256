package node

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// cgroupRoot gives the cgroup2 file system.
func cgroupRoot(t *testing.T) string {
	t.Helper()
	testutil.NeedRoot(t, "makes cgroups")
	for _, dir := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir
		}
	}
	t.Fatal("no cgroup2 file system")
	return ""
}

func TestCgroupIsLeftAsItWas(t *testing.T) {
	top := filepath.Join(cgroupRoot(t), "heddle-node-test-"+strconv.Itoa(os.Getpid()))
	g, err := enterCgroup(filepath.Join(top, "agent"))
	if err != nil {
		t.Fatal(err)
	}
	member := exec.Command("sleep", "60")
	if err := member.Start(); err != nil { // in the cgroup, as this process is
		t.Fatal(err)
	}
	end := func() { _ = member.Process.Kill(); _ = member.Wait() }
	defer end()
	// Start returns when the program is about to have its arguments.
	testutil.EventuallyTrue(t, "the member runs", func() bool { return g.runs("60") })
	if g.runs("61") || g.runs() {
		t.Errorf("runs: 61 %v, none %v", g.runs("61"), g.runs())
	}
	again, err := enterCgroup(g.dir)
	if err != nil || len(again.made) != 0 {
		t.Errorf("entered again: made %v, %v", again.made, err)
	}
	if err := again.leave(); err != nil {
		t.Errorf("leave what was there before: %v", err)
	}
	if _, err := os.Stat(g.dir); err != nil {
		t.Error("an agent that found the cgroup removed it")
	}
	if err := g.leave(); err != nil {
		t.Errorf("leave while a member is there: %v", err)
	}
	if _, err := os.Stat(g.dir); err != nil {
		t.Error("removed with a member in it")
	}
	end()
	if err := g.leave(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(top); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
}

func TestNoCgroupOfVersionOne(t *testing.T) {
	if g, err := enterCgroup(filepath.Join(t.TempDir(), "a")); err == nil {
		t.Errorf("entered %+v on a file system that has no cgroups", g)
	}
}
