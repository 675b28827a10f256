package stacks

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap/task"
)

// The caller's memory may be another task's if the caller has died: whether it still waits is asked
// after each reading, and before each writing.

// read reads n bytes of the caller's memory, or as many as there are.
func (c *call) read(addr uint64, n int) ([]byte, error) {
	var b []byte
	err := c.mayBlock(func() (err error) {
		b, err = task.ReadMemory(c.Thread(), addr, n)
		return err
	})
	if err == nil {
		err = c.StillWaits()
	}
	return b, err
}

// readSockaddr reads an address that a program gives.
func (c *call) readSockaddr(addr, length uint64) ([]byte, error) {
	const longest = 128 // struct sockaddr_storage
	if n := int32(length); n < 0 || n > longest {
		return nil, unix.EINVAL
	}
	b, err := c.read(addr, int(int32(length)))
	if err == nil && len(b) < int(int32(length)) {
		err = unix.EFAULT
	}
	return b, err
}

// readLength reads a socklen_t.
func (c *call) readLength(addr uint64) (int, error) {
	b, err := c.read(addr, 4)
	if err != nil {
		return 0, err
	}
	if len(b) < 4 {
		return 0, unix.EFAULT
	}
	n := int32(binary.NativeEndian.Uint32(b))
	if n < 0 {
		return 0, unix.EINVAL
	}
	return int(n), nil
}

// writeValue writes as much of b as the caller has room for, which the number at lengthAt says, and
// there how long it is: of a socket option, how much was written; of an address, how much there is.
func (c *call) writeValue(addr, lengthAt uint64, b []byte, whole bool) error {
	room, err := c.readLength(lengthAt)
	if err != nil {
		return err
	}
	wrote := b[:min(room, len(b))]
	length := len(wrote)
	if whole {
		length = len(b)
	}
	if err := c.writeMemory(addr, wrote); err != nil {
		return err
	}
	return c.writeMemory(lengthAt, binary.NativeEndian.AppendUint32(nil, uint32(length)))
}

// writeMemory writes all of b to the caller's memory.
func (c *call) writeMemory(addr uint64, b []byte) error {
	return c.mayBlock(func() error {
		if err := c.StillWaits(); err != nil {
			return err
		}
		if err := task.WriteMemory(c.Thread(), addr, b); err != nil {
			return unix.EFAULT
		}
		return nil
	})
}
