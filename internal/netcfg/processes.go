package netcfg

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// Processes lists the processes that are in the network namespace at path; none if there is no such
// namespace. A process that begins or ends meanwhile may be missing.
func Processes(path string) ([]int, error) {
	inode, err := NetnsInode(path)
	if errors.Is(err, ErrNoContainer) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	want := fmt.Sprintf("net:[%d]", inode)
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// Of a process that has ended, and is not reaped, there is no namespace.
		if at, err := os.Readlink(filepath.Join("/proc", e.Name(), "ns/net")); err == nil && at == want {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
