package verbs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// CheckDevice says whether the machine has an RDMA device of this name, and which ones it has.
func CheckDevice(name string) error { return CheckDeviceIn("/sys/class/infiniband", name) }

// CheckDeviceIn is CheckDevice for a machine whose devices are in dir.
func CheckDeviceIn(dir, name string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without RDMA has no such folder
		return fmt.Errorf("look for RDMA devices: %w", err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	switch {
	case slices.Contains(all, name):
		return nil
	case len(all) == 0:
		return fmt.Errorf("there is no RDMA device %s, and no other: load its driver, or leave the flag away", name)
	}
	return fmt.Errorf("there is no RDMA device %s; there are: %s", name, strings.Join(all, ", "))
}
