package task

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// ReadMemory reads n bytes at addr in the memory of thread tid, or fewer if they end before.
// Nothing to read is no error: a pointer may be wrong.
func ReadMemory(tid uint32, addr uint64, n int) ([]byte, error) {
	if n <= 0 || addr == 0 || addr > math.MaxInt64 {
		return nil, nil
	}
	b := make([]byte, n)
	local := []unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(n)
	got, err := unix.ProcessVMReadv(int(tid), local, []unix.RemoteIovec{{Base: uintptr(addr), Len: n}}, 0)
	if err == unix.EFAULT {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read memory of thread %d: %w", tid, err)
	}
	return b[:got], nil
}

// WriteMemory writes all of b at addr in the memory of thread tid.
func WriteMemory(tid uint32, addr uint64, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if addr == 0 || addr > math.MaxInt64 {
		return unix.EFAULT
	}
	local := []unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	got, err := unix.ProcessVMWritev(int(tid), local, []unix.RemoteIovec{{Base: uintptr(addr), Len: len(b)}}, 0)
	if err == nil && got != len(b) {
		err = unix.EFAULT
	}
	return err
}
