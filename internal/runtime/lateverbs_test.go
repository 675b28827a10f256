package runtime

import (
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// onNode calls f in a mount namespace that stands for the node's, and gives it the pid of a process
// in another one, a container's.
func onNode(t *testing.T, f func(container int)) {
	t.Helper()
	testutil.NeedRoot(t, "mounts")
	done := make(chan struct{})
	go func() {
		defer close(done)
		goruntime.LockOSThread() // for good: the thread ends with this
		if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Error(err)
			return
		}
		process := exec.Command("sleep", "infinity")
		process.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
		if err := process.Start(); err != nil {
			t.Error(err)
			return
		}
		defer func() { _, _ = process.Process.Kill(), process.Wait() }()
		f(process.Process.Pid)
	}()
	<-done
}

// mountsAt gives the lines of what the calling thread has mounted at a path.
func mountsAt(t *testing.T, path string) (lines []string) {
	t.Helper()
	raw, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(raw)) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] == path {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestMountIntoIsPrivate: the node's mounts are shared where systemd runs; a container that mounts
// over what it was given changes nothing of the node's.
func TestMountIntoIsPrivate(t *testing.T) {
	root, source := t.TempDir(), t.TempDir()
	place := filepath.Join(root, "place")
	testutil.NoError(t, os.Mkdir(place, 0o755))
	onNode(t, func(container int) {
		must := func(what string, err error) {
			if err != nil {
				t.Errorf("%s: %v", what, err)
				goruntime.Goexit()
			}
		}
		must("mount the source", unix.Mount("tmpfs", source, "tmpfs", 0, ""))
		must("share it", unix.Mount("", source, "", unix.MS_SHARED, ""))
		node, err := os.Open("/proc/thread-self/ns/mnt")
		must("keep the namespace", err)
		defer node.Close()
		must("mountInto", mountInto(container, root, "/place", source))
		lines := mountsAt(t, place)
		if len(lines) != 1 || strings.Contains(lines[0], "shared:") || strings.Contains(lines[0], "master:") {
			t.Errorf("the container has %q", lines)
		}
		must("mount over it", unix.Mount("tmpfs", place, "tmpfs", 0, ""))
		must("go back", unix.Setns(int(node.Fd()), unix.CLONE_NEWNS))
		if lines := mountsAt(t, source); len(lines) != 1 {
			t.Errorf("the node has %q", lines)
		}
	})
}
