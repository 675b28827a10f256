// Package procnet shows programs in intercepted containers their TCP sockets in /proc/net. The
// kernel makes /proc/net/tcp and /proc/net/tcp6 of what lives in the reader's network namespace,
// where those sockets are not. So /proc/net, a symbolic link, is covered by another, which leads to
// a directory with two files of Heddle's, links of iterators (bpf/iter/proc.bpf.c); whatever else
// is in it leads to /proc/self/net. Decision 0049.
package procnet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	// Dir is the directory, beside the node's seccomp socket, in which an agent puts what
	// containers need.
	Dir = "proc"
	// InContainer is where a container has filesDir.
	InContainer = "/dev/heddle-proc"
	// filesDir is the part of Dir that containers see: linkFile, and the directory that it leads
	// to.
	filesDir = "files"
	linkFile = "link"
	netDir   = "net"
)

// Names are those of the files that are Heddle's.
var Names = []string{"tcp", "tcp6"}

// Publish makes dir, or brings it up to date. pin gives the file whose content a container is to
// see under a name.
func Publish(dir string, pin func(name string) string) error {
	files := filepath.Join(dir, filesDir)
	shown := filepath.Join(files, netDir)
	if err := os.MkdirAll(shown, 0o755); err != nil {
		return err
	}
	for _, d := range []string{dir, files, shown} {
		if err := os.Chmod(d, 0o755); err != nil { // whatever the umask: containers' users look into it
			return err
		}
	}
	entries, err := os.ReadDir("/proc/self/net")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if slices.Contains(Names, e.Name()) {
			continue
		}
		if err := link("../../../proc/self/net/"+e.Name(), filepath.Join(shown, e.Name())); err != nil {
			return err
		}
	}
	for _, name := range Names {
		// Made once: what is mounted there in containers would go with it.
		f, err := os.OpenFile(filepath.Join(shown, name), os.O_CREATE|os.O_RDONLY, 0o444)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Close(), link(pin(name), filepath.Join(dir, name))); err != nil {
			return err
		}
	}
	return link(".."+InContainer+"/"+netDir, filepath.Join(files, linkFile))
}

// link makes path a symbolic link to target, unless it is one.
func link(target, path string) error {
	if has, err := os.Readlink(path); err == nil && has == target {
		return nil
	}
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, next); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// Mount is a file or directory of the node's that a container is to have.
type Mount struct{ Source, Destination string }

// Mounts gives what a container needs of dir, in the order in which it is mounted; nil if no agent
// has published it, or what it published is gone.
func Mounts(dir string) ([]Mount, error) {
	mounts := []Mount{{filepath.Join(dir, filesDir), InContainer}}
	for _, name := range Names {
		pin, err := filepath.EvalSymlinks(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("look for /proc/net/%s: %w", name, err)
		}
		mounts = append(mounts, Mount{pin, filepath.Join(InContainer, netDir, name)})
	}
	return mounts, nil
}

// Cover covers /proc/net of the container whose mounts are in the mount namespace of process pid,
// and whose root file system is at root there: it has not become the root yet. What the container's
// image has made of these paths is not followed out of root. It leaves the calling thread in that
// namespace.
func Cover(pid int, root string) error {
	mounts, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return fmt.Errorf("open the container's mount namespace: %w", err)
	}
	defer mounts.Close()
	if err := EnterMounts(mounts); err != nil {
		return fmt.Errorf("enter the container's mount namespace: %w", err)
	}
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", root, err)
	}
	defer unix.Close(at)
	target, err := openLink(at, "proc/net", unix.PROC_SUPER_MAGIC)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	source, err := openLink(at, InContainer[1:]+"/"+linkFile, 0)
	if err != nil {
		return err
	}
	defer unix.Close(source)
	tree, err := unix.OpenTree(source, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("take %s/%s: %w", InContainer, linkFile, err)
	}
	defer unix.Close(tree)
	// mount() would follow /proc/net; this does not.
	if err := unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount on /proc/net: %w", err)
	}
	return nil
}

// EnterMounts brings the calling goroutine, for good, into a mount namespace.
func EnterMounts(namespace *os.File) error {
	runtime.LockOSThread()
	// Other threads keep their root and working directory.
	return errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS))
}

// openLink opens a symbolic link below root, not what it leads to; on a file system of the given
// kind, if that is not 0.
func openLink(root int, path string, kind int64) (int, error) {
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	var file unix.Stat_t
	var fs unix.Statfs_t
	if err = errors.Join(unix.Fstat(fd, &file), unix.Fstatfs(fd, &fs)); err == nil &&
		(file.Mode&unix.S_IFMT != unix.S_IFLNK || kind != 0 && int64(fs.Type) != kind) {
		err = errors.New("not the symbolic link that it should be")
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", path, err)
	}
	return fd, nil
}
