package trap

import (
	"fmt"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The structures are the kernel's: their sizes are part of the ioctl numbers.
func TestKernelStructs(t *testing.T) {
	for _, s := range []struct {
		name    string
		size    uintptr
		request uint
	}{
		{"notification", unsafe.Sizeof(notification{}), unix.SECCOMP_IOCTL_NOTIF_RECV},
		{"response", unsafe.Sizeof(response{}), unix.SECCOMP_IOCTL_NOTIF_SEND},
		{"addFD", unsafe.Sizeof(addFD{}), unix.SECCOMP_IOCTL_NOTIF_ADDFD},
	} {
		if want := uintptr(s.request >> 16 & 0x3fff); s.size != want {
			t.Errorf("%s: %d bytes, the kernel's has %d", s.name, s.size, want)
		}
	}
}

func TestErrnoTable(t *testing.T) {
	why := newReasons()
	passes := &Reason{Name: "make", Errno: unix.ENETDOWN, Passes: true}
	for _, c := range []struct {
		why  *Reason
		err  error
		want unix.Errno
	}{
		{why.of(why.unknown.Because(errUnknownEndpoint)), errUnknownEndpoint, unix.ENETDOWN},
		{why.of(fmt.Errorf("x: %w", why.netns.Because(unix.ENOENT))), unix.ENOENT, unix.ENETDOWN},
		{why.of(errNoEndpoint), errNoEndpoint, unix.ENETDOWN},
		{why.ofAnswer(unix.EMFILE), unix.EMFILE, unix.EMFILE},
		{why.ofAnswer(unix.ENFILE), unix.ENFILE, unix.ENFILE},
		{why.ofAnswer(unix.ENOMEM), unix.ENOMEM, unix.ENOMEM},
		{why.ofAnswer(unix.EACCES), unix.EACCES, unix.EACCES},
		{why.ofAnswer(unix.EINVAL), unix.EINVAL, unix.ENETDOWN},
		{&why.agentNofile, unix.EMFILE, unix.ENFILE},
		{passes, fmt.Errorf("x: %w", unix.ENOBUFS), unix.ENOBUFS},
		{passes, unix.EINTR, unix.ENETDOWN},
	} {
		if got := c.why.errno(c.err); got != c.want {
			t.Errorf("%v of %v: %v, want %v", c.why.Name, c.err, got, c.want)
		}
	}
	for _, e := range []unix.Errno{unix.ENOENT, unix.ESRCH, unix.EINPROGRESS} {
		if why.ofAnswer(e) != &why.callerGone {
			t.Errorf("%v: not taken for a caller that has gone", e)
		}
	}
}
