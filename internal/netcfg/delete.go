package netcfg

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// deleteSeen deletes l, and returns when nobody can see or use it any more: it, its peer and their
// routes are gone from their namespaces, and their names can be taken. The kernel then waits for a
// grace period of RCU, some 12 ms, before it frees the last memory of the device and answers; a
// thread of its own waits for that. Kernels before 6.2 do not say when the device is gone, and are
// waited for: told is false.
func deleteSeen(l netlink.Link) (told bool, err error) {
	told, err = deleteEchoed(l.Attrs().Index)
	if err != nil {
		return false, fmt.Errorf("delete device %s: %w", l.Attrs().Name, err)
	}
	if !told {
		return false, nil
	}
	// It is told of the first end of a pair, under the lock that this question waits for.
	left, err := rtnl.FindLink(l.Attrs().Name)
	if err == nil && left != nil && left.Attrs().Index == l.Attrs().Index {
		err = fmt.Errorf("delete device %s: the kernel says that it is gone, and it is there", l.Attrs().Name)
	}
	return true, err
}

// deleteEchoed asks for the deletion of a device and waits until the kernel tells that it is gone,
// or, if told is false, until the request is answered. A device that is not there is no error.
func deleteEchoed(index int) (told bool, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return false, fmt.Errorf("open netlink: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "netlink")
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	request := (&nl.NetlinkRequest{NlMsghdr: unix.NlMsghdr{
		Len: unix.SizeofNlMsghdr, Type: unix.RTM_DELLINK, Flags: unix.NLM_F_REQUEST | unix.NLM_F_ACK | unix.NLM_F_ECHO, Seq: 1,
	}, Data: []nl.NetlinkRequestData{msg}}).Serialize()
	sent, read := make(chan error, 1), make(chan struct{})
	defer close(read)
	go func() {
		err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) // as long as the kernel is at it
		sent <- err
		if err != nil {
			_ = socket.SetReadDeadline(time.Now()) // nothing will come
		}
		<-read
		_ = socket.Close()
	}()
	answer := make([]byte, rtnl.AnswerBytes)
	for {
		n, err := socket.Read(answer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false, fmt.Errorf("send netlink request: %w", <-sent)
		}
		if err != nil {
			return false, fmt.Errorf("receive netlink answer: %w", err)
		}
		if done, told, err := goneBy(answer[:n], index); done || err != nil {
			return told, err
		}
	}
}

// goneBy reads what the kernel says of a deletion: done if it is, or has failed, told if it has not
// been answered yet.
func goneBy(raw []byte, index int) (done, told bool, err error) {
	messages, err := syscall.ParseNetlinkMessage(raw)
	if err != nil {
		return false, false, fmt.Errorf("netlink answer: %w", err)
	}
	order := nl.NativeEndian()
	for _, m := range messages {
		switch {
		case m.Header.Type == unix.RTM_DELLINK && len(m.Data) >= unix.SizeofIfInfomsg && int(int32(order.Uint32(m.Data[4:]))) == index:
			return true, true, nil
		case m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4:
			if errno := unix.Errno(-int32(order.Uint32(m.Data))); errno != 0 && errno != unix.ENODEV {
				return true, false, errno
			}
			return true, false, nil
		}
	}
	return false, false, nil
}
