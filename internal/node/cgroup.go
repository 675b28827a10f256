package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// enterCgroup makes cgroup if it is missing and moves this process there. The datapath's hooks see the
// sockets of this cgroup's processes, so nothing else may live in it.
func enterCgroup(dir string) error {
	parent := dir
	for {
		if _, err := os.Stat(parent); err == nil || parent == "/" {
			break
		}
		parent = filepath.Dir(parent)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(parent, &st); err != nil {
		return fmt.Errorf("cgroup %s: %w", dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("cgroup %s: not on a cgroup2 file system; this host may have version 1 only: "+
			"mount version 2 with: mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1", dir)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	procs := filepath.Join(dir, "cgroup.procs")
	if raw, err := os.ReadFile(procs); err == nil && contains(string(raw), os.Getpid()) {
		return nil
	}
	if err := os.WriteFile(procs, []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return fmt.Errorf("enter cgroup %s: %w", dir, err)
	}
	return nil
}

func contains(procs string, pid int) bool {
	for line := range strings.Lines(procs) {
		if strings.TrimSpace(line) == strconv.Itoa(pid) {
			return true
		}
	}
	return false
}
