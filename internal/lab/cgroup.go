package lab

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mountPoint is one line of mountinfo.
type mountPoint struct{ path, fstype string }

// mounts reads where what is mounted in this process's mount namespace, in the order of mounting.
func mounts() ([]mountPoint, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMountinfo(string(data)), nil
}

func parseMountinfo(text string) (out []mountPoint) {
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 1 {
			continue
		}
		out = append(out, mountPoint{unescapeMount(left[4]), right[0]})
	}
	return out
}

// unescapeMount undoes mountinfo's octal escapes: \040 is a space.
func unescapeMount(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// cgroups are the mount points of the machine's cgroup hierarchies.
type cgroups struct {
	v2 string   // the unified one
	v1 []string // the others; runc makes containers' cgroups there as well
}

// findCgroups finds them; an error if there is no cgroup2.
func findCgroups() (cgroups, error) {
	all, err := mounts()
	if err != nil {
		return cgroups{}, fmt.Errorf("find cgroups: %w", err)
	}
	c := selectCgroups(all)
	if c.v2 == "" {
		return c, errors.New("no cgroup2 file system is mounted; this host may have version 1 only: " +
			"mount version 2 with: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1")
	}
	return c, nil
}

func selectCgroups(all []mountPoint) (c cgroups) {
	for _, m := range all {
		switch {
		case m.fstype == "cgroup2" && c.v2 == "":
			c.v2 = m.path
		case m.fstype == "cgroup" && !slices.Contains(c.v1, m.path):
			c.v1 = append(c.v1, m.path)
		}
	}
	return c
}

// joinCgroup moves a process into a cgroup, which it makes unless it is there. Not by
// CLONE_INTO_CGROUP: Linux 6.18 kills the new process if cgroup.kill was used before in only one of
// the two cgroups.
func joinCgroup(dir string, pid int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		return fmt.Errorf("enter cgroup: %w", err)
	}
	return nil
}

// processes gives the processes of a cgroup, itself only. None if there is no such cgroup.
func processes(dir string) ([]int, error) {
	f, err := os.Open(filepath.Join(dir, "cgroup.procs"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var pids []int
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if pid, err := strconv.Atoi(lines.Text()); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	// ENODEV: the cgroup went while it was read.
	if err := lines.Err(); err != nil && !errors.Is(err, unix.ENODEV) {
		return nil, err
	}
	return pids, nil
}

// eachCgroup calls fn for dir and every cgroup under it, children first. Cgroups that go meanwhile
// are left out.
func eachCgroup(dir string, fn func(dir string) error) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := eachCgroup(filepath.Join(dir, e.Name()), fn); err != nil {
				return err
			}
		}
	}
	return fn(dir)
}

// killPoll is how often a cgroup is looked at while its processes die.
const killPoll = 5 * time.Millisecond

// killCgroup kills every process in and under dir and waits until they are gone.
func killCgroup(dir string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		// One write kills all at once from Linux 5.14 on. Without it, or when processes fork
		// meanwhile, killing again until none is left does.
		_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
		left := 0
		err := eachCgroup(dir, func(d string) error {
			pids, err := processes(d)
			for _, pid := range pids {
				left++
				_ = unix.Kill(pid, unix.SIGKILL) // it may have died
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("kill the processes of cgroup %s: %w", dir, err)
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("cgroup %s: %d processes do not die: look at them with `cat %s/cgroup.procs`", dir, left, dir)
		}
		time.Sleep(killPoll)
	}
}

// removeCgroup removes dir and what is under it, which no process may be in.
func removeCgroup(dir string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	return eachCgroup(dir, func(d string) error {
		for {
			err := unix.Rmdir(d)
			if err == nil || errors.Is(err, unix.ENOENT) {
				return nil
			}
			// A process that is dead to us may take the kernel a moment to account for.
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				return fmt.Errorf("remove cgroup %s: %w", d, err)
			}
			time.Sleep(killPoll)
		}
	})
}
