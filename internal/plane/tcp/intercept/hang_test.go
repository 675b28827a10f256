package intercept

import (
	"encoding/binary"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// hang makes an ioctl whose memory is on a page that nobody provides, and returns when something
// touches it.
func hang(c command) outcome {
	page, uffd, err := testutil.MissingPage()
	if err != nil {
		return outcome{Errno: int(errnoIn(err))}
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // not trapped
	if err != nil {
		return outcome{Errno: int(errnoIn(err))}
	}
	arg := &page[0]
	if c.N == unix.SIOCGIFCONF { // the list goes there
		conf := make([]byte, 16)
		binary.NativeEndian.PutUint32(conf, uint32(len(page)))
		binary.NativeEndian.PutUint64(conf[8:], uint64(uintptr(unsafe.Pointer(arg))))
		arg = &conf[0]
	}
	go func() {
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(c.N), uintptr(unsafe.Pointer(arg)))
	}()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(uffd), Events: unix.POLLIN}}, int(10*time.Second/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		return outcome{OK: n}
	}
}

// A program whose memory does not answer keeps the agent neither from ending nor from serving
// others.
func TestMemoryThatHangs(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	for name, request := range map[string]int{"read": unix.SIOCGIFINDEX, "write": unix.SIOCGIFCONF} {
		t.Run(name, func(t *testing.T) {
			path := socketPath(t)
			_, stop := serve(t, testConfig(path, "", &testMaker{}))
			bad, good := trapped(t, path, testName), trapped(t, path, testName)
			switch o := bad.do(command{Op: "hang", N: request}); {
			case unix.Errno(o.Errno) == unix.ENOSYS || unix.Errno(o.Errno) == unix.EPERM:
				t.Skipf("userfaultfd: %v", unix.Errno(o.Errno))
			case o.Errno != 0 || o.OK != 1:
				t.Fatalf("the agent did not touch the memory: %+v", o)
			}
			if o := good.tcp(unix.AF_INET); o.Errno != 0 {
				t.Errorf("another container's socket(): %v", unix.Errno(o.Errno))
			}
			done := make(chan struct{})
			go func() { defer close(done); stop() }()
			select {
			case <-done:
			case <-time.After(20 * time.Second):
				t.Error("the server did not end")
			}
			bad.kill() // and with it what touches its memory
			<-done
		})
	}
}
