package netcfg

import (
	"bytes"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctls is an open /proc/sys/net of a network namespace, for the threads that are in it. To find
// the directory the kernel compares those of all namespaces, one after the other: with 700 that was
// most of what settings cost, and so it is found once for all that are read and set.
type sysctls int

// openSysctls opens that of the calling thread's network namespace.
func openSysctls() (sysctls, error) {
	fd, err := unix.Open("/proc/sys/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /proc/sys/net: %w", err)
	}
	return sysctls(fd), nil
}

func (n sysctls) close() { _ = unix.Close(int(n)) }

// setting is a file under /proc/sys/net and what is to be in it.
type setting struct{ path, value string }

// get reads the file path.
func (n sysctls) get(path string) (string, error) {
	fd, err := unix.Openat(int(n), path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
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
func (n sysctls) set(settings ...setting) error {
	for _, s := range settings {
		if err := n.setOne(s); err != nil {
			return fmt.Errorf("set sysctl %s = %s: %w", sysctlName(s.path), s.value, err)
		}
	}
	return nil
}

// setOne opens the file once to read and to write it.
func (n sysctls) setOne(s setting) error {
	have := make([]byte, sysctlBytes)
	fd, err := unix.Openat(int(n), s.path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	readOnly := err
	if err != nil { // it may be right where it cannot be written
		fd, err = unix.Openat(int(n), s.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
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
