package netstack

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/loopback"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// netstack's devices: the tenant's, and one for what it sends to itself.
const (
	deviceNIC   tcpip.NICID = 1
	loopbackNIC tcpip.NICID = 2
)

var loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

func newLoopback() stack.LinkEndpoint { return loopback.New() }

// networkProtocols are IPv4 and IPv6 without anything that speaks of its own accord.
func networkProtocols() []stack.NetworkProtocolFactory {
	return []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocolWithOptions(ipv6.Options{})}
}

// tune sets what holds for all connections of a stack.
func tune(s *stack.Stack) error {
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(false)
	recovery := tcpip.TCPRecovery(0) // RACK's probes have no least time: docs/decisions/0111-netstack-without-rack.md
	linger, wait := tcpip.TCPTimeWaitTimeoutOption(timeWait), tcpip.TCPLingerTimeoutOption(orphan)
	send := tcpip.TCPSendBufferSizeRangeOption{Min: bufferMin, Default: 1 << 20, Max: bufferMax}
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 2 * bufferMin, Default: 2 << 20, Max: 2 * bufferMax}
	minRTO := tcpip.TCPMinRTOOption(200 * time.Millisecond)
	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &moderate, &recovery, &linger, &wait, &send, &receive, &minRTO} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return errors.New(err.String())
		}
	}
	for _, o := range []any{
		tcpip.SendBufferSizeOption{Min: bufferMin, Default: 1 << 20, Max: bufferMax},
		tcpip.ReceiveBufferSizeOption{Min: 2 * bufferMin, Default: 2 << 20, Max: 2 * bufferMax},
	} {
		if err := s.SetOption(o); err != nil {
			return errors.New(err.String())
		}
	}
	return nil
}

func familyOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return header.IPv4ProtocolNumber
	}
	return header.IPv6ProtocolNumber
}

func toAddress(a netip.Addr) tcpip.Address {
	if a.Is4() {
		return tcpip.AddrFrom4(a.As4())
	}
	return tcpip.AddrFrom16(a.As16())
}

func toAddr(a tcpip.Address) netip.Addr {
	out, _ := netip.AddrFromSlice(a.AsSlice()) // it has 4 or 16 bytes
	return out
}

// processorTime gives the nanoseconds of processor that the process has used.
func processorTime() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now) // it is always there
	return uint64(now.Nano())
}
