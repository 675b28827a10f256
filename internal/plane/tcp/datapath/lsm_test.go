package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// attachLSMForTest attaches the LSM hooks over a map of tags of its own. Most kernels refuse it;
// `make test-lsm` boots one that does not, and says so by HEDDLE_DEMAND_LSM.
func attachLSMForTest(t *testing.T) (tags *ebpf.Map) {
	t.Helper()
	testutil.NeedRoot(t, "loads BPF programs")
	tags, err := ebpf.NewMap(tagMapSpec())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tags.Close() })
	objs, err := loadLSMOver(tags)
	if errors.Is(err, ErrNoLSM) && os.Getenv("HEDDLE_DEMAND_LSM") == "" {
		t.Skipf("the LSM hooks cannot be tried on this kernel (`make test-lsm` boots another): %v", err)
	}
	if err != nil {
		var ve *ebpf.VerifierError
		if errors.As(err, &ve) {
			t.Fatalf("%+v", ve)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = objs.Close() })
	for name, prog := range lsmHooks(objs) {
		l, err := link.AttachLSM(link.LSMOptions{Program: prog})
		if err != nil {
			t.Fatalf("attach %s: %v", name, err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	return tags
}

func streamSocket(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// The calls that the lock is about, and one that it is not.
func attachFilter(fd int) error {
	accept := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &accept})
}

func listDevices(fd int) error {
	ifconf := struct {
		length int32
		_      int32
		buf    uintptr
	}{}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCGIFCONF, uintptr(unsafe.Pointer(&ifconf)))
	if errno != 0 {
		return errno
	}
	return nil
}

func reuseAddress(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }

// inOtherNetns runs f in a network namespace of its own, on a thread that ends with it.
func inOtherNetns(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// TestLock tries what the LSM hooks forbid: on a tagged socket from another network namespace,
// where it must fail, and on others, where it must not.
func TestLock(t *testing.T) {
	tags := attachLSMForTest(t)
	lent, plain := streamSocket(t), streamSocket(t)
	if err := tags.Put(int32(lent), &heddleSockTag{EndpointId: 1}); err != nil {
		t.Fatal(err)
	}
	for _, call := range []struct {
		name   string
		locked bool
		do     func(fd int) error
	}{
		{"SO_ATTACH_FILTER", true, attachFilter},
		{"SIOCGIFCONF", true, listDevices},
		{"SO_REUSEADDR", false, reuseAddress},
	} {
		for name, fd := range map[string]int{"tagged": lent, "untagged": plain} {
			if err := call.do(fd); err != nil {
				t.Errorf("%s on a socket that is %s, from its own namespace: %v", call.name, name, err)
			}
			var want error
			if call.locked && fd == lent {
				want = unix.EPERM
			}
			if err := inOtherNetns(func() error { return call.do(fd) }); !errors.Is(err, want) {
				t.Errorf("%s on a socket that is %s, from another namespace: %v, want %v", call.name, name, err, want)
			}
		}
	}
}

// TestCallsBPF reads lists of security modules.
func TestCallsBPF(t *testing.T) {
	dir := t.TempDir()
	for list, want := range map[string]error{"lockdown,capability,bpf\n": nil, "bpf": nil, "capability,ebpf": ErrNoLSM, "": ErrNoLSM} {
		path := filepath.Join(dir, "lsm")
		if err := os.WriteFile(path, []byte(list), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := callsBPF(path); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", list, err, want)
		}
	}
	if err := callsBPF(filepath.Join(dir, "absent")); err != nil {
		t.Error(err)
	}
}
