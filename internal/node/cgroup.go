package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// cgroup is the agent's.
type cgroup struct {
	dir string
	// made are the directories that were not there before, the lowest first.
	made []string
}

// enterCgroup makes cgroup dir if it is missing and moves this process there. The datapath's hooks
// see the sockets of this cgroup's processes, so nothing else may live in it.
func enterCgroup(dir string) (_ *cgroup, err error) {
	g := &cgroup{dir: dir}
	parent := dir
	for {
		if _, err := os.Stat(parent); err == nil || parent == "/" {
			break
		}
		g.made = append(g.made, parent)
		parent = filepath.Dir(parent)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(parent, &st); err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("cgroup %s: not on a cgroup2 file system; this host may have version 1 only: "+
			"mount version 2 with: mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1", dir)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	procs := filepath.Join(dir, "cgroup.procs")
	if raw, err := os.ReadFile(procs); err == nil && slices.Contains(pids(string(raw)), os.Getpid()) {
		return g, nil
	}
	if err := os.WriteFile(procs, []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return nil, errors.Join(fmt.Errorf("enter cgroup %s: %w", dir, err), g.remove())
	}
	return g, nil
}

// leave undoes enterCgroup for an agent that does not start, if that made the cgroup: it must not
// look as if there were an agent.
func (g *cgroup) leave() error {
	if g == nil || len(g.made) == 0 {
		return nil
	}
	above := filepath.Join(filepath.Dir(g.made[len(g.made)-1]), "cgroup.procs")
	if err := os.WriteFile(above, []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return fmt.Errorf("leave cgroup %s: %w", g.dir, err)
	}
	return g.remove()
}

// remove removes the directories that enterCgroup made, unless others have moved in: an fd keeper
// stays.
func (g *cgroup) remove() error {
	for _, dir := range g.made {
		if err := os.Remove(dir); errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
			return nil
		} else if err != nil {
			return fmt.Errorf("remove cgroup: %w", err)
		}
	}
	return nil
}

// runs reports whether a process of the cgroup was started with these arguments.
func (g *cgroup) runs(args ...string) bool {
	raw, err := os.ReadFile(filepath.Join(g.dir, "cgroup.procs"))
	if err != nil {
		return false
	}
	for _, pid := range pids(string(raw)) {
		cmdline, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if err != nil {
			continue // it has ended
		}
		words := strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00")
		if slices.Equal(words[1:], args) {
			return true
		}
	}
	return false
}

// pids reads a cgroup.procs. Processes of other PID namespaces are 0 there.
func pids(procs string) (out []int) {
	for word := range strings.FieldsSeq(procs) {
		if pid, err := strconv.Atoi(word); err == nil && pid > 0 {
			out = append(out, pid)
		}
	}
	return out
}
