// Package sysctl reads and writes the settings of network namespaces, below /proc/sys/net. It owns
// how they are found quickly where there are thousands of namespaces, and the open directories of
// the node's; what a setting should be its callers know.
package sysctl

import (
	"bytes"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Namespace are the settings of a network namespace, for the threads that are in it. To find "ipv4"
// or "ipv6" there the kernel compares those of all namespaces that were looked at by way of the
// same mount, one after the other: 4 to 9 ms with 10,000, for each of a dozen settings of a new
// endpoint. So each is found once for all that is read and set below it, and in a container's
// namespace by way of a mount that few others were looked at by.
type Namespace struct {
	net int // an open /proc/sys/net

	mu   sync.Mutex     // guards the rest
	dirs map[string]int // "ipv4" and "ipv6", if they have been found
}

// Open opens those of the calling thread's network namespace.
func Open() (*Namespace, error) {
	fd, err := privateRoot()
	if err != nil { // it is the same, and may take longer
		fd, err = unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", root, err)
	}
	return &Namespace{net: fd, dirs: make(map[string]int)}, nil
}

const root = "/proc/sys/net"

// private is the mount that namespaces are looked at by way of now. When one goes the kernel waits
// until no processor walks its mounts any more: up to some ms, of an endpoint's few.
var private struct {
	mu    sync.Mutex // guards the rest
	mount int        // 0: none yet
	left  int        // how many more may use it
}

// mountUses is how many look at their settings by way of a mount before it goes, with what the
// kernel keeps of each in it.
const mountUses = 32

// privateRoot opens it by way of a mount of procfs that is this process's alone.
func privateRoot() (int, error) {
	private.mu.Lock()
	defer private.mu.Unlock()
	if private.left == 0 {
		mount, err := mountProc()
		if err != nil {
			return -1, err
		}
		if private.mount != 0 {
			_ = unix.Close(private.mount) // which lives on below what is open of it
		}
		private.mount, private.left = mount, mountUses
	}
	private.left--
	return unix.Openat(private.mount, "sys/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// TryMount says why namespaces are looked at by way of the node's /proc, if they are.
func TryMount() error {
	mount, err := mountProc()
	if err != nil {
		return fmt.Errorf("mount of procfs: %w", err)
	}
	return unix.Close(mount)
}

// mountProc mounts procfs in no directory.
func mountProc() (int, error) {
	context, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return -1, err
	}
	return unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
}

// Close closes what is open of them.
func (n *Namespace) Close() {
	for _, fd := range n.dirs {
		_ = unix.Close(fd)
	}
	_ = unix.Close(n.net)
}

// nodes are the settings of the namespace that is set most often and lives longest, the node's:
// they stay open.
var nodes struct {
	mu     sync.Mutex // guards the rest
	cookie uint64     // of the namespace; the kernel gives none twice
	open   *Namespace
}

// OfNode gives those of the calling thread's network namespace, which is the node's. They are
// not to be closed.
func OfNode() (*Namespace, error) {
	cookie, err := NetnsCookie()
	if err != nil {
		return nil, err
	}
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	if nodes.open != nil && nodes.cookie == cookie {
		return nodes.open, nil
	}
	opened, err := Open()
	if err != nil {
		return nil, err
	}
	// Nobody closes another namespace's, which may be in use. Only tests have several.
	nodes.cookie, nodes.open = cookie, opened
	return opened, nil
}

// NetnsCookie gives the number of the calling thread's network namespace, which no other has, or
// gets, until the machine starts again.
func NetnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("number of the network namespace: %w", err)
	}
	return cookie, nil
}

// open opens the file path.
func (n *Namespace) open(path string, flags int) (int, error) {
	family, file, _ := strings.Cut(path, "/")
	dir, err := n.dir(family)
	if err != nil {
		return -1, err
	}
	return unix.Openat(dir, file, flags|unix.O_CLOEXEC, 0)
}

// dir gives the open directory of that name.
func (n *Namespace) dir(family string) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if fd, found := n.dirs[family]; found {
		return fd, nil
	}
	fd, err := unix.Openat(n.net, family, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		n.dirs[family] = fd
	}
	return fd, err
}

// Setting is a file under /proc/sys/net and what is to be in it.
type Setting struct{ Path, Value string }

// Get reads the file path.
func (n *Namespace) Get(path string) (string, error) {
	fd, err := n.open(path, unix.O_RDONLY)
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name(path), err)
	}
	defer unix.Close(fd)
	have := make([]byte, valueBytes)
	size, err := unix.Pread(fd, have, 0)
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name(path), err)
	}
	return string(bytes.TrimSpace(have[:size])), nil
}

// Set writes values to files, unless they are there: some writes have side effects even when they
// change nothing.
func (n *Namespace) Set(settings ...Setting) error {
	for _, s := range settings {
		if err := n.setOne(s); err != nil {
			return fmt.Errorf("set sysctl %s = %s: %w", name(s.Path), s.Value, err)
		}
	}
	return nil
}

// setOne opens the file once to read and to write it.
func (n *Namespace) setOne(s Setting) error {
	have := make([]byte, valueBytes)
	fd, err := n.open(s.Path, unix.O_RDWR)
	readOnly := err
	if err != nil { // it may be right where it cannot be written
		fd, err = n.open(s.Path, unix.O_RDONLY)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	size, err := unix.Pread(fd, have, 0)
	if err != nil || string(bytes.TrimSpace(have[:size])) == s.Value {
		return err
	}
	if readOnly != nil {
		return readOnly
	}
	_, err = unix.Pwrite(fd, []byte(s.Value), 0)
	return err
}

// valueBytes is more than any value has that is read or set here.
const valueBytes = 256

func name(path string) string { return "net." + strings.ReplaceAll(path, "/", ".") }

// Get is Namespace.Get of the calling thread's network namespace.
func Get(path string) (string, error) {
	n, err := Open()
	if err != nil {
		return "", err
	}
	defer n.Close()
	return n.Get(path)
}

// Set is Namespace.Set of the calling thread's network namespace, for one file.
func Set(path, value string) error {
	n, err := Open()
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Set(Setting{path, value})
}
