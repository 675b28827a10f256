package verbs

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// TestListenStaysInItsFolder: the agent makes no socket, and changes no mode, in what somebody has
// put in the place of an endpoint's folder.
func TestListenStaysInItsFolder(t *testing.T) {
	testutil.NeedRoot(t, "mounts")
	above, others := t.TempDir(), t.TempDir()
	testutil.NoError(t, os.Chmod(others, 0o700))
	testutil.NoError(t, os.Mkdir(filepath.Join(above, "mounted"), 0o755))
	testutil.NoError(t, os.Symlink(others, filepath.Join(above, "link")))
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: its mounts end with the thread
		for _, err := range []error{
			unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("tmpfs", others, "tmpfs", 0, "mode=700"),
			unix.Mount(others, filepath.Join(above, "mounted"), "", unix.MS_BIND, ""),
		} {
			if err != nil {
				t.Error(err)
				return
			}
		}
		for name, fails := range map[string]bool{"mounted": true, "link": true, "own": false} {
			ep := newEndpoint(model.Endpoint{}, filepath.Join(above, name))
			if err := ep.listen(); (err != nil) != fails || ep.hasSocket() == fails {
				t.Errorf("%s: %v, socket %v", name, err, ep.hasSocket())
			}
			ep.close()
		}
		if info, err := os.Stat(others); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("the other's folder is %v, %v", info.Mode(), err)
		}
	}()
	<-done
}

// TestListenerHasAName: who looks at the node's sockets (`ss -x`) sees whose an endpoint's is, and
// nothing is left beside its folder.
func TestListenerHasAName(t *testing.T) {
	above, err := os.MkdirTemp("/tmp", "heddle-") // a name of t.TempDir() may be too long
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(above) })
	ep := newEndpoint(model.Endpoint{}, filepath.Join(above, "3"))
	for range 2 { // an agent that starts anew finds the socket of the last one
		testutil.NoError(t, ep.listen())
		name, err := unix.Getsockname(int(ep.listener.Fd()))
		testutil.NoError(t, err)
		if got := name.(*unix.SockaddrUnix).Name; got != filepath.Join(above, "3.control") {
			t.Errorf("it is %s", got)
		}
		if left, err := os.ReadDir(above); err != nil || len(left) != 1 || !ep.hasSocket() {
			t.Errorf("the folders are %v, %v, and a socket %v", left, err, ep.hasSocket())
		}
	}
	ep.close()
}
