package doctor

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/verbs"
)

// verbsRouter looks whether the router of the verbs plane could run: its program is there, and the
// kernel copies between processes.
func verbsRouter() finding {
	f := finding{name: "verbs_router"}
	self, err := os.Executable()
	if err == nil {
		f.detail, err = verbs.FindProgram(self)
	}
	f.err = errors.Join(err, copiesMemory())
	return f
}

// copiesMemory has the kernel copy a byte of this process as it would one of another.
func copiesMemory() error {
	from, to := []byte{1}, []byte{0}
	local := []unix.Iovec{{Base: &to[0]}}
	local[0].SetLen(1)
	remote := []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&from[0])), Len: 1}}
	if _, err := unix.ProcessVMReadv(os.Getpid(), local, remote, 0); err != nil {
		return fmt.Errorf("process_vm_readv: %w", err)
	}
	if to[0] != from[0] {
		return errors.New("process_vm_readv: copied something else")
	}
	return nil
}
