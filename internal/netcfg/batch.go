package netcfg

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// batch are requests that the kernel is sent at once, by one system call. It takes them in order,
// and the next one whether or not one failed. The library's requests go one by one, and each takes
// 64 KB of memory for its answer: of an endpoint's 56 that was a third of the time.
type batch struct {
	raw  []byte
	what []string // each request, for whoever reads of its failure
}

// answerBytes is more than the kernel's answers take that one receive gives.
const answerBytes = 8192

// add appends a request.
func (b *batch) add(what string, kind, flags int, data ...nl.NetlinkRequestData) {
	b.what = append(b.what, what)
	req := nl.NetlinkRequest{NlMsghdr: unix.NlMsghdr{
		Len: unix.SizeofNlMsghdr, Type: uint16(kind), Flags: uint16(unix.NLM_F_REQUEST | unix.NLM_F_ACK | flags), Seq: uint32(len(b.what)),
	}, Data: data}
	b.raw = append(b.raw, req.Serialize()...)
}

// send makes the requests in the calling thread's network namespace, and gives what became of each:
// nil or its error. The batch is empty then.
func (b *batch) send() (failed []error, err error) {
	sent := *b
	*b = batch{}
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
	answer := make([]byte, answerBytes)
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

// do is send for requests of which none may fail but with an error in but.
func (b *batch) do(but ...unix.Errno) error {
	failed, err := b.send()
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

// up sets a device up.
func (b *batch) up(index int) {
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index, msg.Flags, msg.Change = int32(index), unix.IFF_UP, unix.IFF_UP
	b.add(fmt.Sprintf("set device %d up", index), unix.RTM_SETLINK, 0, msg)
}

// alias names a device for operators. It comes before up, and not with it: to tell of the alias of
// a device that is up, the kernel goes through all IPv6 routes of its namespace.
func (b *batch) alias(index int, alias string) {
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	b.add(fmt.Sprintf("set alias of device %d", index), unix.RTM_SETLINK, 0, msg, nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias)))
}

// address adds a as a host address.
func (b *batch) address(index int, a netip.Addr) {
	msg := nl.NewIfAddrmsg(familyOf(a))
	msg.Index, msg.Prefixlen = uint32(index), uint8(a.BitLen())
	if a.Is6() {
		msg.Flags = unix.IFA_F_NODAD // nobody else can have it: the prefix is the node's
	}
	b.add(fmt.Sprintf("add address %v", a), unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, msg,
		nl.NewRtAttr(unix.IFA_LOCAL, a.AsSlice()), nl.NewRtAttr(unix.IFA_ADDRESS, a.AsSlice()))
}

// neighbour makes permanent where a is reached.
func (b *batch) neighbour(index int, a netip.Addr, mac string) {
	hw := permanentNeighbour(index, a, mac).HardwareAddr
	b.add(fmt.Sprintf("set neighbour %v to %s", a, mac), unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE,
		&netlink.Ndmsg{Family: uint8(familyOf(a)), Index: uint32(index), State: netlink.NUD_PERMANENT},
		nl.NewRtAttr(netlink.NDA_DST, a.AsSlice()), nl.NewRtAttr(netlink.NDA_LLADDR, hw))
}

// route adds r. replace has it take the place of one to the same destination.
func (b *batch) route(r route, replace bool) {
	msg := nl.NewRtMsg()
	n := r.netlink()
	msg.Family, msg.Dst_len, msg.Type, msg.Scope, msg.Protocol = uint8(familyOf(r.dst.Addr())), uint8(r.dst.Bits()), uint8(n.Type), uint8(n.Scope), uint8(n.Protocol)
	msg.Flags, msg.Table = uint32(n.Flags), unix.RT_TABLE_UNSPEC
	data := []nl.NetlinkRequestData{msg, nl.NewRtAttr(unix.RTA_DST, r.dst.Addr().AsSlice()), nl.NewRtAttr(unix.RTA_TABLE, nl.Uint32Attr(uint32(r.table)))}
	for _, a := range []struct {
		kind int
		addr netip.Addr
	}{{unix.RTA_GATEWAY, r.gw}, {unix.RTA_PREFSRC, r.src}} {
		if a.addr.IsValid() {
			data = append(data, nl.NewRtAttr(a.kind, a.addr.AsSlice()))
		}
	}
	for _, a := range []struct{ kind, value int }{{unix.RTA_OIF, r.link}, {unix.RTA_PRIORITY, r.metric}} {
		if a.value != 0 {
			data = append(data, nl.NewRtAttr(a.kind, nl.Uint32Attr(uint32(a.value))))
		}
	}
	if r.advMSS != 0 {
		metrics := nl.NewRtAttr(unix.RTA_METRICS, nil)
		metrics.AddRtAttr(unix.RTAX_ADVMSS, nl.Uint32Attr(uint32(r.advMSS)))
		data = append(data, metrics)
	}
	flags := unix.NLM_F_CREATE | unix.NLM_F_EXCL
	if replace {
		flags = unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	}
	b.add(fmt.Sprintf("route %v", r), unix.RTM_NEWROUTE, flags, data...)
}

// clsact adds the qdisc that holds filters of both directions.
func (b *batch) clsact(index int) {
	b.add("add clsact qdisc", unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		&nl.TcMsg{Ifindex: int32(index), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("clsact")))
}

// filter attaches f, in place of what of Heddle's is there.
func (b *batch) filter(index int, f Filter) {
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	if f.class != 0 {
		options.AddRtAttr(nl.TCA_BPF_CLASSID, nl.Uint32Attr(f.class))
	}
	options.AddRtAttr(nl.TCA_BPF_FD, nl.Uint32Attr(uint32(f.Program)))
	options.AddRtAttr(nl.TCA_BPF_NAME, nl.ZeroTerminated(filterOwner+f.Name))
	options.AddRtAttr(nl.TCA_BPF_FLAGS, nl.Uint32Attr(nl.TCA_BPF_FLAG_ACT_DIRECT))
	b.add(f.String(), unix.RTM_NEWTFILTER, unix.NLM_F_CREATE,
		&nl.TcMsg{Ifindex: int32(index), Handle: filterHandle, Parent: f.Direction.parent(), Info: netlink.MakeHandle(filterPriority, nl.Swap16(unix.ETH_P_ALL))},
		nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bpf")), options)
}

func familyOf(a netip.Addr) int {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
