package netstack

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

const (
	vnetSize  = 10 // struct virtio_net_hdr
	packetMax = 65535
	// gsoMax is how large a packet may be that the device cuts, with its headers.
	gsoMax = packetMax - 255
	// heldMost is how many bytes wait for a device that takes none.
	heldMost = 8 << 20
	// partsMost is how many parts one write takes: the kernel's UIO_MAXIOV.
	partsMost = 1024

	// Of struct virtio_net_hdr, <linux/virtio_net.h>.
	vnetNeedsCsum, vnetDataValid = 1, 2
	vnetTCPv4, vnetTCPv6         = 1, 4
)

// device is a tenant's device as netstack's link: packets with a virtio header before them. ARP and
// neighbour discovery are nobody's business: all frames go to the gateway.
type device struct {
	t        *tenant
	file     *os.File
	raw      syscall.RawConn
	mtu      uint32
	ethernet bool
	offloads bool
	frame    [header.EthernetMinimumSize]byte // of what is sent, but for its type

	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	sent       atomic.Uint64
	received   atomic.Uint64

	holds     chan struct{} // something is held
	mu        sync.Mutex    // guards the rest, and writes
	vectors   []unix.Iovec  // of the packet that is written
	held      [][]byte      // packets that wait for the device
	heldBytes int
}

func newDevice(t *tenant, m *protocol.Tenant, fd int) (*device, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	d := &device{
		t: t, holds: make(chan struct{}, 1), file: os.NewFile(uintptr(fd), "device"), mtu: m.MTU, ethernet: m.Link == protocol.LinkEthernet, offloads: m.Offloads == 1,
	}
	copy(d.frame[:6], m.Gateway[:])
	copy(d.frame[6:12], m.MAC[:])
	var err error
	d.raw, err = d.file.SyscallConn()
	return d, err
}

// headers gives how many bytes are before an IP packet.
func (d *device) headers() int {
	if d.ethernet {
		return vnetSize + header.EthernetMinimumSize
	}
	return vnetSize
}

// run reads packets until the device is gone.
func (d *device) run() error {
	link, room := make([]byte, d.headers()), newRoom()
	parts := []unix.Iovec{part(link), {}}
	return d.raw.Read(func(fd uintptr) bool {
		for {
			d.t.gate()
			parts[1] = part(room.AsSlice())
			n, err := readParts(fd, parts)
			switch err {
			case nil:
			case unix.EINTR:
				continue
			default:
				return err != unix.EAGAIN
			}
			if n == 0 {
				return false // of a socket whose other end is gone; nothing more comes
			}
			if d.arrived(link, room, max(n-len(link), 0)) {
				room = newRoom()
			}
		}
	})
}

// newRoom is where the next IP packet comes to lie.
func newRoom() *buffer.View { return buffer.NewViewSize(buffer.MaxChunkSize) }

// arrived has netstack read a packet of n bytes if there is nothing wrong with it. It reports
// whether netstack has kept the room in which it lies.
func (d *device) arrived(link []byte, room *buffer.View, n int) (kept bool) {
	s, why := d.parse(link, room.AsSlice()[:n])
	if why != dropNone {
		d.t.drops[why].Add(1)
		return false
	}
	d.t.arriving(&s)
	// netstack copies the piece of memory in which headers are: they have one of their own.
	packet := buffer.MakeWithView(buffer.NewViewWithData(s.ip[:s.headers]))
	data := room
	if kept = n-s.headers > buffer.MaxChunkSize/2; kept { // a copy would take as much memory
		room.CapLength(n)
		room.TrimFront(s.headers)
	} else {
		data = buffer.NewViewWithData(s.ip[s.headers:])
	}
	rest := buffer.MakeWithView(data)
	packet.Merge(&rest)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: packet})
	(*d.dispatcher.Load()).DeliverNetworkPacket(s.family, pkt)
	pkt.DecRef()
	d.received.Add(1)
	return kept
}

// segment is what has to be known of a packet before netstack reads it.
type segment struct {
	ip            []byte
	headers       int // bytes of it before the data
	family        tcpip.NetworkProtocolNumber
	local, remote netip.AddrPort
	flags         header.TCPFlags
	ack           uint32
}

