package baseline

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolValue makes one of ethtool's requests that yield a number, on a device of the calling
// thread's network namespace.
func ethtoolValue(socket int, device string, request uint32) (uint32, error) {
	value := struct{ request, data uint32 }{request: request} // struct ethtool_value
	ifreq := struct {                                         // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(ifreq.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifreq)))
	runtime.KeepAlive(&value)
	if errno != 0 {
		return 0, errno
	}
	return value.data, nil
}
