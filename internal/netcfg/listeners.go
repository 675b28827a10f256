package netcfg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// tcpListen is TCP_LISTEN of the kernel's socket states.
const tcpListen = 10

// Sizes in bytes of inet_diag_req_v2 and of the part of inet_diag_msg that is read
// (linux/inet_diag.h).
const (
	diagRequestSize = 56
	diagSocketSize  = 44
)

// ListenersIn lists the TCP sockets of this network namespace that listen on a port in r, IPv4 and
// IPv6, sorted. A socket on [::] shows as such, whether it also takes IPv4 or not. Sockets tied to
// netdev.Divert are left out: they are of containers, which listen without an address, and nothing
// reaches them.
func ListenersIn(r model.PortRange) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	divert, err := divertIfindex()
	if err != nil {
		return nil, err
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		req.AddRawData(listenRequest(family))
		msgs, err := rtnl.Dump(func() ([][]byte, error) { return req.Execute(unix.NETLINK_INET_DIAG, 0) })
		if errors.Is(err, unix.ENOENT) {
			continue // the kernel has no sock_diag for this family, so no such sockets either
		}
		if err != nil {
			return nil, fmt.Errorf("list listening TCP sockets: %w", err)
		}
		for _, m := range msgs {
			ap, ok := parseDiagSocket(m)
			if ok && r.Contains(ap.Port()) && (divert == 0 || boundDevice(m) != divert) {
				out = append(out, ap)
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out), nil
}

// divertIfindex gives the index of netdev.Divert in this network namespace, 0 if there is none.
func divertIfindex() (int, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return 0, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	l, err := rtnl.FindLink(netdev.Divert)
	if err != nil || l == nil {
		return 0, err
	}
	return l.Attrs().Index, nil
}

// listenRequest is an inet_diag_req_v2 for the listening sockets of a family.
func listenRequest(family uint8) []byte {
	b := make([]byte, diagRequestSize)
	b[0], b[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], 1<<tcpListen)
	return b
}

// boundDevice gives the index of the device that the socket of an inet_diag_msg is tied to, 0 for
// none.
func boundDevice(m []byte) int { return int(binary.NativeEndian.Uint32(m[40:])) }

// parseDiagSocket reads the local address of an inet_diag_msg: family and state in the first two
// bytes, the port (network byte order) at 4, the address at 8.
func parseDiagSocket(m []byte) (netip.AddrPort, bool) {
	if len(m) < diagSocketSize || m[1] != tcpListen {
		return netip.AddrPort{}, false
	}
	port := binary.BigEndian.Uint16(m[4:])
	switch m[0] {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(m[8:12])), port), true
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(m[8:24])), port), true
	}
	return netip.AddrPort{}, false
}
