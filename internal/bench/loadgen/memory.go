package loadgen

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"time"
)

// Held is what hold measures: idle connections, each used for one byte there and back so that both
// ends exist, and what the kernel's object caches grew by.
type Held struct {
	Connections int   `json:"connections"`
	SlabBytes   int64 `json:"slab_bytes"` // both ends, whole machine
}

// hold opens connections and sees what the kernel's slab caches (sockets, files, inodes, BPF socket
// storage) grow by. Buffers in use would come on top, and are the same for any idle connection:
// none.
func hold(to netip.AddrPort, s settings) (result Held, err error) {
	sa, family := sockaddr(to)
	fds := make([]int, 0, s.connections)
	defer func() {
		for _, fd := range fds {
			err = errors.Join(err, abort(fd))
		}
	}()
	before, err := steadySlab(slack / 3)
	if err != nil {
		return Held{}, err
	}
	b := make([]byte, 1)
	for range s.connections {
		fd, err := dial(sa, family)
		if err != nil {
			return Held{}, fmt.Errorf("connection %d of %d: %w", len(fds)+1, s.connections, err)
		}
		fds = append(fds, fd)
		if err := errors.Join(writeFull(fd, b), readFull(fd, b)); err != nil {
			return Held{}, fmt.Errorf("connection %d of %d: %w", len(fds), s.connections, err)
		}
	}
	after, err := steadySlab(slack / 3)
	if err != nil {
		return Held{}, err
	}
	return Held{Connections: len(fds), SlabBytes: after - before}, nil
}

// steadySlab reads the slab size once it has stopped moving: sockets of an earlier measurement are
// freed only after an RCU grace period. After the limit it takes the size as it is; the spread over
// the runs shows it.
func steadySlab(limit time.Duration) (int64, error) {
	const (
		interval = 250 * time.Millisecond
		still    = 256 << 10 // bytes
	)
	deadline := time.Now().Add(limit)
	last, err := readSlab()
	for err == nil && time.Now().Before(deadline) {
		<-time.After(interval)
		previous := last
		if last, err = readSlab(); max(last-previous, previous-last) < still {
			break
		}
	}
	return last, err
}

// readSlab gives the size of the kernel's object caches in bytes.
func readSlab() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read slab size: %w", err)
	}
	return parseSlab(b)
}

// parseSlab finds the Slab line in the text of /proc/meminfo.
func parseSlab(b []byte) (int64, error) {
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) != 3 || string(f[0]) != "Slab:" || string(f[2]) != "kB" {
			continue
		}
		kb, err := strconv.ParseInt(string(f[1]), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read slab size: %w", err)
		}
		return kb << 10, nil
	}
	return 0, errors.New("read slab size: /proc/meminfo has no Slab line")
}
