package main

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// rawAddr is room for any socket address.
type rawAddr [128]byte

// sockaddr makes an address of its symbols.
func (w *worker) sockaddr(a differ.Addr) (raw rawAddr, size int) {
	host := w.hosts[a.Host]
	ip := netip.MustParseAddr(host.V4)
	family, size := unix.AF_INET, unix.SizeofSockaddrInet4
	switch a.Form {
	case "6", "mapped":
		family, size = unix.AF_INET6, unix.SizeofSockaddrInet6
	case "unspec":
		family = unix.AF_UNSPEC
	case "unix":
		family = unix.AF_UNIX
	case "junk":
		family = 77
	}
	binary.NativeEndian.PutUint16(raw[:], uint16(family))
	binary.BigEndian.PutUint16(raw[2:], uint16(w.ports[a.Port]))
	if family == unix.AF_INET6 {
		sixteen := ip.As16()
		if a.Form == "6" && host.V6 != "" {
			sixteen = netip.MustParseAddr(host.V6).As16()
		}
		copy(raw[8:], sixteen[:])
	} else {
		four := ip.As4()
		copy(raw[4:], four[:])
	}
	if a.Len != 0 {
		size = a.Len
	}
	return raw, size
}

// text writes an address that the kernel gave: between angle brackets, where the Hub looks for
// ports to normalise. had is the room the caller gave, size what the kernel says the address needs.
func (a *rawAddr) text(had int, size int32) string {
	n := max(0, min(had, int(size), len(a)))
	family := int(binary.NativeEndian.Uint16(a[:]))
	port := binary.BigEndian.Uint16(a[2:])
	text := "none"
	switch {
	case n >= unix.SizeofSockaddrInet4 && family == unix.AF_INET:
		text = fmt.Sprintf("%s %d", netip.AddrFrom4([4]byte(a[4:8])), port)
	case n >= unix.SizeofSockaddrInet6 && family == unix.AF_INET6:
		text = fmt.Sprintf("%s %d flow %x scope %d", netip.AddrFrom16([16]byte(a[8:24])), port, a[4:8], binary.NativeEndian.Uint32(a[24:]))
	case n >= 4 && (family == unix.AF_INET || family == unix.AF_INET6):
		text = fmt.Sprintf("family %d %d %x", family, port, a[4:n]) // cut off
		if n > 8 {
			text = fmt.Sprintf("family %d %d ...", family, port)
		}
	case n >= 2:
		text = fmt.Sprintf("family %d", family)
	}
	return fmt.Sprintf("<%s> len %d", text, size)
}

func getName(trap uintptr, fd, length int) differ.Result {
	var a rawAddr
	size := int32(length)
	n, err := sys(trap, uintptr(fd), uintptr(unsafe.Pointer(&a)), uintptr(unsafe.Pointer(&size)))
	if err != nil {
		return result(n, err)
	}
	return result(n, nil, a.text(length, size))
}

// Options whose values are chance or the machine's: of these only the length is compared. Of
// TCP_INFO that is the state, the rest are measurements.
var volatile = map[[2]int]bool{
	{unix.SOL_SOCKET, unix.SO_COOKIE}: true, {unix.SOL_SOCKET, unix.SO_INCOMING_CPU}: true,
	{unix.SOL_SOCKET, unix.SO_INCOMING_NAPI_ID}: true, {unix.SOL_SOCKET, unix.SO_MEMINFO}: true,
	{unix.SOL_TCP, unix.TCP_CC_INFO}: true, {unix.SOL_TCP, unix.TCP_TIMESTAMP}: true,
}

func getOption(fd, level, name, length int) differ.Result {
	value := make([]byte, 512)
	size := int32(length)
	n, err := sys(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&size)))
	if err != nil {
		return result(n, err)
	}
	got := value[:max(0, min(int(size), length, len(value)))]
	text := "0x" + hex.EncodeToString(got)
	switch key := [2]int{level, name}; {
	case key == [2]int{unix.SOL_TCP, unix.TCP_INFO} && len(got) > 0:
		text = "state " + stateName(got[0])
	case key == [2]int{unix.SOL_SOCKET, 28}: // SO_PEERNAME
		var a rawAddr
		copy(a[:], got)
		text = a.text(length, size)
	case volatile[key]:
		text = "some"
	}
	return result(n, nil, text, fmt.Sprintf("len %d", size))
}
