package ioctl

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap/task"
)

// caller is a thread whose ioctl the agent makes.
type caller struct {
	task  int    // pidfd
	netns int    // its network namespace
	inode uint64 // of that
	owner task.Owner
	// caps are the capabilities that ioctls ask for and the caller has in the agent's user
	// namespace: bit i for capability i.
	caps uint64
	ids  taskIDs
}

// taskIDs are a thread's numbers as the agent has them (outer) and as the thread itself does
// (inner).
type taskIDs struct {
	thread, process, group struct{ outer, inner int }
}

// lendable are the capabilities that the kernel asks for in the ioctls of sockets and their
// devices.
const lendable = 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_NET_RAW | 1<<unix.CAP_SYS_MODULE

func (c *caller) close() {
	if c.task >= 0 {
		closeFD(c.task)
	}
	if c.netns >= 0 {
		closeFD(c.netns)
	}
}

// callerOf looks at thread tid and the file it has at number fd. errno is what its ioctl must fail
// with if that is no file or none that ioctls of sockets are for: epoll on an epoll instance. All
// of it may be another task's if tid has died: the caller checks.
func callerOf(p task.Proc, tid uint32, fd int32, epoll unix.Errno) (c *caller, errno unix.Errno, err error) {
	c = &caller{task: -1, netns: -1}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	dir := strconv.FormatUint(uint64(tid), 10)
	if errno, err = fileKind(p, dir, fd, epoll); errno != 0 || err != nil {
		return c, errno, err
	}
	if err := c.readStatus(p, dir); err != nil {
		return c, 0, err
	}
	if c.netns, err = unix.Openat(int(p), dir+"/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return c, 0, fmt.Errorf("network namespace of thread %d: %w", tid, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(c.netns, &st); err != nil {
		return c, 0, fmt.Errorf("network namespace of thread %d: %w", tid, err)
	}
	c.inode = st.Ino
	// Threads can have descriptors of their own. Before Linux 6.9 there is no pidfd of a thread;
	// then it is the process's, and one that made its threads' descriptors different gets the
	// answer for another of its files.
	c.task, err = unix.PidfdOpen(int(tid), unix.PIDFD_THREAD)
	if err == unix.EINVAL {
		c.task, err = unix.PidfdOpen(c.ids.process.outer, 0)
	}
	if err != nil {
		return c, 0, fmt.Errorf("thread %d: %w", tid, err)
	}
	return c, 0, nil
}

// fileKind says with what errno an ioctl of sockets fails on a thread's file, before anything
// touches the file: 0 for sockets and TUN devices. Files of other kinds are left alone: to close
// one may make a file system wait.
func fileKind(p task.Proc, dir string, fd int32, epoll unix.Errno) (unix.Errno, error) {
	if fd < 0 {
		return unix.EBADF, nil
	}
	number := strconv.Itoa(int(fd))
	var buf [256]byte
	n, err := unix.Readlinkat(int(p), dir+"/fd/"+number, buf[:])
	if err == unix.ENOENT {
		return unix.EBADF, nil // or the thread is gone
	}
	if err != nil {
		return 0, fmt.Errorf("descriptor %d: %w", fd, err)
	}
	link := string(buf[:n])
	if isSocketLink(link) || strings.HasSuffix(link, "/net/tun") {
		return 0, nil
	}
	// Who could read or write it has not opened it as a path only. What fdinfo says of those may
	// wait for the container: of an epoll instance for whoever holds its lock.
	var st unix.Stat_t
	if err := unix.Fstatat(int(p), dir+"/fd/"+number, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return 0, fmt.Errorf("descriptor %d: %w", fd, err)
	} else if st.Mode&(unix.S_IRUSR|unix.S_IWUSR) != 0 {
		if link == "anon_inode:[eventpoll]" {
			return epoll, nil
		}
		return unix.ENOTTY, nil
	}
	info, err := p.Read(dir + "/fdinfo/" + number)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(info) {
		if text, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(text), 8, 32)
			if err == nil && flags&unix.O_PATH != 0 {
				return unix.EBADF, nil
			}
		}
	}
	return unix.ENOTTY, nil
}

// readStatus reads who the thread is and what it may.
func (c *caller) readStatus(p task.Proc, dir string) error {
	text, err := p.Read(dir + "/status")
	if err != nil {
		return err
	}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		f := strings.Fields(value)
		var bad error
		switch name {
		case "Uid":
			c.owner.UID, bad = parseID(f)
		case "Gid":
			c.owner.GID, bad = parseID(f)
		case "CapEff":
			c.caps, bad = strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		case "NSpid":
			c.ids.thread.outer, c.ids.thread.inner, bad = parseNested(f)
		case "NStgid":
			c.ids.process.outer, c.ids.process.inner, bad = parseNested(f)
		case "NSpgid":
			c.ids.group.outer, c.ids.group.inner, bad = parseNested(f)
		}
		if bad != nil {
			return fmt.Errorf("/proc/%s/status: %s: %w", dir, strings.TrimSpace(line), bad)
		}
	}
	userns, err := p.ReadLink(dir + "/ns/user")
	if err != nil {
		return err
	}
	own, err := p.ReadLink("self/ns/user")
	if err != nil {
		return err
	}
	// Capabilities in another user namespace are none in the agent's.
	if c.caps &= lendable; userns != own {
		c.caps = 0
	}
	return nil
}

// parseID takes the effective one of real, effective, saved and file system id.
func parseID(f []string) (uint32, error) {
	if len(f) != 4 {
		return 0, errors.New("want four numbers")
	}
	id, err := strconv.ParseUint(f[1], 10, 32)
	return uint32(id), err
}

// parseNested takes the first and the last of the numbers that nested PID namespaces have for a
// task.
func parseNested(f []string) (outer, inner int, err error) {
	if len(f) == 0 {
		return 0, 0, errors.New("want a number")
	}
	if outer, err = strconv.Atoi(f[0]); err != nil {
		return 0, 0, err
	}
	inner, err = strconv.Atoi(f[len(f)-1])
	return outer, inner, err
}

// outer gives the agent's number for what the caller calls pid: a process, or a process group if
// negative. The caller itself, its process and its group are known; others are not looked for.
func (t taskIDs) outer(pid int32) (int, unix.Errno) {
	switch {
	case pid == 0:
		return 0, 0
	case pid == math.MinInt32:
		return 0, unix.EINVAL
	case int(pid) == t.process.inner:
		return t.process.outer, 0
	case int(pid) == t.thread.inner:
		return t.thread.outer, 0
	case -int(pid) == t.group.inner:
		return -t.group.outer, 0
	}
	return 0, unix.ESRCH
}

// inner gives the caller's number for what the agent calls pid, 0 if it is none of the above.
func (t taskIDs) inner(pid int) int32 {
	switch pid {
	case t.process.outer:
		return int32(t.process.inner)
	case t.thread.outer:
		return int32(t.thread.inner)
	case -t.group.outer:
		return -int32(t.group.inner)
	}
	return 0
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
