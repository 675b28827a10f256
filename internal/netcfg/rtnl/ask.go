package rtnl

import (
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Ask makes one request in the calling thread's network namespace, and gives the messages of its
// answer to each until there are no more, or each says so. It is for what making an endpoint asks
// for: the library takes 64 KB of memory for every message, which was most of what was collected.
func Ask(kind, flags int, each func(m syscall.NetlinkMessage) (more bool), data ...nl.NetlinkRequestData) error {
	return AskOf(unix.NETLINK_ROUTE, kind, flags, each, data...)
}

// AskOf is Ask for another protocol of netlink's than that of devices and routes.
func AskOf(protocol, kind, flags int, each func(m syscall.NetlinkMessage) (more bool), data ...nl.NetlinkRequestData) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer unix.Close(fd)
	request := &nl.NetlinkRequest{NlMsghdr: unix.NlMsghdr{
		Len: unix.SizeofNlMsghdr, Type: uint16(kind), Flags: uint16(unix.NLM_F_REQUEST | flags), Seq: 1,
	}, Data: data}
	if err := unix.Sendto(fd, request.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send netlink request: %w", err)
	}
	answer := make([]byte, AnswerBytes)
	for {
		n, _, err := unix.Recvfrom(fd, answer, unix.MSG_TRUNC)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n > len(answer) {
			err = fmt.Errorf("%d bytes: want at most %d", n, len(answer))
		}
		if err != nil {
			return fmt.Errorf("receive netlink answer: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(answer[:n])
		if err != nil {
			return fmt.Errorf("netlink answer: %w", err)
		}
		for _, m := range messages {
			switch {
			case m.Header.Flags&unix.NLM_F_DUMP_INTR != 0:
				return netlink.ErrDumpInterrupted
			case m.Header.Type == unix.NLMSG_DONE:
				return nil
			case m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4:
				if errno := -int32(nl.NativeEndian().Uint32(m.Data)); errno != 0 {
					return unix.Errno(errno)
				}
				return nil
			case !each(m):
				return nil
			}
		}
	}
}
