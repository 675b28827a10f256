package capture

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxPacket is the longest packet that is read: the kernel hands over what was not cut into
// segments yet.
const maxPacket = 256 << 10

// receiveBuffer bounds what the kernel keeps for a reader that is behind.
const receiveBuffer = 32 << 20

// frame is one packet as a device saw it, from the IP header on.
type frame struct {
	raw     []byte
	at      time.Time
	ifindex int
}

// Source reads copies of the packets of every device of a network namespace.
type Source struct {
	file    *os.File // a packet socket
	addrs   []netip.Addr
	dropped uint64 // by the kernel, read so far
}

// Listen opens a source in the calling thread's network namespace. Unless all is set it reads TCP
// only. Packets are kept from then on until they are read.
func Listen(all bool) (_ *Source, err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w (needs root)", err)
	}
	s := &Source{file: os.NewFile(uintptr(fd), "packet socket")}
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		return nil, fmt.Errorf("packet socket: ask for timestamps: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
		return nil, fmt.Errorf("packet socket: set buffer: %w", err)
	}
	if !all {
		if err := attachFilter(fd, tcpOnly); err != nil {
			return nil, fmt.Errorf("packet socket: attach filter: %w", err)
		}
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list addresses of the node: %w", err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				s.addrs = append(s.addrs, addr.Unmap())
			}
		}
	}
	// Only now does it receive: with its filter on.
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL)}); err != nil {
		return nil, fmt.Errorf("packet socket: bind: %w", err)
	}
	return s, nil
}

func networkOrder(v uint16) uint16 { return v<<8 | v>>8 }

// tcpOnly is a classic BPF program that takes IPv4 TCP, and IPv6 whose first header is TCP or an
// extension. A packet begins with its IP header.
var tcpOnly = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 0xfffff000}, // SKF_AD_OFF + SKF_AD_PROTOCOL
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.ETH_P_IPV6, Jt: 3},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.ETH_P_IP, Jf: 8},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 9},
	{Code: unix.BPF_JMP | unix.BPF_JA, K: 1},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 6},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: protoTCP, Jt: 3},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: protoRouting, Jt: 2},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: protoFragment, Jt: 1},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: protoDestOpts, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: maxPacket},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

func attachFilter(fd int, program []unix.SockFilter) error {
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// Close gives the socket back.
func (s *Source) Close() error { return s.file.Close() }

// Drops is the number of packets that the kernel dropped because the reader was behind.
func (s *Source) Drops() (uint64, error) {
	conn, err := s.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var stats *unix.TpacketStats
	var statErr error
	err = conn.Control(func(fd uintptr) {
		stats, statErr = unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
	})
	if err := errors.Join(err, statErr); err != nil {
		return 0, fmt.Errorf("packet socket: read statistics: %w", err)
	}
	s.dropped += uint64(stats.Drops) // reading resets them
	return s.dropped, nil
}

// read gives every packet to take, until stop is closed; what the socket has by then is still read,
// up to packets seen later than that.
func (s *Source) read(stop <-chan struct{}, take func(frame)) error {
	conn, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	stopped := make(chan struct{})
	defer close(stopped)
	go func() {
		select {
		case <-stop:
			_ = s.file.SetReadDeadline(time.Unix(1, 0)) // ends the wait below
		case <-stopped:
		}
	}()
	buffer := make([]byte, maxPacket)
	var fail error
	for fail == nil {
		err := conn.Read(func(fd uintptr) bool {
			fail = drain(int(fd), buffer, time.Time{}, take)
			return fail != nil
		})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return fmt.Errorf("read packet socket: %w", err)
		}
	}
	end := time.Now()
	if err := conn.Control(func(fd uintptr) { fail = errors.Join(fail, drain(int(fd), buffer, end, take)) }); err != nil {
		return fmt.Errorf("read packet socket: %w", err)
	}
	return fail
}

// drain reads packets until there are none, or until one that was seen after end unless that is
// zero.
func drain(fd int, buffer []byte, end time.Time, take func(frame)) error {
	control := make([]byte, unix.CmsgSpace(int(unsafe.Sizeof(unix.Timespec{}))))
	for {
		n, controlled, flags, from, err := unix.Recvmsg(fd, buffer, control, 0)
		switch {
		case err == unix.EAGAIN:
			return nil
		case err == unix.EINTR || err == unix.ENETDOWN: // a device went down: the others go on
			continue
		case err != nil:
			return fmt.Errorf("read packet socket: %w", err)
		}
		at := timestamp(control[:controlled])
		if !end.IsZero() && at.After(end) {
			return nil
		}
		link, ok := from.(*unix.SockaddrLinklayer)
		// What lo carries is seen twice, on its way out and on its way in.
		if !ok || flags&unix.MSG_TRUNC != 0 || link.Hatype == unix.ARPHRD_LOOPBACK && link.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		take(frame{raw: append([]byte(nil), buffer[:n]...), at: at, ifindex: link.Ifindex})
	}
}

// timestamp reads when the kernel saw the packet.
func timestamp(control []byte) time.Time {
	messages, err := unix.ParseSocketControlMessage(control)
	if err == nil {
		for _, m := range messages {
			if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS && len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})) {
				ts := (*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
				return time.Unix(ts.Unix())
			}
		}
	}
	return time.Now()
}
