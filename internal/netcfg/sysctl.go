package netcfg

import (
	"bytes"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// sysctls are the settings of a network namespace, below /proc/sys/net, for the threads that are in
// it. To find "ipv4" or "ipv6" there the kernel compares those of all namespaces that were looked
// at by way of the same mount, one after the other: 4 to 9 ms with 10,000, for each of a dozen
// settings of a new endpoint. So each is found once for all that is read and set below it, and in a
// container's namespace by way of a mount that nobody else has.
type sysctls struct {
	net int // an open /proc/sys/net

	mu   sync.Mutex     // guards the rest
	dirs map[string]int // "ipv4" and "ipv6", if they have been found
}

// openSysctls opens those of the calling thread's network namespace.
func openSysctls() (*sysctls, error) {
	fd, err := privateProcSysNet()
	if err != nil { // it is the same, and may take longer
		fd, err = unix.Open(procSysNet, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", procSysNet, err)
	}
	return &sysctls{net: fd, dirs: make(map[string]int)}, nil
}

const procSysNet = "/proc/sys/net"

// privateProcSysNet opens it in a file system of its own, which goes with the last descriptor of
// it.
func privateProcSysNet() (int, error) {
	context, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return -1, err
	}
	mount, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(mount)
	return unix.Openat(mount, "sys/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

func (n *sysctls) close() {
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
	open   *sysctls
}

// nodeSysctls gives those of the calling thread's network namespace, which is the node's. They are
// not to be closed.
func nodeSysctls() (*sysctls, error) {
	cookie, err := netnsCookie()
	if err != nil {
		return nil, err
	}
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	if nodes.open != nil && nodes.cookie == cookie {
		return nodes.open, nil
	}
	opened, err := openSysctls()
	if err != nil {
		return nil, err
	}
	// Nobody closes another namespace's, which may be in use. Only tests have several.
	nodes.cookie, nodes.open = cookie, opened
	return opened, nil
}

// netnsCookie gives the number of the calling thread's network namespace.
func netnsCookie() (uint64, error) {
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
func (n *sysctls) open(path string, flags int) (int, error) {
	family, file, _ := strings.Cut(path, "/")
	dir, err := n.dir(family)
	if err != nil {
		return -1, err
	}
	return unix.Openat(dir, file, flags|unix.O_CLOEXEC, 0)
}

// dir gives the open directory of that name.
func (n *sysctls) dir(family string) (int, error) {
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

// setting is a file under /proc/sys/net and what is to be in it.
type setting struct{ path, value string }

// get reads the file path.
func (n *sysctls) get(path string) (string, error) {
	fd, err := n.open(path, unix.O_RDONLY)
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", sysctlName(path), err)
	}
	defer unix.Close(fd)
	have := make([]byte, sysctlBytes)
	size, err := unix.Pread(fd, have, 0)
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", sysctlName(path), err)
	}
	return string(bytes.TrimSpace(have[:size])), nil
}

// set writes values to files, unless they are there: some writes have side effects even when they
// change nothing.
func (n *sysctls) set(settings ...setting) error {
	for _, s := range settings {
		if err := n.setOne(s); err != nil {
			return fmt.Errorf("set sysctl %s = %s: %w", sysctlName(s.path), s.value, err)
		}
	}
	return nil
}

// setOne opens the file once to read and to write it.
func (n *sysctls) setOne(s setting) error {
	have := make([]byte, sysctlBytes)
	fd, err := n.open(s.path, unix.O_RDWR)
	readOnly := err
	if err != nil { // it may be right where it cannot be written
		fd, err = n.open(s.path, unix.O_RDONLY)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	size, err := unix.Pread(fd, have, 0)
	if err != nil || string(bytes.TrimSpace(have[:size])) == s.value {
		return err
	}
	if readOnly != nil {
		return readOnly
	}
	_, err = unix.Pwrite(fd, []byte(s.value), 0)
	return err
}

// sysctlBytes is more than any value has that is read or set here.
const sysctlBytes = 256

func sysctlName(path string) string { return "net." + strings.ReplaceAll(path, "/", ".") }

// sysctl is get of the calling thread's network namespace.
func sysctl(path string) (string, error) {
	n, err := openSysctls()
	if err != nil {
		return "", err
	}
	defer n.close()
	return n.get(path)
}

// setSysctl is set of the calling thread's network namespace, for one file.
func setSysctl(path, value string) error {
	n, err := openSysctls()
	if err != nil {
		return err
	}
	defer n.close()
	return n.set(setting{path, value})
}
