package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

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

// verbsUserfaultfd looks whether the router could give programs what they need for zero copy.
func verbsUserfaultfd() finding {
	f := finding{name: "verbs_userfaultfd"}
	device, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		f.err = err
		return f
	}
	defer device.Close()
	f.detail, f.err = "/dev/userfaultfd", userfaultfdFeatures(device)
	return f
}

// userfaultfdFeatures makes a userfaultfd that can have pages wait for whoever writes them: also
// shared ones (Linux 5.19).
func userfaultfdFeatures(device *os.File) error {
	const (
		makeNew  = 0xaa00     // USERFAULTFD_IOC_NEW
		api      = 0xc018aa3f // UFFDIO_API
		version  = 0xaa
		features = 1<<0 | 1<<12 // write protection, of shared memory
	)
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), makeNew, unix.O_CLOEXEC)
	if errno != 0 {
		return fmt.Errorf("make a userfaultfd: %w", errno)
	}
	defer unix.Close(int(fd))
	want := [3]uint64{version, features}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, api, uintptr(unsafe.Pointer(&want))); errno != 0 {
		return fmt.Errorf("the kernel's userfaultfd has no write protection of shared memory: %w", errno)
	}
	return nil
}

// verbsLibrary looks whether heddle-runtime would find what it gives to containers with verbs, if
// it is beside this program.
func verbsLibrary() finding {
	f := finding{name: "verbs_library"}
	f.detail, f.err = wrapper.VerbsLibrary()
	return f
}

// verbsCard looks whether the router could use the RDMA device of this name: the machine has it and
// libibverbs, and the port that the router uses is up.
func (h host) verbsCard(name string) finding {
	f := finding{name: "verbs_card", detail: name}
	infiniband := filepath.Join(h.root, "sys/class/infiniband")
	if f.err = verbs.CheckDeviceIn(infiniband, name); f.err != nil {
		return f
	}
	if !h.hasLibrary("libibverbs.so.1") {
		f.err = errors.New("the node has no libibverbs.so.1: apt-get install libibverbs1 ibverbs-providers")
		return f
	}
	state, err := os.ReadFile(filepath.Join(infiniband, name, "ports/1/state"))
	switch said := strings.TrimSpace(string(state)); {
	case err != nil:
		f.err = fmt.Errorf("read the state of port 1 of %s: %w", name, err)
	case !strings.HasSuffix(said, ": ACTIVE"):
		f.err = fmt.Errorf("port 1 of %s is not active (%s): bring its network device up, or look at its cable", name, said)
	}
	return f
}

// hasLibrary says whether a program of the machine would find a library: the loader's cache has it,
// or a folder that is looked into without one.
func (h host) hasLibrary(file string) bool {
	if cache, err := os.ReadFile(filepath.Join(h.root, "etc/ld.so.cache")); err == nil && bytes.Contains(cache, []byte("/"+file+"\x00")) {
		return true
	}
	found, _ := filepath.Glob(filepath.Join(h.root, "usr/lib*", file)) // the pattern is good
	return len(found) > 0
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
