package doctor

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"heddle.dev/heddle/internal/plane/verbs"
	wrapper "heddle.dev/heddle/internal/runtime"
)

// verbsRouter looks whether the router of the verbs plane could run: its program is there, and
// memory of programs can be reached.
func verbsRouter() finding {
	f := finding{name: "verbs_router"}
	self, err := os.Executable()
	if err == nil {
		f.detail, err = verbs.FindProgram(self)
	}
	f.err = errors.Join(err, copiesMemory())
	return f
}

// verbsLibrary looks whether heddle-runtime would find what it gives to containers with verbs, if
// it is beside this program.
func verbsLibrary() finding {
	f := finding{name: "verbs_library"}
	f.detail, f.err = wrapper.VerbsLibrary()
	return f
}

// copiesMemory reads a byte of this process as the router does one of another.
func copiesMemory() error {
	memory, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("memory of programs cannot be reached: %w", err)
	}
	defer memory.Close()
	from, to := []byte{1}, []byte{0}
	if _, err := memory.ReadAt(to, int64(uintptr(unsafe.Pointer(&from[0])))); err != nil {
		return fmt.Errorf("memory of programs cannot be reached: %w", err)
	}
	runtime.KeepAlive(from)
	if to[0] != from[0] {
		return errors.New("/proc/self/mem has other bytes than the memory")
	}
	return nil
}
