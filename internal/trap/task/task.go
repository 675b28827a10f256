// Package task says what /proc tells of the threads whose calls are trapped.
//
// None of it is checked against a thread that ends meanwhile and gives its number to another: an
// answer names the call, and the kernel refuses it if the thread that made the call has gone.
package task

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Owner is a task's effective user and group as the agent's user namespace numbers them.
type Owner struct{ UID, GID uint32 }

// Self is the owner of what the calling thread makes.
func Self() Owner { return Owner{uint32(unix.Geteuid()), uint32(unix.Getegid())} }

// Proc is an open /proc: the descriptor.
type Proc int

// Open opens /proc.
func Open() (Proc, error) {
	fd, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /proc: %w", err)
	}
	return Proc(fd), nil
}

// Close closes it.
func (p Proc) Close() { _ = unix.Close(int(p)) }

var errNotVisible = errors.New("thread is not in the agent's PID namespace; run the agent in the host's")

// Owner gives the effective owner of thread tid. The kernel derives the owner of the directory
// /proc/TID from the task's credentials at every stat, and, unlike for the files in it, whether or
// not the task is dumpable.
func (p Proc) Owner(tid uint32) (Owner, error) {
	if tid == 0 {
		return Owner{}, errNotVisible
	}
	var st unix.Stat_t
	err := unix.Fstatat(int(p), strconv.FormatUint(uint64(tid), 10), &st, unix.AT_SYMLINK_NOFOLLOW)
	return Owner{st.Uid, st.Gid}, err
}

// Netns gives the inode of thread tid's network namespace.
func (p Proc) Netns(tid uint32) (inode uint64, err error) {
	return p.netnsAt(strconv.FormatUint(uint64(tid), 10) + "/ns/net")
}

// OwnNetns gives the inode of the network namespace in which this process makes sockets. It asks
// for the thread's own: self is the first thread's, which whatever ran on it before may have left
// elsewhere.
func (p Proc) OwnNetns() (inode uint64, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return p.netnsAt("thread-self/ns/net")
}

// netnsAt gives the inode of the network namespace at path in /proc. It reads the link instead of
// following it, which takes half the time.
func (p Proc) netnsAt(path string) (inode uint64, err error) {
	const head, tail = "net:[", "]"
	var buf [32]byte
	n, err := unix.Readlinkat(int(p), path, buf[:])
	if err != nil {
		return 0, err
	}
	link := string(buf[:n])
	digits, ok := strings.CutPrefix(link, head)
	if !ok {
		return 0, fmt.Errorf("namespace %q: want %sINODE%s", link, head, tail)
	}
	return strconv.ParseUint(strings.TrimSuffix(digits, tail), 10, 64)
}

// IsSocket reports whether descriptor number of thread tid is the socket with that inode.
func (p Proc) IsSocket(tid uint32, number int, inode uint64) bool {
	buf := make([]byte, 64)
	path := strconv.FormatUint(uint64(tid), 10) + "/fd/" + strconv.Itoa(number)
	n, err := unix.Readlinkat(int(p), path, buf)
	return err == nil && string(buf[:n]) == "socket:["+strconv.FormatUint(inode, 10)+"]"
}

// FindSocket looks for the socket with that inode among the descriptors of thread tid. A thread
// that is gone has none.
func (p Proc) FindSocket(tid uint32, inode uint64) (number int, found bool, err error) {
	fd, err := unix.Openat(int(p), strconv.FormatUint(uint64(tid), 10)+"/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ESRCH {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("descriptors of thread %d: %w", tid, err)
	}
	dir := os.NewFile(uintptr(fd), "fd")
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		if number, cerr := strconv.Atoi(name); cerr == nil && p.IsSocket(tid, number, inode) {
			return number, true, nil
		}
	}
	return 0, false, err
}

// maxFile bounds what is read of a file in /proc, in bytes.
const maxFile = 64 << 10

// Read reads a small file.
func (p Proc) Read(path string) (string, error) {
	fd, err := unix.Openat(int(p), path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open /proc/%s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return "", fmt.Errorf("read /proc/%s: %w", path, err)
	}
	return string(b), nil
}

// ReadLink reads a link of at most 64 bytes without following it.
func (p Proc) ReadLink(path string) (string, error) {
	var buf [64]byte
	n, err := unix.Readlinkat(int(p), path, buf[:])
	if err != nil {
		return "", fmt.Errorf("read /proc/%s: %w", path, err)
	}
	return string(buf[:n]), nil
}

// OnThread runs f on a thread that is not the process's first and ends with f: what f makes of the
// thread goes with it. It does not wait.
func OnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread cannot end. While it is locked here, another one runs f.
			started := make(chan struct{})
			OnThread(func() { close(started); f() })
			<-started
			runtime.UnlockOSThread()
			return
		}
		f() // not unlocked: the thread ends with the goroutine
	}()
}

// siocGetNetns is SIOCGSKNS, which x/sys has no name for.
const siocGetNetns = 0x894c

// NetnsOfSocket gives the inode of the network namespace of a socket.
func NetnsOfSocket(fd int) (uint64, error) {
	ns, err := unix.IoctlRetInt(fd, siocGetNetns)
	if err != nil {
		return 0, fmt.Errorf("network namespace of the socket: %w", err)
	}
	defer unix.Close(ns)
	var st unix.Stat_t
	err = unix.Fstat(ns, &st)
	return st.Ino, err
}

// Take gives a duplicate of descriptor number of thread tid, unless that is no socket: to close a
// file of another kind may make a file system wait. ok is false then, or if there is none.
func (p Proc) Take(tid uint32, number int) (fd int, ok bool, err error) {
	link, err := p.ReadLink(strconv.FormatUint(uint64(tid), 10) + "/fd/" + strconv.Itoa(number))
	if number < 0 || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return -1, false, nil
	}
	if err != nil {
		return -1, false, err
	}
	if !strings.HasPrefix(link, "socket:[") {
		return -1, false, nil
	}
	pidfd, err := p.pidfd(tid)
	if err != nil {
		return -1, false, fmt.Errorf("thread %d: %w", tid, err)
	}
	defer unix.Close(pidfd)
	fd, err = unix.PidfdGetfd(pidfd, number, 0)
	if errors.Is(err, unix.EBADF) || errors.Is(err, unix.ESRCH) {
		return -1, false, nil
	}
	if err != nil {
		return -1, false, fmt.Errorf("descriptor %d of thread %d: %w", number, tid, err)
	}
	return fd, true, nil
}

// pidfd opens thread tid. Threads can have descriptors of their own, but before Linux 6.9 there is
// no pidfd of a thread; then it is the process's.
func (p Proc) pidfd(tid uint32) (int, error) {
	fd, err := unix.PidfdOpen(int(tid), unix.PIDFD_THREAD)
	if err != unix.EINVAL {
		return fd, err
	}
	process, err := p.Process(tid)
	if err != nil {
		return -1, err
	}
	return unix.PidfdOpen(int(process), 0)
}

// Process gives the process of thread tid.
func (p Proc) Process(tid uint32) (uint32, error) {
	status, err := p.Read(strconv.FormatUint(uint64(tid), 10) + "/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(status) {
		if text, ok := strings.CutPrefix(line, "Tgid:"); ok {
			process, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
			if err != nil {
				return 0, fmt.Errorf("process of thread %d: %w", tid, err)
			}
			return uint32(process), nil
		}
	}
	return 0, fmt.Errorf("process of thread %d: not in its status", tid)
}