func (s *segment) opens() bool {
	return s.flags&(header.TCPFlagSyn|header.TCPFlagAck|header.TCPFlagRst) == header.TCPFlagSyn
}

// parse reads what is before an IP packet, and the packet, or says as what it is dropped.
func (d *device) parse(link, ip []byte) (s segment, why drop) {
	if len(ip) == 0 {
		return s, dropMalformed
	}
	checked := link[0]&(vnetNeedsCsum|vnetDataValid) != 0
	s.ip = ip
	if d.ethernet {
		kind := binary.BigEndian.Uint16(link[vnetSize+12:])
		ours := string(link[vnetSize:vnetSize+6]) == string(d.frame[6:12])
		if !ours || kind != uint16(header.IPv4ProtocolNumber) && kind != uint16(header.IPv6ProtocolNumber) {
			return s, dropProtocol
		}
	}
	var payload []byte
	var from, to tcpip.Address
	switch header.IPVersion(s.ip) {
	case header.IPv4Version:
		h := header.IPv4(s.ip)
		switch {
		case !h.IsValid(len(s.ip)):
			return s, dropMalformed
		case h.TransportProtocol() != header.TCPProtocolNumber || h.More() || h.FragmentOffset() != 0:
			return s, dropProtocol
		case !h.IsChecksumValid():
			return s, dropChecksum
		}
		s.family, s.headers = header.IPv4ProtocolNumber, int(h.HeaderLength())
		payload, from, to = h.Payload(), h.SourceAddress(), h.DestinationAddress()
	case header.IPv6Version:
		h := header.IPv6(s.ip)
		switch {
		case !h.IsValid(len(s.ip)):
			return s, dropMalformed
		case h.NextHeader() != uint8(header.TCPProtocolNumber):
			return s, dropProtocol
		}
		s.family, s.headers = header.IPv6ProtocolNumber, header.IPv6MinimumSize
		payload, from, to = h.Payload(), h.SourceAddress(), h.DestinationAddress()
	default:
		return s, dropMalformed
	}
	tcp := header.TCP(payload)
	if len(tcp) < header.TCPMinimumSize || int(tcp.DataOffset()) < header.TCPMinimumSize || int(tcp.DataOffset()) > len(tcp) {
		return s, dropMalformed
	}
	if tcp.SourcePort() == 0 || tcp.DestinationPort() == 0 {
		return s, dropMalformed
	}
	if !checked && !isSumRight(tcp, from, to) {
		return s, dropChecksum
	}
	s.remote, s.local = netip.AddrPortFrom(toAddr(from), tcp.SourcePort()), netip.AddrPortFrom(toAddr(to), tcp.DestinationPort())
	if d.t.isMartian(s.remote.Addr(), s.local.Addr()) {
		return s, dropMartian
	}
	s.headers += int(tcp.DataOffset())
	s.flags, s.ack = tcp.Flags(), tcp.AckNumber()
	return s, dropNone
}

func isSumRight(tcp header.TCP, from, to tcpip.Address) bool {
	data := tcp.Payload()
	return tcp.IsChecksumValid(from, to, checksum.Checksum(data, 0), uint16(len(data)))
}

// WritePackets implements stack.LinkWriter.
func (d *device) WritePackets(all stack.PacketBufferList) (int, tcpip.Error) {
	for _, pkt := range all.AsSlice() {
		if pkt.TransportProtocolNumber == header.TCPProtocolNumber {
			d.write(pkt)
		}
	}
	return all.Len(), nil
}

