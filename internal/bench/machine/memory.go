package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"
)

// The lines of /proc/meminfo with what the kernel cannot give back at will. Caches that can be
// reclaimed are not among them: they are files' and come and go with what else the machine does.
var (
	// EndpointFields grow with devices, routes and maps.
	EndpointFields = []string{"SUnreclaim", "Percpu", "KernelStack"}
	// ContainerFields grow with processes, too.
	ContainerFields = append(EndpointFields[:3:3], "PageTables")
)

// socketInodes is a reclaimable cache that grows with sockets.
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

// KernelMemory sums fields of /proc/meminfo, in bytes.
func KernelMemory(fields ...string) (float64, error) {
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	return ParseMeminfo(raw, fields...)
}

// ContainerMemory is the kernel's memory that containers and connections make grow: ContainerFields
// and sockets' inodes.
func ContainerMemory() (float64, error) {
	total, err := KernelMemory(ContainerFields...)
	if err != nil {
		return 0, err
	}
	raw, err := os.ReadFile("/proc/slabinfo")
	if err != nil {
		return 0, fmt.Errorf("read the kernel's memory: %w", err)
	}
	inodes, err := ParseSlabinfo(raw, socketInodes)
	return total + inodes, err
}

// steadyInterval is the time between two readings of Steady.
const steadyInterval = 250 * time.Millisecond

// Steady reads memory until it moves by less than still bytes for a moment, and no longer than
// limit: sockets, devices and namespaces are freed some time after they have gone.
func Steady(ctx context.Context, read func() (float64, error), still float64, limit time.Duration) (now float64, err error) {
	for deadline, last := time.Now().Add(limit), -1.0; ; last = now {
		if now, err = read(); err != nil {
			return now, err
		}
		if last >= 0 && math.Abs(now-last) < still || time.Now().After(deadline) {
			return now, nil
		}
		select {
		case <-time.After(steadyInterval):
		case <-ctx.Done():
			return now, ctx.Err()
		}
	}
}

// ParseSlabinfo finds the size of one of the kernel's caches in the text of /proc/slabinfo, in
// bytes: slabinfo(5).
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
