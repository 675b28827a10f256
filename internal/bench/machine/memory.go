package machine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// densityFields are the lines of /proc/meminfo that a connection or a container makes grow. Caches that can be reclaimed are not
// among them: they are files' and come and go with what else the machine does. Of these, sockets' inodes are counted.
var densityFields = []string{"SUnreclaim", "Percpu", "KernelStack", "PageTables"}

const socketInodes = "sock_inode_cache"

// ParseMeminfo sums fields of the text of /proc/meminfo, in bytes.
func ParseMeminfo(raw []byte, fields ...string) (total float64, err error) {
	for _, name := range fields {
		found := false
		for line := range bytes.Lines(raw) {
			f := strings.Fields(string(line))
			if len(f) != 3 || f[0] != name+":" || f[2] != "kB" {
				continue
			}
			kb, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				return 0, fmt.Errorf("read the kernel's memory: %w", err)
			}
			total, found = total+1024*kb, true
		}
		if !found {
			return 0, fmt.Errorf("read the kernel's memory: /proc/meminfo has no line %s", name)
		}
	}
	return total, nil
}

func KernelMemory() (float64, error) {
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	total, err := ParseMeminfo(raw, densityFields...)
	if err != nil {
		return 0, err
	}
	if raw, err = os.ReadFile("/proc/slabinfo"); err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	inodes, err := ParseSlabinfo(raw, socketInodes)
	return total + inodes, err
}

// ParseSlabinfo finds the size of one of the kernel's caches in the text of /proc/slabinfo, in bytes: slabinfo(5).
func ParseSlabinfo(raw []byte, cache string) (float64, error) {
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 15 || f[0] != cache {
			continue
		}
		pages, e1 := strconv.ParseFloat(f[5], 64) // a slab
		slabs, e2 := strconv.ParseFloat(f[14], 64)
		if err := errors.Join(e1, e2); err != nil {
			return 0, fmt.Errorf("read the kernel's memory: cache %s: %w", cache, err)
		}
		return pages * slabs * float64(os.Getpagesize()), nil
	}
	return 0, fmt.Errorf("read the kernel's memory: /proc/slabinfo has no cache %s", cache)
}

// Unreclaimable gives the kernel's memory that it cannot give back at will, in bytes; the page cache and caches of files
// are none of it.
func Unreclaimable() (float64, error) {
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	return parseUnreclaimable(raw)
}

func parseUnreclaimable(raw []byte) (total float64, err error) {
	found := 0
	for line := range bytes.Lines(raw) {
		f := bytes.Fields(line)
		if len(f) != 3 || string(f[2]) != "kB" {
			continue
		}
		switch string(f[0]) {
		case "SUnreclaim:", "Percpu:", "KernelStack:":
			kb, err := strconv.ParseFloat(string(f[1]), 64)
			if err != nil {
				return 0, fmt.Errorf("read the kernel's memory: %w", err)
			}
			total += 1024 * kb
			found++
		}
	}
	if found != 3 {
		return 0, fmt.Errorf("read the kernel's memory: /proc/meminfo has %d of the 3 lines", found)
	}
	return total, nil
}