func (d *device) write(pkt *stack.PacketBuffer) {
	head := make([]byte, d.headers(), vnetSize+header.EthernetMinimumSize)
	if d.ethernet {
		copy(head[vnetSize:], d.frame[:])
		binary.BigEndian.PutUint16(head[vnetSize+12:], uint16(pkt.NetworkProtocolNumber))
	}
	before := len(head) - vnetSize
	if g := pkt.GSOOptions; g.Type != stack.GSONone && g.NeedsCsum {
		head[0] = vnetNeedsCsum
		binary.NativeEndian.PutUint16(head[6:], uint16(before)+g.L3HdrLen)
		binary.NativeEndian.PutUint16(head[8:], g.CsumOffset)
		if pkt.Data().Size() > int(g.MSS) {
			if head[1] = vnetTCPv4; g.Type == stack.GSOTCPv6 {
				head[1] = vnetTCPv6
			}
			binary.NativeEndian.PutUint16(head[2:], uint16(before+pkt.HeaderSize()))
			binary.NativeEndian.PutUint16(head[4:], g.MSS)
		}
	}
	if tcp := header.TCP(pkt.TransportHeader().Slice()); tcp.Flags().Contains(header.TCPFlagSyn) {
		d.t.opening(pkt, tcp)
	}
	d.emit(append([][]byte{head}, pkt.AsSlices()...))
}

// emit writes a packet, or has it wait for the device: whoever sends has locks of netstack's.
func (d *device) emit(parts [][]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := error(unix.EAGAIN)
	if len(parts) > partsMost { // as many writes of the program's are in it
		parts = [][]byte{bytes.Join(parts, nil)}
	}
	if len(d.held) == 0 {
		d.vectors = d.vectors[:0]
		for _, p := range parts {
			d.vectors = append(d.vectors, part(p))
		}
		control := d.raw.Control(func(fd uintptr) { _, err = writeParts(fd, d.vectors) })
		err = cmp.Or(control, err)
	}
	if err == nil {
		d.sent.Add(1)
		return
	}
	packet := bytes.Join(parts, nil)
	switch {
	case (err == unix.EAGAIN || err == unix.EINTR) && d.heldBytes+len(packet) <= heldMost:
		d.held = append(d.held, packet)
		d.heldBytes += len(packet)
		select {
		case d.holds <- struct{}{}:
		default: // flush knows
		}
	default:
		d.t.drops[dropDevice].Add(1)
	}
}

// flush writes what has waited for the device, until it is gone.
func (d *device) flush() error {
	for range d.holds {
		if err := d.raw.Write(func(fd uintptr) bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			for len(d.held) > 0 {
				_, err := unix.Write(int(fd), d.held[0])
				if err == unix.EAGAIN {
					return false
				}
				if err == nil {
					d.sent.Add(1)
				} else {
					d.t.drops[dropDevice].Add(1)
				}
				d.heldBytes -= len(d.held[0])
				d.held = d.held[1:]
			}
			d.held = nil
			return true
		}); err != nil {
			return err
		}
	}
	return nil
}

// MTU implements stack.NetworkLinkEndpoint, as what follows.
func (d *device) MTU() uint32 { return d.mtu }

// SetMTU is not to be: the agent says it once.
func (d *device) SetMTU(uint32) {}

// MaxHeaderLength is what netstack leaves free before packets.
func (d *device) MaxHeaderLength() uint16 { return 0 }

// LinkAddress is nobody's business.
func (d *device) LinkAddress() tcpip.LinkAddress { return "" }

// SetLinkAddress has no effect.
func (d *device) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities says that checksums of what comes were looked at.
func (d *device) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// Attach is called once, before run.
func (d *device) Attach(to stack.NetworkDispatcher) { d.dispatcher.Store(&to) }

// IsAttached says whether packets can come.
func (d *device) IsAttached() bool { return d.dispatcher.Load() != nil }

// Wait has nothing to wait for.
func (d *device) Wait() {}

// ARPHardwareType is that of a link without ARP.
func (d *device) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader has nothing to do: write does it.
func (d *device) AddHeader(*stack.PacketBuffer) {}

// ParseHeader has nothing to do: parse has done it.
func (d *device) ParseHeader(*stack.PacketBuffer) bool { return true }

// Close has nothing to do: the process ends.
func (d *device) Close() {}

// SetOnCloseAction has no effect.
func (d *device) SetOnCloseAction(func()) {}

// GSOMaxSize implements stack.GSOEndpoint.
func (d *device) GSOMaxSize() uint32 { return gsoMax }

// SupportedGSO implements stack.GSOEndpoint.
func (d *device) SupportedGSO() stack.SupportedGSO {
	if d.offloads {
		return stack.HostGSOSupported
	}
	return stack.GSONotSupported
}
