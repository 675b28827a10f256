package rtnl

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Batch are requests that the kernel is sent at once, by one system call. It takes them in order,
// and the next one whether or not one failed. The library's requests go one by one, and each takes
// 64 KB of memory for its answer: of an endpoint's 56 that was a third of the time.
type Batch struct {
	raw  []byte
	what []string // each request, for whoever reads of its failure
}

// AnswerBytes is more than the kernel's answers take that one receive gives.
const AnswerBytes = 8192

// Add appends a request.
func (b *Batch) Add(what string, kind, flags int, data ...nl.NetlinkRequestData) {
	b.what = append(b.what, what)
	req := nl.NetlinkRequest{NlMsghdr: unix.NlMsghdr{
		Len: unix.SizeofNlMsghdr, Type: uint16(kind), Flags: uint16(unix.NLM_F_REQUEST | unix.NLM_F_ACK | flags), Seq: uint32(len(b.what)),
	}, Data: data}
	b.raw = append(b.raw, req.Serialize()...)
}

// Send makes the requests in the calling thread's network namespace, and gives what became of each:
// nil or its error. The batch is empty then.
func (b *Batch) Send() (failed []error, err error) {
	sent := *b
	*b = Batch{}
	if len(sent.what) == 0 {
		return nil, nil
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, sent.raw, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("send netlink requests: %w", err)
	}
	failed = make([]error, len(sent.what))
	answer := make([]byte, AnswerBytes)
	for missing := len(failed); missing > 0; {
		n, _, err := unix.Recvfrom(fd, answer, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("receive netlink answers: %w", err)
		}
		acks, err := parseAcks(answer[:n])
		if err != nil {
			return nil, err
		}
		for _, a := range acks {
			if a.seq == 0 || int(a.seq) > len(failed) {
				return nil, fmt.Errorf("netlink answer to request %d of %d", a.seq, len(failed))
			}
			if a.errno != 0 {
				failed[a.seq-1] = fmt.Errorf("%s: %w", sent.what[a.seq-1], a.errno)
			}
			missing--
		}
	}
	return failed, nil
}

// Do is Send for requests of which none may fail but with an error in but.
func (b *Batch) Do(but ...unix.Errno) error {
	failed, err := b.Send()
	if err != nil {
		return err
	}
	for _, err := range failed {
		if err != nil && !slices.ContainsFunc(but, func(e unix.Errno) bool { return errors.Is(err, e) }) {
			return err
		}
	}
	return nil
}

// ack is the kernel's answer to a request.
type ack struct {
	seq   uint32
	errno unix.Errno
}

// parseAcks reads what one receive gave.
func parseAcks(raw []byte) (acks []ack, err error) {
	for len(raw) >= unix.SizeofNlMsghdr {
		order := nl.NativeEndian()
		size, kind := int(order.Uint32(raw)), order.Uint16(raw[4:])
		if kind != unix.NLMSG_ERROR || size < unix.SizeofNlMsghdr+4 || size > len(raw) {
			return nil, fmt.Errorf("netlink answer of type %d and %d bytes", kind, size)
		}
		acks = append(acks, ack{order.Uint32(raw[8:]), unix.Errno(-int32(order.Uint32(raw[unix.SizeofNlMsghdr:])))})
		raw = raw[min((size+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(raw)):]
	}
	return acks, nil
}

// Up sets a device up.
func (b *Batch) Up(index int) {
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index, msg.Flags, msg.Change = int32(index), unix.IFF_UP, unix.IFF_UP
	b.Add(fmt.Sprintf("set device %d up", index), unix.RTM_SETLINK, 0, msg)
}

// Alias names a device for operators. It comes before up, and not with it: to tell of the alias of
// a device that is up, the kernel goes through all IPv6 routes of its namespace.
func (b *Batch) Alias(index int, alias string) {
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	b.Add(fmt.Sprintf("set alias of device %d", index), unix.RTM_SETLINK, 0, msg, nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias)))
}

// Address adds a as a host address.
func (b *Batch) Address(index int, a netip.Addr) {
	msg := nl.NewIfAddrmsg(FamilyOf(a))
	msg.Index, msg.Prefixlen = uint32(index), uint8(a.BitLen())
	if a.Is6() {
		msg.Flags = unix.IFA_F_NODAD // nobody else can have it: the prefix is the node's
	}
	b.Add(fmt.Sprintf("add address %v", a), unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, msg,
		nl.NewRtAttr(unix.IFA_LOCAL, a.AsSlice()), nl.NewRtAttr(unix.IFA_ADDRESS, a.AsSlice()))
}

// Neighbour makes permanent where a is reached.
func (b *Batch) Neighbour(index int, a netip.Addr, mac string) {
	hw, _ := net.ParseMAC(mac)
	b.Add(fmt.Sprintf("set neighbour %v to %s", a, mac), unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE,
		&netlink.Ndmsg{Family: uint8(FamilyOf(a)), Index: uint32(index), State: netlink.NUD_PERMANENT},
		nl.NewRtAttr(netlink.NDA_DST, a.AsSlice()), nl.NewRtAttr(netlink.NDA_LLADDR, hw))
}

// FamilyOf gives the address family of a.
func FamilyOf(a netip.Addr) int {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
