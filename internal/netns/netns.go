// Package netns makes, names and enters network namespaces.
//
// Named namespaces are those of `ip netns`: a bind mount of the namespace at /run/netns/NAME keeps
// it alive without a process. The package and `ip netns` see each other's namespaces.
//
// A network namespace belongs to an OS thread, not to a goroutine. Every function here that enters
// one does so on a thread of its own, locked to a goroutine that ends without unlocking it, so that
// the Go runtime destroys the thread instead of running other goroutines in the wrong namespace;
// but for Visit, which comes back.
// The process's main thread is never used: /proc/self/ns/net is that thread's, and the runtime
// cannot destroy it.
package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Dir is where named namespaces are mounted, as for `ip netns`.
const Dir = "/run/netns"

// Path gives the path of the namespace called name, whether it exists or not.
func Path(name string) string { return filepath.Join(Dir, name) }

// Exists reports whether the namespace called name exists: a plain file left by a half-done Create
// does not count.
func Exists(name string) bool {
	return validName(name) == nil && isNamespace(Path(name))
}

// Create makes the namespace called name unless it exists, and pins it under Dir. Like `ip netns
// add` it leaves the new namespace's loopback device down. It needs CAP_SYS_ADMIN.
func Create(name string) (err error) {
	if err := validName(name); err != nil {
		return err
	}
	if err := prepareDir(); err != nil {
		return err
	}
	unlock, err := lockDir()
	if err != nil {
		return err
	}
	defer unlock()
	path := Path(name)
	if isNamespace(path) {
		return nil
	}
	// A plain file here is what a killed Create leaves; it is mounted over.
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o444)
	if err != nil {
		return fmt.Errorf("create network namespace %q: %w", name, err)
	}
	f.Close()
	defer func() {
		if err != nil {
			os.Remove(path)
		}
	}()
	return OnDiscardedThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create network namespace %q: unshare: %w", name, err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("create network namespace %q: bind mount at %s: %w", name, path, err)
		}
		return nil
	})
}

// Delete unpins and removes the namespace called name. Its devices go once no process and no open
// file uses it any more. It is no error if there is no such namespace.
func Delete(name string) error {
	if err := validName(name); err != nil {
		return err
	}
	unlock, err := lockDir()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	path := Path(name)
	// More than one mount can be stacked here if other tools raced; all must go before the file
	// can.
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == unix.EINVAL || err == unix.ENOENT {
			break
		}
		if err != nil {
			return fmt.Errorf("delete network namespace %q: unmount %s: %w", name, path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("delete network namespace %q: %w", name, err)
	}
	return nil
}

// ErrNone says that a path leads to no network namespace.
var ErrNone = errors.New("no network namespace")

// Open opens the network namespace at path: a path of Path, /proc/PID/ns/net, or any other file of
// a namespace. The file keeps the namespace alive, and keeps meaning that namespace when the path
// no longer does. It fails if path is anything else than a network namespace: with ErrNone if there
// is no file, or another one.
func Open(path string) (*os.File, error) {
	f, err := os.Open(path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%w: %w", ErrNone, err)
	}
	if err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	// A file of another kind than a namespace does not know the request (ENOTTY).
	kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		f.Close()
		return nil, fmt.Errorf("%w: %s is another file", ErrNone, path)
	}
	return f, nil
}

// Same reports whether files a and b, as Open gives them, are the same namespace, of any kind.
func Same(a, b *os.File) (bool, error) {
	ai, err := a.Stat()
	if err != nil {
		return false, err
	}
	bi, err := b.Stat()
	if err != nil {
		return false, err
	}
	return os.SameFile(ai, bi), nil
}

// Do runs fn in the network namespace at path and gives its error. fn runs on an OS thread of its
// own which is destroyed afterwards; goroutines that fn starts do not run in the namespace. Only
// the network namespace changes: /proc/sys/net follows it, a mounted /sys does not.
func Do(path string, fn func() error) error {
	f, err := Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return DoIn(f, fn)
}

// DoIn is Do for a namespace file that is already open.
func DoIn(f *os.File, fn func() error) error {
	return OnDiscardedThread(func() error {
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", f.Name(), err)
		}
		return fn()
	})
}

// Visit is DoIn on the calling thread, which comes back: to begin and to end a thread takes longer
// than most of what is done in a namespace. A thread that could not come back would run whatever
// the Go runtime gives it in the wrong namespace: the process ends then, which no recover prevents.
func Visit(f *os.File, fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if unix.Gettid() == unix.Getpid() { // others see by it where the process is
		return DoIn(f, fn)
	}
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer unix.Close(home)
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", f.Name(), err)
	}
	defer func() {
		if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
			fmt.Fprintf(os.Stderr, "leave network namespace %s: %v\n", f.Name(), err)
			os.Exit(1)
		}
	}()
	return fn()
}

// Start starts cmd in the network namespace at path; the caller waits for it as after cmd.Start.
// The command's Pdeathsig must be unset: the kernel sends that signal when the thread that started
// the command ends, and that is at once.
func Start(path string, cmd *exec.Cmd) error {
	if cmd.SysProcAttr != nil && cmd.SysProcAttr.Pdeathsig != 0 {
		return fmt.Errorf("start %s in network namespace %s: Pdeathsig is set; it would fire when the starting thread ends", cmd.Path, path)
	}
	return Do(path, cmd.Start)
}

// OnDiscardedThread runs fn on a locked OS thread that is not the main thread and that dies with
// fn: fn may leave it in other namespaces. The main thread would live on there, and /proc/self with
// it.
func OnDiscardedThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// This is the main thread. While it stays locked here, the nested call cannot get it.
			done <- OnDiscardedThread(fn)
			runtime.UnlockOSThread()
			return
		}
		// The send is deferred so that a runtime.Goexit in fn (as by testing.T.FailNow) cannot
		// leave the caller waiting for ever.
		err := errors.New("network namespace: the function ended its goroutine")
		defer func() { done <- err }()
		err = fn()
	}()
	return <-done
}

// prepareDir makes Dir a shared mount point, as `ip netns` does, so that a namespace deleted in one
// mount namespace is not kept alive by a copy of its mount in another.
func prepareDir() error {
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return fmt.Errorf("network namespaces: %w", err)
	}
	unlock, err := lockDir()
	if err != nil {
		return err
	}
	defer unlock()
	err = unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if err == unix.EINVAL { // not a mount point yet
		if err := unix.Mount(Dir, Dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("network namespaces: bind mount %s: %w", Dir, err)
		}
		err = unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	}
	if err != nil {
		return fmt.Errorf("network namespaces: share mount %s: %w", Dir, err)
	}
	return nil
}

// lockDir serialises changes under Dir between processes, `ip netns` included.
func lockDir() (unlock func(), err error) {
	d, err := os.Open(Dir)
	if err != nil {
		return nil, fmt.Errorf("network namespaces: %w", err)
	}
	for {
		err = unix.Flock(int(d.Fd()), unix.LOCK_EX)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("network namespaces: lock %s: %w", Dir, err)
	}
	return func() { d.Close() }, nil
}

func isNamespace(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

func validName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > unix.NAME_MAX || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("network namespace name %q: want 1 to %d characters without '/', and not '.' or '..'", name, unix.NAME_MAX)
	}
	return nil
}
