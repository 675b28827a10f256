package lanes

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"

	"golang.org/x/sys/unix"
)

// The memory of a connection, as clib/guest/lanes.h has it (TestLayout).
const (
	magic      = 0x53454e414c4c4448 // "HDLLANES"
	version    = 1
	capacity   = 1 << 20
	headBytes  = 4096
	laneBytes  = 256
	stopAt     = 128
	beatAt     = 132
	lanesAt    = 256
	consumedAt = 128 // in a lane
	size       = headBytes + 2*capacity
)

// maxAtOnce bounds what is counted of a lane between two looks: what memory could carry at most,
// so that a container that writes nonsense to the counters spoils little.
const maxAtOnce = 1 << 40

// pair is the two lanes of a connection, and who has them.
type pair struct {
	fd    int
	ends  [2]*endpoint // the one that connected, the one that accepted
	given [2]bool
	first end // that asked first
	// counted are the bytes that went each way: those of the connector's, and back.
	counted [2]uint64
}

// newPair makes lanes for a connection.
func newPair(ends [2]*endpoint) (*pair, error) {
	fd, err := unix.MemfdCreate("heddle-lanes", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("heddle-lanes", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("make memory for lanes: %w", err)
	}
	p := &pair{fd: fd, ends: ends}
	head := binary.NativeEndian.AppendUint64(nil, magic)
	head = binary.NativeEndian.AppendUint32(head, version)
	head = binary.NativeEndian.AppendUint32(head, capacity)
	err = unix.Ftruncate(fd, size)
	if err == nil {
		_, err = unix.Pwrite(fd, head, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("make memory for lanes: %w", err)
	}
	return p, nil
}

func (p *pair) close() { closeFD(p.fd) }

// open gives a file of the lanes for an end. It has a lock of its own, which the kernel takes away
// when nobody has the file, or memory of it, any more: see gone.
func (p *pair) open(role int) (fd int, err error) {
	fd, err = unix.Open("/proc/self/fd/"+strconv.Itoa(p.fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open lanes: %w", err)
	}
	lock := unix.Flock_t{Type: unix.F_RDLCK, Whence: io.SeekStart, Start: int64(role), Len: 1}
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lock); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("lock lanes: %w", err)
	}
	p.given[role] = true
	return fd, nil
}

// gone reports whether nobody has the lanes any more.
func (p *pair) gone() bool {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: 0, Len: 2}
	err := unix.FcntlFlock(uintptr(p.fd), unix.F_OFD_GETLK, &lock)
	return err == nil && lock.Type == unix.F_UNLCK
}

// beat says that the agent is there: libraries leave lanes that nobody looks after.
func (p *pair) beat(n uint32) {
	_, _ = unix.Pwrite(p.fd, binary.NativeEndian.AppendUint32(nil, n), beatAt) // or the next one
}

// stop has libraries leave the lanes unused, or use them again.
func (p *pair) stop(yes bool) error {
	var word uint32
	if yes {
		word = 1
	}
	_, err := unix.Pwrite(p.fd, binary.NativeEndian.AppendUint32(nil, word), stopAt)
	return err
}

// count adds what went by the lanes to the accounts of the two endpoints, as their readers have
// noted it. They may have noted anything.
func (p *pair) count() {
	var both [2 * laneBytes]byte
	if n, err := unix.Pread(p.fd, both[:], lanesAt); err != nil || n < len(both) {
		return // memory that the kernel could not get; counted the next time
	}
	for role := range 2 {
		now := binary.NativeEndian.Uint64(both[role*laneBytes+consumedAt:])
		more := now - p.counted[role]
		if now < p.counted[role] || more > maxAtOnce {
			continue
		}
		p.counted[role] = now
		p.ends[role].sent += more
		p.ends[1-role].received += more
	}
}
